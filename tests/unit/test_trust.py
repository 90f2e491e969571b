"""The key that signs what a user's commands name: there whole or not at all."""

import os
from pathlib import Path

import pytest

from lab import trust

CONFIG = {"model": {"model": "mine:Mixer"}}


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path


def test_a_key_is_made_once_for_its_user_alone(home):
    signature = trust.sign(CONFIG)
    assert trust.is_trusted(CONFIG, signature)
    assert trust.find_key().stat().st_mode & 0o777 == 0o600
    assert list(trust.find_key().parent.iterdir()) == [trust.find_key()]
    assert trust.sign(CONFIG) == signature
    assert not trust.is_trusted({"model": {"model": "another:Mixer"}}, signature)


def test_a_command_that_is_killed_while_it_makes_a_key_leaves_none_or_a_whole_one(
    home, monkeypatch
):
    def stop(*given: object) -> None:
        raise KeyboardInterrupt

    for call in ("fsync", "link"):
        with monkeypatch.context() as patched:
            patched.setattr(os, call, stop)
            with pytest.raises(KeyboardInterrupt):
                trust.sign(CONFIG)
        assert list(trust.find_key().parent.iterdir()) == []
    assert trust.sign(CONFIG)


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 33])
def test_a_damaged_key_is_made_anew(home, content):
    trust.find_key().parent.mkdir(parents=True)
    trust.find_key().write_bytes(content)
    assert trust.is_trusted(CONFIG, trust.sign(CONFIG))
    assert len(trust.find_key().read_bytes()) == trust.BYTES


def test_without_a_place_for_a_key_nothing_is_signed(home):
    (home / "wonderful-lab").write_text("a file in the place of the folder")
    assert trust.sign(CONFIG) is None
