"""The kept mutants: each can still be planted in its file, and its tests are still there."""

import re

from tests.mutants.run import HOME, Mutant, plant, read_mutants

MUTANTS = read_mutants()


def test_there_are_forty_and_no_two_share_a_name():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40


def test_what_a_mutant_breaks_stands_once_in_its_file():
    counts = {m.name: (HOME / m.file).read_text("utf-8").count(m.before) for m in MUTANTS}
    assert counts == dict.fromkeys(counts, 1)


def test_the_tests_of_a_mutant_are_there():
    for mutant in MUTANTS:
        assert 1 <= len(mutant.tests) <= 3, mutant.name
        for test in mutant.tests:
            file, _, name = test.partition("::")
            defined = re.findall(r"^def (test_\w+)\(", (HOME / file).read_text("utf-8"), re.M)
            assert not name or name.split("[")[0] in defined, test


def test_a_planted_fault_is_taken_out_again(tmp_path):
    file = tmp_path / "room.py"
    file.write_text("a = 1\n")
    before = file.stat().st_mtime_ns
    with plant(Mutant("a is off by one", "room.py", "1", "2", ()), tmp_path):
        assert file.read_text() == "a = 2\n"
    assert (file.read_text(), file.stat().st_mtime_ns) == ("a = 1\n", before)
