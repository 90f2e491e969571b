"""The page of a sweep: how its runs ended, a table of settings, and the figures that apply."""

from pathlib import Path

from analysis.base import Table
from analysis.pages.page import PagePart, Shown, build_page, show_finding
from analysis.sweeps.results import SweepResults
from analysis.words import count_decimals, percent
from lab.files import explain_write_errors, write

COLUMNS = (
    *("setting", "mean accuracy", "95 %", "seeds", "solved", "steps", "seconds", "parameters"),
    "state bytes",
)


def render(results: SweepResults, name: str, question: str = "") -> str:
    """Return the page as HTML; all text from users is escaped."""
    how = (
        "Each at the learning rate that is best on validation rows. Intervals are over seeds, and "
        "over rows where those are wider. State bytes are what decoding keeps of one row after its "
        "last token, where every mixer tells."
    )
    errors = [f"{error}: {'; '.join(runs)}" for error, runs in results.errors.items()]
    parts = [
        PagePart("settings", "Settings", [how], _tabulate(results)),
        PagePart("figures", "Figures", figures=show_figures(results, name)),
        PagePart("errors", "Runs that failed or diverged", errors),
    ]
    return build_page("Sweep", question or name, results.summarize(), parts)


def _tabulate(results: SweepResults) -> Table:
    """Return accuracy, steps, time and sizes of each setting; – for what no run has."""
    shares = [share for s in results.settings for share in (*s.accuracies, *s.interval)]
    decimals = count_decimals(share for share in shares if share == share)
    rows = []
    for setting in results.settings:
        count, without = len(setting.seeds), setting.unended
        if not count:
            rows.append((setting.name(), "–", "–", f"none of {without} has a result", *"–––––"))
            continue
        rows.append(
            (
                setting.name(),
                percent(setting.mean, decimals),
                " … ".join(percent(end, decimals) for end in setting.interval),
                f"{count}, {without} without a result" if without else f"{count}",
                f"{sum(setting.solved)} of {count}",
                f"{sum(setting.steps) / count:,.0f}",
                f"{sum(setting.seconds) / count:,.0f}",
                *(
                    "–" if n is None else f"{n:,}"
                    for n in (setting.parameters, setting.state_bytes)
                ),
            )
        )
    return Table(COLUMNS, tuple(rows))


def show_figures(results: SweepResults, name: str) -> list[tuple[str, Shown]]:
    """Return every figure of a sweep with its words, each after its identifier."""
    return [
        (f"{key}-{i}", show_finding(finding, name))
        for key, findings in results.findings.items()
        for i, finding in enumerate(findings, 1)
    ]


def write_page(results: SweepResults, name: str, question: str, path: Path) -> None:
    """Write the page.

    Raises:
        RunError: when it cannot be written.
    """
    page = render(results, name, question)
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, page)
