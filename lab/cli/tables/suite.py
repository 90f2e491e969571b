"""Tables of tasks, models, errata, claims and studies."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lab.studies.published import PUBLISHED
from lab.studies.recall import MIXERS

if TYPE_CHECKING:
    from analysis.base import Table as Numbers
    from analysis.claims.claim import Claim
    from analysis.studies.recall import Setting
    from analysis.sweeps.settings import SettingResult
    from lab.constructions import Rung
    from lab.errata.erratum import Erratum
    from lab.models.anatomy import Anatomy, Part
    from lab.models.mixers import MixerSummary
    from lab.models.paper_sizes import SizeComparison
    from lab.suite.audit import Audit
    from lab.suite.suites import Suite
    from lab.suite.survey import Size, TaskSummary

ROOM_FOR_A_LINE = 136
"""Columns that a terminal needs to show each task on one line."""


LEARNED = "Seconds: of training on one thread of the log's machine, an AMD EPYC."


def build_suite_table(entries: Sequence["TaskSummary"], width: int) -> RenderableType:
    """Build the table of the suite: one line a task where there is room, else several."""
    numbers = (
        "scored",
        "chance",
        "µs per row",
        "tokens × vocabulary",
        "starts at",
        "small",
        "published",
    )
    if width >= ROOM_FOR_A_LINE:
        table = Table(box=None, padding=(0, 2, 0, 0))
        table.add_column("task", no_wrap=True)
        table.add_column("what it tests", overflow="fold")
        for name in numbers:
            table.add_column(name, justify="right", no_wrap=True)
        for entry in entries:
            table.add_row(entry.name, entry.separates, *_format_numbers(entry))
        fixed = [
            f"— {e.name} cannot shorten its rows: {e.why_fixed}." for e in entries if not e.grows
        ]
        start = "starts at: tokens per row when training starts; rows grow from there."
        return Group(table, Text("\n".join(["", start, LEARNED, *fixed])))
    parts: list[RenderableType] = []
    for entry in entries:
        parts.append(Text(f"{entry.name}: {entry.separates}"))
        scored, chance, cost, size, start, small, published = _format_numbers(entry)
        grows = ", ".join(entry.grows)
        below = (
            f"{size} (small {small}, published {published})",
            f"grows from {start} tokens ({grows})" if grows else f"fixed: {entry.why_fixed}",
            f"{scored} scored, chance {chance}, {cost} µs per row",
        )
        parts.append(Padding(Text("\n".join(below)), (0, 0, 0, 4)))
    parts.append(Text("Sizes are tokens a row × vocabulary, or vectors a row × numbers in each."))
    parts.append(Text(LEARNED))
    return Group(*parts)


def _format_numbers(entry: "TaskSummary") -> tuple[str, ...]:
    small, published = (
        _format_size(entry.presets[name]) if name in entry.presets else "—"
        for name in ("small", "published")
    )
    if entry.seconds is not None:
        small += f", learned in {entry.seconds} s"
    return (
        f"{entry.scored:,.0f}" if entry.scored == int(entry.scored) else f"{entry.scored:,.1f}",
        f"{entry.chance:.2g}",
        f"{entry.microseconds:,.0f}" if entry.microseconds >= 10 else f"{entry.microseconds:.1f}",
        _format_size(entry.size),
        f"{entry.grows_from:,}" if entry.grows else "—",
        small,
        published,
    )


def _format_size(size: "Size") -> str:
    each = f"{size.d_input:,} numbers" if size.d_input else f"{size.vocab_size:,}"
    return f"{size.seq_len:,} × {each}"


def build_mixers_table(found: Sequence["MixerSummary"]) -> Table:
    """Build a table of mixers: what each is, the bytes of its state, and where it is from."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("mixer", "letter", "what it is", "state", "source"):
        table.add_column(column, overflow="fold")
    for summary in found:
        state = _describe_state(summary.fixed_bytes, summary.token_bytes)
        table.add_row(summary.name, summary.letter, summary.says, state, summary.source)
    return table


def _describe_state(fixed: int, token: int) -> str:
    grows = f"{token:,} a token" if token else ""
    return " + ".join(filter(None, (f"{fixed:,}" if fixed or not token else "", grows)))


def build_audit_table(found: "Audit", bits: Mapping[str, float], title: str, measure: str) -> Table:
    """Build a table of the predictors of a task, best first, with 95 % intervals but for chance."""
    caption = f"{found.rows:,} rows, {found.scored:,} scored positions"
    for name, each in bits.items():
        caption += f"\n{name}: {each:.3f} bits a token"
    table = Table(title=title, title_justify="left", caption=caption)
    for name in ("", measure, "95 %"):
        table.add_column(name, justify="right" if name else "left")
    for score in found.best_first:
        interval = "{:.4f} … {:.4f}".format(*score.interval) if score.interval else ""
        table.add_row(score.name, f"{score.accuracy:.4f}", interval)
    return table


def build_ladder_table(rungs: Sequence["Rung"]) -> Table:
    """Build a table of what each mixer reaches with weights set by hand, equal ones together."""
    table = Table.grid(padding=(0, 2))
    table.title, table.title_justify = "weights set by hand", "left"
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    alike: dict[tuple[str, float | None, str], list[str]] = {}
    for rung in rungs:
        alike.setdefault((rung.outcome, rung.accuracy, rung.because), []).append(rung.mixer)
    for (outcome, accuracy, because), mixers in alike.items():
        reached = "" if accuracy is None else f"accuracy {accuracy:.4f}: "
        table.add_row(outcome, "; ".join(mixers))
        table.add_row("", f"→ {reached}{because}")
    return table


