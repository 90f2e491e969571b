"""Reports kept in a run folder: which ones merge, and which get files of their own.

A report describes the weights of one step on one number of rows. analysis.json and report.html
belong to the newest weights; reports for other steps or rows have these in their names. No report
replaces a fuller one.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NotRequired

from pydantic import TypeAdapter, with_config
from typing_extensions import TypedDict

from analysis import ANALYSES
from analysis.base import count_default_rows
from analysis.examination import DATA, FORMAT, Examination, record
from analysis.pages.page import Shown, make_stamp, show_finding
from analysis.plain import to_plain
from lab.files import RunError, has_entries, is_marked, read_json, write, write_json
from lab.training.records import STRICT, Amount, Count, validate
from lab.training.run import Run

SAME = ("format", "step", "seed", "rows", "seq_len")
"""Entries of analysis.json that merged analyses must share."""
MOST_SECTIONS = 2**26
"""Bytes of the largest report.json that is read: it holds figures."""


@with_config(STRICT)
class NumbersFile(TypedDict):
    """The content of analysis.json."""

    step: Count
    seed: int
    rows: Count
    seq_len: Count
    provenance: dict[str, str] | None
    analyses: dict[str, list[dict[str, Any]]]
    seconds: dict[str, Amount]
    not_applicable: dict[str, str]
    earlier: NotRequired[dict[str, dict[str, str] | None]]


class SectionsFile(TypedDict):
    """The content of report.json."""

    sections: dict[str, list[Shown]]


@dataclass(frozen=True)
class Report:
    """What analyses of the same weights on the same rows found."""

    numbers: dict[str, Any]
    sections: dict[str, list[Shown]]

    @classmethod
    def of(cls, examination: Examination) -> "Report":
        """Describe and draw what an examination found."""
        stamp = make_stamp(examination.subject)
        sections = {
            name: [show_finding(finding, stamp) for finding in findings]
            for name, findings in examination.results.items()
        }
        return cls(record(examination), sections)

    def matches(self, other: "Report") -> bool:
        """Whether both reports describe the same weights on the same rows."""
        ours, theirs = self.numbers, other.numbers
        data = [(numbers["provenance"] or {}).get(DATA) for numbers in (ours, theirs)]
        return data[0] == data[1] and all(ours[name] == theirs[name] for name in SAME)

    def update(self, newer: "Report") -> "Report":
        """Return this report with the analyses of a newer one, which take precedence."""
        old, new = self.numbers, newer.numbers
        analyses = _sort({**old["analyses"], **new["analyses"]})
        refused = _sort({**old["not_applicable"], **new["not_applicable"]})
        earlier = {
            name: old.get("earlier", {}).get(name, old["provenance"])
            for name in analyses
            if name not in new["analyses"]
        }
        numbers = {
            **new,
            "earlier": {name: of for name, of in earlier.items() if of != new["provenance"]},
            "seconds": _sort({**old["seconds"], **new["seconds"]}),
            "not_applicable": {n: why for n, why in refused.items() if n not in analyses},
            "analyses": analyses,
        }
        return Report(numbers, _sort({**self.sections, **newer.sections}))


@dataclass(frozen=True)
class ReportFiles:
    """The files of a report in a run folder.

    Attributes:
        suffix: what follows "analysis" and "report" in their names, e.g. "-step256".
    """

    folder: Path
    suffix: str = ""

    @property
    def numbers(self) -> Path:
        """The numbers: analysis.json."""
        return self.folder / f"analysis{self.suffix}.json"

    @property
    def page(self) -> Path:
        """The page: report.html."""
        return self.folder / f"report{self.suffix}.html"

    @property
    def sections(self) -> Path:
        """The page's sections, from which it is put together again: report.json."""
        return self.folder / f"report{self.suffix}.json"

    def list_all(self) -> tuple[Path, Path, Path]:
        """Return all files; the numbers come last, as they say that there is a report."""
        return self.sections, self.page, self.numbers

    def read(self) -> Report | None:
        """Return the report; None if there is none.

        Raises:
            RunError: when it cannot be read.
        """
        if not os.path.lexists(self.numbers):
            return None
        advice = "move it away to begin a new one"
        numbers = read_json(self.numbers, f"{self.numbers} cannot be read; {advice}")
        wrong = f"{self.numbers}: is not of format {FORMAT}; {advice}"
        if numbers.get("format") != FORMAT:
            raise RunError(wrong)
        validate(NumbersFile, numbers, wrong)
        sections: dict[str, list[Shown]] = {}
        if os.path.lexists(self.sections):
            where = f"{self.sections} cannot be read; {advice}"
            kept = read_json(self.sections, where, MOST_SECTIONS)
            if all(kept.get(name) == numbers[name] for name in SAME):
                validate(SectionsFile, kept, where)
                found = TypeAdapter(SectionsFile).validate_python(kept)["sections"]
                sections = {name: found[name] for name in found if name in numbers["analyses"]}
        return Report(numbers, sections)

    def write(self, report: Report, page: str, on_note: Callable[[str], None]) -> None:
        """Write all files; a page or sections that the lab did not make are renamed, with a note.

        Raises:
            RunError: when a folder is in the way.
        """
        if self.page.is_dir():
            raise RunError(f"{self.page}: is a folder, must be a file")
        for file in (self.sections, self.page):
            is_own = is_marked(file) or has_entries(file, "sections", most=MOST_SECTIONS)
            if os.path.lexists(file) and not file.is_dir() and not is_own:
                names = (f"{file.stem}-other{number}{file.suffix}" for number in count(1))
                free = next(f for f in map(file.with_name, names) if not os.path.lexists(f))
                os.rename(file, free)
                on_note(f"{file} was not made by the lab; it is now {free}")
        about = {name: report.numbers[name] for name in SAME}
        sections = {n: [*map(to_plain, shown)] for n, shown in report.sections.items()}
        write_json(self.sections, {**about, "sections": sections}, indent=None)
        write(self.page, page)
        write_json(self.numbers, report.numbers)

    def move(self, suffix: str) -> "ReportFiles":
        """Rename the files, to a free name that begins with a suffix."""
        free = next(
            files
            for files in self.list_names(suffix)
            if not any(map(os.path.lexists, files.list_all()))
        )
        for file, name in zip(self.list_all(), free.list_all(), strict=True):
            if os.path.lexists(file):
                os.rename(file, name)
        return free

    def list_names(self, suffix: str) -> Iterator["ReportFiles"]:
        """Yield files with a longer suffix, then with a number after it."""
        for number in count(1):
            again = f"-{number}" if number > 1 else ""
            yield ReportFiles(self.folder, f"{self.suffix}{suffix}{again}")


