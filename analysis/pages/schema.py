"""What the JSON files of a report must look like, checked whole by pydantic when they are read."""

from typing import Any, NotRequired

from pydantic import with_config
from typing_extensions import TypedDict

from lab.training.records import STRICT


@with_config(STRICT)
class WordsEntry(TypedDict):
    """The words of a finding, as `analysis.base.Words`."""

    title: str
    says: str
    reading: str
    alt: str
    passages: list[dict[str, Any]]
    gist: NotRequired[str]
    tokens: NotRequired[dict[str, Any] | None]


@with_config(STRICT)
class ShownEntry(TypedDict):
    """A finding on a page, as `analysis.pages.page.Shown`."""

    words: WordsEntry
    spec: dict[str, Any] | None
    ratio: str
    least: NotRequired[int | None]


@with_config(STRICT)
class SectionsFile(TypedDict):
    """The content of report.json."""

    sections: dict[str, list[ShownEntry]]


@with_config(STRICT)
class NumbersFile(TypedDict):
    """The content of analysis.json."""

    step: int
    seed: int
    rows: int
    seq_len: int
    provenance: dict[str, str] | None
    analyses: dict[str, list[dict[str, Any]]]
    seconds: dict[str, float]
    not_applicable: dict[str, str]
    earlier: NotRequired[dict[str, dict[str, str] | None]]
