"""What can be asked of the functions of `lab.api`, each option said once: default, help, bound.

The commands of `lab` are made of these dataclasses (`lab.cli.command.make_command`). Nothing here
imports torch, so that a command's help does not wait for it.
"""

from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from analysis import ANALYSES
from lab.suite.suites import SuiteName
from tasks.bounds import option

MOST_MEMORY = 2**20
"""GiB that an analysis may be allowed: a pebibyte, more than any machine has."""

make_trust = partial(
    option,
    False,
    "Import the code and read the text that the run names, even if you did not name them in a "
    "command.",
)
make_force = partial(option, False, "Overwrite a file that the lab did not make.")
make_rows = partial(option, None, "Rows of the test split to analyze.", "by their length")
make_workers = partial(
    option, None, "Number of runs at the same time, each with one thread.", "one for each core"
)
make_ray = partial(
    option,
    None,
    "Train on a Ray cluster: HOST:PORT of its head node; auto, the cluster of this machine; or "
    "local, a new one on this machine.",
    "this machine, without Ray",
    metavar="ADDRESS",
)
make_max_minutes = partial(
    option, None, "Maximum minutes that one run may take in total.", "no limit"
)


@dataclass(frozen=True, kw_only=True)
class AnalyzeOptions:
    """What to analyze of a run.

    Raises:
        ValueError: for rows or memory out of their bounds, or a folder without a name.
    """

    path: Path = option(MISSING, "A run folder.", argument=True)
    only: tuple[str, ...] = option(
        (),
        f"Run only this analysis; repeat for more. One of {', '.join(ANALYSES)}.",
        metavar="NAME",
    )
    rows: int | None = make_rows()
    step: int | None = option(None, "Analyze the weights of this step.", "the newest checkpoint")
    memory: float | None = option(None, "Maximum memory to take.", "what is free", metavar="GIB")
    figures: Path | None = option(None, "Also save every figure in this folder.")
    format: Literal["png", "svg", "html"] = option("png", "File format of the saved figures.")
    trust: bool = make_trust()
    force: bool = make_force()

    def __post_init__(self):
        _check_rows(self.rows)
        if self.memory is not None and not 0 < self.memory <= MOST_MEMORY:
            raise ValueError(f"memory={self.memory}: must be > 0 and ≤ {MOST_MEMORY:,} GiB")
        if self.figures is not None and not str(self.figures).strip("."):
            raise ValueError(f"figures={str(self.figures)!r}: must name a folder")


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """What to compare, and where to write the page.

    Raises:
        ValueError: for rows below 1.
    """

    paths: tuple[Path, ...] = option(MISSING, "Run folders.", argument=True, metavar="RUN RUN…")
    out: Path | None = option(
        None,
        "Write the page to this file, replacing an existing one.",
        "compare.html, or compare-2.html where other runs are compared in it",
    )
    rows: int | None = make_rows()
    trust: bool = make_trust()
    force: bool = make_force()

    def __post_init__(self):
        _check_rows(self.rows)


def _check_rows(rows: int | None) -> None:
    if rows is not None and rows < 1:
        raise ValueError(f"rows={rows}: must be ≥ 1")


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """How to run a sweep.

    Raises:
        ValueError: for options that exclude each other.
    """

    out: Path | None = option(None, "Folder of the runs; the same folder resumes.", "runs/NAME")
    only: tuple[str, ...] = option(
        (), "Run only these settings; may be repeated.", metavar="FACTOR=VALUE"
    )
    seeds: int | None = option(None, "Number of runs of each setting, each with its own seed.", "3")
    precision: Literal["fp32", "bf16"] | None = option(None, "Precision of all runs.", "fp32")
    workers: int | None = make_workers()
    ray: str | None = make_ray()
    max_minutes: float | None = make_max_minutes()
    table: Path | None = option(
        None,
        "Also write the table to this .csv or .parquet file after every run. Runs that it already "
        "shows as ended, with the same settings, are not repeated.",
    )
    figures: Path | None = option(None, "Also save every figure in this folder, as pages, .html.")
    fresh: bool = option(False, "Train all runs anew: remove what their folders hold first.")
    force: bool = make_force()
    show: bool = option(False, "Show the results so far; run nothing, change no table.")

    def __post_init__(self):
        if self.fresh and self.show:
            raise ValueError("--fresh: has no effect with --show")