def merge(
    run: Run, new: Report, on_note: Callable[[str], None] = lambda text: None
) -> tuple[ReportFiles, Report]:
    """Return the files of a new report, and the report with what these files have already.

    A report that it must not replace is moved aside.

    Args:
        on_note: called with a sentence on what goes to another file than usual, and why.

    Raises:
        RunError: when a report in the folder cannot be read.
    """
    step, rows = new.numbers["step"], new.numbers["rows"]
    files = _find(run, step)
    kept = files.read()
    if kept and not kept.matches(new):
        kept_step, kept_rows = kept.numbers["step"], kept.numbers["rows"]
        if kept_step == step and kept.numbers["analyses"].keys() - new.numbers["analyses"].keys():
            on_note(
                f"{files.page} has other analyses, on {kept_rows:,} rows; those on {rows:,} rows "
                "get files of their own"
            )
            every = ((own, own.read()) for own in files.list_names(f"-rows{rows}"))
            files, kept = next((own, of) for own, of in every if of is None or of.matches(new))
        else:
            other = kept_step != step
            moved = files.move(f"-step{kept_step}" if other else f"-rows{kept_rows}")
            of = f"of step {kept_step:,}" if other else f"on {kept_rows:,} rows"
            on_note(f"the report {of} is now {moved.page}")
            kept = None
    return files, kept.update(new) if kept else new


def choose_work(
    run: Run, only: Sequence[str] | None, rows: int | None, step: int | None
) -> tuple[Sequence[str] | None, int | None]:
    """Return which analyses to run, and on how many rows, so that they can join the kept report.

    Without a number of rows, they run on those of the report. Analyses whose figures are not kept
    run again, or else the page would lose them.

    Args:
        step: of the weights; None: the newest checkpoint.

    Raises:
        RunError: when the report cannot be read.
    """
    step = _get_newest(run) if step is None else step
    kept = _find(run, step).read()
    if kept is None or kept.numbers["step"] != step:
        return only, rows
    recorded = kept.numbers["rows"]
    if rows is None:
        rows = recorded if only else max(recorded, count_default_rows(run.task))
    if only and rows == recorded:
        lost = kept.numbers["analyses"].keys() - kept.sections.keys()
        only = [*only, *(name for name in ANALYSES if name in lost)]
    return only, rows


def find_page(run: Run) -> Path | None:
    """Return the page of a run's newest weights; None if there is none."""
    page = ReportFiles(run.path).page
    current = run.read_coverage(_get_newest(run)) is not None
    return page if current and page.exists() else None


def is_complete(run: Run) -> bool:
    """Whether each analysis of a run's newest weights is kept, or does not apply."""
    return (run.read_coverage(_get_newest(run)) or set()) >= {*ANALYSES}


def _find(run: Run, step: int) -> ReportFiles:
    """Return the files of a step's report: the usual ones for the newest weights."""
    newest = step == _get_newest(run)
    return ReportFiles(run.path, "" if newest else f"-step{step}")


def _get_newest(run: Run) -> int:
    return max(run.list_checkpoints(), default=0)


def _sort(found: dict[str, Any]) -> dict[str, Any]:
    """Sort by the order of `ANALYSES`; what this lab does not know comes last."""
    return {name: found[name] for name in (*ANALYSES, *found) if name in found}
