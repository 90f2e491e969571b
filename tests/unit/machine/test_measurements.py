"""Measurements: kept by kind and key, made anew where the file is damaged."""

import pytest

from lab.machine.measurements import find_file, read, remember


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_is_remembered_is_read_and_other_keys_stay():
    assert read("speed") == {}
    remember("speed", "a", 1.5)
    remember("speed", "b", [2])
    assert read("speed") == {"a": 1.5, "b": [2]}
    assert read("another") == {}


@pytest.mark.parametrize("content", [b"", b"[]", b"1", b"{", b"\xff"])
def test_a_damaged_file_is_replaced(content):
    find_file("speed").parent.mkdir(parents=True)
    find_file("speed").write_bytes(content)
    assert read("speed") == {}
    remember("speed", "a", 1)
    assert read("speed") == {"a": 1}


def test_a_folder_that_cannot_be_written_is_done_without(cache):
    cache.write_text("in the way")
    remember("speed", "a", 1)
    assert read("speed") == {}
