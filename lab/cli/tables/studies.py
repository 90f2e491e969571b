"""Tables of studies, for the terminal."""

import math
from collections.abc import Sequence

from rich.table import Table

from analysis.studies.recall import Setting
from analysis.studies.trainability import FactorEffect
from analysis.sweeps.capacity import CapacityCurve
from lab.studies.published import PUBLISHED
from lab.studies.recall import MIXERS


def build_recall_table(settings: Sequence[Setting]) -> Table:
    """Return the accuracy by mixer, row length and width; after a slash, the paper's.

    A star stands at settings with a run that reached its time limit unsolved.
    """
    widths = sorted({width for _, _, width in PUBLISHED})
    by_place = {(s.mixer, s.seq_len, s.d_model): s for s in settings}
    table = Table(box=None, title="test accuracy / the paper's (±0.02)", title_justify="left")
    table.add_column("mixer")
    table.add_column("T", justify="right")
    for width in widths:
        table.add_column(f"d {width}", justify="right")
    known = dict.fromkeys(setting.mixer for setting in settings)
    for mixer in [*known, *(name for name in MIXERS if name not in known)]:
        if mixer not in known:
            table.add_row(mixer, "all", *["not run"] * len(widths))
        for length in sorted({length for name, length, _ in by_place if name == mixer}):
            cells = [_format_cell(by_place.get((mixer, length, width))) for width in widths]
            table.add_row(mixer, f"{length:,}", *cells)
    return table


def _format_cell(setting: Setting | None) -> str:
    if setting is None:
        return "not run"
    cut = "*" if setting.cut else ""
    published = "" if setting.published is None else f" / {setting.published:.2f}"
    return f"{setting.mean:.3f}{cut}{published}"


def build_trainability_table(effects: Sequence[FactorEffect]) -> Table:
    """Return a table of the factors with the median number of steps until solved."""
    table = Table(box=None)
    for name in ("factor", "median steps", "95 %", "rows", "solved", "p", "Holm"):
        table.add_column(name, justify="left" if name == "factor" else "right")
    for effect in effects:
        low, high = effect.interval
        table.add_row(
            effect.factor,
            _format_number(effect.median),
            f"{_format_number(low)} … {_format_number(high)}",
            _format_number(effect.rows),
            f"{sum(effect.solved)} of {len(effect.solved)}",
            "" if effect.p is None else f"{effect.p:.2g}",
            "" if effect.corrected is None else f"{effect.corrected:.2g}",
            style="bold" if effect.counts else "",
        )
    return table


def build_capacity_table(curves: Sequence[CapacityCurve]) -> Table:
    """Return a table of accuracy by setting and number of pairs, with the fitted half point."""
    tried = sorted({int(k) for curve in curves for k in curve.pairs})
    table = Table(box=None, title="mean test accuracy over seeds", title_justify="left")
    for name in ("setting", *(f"K {pairs}" for pairs in tried), "half point"):
        table.add_column(name, justify="right")
    for curve in curves:
        means = [curve.accuracy[curve.pairs == pairs] for pairs in tried]
        table.add_row(
            curve.name,
            *(f"{found.mean():.3f}" if len(found) else "not run" for found in means),
            f"{curve.half:.1f}" if curve.half is not None and curve.within else "—",
        )
    return table


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else "—"
