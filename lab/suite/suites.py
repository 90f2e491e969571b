"""Published suites: for each of their tasks the lab's, at the same size, beside their numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from lab.files import read_toml
from tasks import TASKS
from tasks.bounds import check_choice

SuiteName = Literal["mad", "cogscale", "kimi", "zoology"]


@dataclass(frozen=True)
class SuiteTask:
    """A task of a suite.

    Attributes:
        name: what the suite calls it.
        task: of the lab, that stands for it; empty for none.
        options: of `lab TASK`, its size.
        lengths: row lengths at which each run is evaluated; empty: that of the task.
        published: accuracy by model, in [0, 1].
        note: how it differs, or what the lab does not have.
    """

    name: str
    task: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    lengths: Sequence[int] = ()
    published: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def known(self) -> bool:
        """Whether the lab has a task for it."""
        return self.task in TASKS


@dataclass(frozen=True)
class Suite:
    """A published suite.

    Attributes:
        name: for `lab sweep --suite`.
        title: what it is.
        source: where its sizes and numbers are from.
        entries: its tasks, also those that the lab does not have.
    """

    name: str
    title: str
    source: str
    entries: tuple[SuiteTask, ...]

    @property
    def known(self) -> list[SuiteTask]:
        """The entries that the lab has a task for."""
        return [entry for entry in self.entries if entry.known]


def read_suite(name: str) -> Suite:
    """Read a suite from the file of its name beside this one.

    Raises:
        ValueError: for an unknown suite.
    """
    check_choice("suite", name, get_args(SuiteName))
    content = read_toml(Path(__file__).with_name(f"{name}.toml"))
    entries = tuple(SuiteTask(**entry) for entry in content["tasks"])
    return Suite(name, content["title"], content["source"], entries)
