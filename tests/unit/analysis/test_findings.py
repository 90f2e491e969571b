"""Each finding's sentence is put to three cases: a planted truth, a null and a boundary.

The cases of a room of `analysis/` stand in `cases/`, a file for each.
"""

import importlib
import json
import pkgutil
import re
from collections.abc import Iterator

import plotly.graph_objects as go
import pytest

import analysis
from analysis.base import Finding
from analysis.plain import to_plain
from tests.unit.analysis import cases
from tests.unit.analysis.case import Case

CASES: list[Case] = [
    case
    for module in pkgutil.iter_modules(cases.__path__)
    for case in importlib.import_module(f"{cases.__name__}.{module.name}").CASES
]
IDS = [f"{type(case.finding).__name__}-{case.kind}" for case in CASES]
KINDS = ("planted", "null", "boundary")
FACTS = {"Examples", "RowLayout", "StackAnatomy"}
"""Findings that list what is there and compare nothing, so that there is no null."""
LONGEST = 320
"""Characters of a sentence: what takes more is a table in disguise."""


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_sentence_has_what_holds_and_lacks_what_does_not(case: Case):
    finding, table = case.finding, case.finding.numbers()
    rows = [] if table is None else [" ".join(row) for row in (table.columns, *table.rows)]
    said = "\n".join([finding.says, *rows])
    assert case.has in said
    assert case.lacks not in said
    assert not re.search(r"\b(nan|inf|None)\b", said)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_caption_is_one_sentence_beside_a_figure(case: Case):
    finding, table = case.finding, case.finding.numbers()
    assert finding.says.endswith(".")
    assert len(finding.says) <= LONGEST
    assert finding.title
    assert finding.says in finding.alt
    assert table is None or {len(row) for row in table.rows} <= {len(table.columns)}
    figure = finding.figure()
    if isinstance(figure, go.Figure):
        assert finding.reading.endswith(".")
        assert figure.data
        assert figure.layout["height"] <= 1600
    json.dumps(to_plain(finding), allow_nan=False)


def list_findings(base: type = Finding) -> Iterator[str]:
    for found in base.__subclasses__():
        if found.__module__.startswith("analysis."):
            yield found.__name__
        yield from list_findings(found)


def test_every_finding_is_put_to_the_three():
    for module in pkgutil.walk_packages(analysis.__path__, "analysis."):
        importlib.import_module(module.name)
    here = {(type(case.finding).__name__, case.kind) for case in CASES}
    every = {(name, kind) for name in set(list_findings()) - FACTS for kind in KINDS}
    assert every - here == set()
