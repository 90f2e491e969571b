"""Examples in docstrings run, and the API reference names only what exists."""

import doctest
import re
from importlib import import_module
from pathlib import Path
from pydoc import locate

import pytest

from tasks import TASKS

HOME = Path(__file__).parents[2]
EXAMPLES = [
    ".".join(path.relative_to(HOME).with_suffix("").parts).removesuffix(".__init__")
    for package in ("lab", "tasks", "analysis")
    for path in sorted((HOME / package).rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]
PAGES = sorted((HOME / "docs" / "reference").glob("*.md"))


def test_every_task_has_an_example():
    assert {TASKS.module(name) for name in TASKS} <= set(EXAMPLES)


@pytest.mark.parametrize("module", EXAMPLES)
def test_examples_run(module):
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    results = doctest.testmod(import_module(module), optionflags=flags)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_reference_names_what_exists(page):
    names = re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert names or page.stem == "index"
    missing = [name for name in names if locate(name) is None]
    assert missing == []
