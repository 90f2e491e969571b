"""The pages of docs/findings/ and their programs name each other."""

import re
from collections import Counter
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2]
TABLE = (HOME / "docs/findings.md").read_text(encoding="utf-8")
PROGRAMS = {path.stem for path in (HOME / "docs/findings/programs").glob("*.py")} - {"run"}
SECTIONS = [
    pytest.param(section, path.name, id=f"{path.stem}-{number}")
    for path in sorted((HOME / "docs/findings").glob("*.md"))
    for number, section in enumerate(path.read_text(encoding="utf-8").split("\n## ")[1:], start=1)
]


def find_programs(text: str) -> list[str]:
    """Find the programs that a section says to run."""
    return re.findall(
        r"^\*\*Program\.\*\* `python docs/findings/programs/(\w+)\.py`", text, flags=re.MULTILINE
    )


@pytest.mark.parametrize(("section", "page"), SECTIONS)
def test_a_section_names_its_program_and_says_whether_a_fix_was_tried(section: str, page: str):
    (program,) = find_programs(section)
    assert program in PROGRAMS
    assert f"[`{program}`](findings/{page})" in TABLE or f"`{program}`" not in TABLE
    tried = "**Fix tried: the program shows nothing any more.**" in section
    assert tried == ("```diff\n" in section)
    assert tried != ("**No fix tried**, because " in section)


def test_each_program_has_one_section():
    found = Counter(name for param in SECTIONS for name in find_programs(str(param.values[0])))
    assert found == dict.fromkeys(PROGRAMS, 1)


def test_the_table_names_only_programs_that_have_a_section():
    linked = re.findall(r"\[`(\w+)`\]\(findings/[\w-]+\.md\) \|$", TABLE, flags=re.MULTILINE)
    rows = [line for line in TABLE.splitlines() if line.startswith("| ") and "`" in line]
    assert len(linked) == len(rows) == len(set(linked)) > 0
    assert set(linked) <= PROGRAMS