@dataclass(frozen=True, kw_only=True)
class GridOptions(SweepOptions):
    """A grid of runs, and how to run it."""

    what: str | None = option(
        None, "A task, or a sweep as a .toml file.", argument=True, metavar="TASK|FILE"
    )
    suite: SuiteName | None = option(
        None, "The tasks of a published suite in place of one task, at the suite's sizes."
    )
    grid: tuple[str, ...] = option(
        (),
        "Values of an option of `lab TASK`, or of layers, such as S.d_state; if repeated, all "
        "combinations are run. A value that holds a comma is written in double quotes.",
        metavar="NAME=VALUE,…",
    )
    lengths: str | None = option(
        None,
        "Evaluate each run at these row lengths, which it passes on its way.",
        "the task's",
        metavar="INT,…",
    )


@dataclass(frozen=True, kw_only=True)
class StudyOptions(SweepOptions):
    """Which of the lab's own studies to run, and how."""

    name: Literal["trainability", "trainability-ssd", "capacity"] = option(
        MISSING, "Which study.", argument=True
    )
    figure: Path | None = option(None, "Save the study's figure as this .html, .png or .svg file.")


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(SweepOptions):
    """Which mixer to profile, how thoroughly, and beside which others."""

    what: str = option(
        MISSING,
        "A word of `lab mixers`, or MODULE:CLASS of your own mixer.",
        argument=True,
        metavar="MIXER",
    )
    options: tuple[str, ...] = option(
        (), "An option of the mixer; may be repeated.", flag="--option", metavar="NAME=VALUE"
    )
    scale: Literal["quick", "standard", "full"] = option(
        "standard",
        "How much is trained: quick 7 models on 2 million tokens each, standard 35 on 4 million, "
        "full 57 on 16 million.",
    )
    against: tuple[str, ...] = option(
        ("attention", "ssd", "gdn"),
        "Mixers to name beside it, with commas between.",
        "attention,ssd,gdn",
        metavar="MIXER,…",
        read=lambda text: tuple(filter(None, text.split(","))),
    )
    out: Path | None = option(None, "Folder of the runs; the same folder resumes.", "runs/profile")
    seeds: int | None = option(
        None, "Number of runs of each ability, each with its own seed.", "the scale's"
    )
    precision: Literal["fp32", "bf16"] | None = option(None, "", flag="")
    figures: Path | None = option(None, "", flag="")


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions(SweepOptions):
    """Which figure of the paper to reproduce, and how.

    Raises:
        ValueError: for a learning rate that is not above 0.
    """

    name: Literal["recall"] = option(MISSING, "Which table or figure.", argument=True)
    learning_rate: tuple[float, ...] = option(
        (),
        "Peak learning rate. If repeated, the best on validation rows counts.",
        "the lab's, half and double",
    )
    figure: Path | None = option(None, "Save the study's figure as this .html, .png or .svg file.")

    def __post_init__(self):
        super().__post_init__()
        for rate in self.learning_rate:
            if not 0 < rate < float("inf"):
                raise ValueError(f"learning_rate={rate}: must be > 0 and finite")


@dataclass(frozen=True, kw_only=True)
class ClaimOptions:
    """Which claim to decide, and how to run what decides it."""

    what: str | None = option(
        None, "A claim of --list, or a .toml file.", argument=True, metavar="NAME|FILE"
    )
    listing: bool = option(False, "List the claims that come with the lab.", flag="--list")
    scale: Literal["smoke", "small", "paper"] = option(
        "small",
        "Size of the sweep: smoke takes minutes, small an hour or two on two cores, and paper "
        "needs a larger machine.",
    )
    out: Path | None = option(
        None, "Folder of the runs; the same folder resumes.", "runs/claims/NAME-SCALE"
    )
    workers: int | None = make_workers()
    ray: str | None = make_ray()
    max_minutes: float | None = make_max_minutes()
    show: bool = option(False, "Judge the results so far and run nothing.")
    force: bool = make_force()
