"""One word has one meaning: classes have names of their own, and the glossary's terms are used."""

import re
from collections import defaultdict
from pathlib import Path

HOME = Path(__file__).parents[2]
SOURCES = {
    path.relative_to(HOME).as_posix(): path.read_text(encoding="utf-8")
    for package in ("lab", "tasks", "analysis")
    for path in (HOME / package).rglob("*.py")
}


def test_no_two_classes_share_a_name():
    homes = defaultdict(list)
    for path, text in SOURCES.items():
        for name in re.findall(r"^class (\w+)", text, re.MULTILINE):
            homes[name].append(path)
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_the_code_uses_every_term_of_the_glossary():
    lines = (HOME / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    terms = [line.split("|")[1].strip() for line in lines if line.startswith("| ")][1:]
    assert len(terms) > 40
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", "\n".join(SOURCES.values())).lower()
    words = [word for term in terms for word in term.lower().split(", ")]
    assert [word for word in words if not re.search(rf"\b{re.escape(word)}", spaced)] == []
