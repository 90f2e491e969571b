"""A certificate drawn: a row for each law, marks by number and outcome."""

import math
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from analysis.pages.certificate import Laws, render, save
from lab.certification import OUTCOMES
from lab.cli.app import app

HOSTILE = "<b>& no such law"
MARKS = [words[0] for words in OUTCOMES.values()]


def law(name, verdict, measured=None, allowed=None, **words):
    entry = {"law": name, "verdict": verdict, "evidence": f"of {name}", "counterexample": None}
    return {**entry, "measured": measured, "allowed": allowed, "snippet": None, **words}


LAWS = [
    law("deterministic", "holds", 0.0, 0.0),
    law("causal", "fails", 1e-3, 1e-13, counterexample="moves output 0", snippet="sys.exit(1)"),
    law("padding", "not applicable", evidence=HOSTILE),
    law("forms agree", "not decided", 2.0, 1.0, evidence="neither " + "here nor there " * 9),
    law("precision", "holds", 0.01, 1),
    law("stable", "fails", "Infinity", 2.8, counterexample="not finite"),
]
CERTIFICATE = {
    "target": "a.b:C<D>",
    "notes": ["reads vectors of width 4 (found by trying)"],
    "lengths": [1, 7],
    "d_model": 4,
    "seconds": 1.2,
    "laws": LAWS,
}


@pytest.fixture(scope="module")
def fig():
    return Laws("Laws", CERTIFICATE).figure()


def test_marks_stand_at_measured_over_allowed_and_ends_are_nothing_and_no_limit(fig):
    places = {
        int(row): math.log10(x)
        for trace in fig.data
        if trace.name in MARKS
        for x, row in zip(trace.x, trace.y, strict=True)
        if not math.isnan(x)
    }
    low, high = fig.layout.xaxis.range
    ticks = {
        text: math.log10(at)
        for text, at in zip(fig.layout.xaxis.ticktext, fig.layout.xaxis.tickvals, strict=True)
    }
    assert places[1] == pytest.approx(10)
    assert places[4] == pytest.approx(-2)
    assert places[0] == pytest.approx(ticks["0"])
    assert places[2] == places[3] == pytest.approx(ticks["none"])
    assert places[5] == pytest.approx(ticks["∞"])
    assert low < ticks["none"] < ticks["0"] < places[4] < ticks["1"] == 0 < places[1] < places[5]
    assert places[5] < high


def test_outcomes_differ_in_symbol_as_well_as_colour(fig):
    traces: Any = fig.data
    named = {t.name: t.marker.symbol for t in traces if t.name in MARKS}
    assert set(named) == set(MARKS)
    assert len(set(named.values())) == len(MARKS)
    (failing,) = (law for law in LAWS if law["law"] == "causal")
    alone = Laws("Laws", {**CERTIFICATE, "laws": [failing]}).figure()
    marks: Any = alone.select_traces({"name": "fails"})
    assert [mark.marker.symbol for mark in marks] == [named["fails"]]


def test_the_page_escapes_and_holds_the_program():
    whole = render(CERTIFICATE)
    assert "&lt;b&gt;&amp; no such law" in whole
    assert HOSTILE not in whole
    assert '<pre tabindex="0">sys.exit(1)</pre>' in whole
    assert "a.b:C&lt;D&gt;" in whole


def test_an_svg_has_title_and_counts(tmp_path):
    save(CERTIFICATE, tmp_path / "certificate.svg")
    root = ElementTree.parse(tmp_path / "certificate.svg").getroot()
    text = "".join(root.itertext())
    assert "Laws of a.b:C<D>" in text
    assert "2 hold, 2 fail" in text


def test_lab_certify_draws_it(tmp_path, monkeypatch):
    monkeypatch.setattr("lab.cli.certify.certify_in_child", lambda *_: CERTIFICATE)
    path = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["certify", "a.b:C", "--json", "--figure", str(path)])
    assert result.exit_code == 1
    assert result.stderr == f"figure: {path}\n"
    assert path.read_text() == render(CERTIFICATE)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("x.pdf", "figure=x.pdf: must end in .png, .svg, .html"),
        ("nowhere/x.svg", "figure=nowhere/x.svg: nowhere is not a folder"),
    ],
)
def test_a_figure_that_cannot_be_is_said_first(path, said, monkeypatch):
    monkeypatch.setattr("lab.cli.certify.certify_in_child", None)
    result = CliRunner().invoke(app, ["certify", "a.b:C", "--figure", path])
    assert result.stderr == f"Error: {said}\n"
    assert result.exit_code == 2