def build_anatomy_table(found: "Anatomy") -> Table:
    """Return a model's parts from tokens to logits, alike neighbours in one row."""
    table = Table(box=None)
    for name in ("blocks", "part", ""):
        table.add_column(name, no_wrap=name == "part")
    for name in ("parameters each", "active"):
        table.add_column(name, justify="right", no_wrap=True)

    def add(where: str, part: "Part") -> None:
        note = part.note
        if part.state is not None and part.state.bytes is not None:
            note = f"{note}; state {part.state.bytes:,} bytes".removeprefix("; ")
        table.add_row(where, part.name, note, f"{part.parameters:,}", f"{part.active:,}")

    add("", found.embedding)
    first = 0
    for repeat in found.unit:
        last = first + repeat.times - 1
        where = str(first) if first == last else f"{first}–{last}"
        for part in (repeat.pair.mixer, repeat.pair.transform):
            if part is not None:
                add(where, part)
                where = ""
        first += repeat.times
    add("", found.head)
    if found.times > 1:
        whole = "block 0 stands" if first == 1 else f"blocks 0–{first - 1} stand"
        table.caption = f"{whole} {found.times} times in a row"
    return table


def describe_totals(found: "Anatomy", compared: "SizeComparison | None") -> str:
    """Describe a model's totals, beside the paper's where it has one."""
    line = (
        f"total {found.total:,} parameters, {found.active:,} of them active for a token\n"
        f"state of a row: {found.state}"
    )
    if compared is None:
        return line
    return f"{line}\nthe paper's {compared.size}: {compared.difference:+.2%}; {compared.because}"


def build_erratum_table(erratum: "Erratum") -> Table:
    """Return a table of an erratum: each reading, its evidence, and how to train it."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    mark = "✓" if erratum.confirmed else "✗"
    table.add_row(f"{mark} {erratum.row}", erratum.where, style="bold")
    for name, said, evidence, option in (
        ("printed", erratum.printed, erratum.printed_evidence, erratum.printed_option),
        ("intended", erratum.meant, erratum.meant_evidence, erratum.meant_option),
    ):
        table.add_row(f"  {name}", said)
        table.add_row("", f"→ {evidence[:1].upper()}{evidence[1:]}.")
        if option is not None:
            table.add_row("", option, style="dim")
    if erratum.note:
        table.add_row("  note", erratum.note)
    table.add_row()
    return table


def build_claims_list(claims: Sequence["Claim"]) -> Group:
    """Return a line for each claim with its name and scales, and below it what it says."""
    parts: list[RenderableType] = []
    for claim in claims:
        parts.append(Text.assemble((claim.name, "bold"), f" ({', '.join(claim.sweeps)})"))
        parts.append(Padding(Text(claim.says), (0, 0, 0, 4)))
    return Group(*parts)


def build_recall_table(settings: Sequence["Setting"]) -> Table:
    """Return the accuracy by mixer, row length and width; after a slash, the paper's.

    A star stands at settings with a run that reached its time limit unsolved.
    """
    widths = sorted({width for _, _, width in PUBLISHED})
    by_place = {(s.mixer, s.seq_len, s.d_model): s for s in settings}
    table = Table(
        box=None,
        title="test accuracy / the paper's (±0.02); *: a run was cut short",
        title_justify="left",
    )
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


def _format_cell(setting: "Setting | None") -> str:
    if setting is None:
        return "not run"
    cut = "*" if setting.cut else ""
    published = "" if setting.published is None else f" / {setting.published:.2f}"
    return f"{setting.mean:.3f}{cut}{published}"


def build_published_table(
    suite: "Suite", settings: Sequence["SettingResult"], first: str
) -> RenderableType:
    """Return our accuracy on each task of a suite beside the published ones; notes below.

    Args:
        suite: the suite.
        settings: of the sweep.
        first: the task of those that name none, as there is only one.
    """
    table = Table(box=None, title=suite.title, title_justify="left")
    for name in ("task", "in the lab", "setting", "accuracy", "95 %", "published"):
        table.add_column(name, overflow="fold")
    for entry in suite.entries:
        numbers = ", ".join(f"{model} {share:g}" for model, share in entry.published.items())
        of_it = [s for s in settings if s.factors.get("task", first) == entry.name]
        if not of_it:
            table.add_row(entry.name, entry.task if entry.known else "none", "", "", "", numbers)
        for i, setting in enumerate(of_it):
            low, high = setting.interval if setting.seeds else (None, None)
            table.add_row(
                *(("", "") if i else (entry.name, entry.task)),
                setting.name(["task"]),
                f"{setting.mean:.4f}" if setting.seeds else "no result",
                "" if low is None else f"{low:.4f} … {high:.4f}",
                "" if i else numbers,
            )
    notes = [f"{entry.name}: {entry.note}" for entry in suite.entries if entry.note]
    return Group(table, Text("\n".join(["", suite.source, *notes])))


def build_numbers_table(numbers: "Numbers") -> Table:
    """Return the numbers of a finding as a table, a line for each row."""
    table = Table(box=None)
    for i, name in enumerate(numbers.columns):
        table.add_column(name, justify="right" if i else "left")
    for row in numbers.rows:
        table.add_row(*row)
    return table
