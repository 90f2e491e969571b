"""The page of a certificate of `lab certify`: one mark per law, and each law's evidence."""

import html
import math
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from analysis.base import Finding, Table
from analysis.figures import Axis, Dots, Pairs, pairs
from analysis.figures.theme import add_title
from analysis.pages import export
from analysis.pages.page import PagePart, build_page, show_finding
from lab.certification import OUTCOMES, SIGNS, Certificate, count_outcomes
from lab.files import write

FAINTEST, STRONGEST = -4, 1
"""Decades around the bound that the axis always shows."""
TICKS = 4
"""Maximum number of decades with a label: few enough for a phone."""
HOVER = 60
"""Characters per line of a hover text."""
LOOKS: dict[str, Any] = {
    "holds": "dot",
    "fails": "diamond",
    "not applicable": "run",
    "not decided": "unsolved",
}
"""Markers of the outcomes: muted where a law says nothing."""


@dataclass(frozen=True)
class Laws(Finding):
    """Which laws a module keeps, and by how much."""

    title: str
    certificate: Certificate
    reading = (
        "A mark is the measured number divided by the allowed one: beyond the line at 1 a law "
        "fails. On the left stand 0 and laws without such a number."
    )

    @property
    def says(self) -> str:
        """Say how many laws had which outcome."""
        laws = self.certificate["laws"]
        return f"Of {len(laws)} laws {count_outcomes(self.certificate)}."

    def numbers(self) -> Table | None:
        """Return what shows that laws fail."""
        failing = [law for law in self.certificate["laws"] if law["verdict"] == "fails"]
        rows = tuple((law["law"], law["counterexample"] or law["evidence"]) for law in failing)
        return Table(("fails", "because"), rows) if rows else None

    def figure(self) -> go.Figure:
        """Draw a line per law, the first on top: measured over allowed, in powers of ten."""
        laws = self.certificate["laws"]
        decades = np.array([_count_decades(law) for law in laws])
        finite = decades[np.isfinite(decades)]
        low = math.floor(min([FAINTEST, *finite]))
        high = math.ceil(max([STRONGEST, *finite]))
        step = math.ceil((high - low) / TICKS)
        none, zero, infinite = low - 1.6 * step, low - 0.8 * step, high + 0.8 * step
        places = np.clip(decades, zero, infinite)
        places[np.isnan(decades)] = none
        left, right = min(low, *places), max(high, *places)
        ticks = {none: "none", zero: "0", infinite: "∞"}
        ticks = {decade: text for decade, text in ticks.items() if decade in places}
        ticks |= {d: f"10<sup>{d}</sup>" for d in range(low, high + 1) if d % step == 0}
        ticks[0] = "1"
        verdicts = np.array([law["verdict"] for law in laws])
        notes = ["<br>".join(map(html.escape, textwrap.wrap(_explain(law), HOVER))) for law in laws]
        axis = Axis(
            "measured / allowed",
            scale="log",
            ends=(10.0 ** (left - step / 2), 10.0 ** (right + step / 2)),
            ticks={10.0**decade: text for decade, text in sorted(ticks.items())},
        )
        dots = [
            Dots(
                words[0],
                np.where(verdicts == outcome, 10.0**places, np.nan),
                look=LOOKS[outcome],
                notes=notes,
            )
            for outcome, words in OUTCOMES.items()
            if outcome in verdicts
        ]
        panel = Pairs(dots, axis, levels={"allowed": 1.0})
        return pairs([law["law"] for law in laws], panel, joined=True)


def _count_decades(law: Certificate) -> float:
    """Return how many powers of ten a law's number is above its bound; NaN where it has none."""
    measured, allowed = law["measured"], law["allowed"]
    if measured is None or allowed is None or law["verdict"] not in ("holds", "fails"):
        return math.nan
    measured, allowed = float(measured), float(allowed)
    if measured == 0:
        return -math.inf
    if not math.isfinite(measured) or allowed == 0:
        return math.inf
    return math.log10(measured / allowed)


def _explain(law: Certificate) -> str:
    texts = filter(None, (law["evidence"], law["counterexample"]))
    return f"{law['law']}: {'; '.join(texts)}"


def render(certificate: Certificate) -> str:
    """Return a certificate as HTML: the figure, every law's evidence, programs of failures."""
    laws = certificate["laws"]
    rows = tuple(
        (law["law"], f"{SIGNS[law['verdict']]} {law['verdict']}", law["evidence"]) for law in laws
    )
    shown = show_finding(_get_finding(certificate), _make_stamp(certificate))
    programs = {f"{law['law']}: a program that shows it": law["snippet"] for law in laws}
    parts = [
        PagePart("laws", "Measured over allowed", figures=[("laws-1", shown)]),
        PagePart(
            "evidence",
            "Law by law",
            table=Table(("law", "verdict", "evidence"), rows),
            programs={name: code for name, code in programs.items() if code},
        ),
        PagePart(
            "tried",
            "How it was tried",
            facts={
                "width": certificate["d_model"],
                "lengths": certificate["lengths"],
                "notes": "; ".join(certificate["notes"]),
                "seconds": certificate["seconds"],
            },
        ),
    ]
    return build_page("Certificate", certificate["target"], count_outcomes(certificate), parts)


def save(certificate: Certificate, path: Path) -> None:
    """Write a certificate's page as .html, its figure as .png or .svg.

    Raises:
        ValueError: for another suffix.
        BrowserError: for an image without a Chromium that can draw it.
        OSError: when the file cannot be written.
    """
    if path.suffix.lower() == ".html":
        write(path, render(certificate))
        return
    finding = _get_finding(certificate)
    export.save(add_title(finding.figure(), finding.title, _make_stamp(certificate)), path)


def _get_finding(certificate: Certificate) -> Laws:
    return Laws(f"Laws of {certificate['target']}", certificate)


def _make_stamp(certificate: Certificate) -> str:
    lengths = ", ".join(map(str, certificate["lengths"]))
    return f"{count_outcomes(certificate)} · width {certificate['d_model']} · lengths {lengths}"
