"""What the files of a run hold: checked whole when they are read, and the metrics by stages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal, NotRequired, TypeVar, overload

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from lab.files import RunError, shorten_message

T = TypeVar("T")
NOT_SOLVED = "not solved: "
ENDINGS = {
    "solved": "solved",
    "budget": f"{NOT_SOLVED}step limit reached",
    "out of time": f"{NOT_SOLVED}time limit reached",
    "interrupted": "interrupted",
    "diverged": "diverged",
}
"""Words for each key that `find_ending` returns."""

STRICT = ConfigDict(strict=True, allow_inf_nan=False)
Count = Annotated[int, Field(ge=0, le=2**53)]
"""A count that JSON, a table and a float can hold."""
Share = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0)]
Interval = Annotated[
    list[Share], Field(min_length=2, max_length=2), AfterValidator(lambda ends: _check_order(ends))
]


@with_config(STRICT)
class ConfigFile(TypedDict):
    """The content of config.json; `ModelConfig`, `TrainConfig` and the task check their parts."""

    format: Count
    task: dict[str, Any]
    model: dict[str, Any]
    train: dict[str, Any]
    source: NotRequired[str | None]


@with_config(STRICT)
class RowLine(TypedDict):
    """A line of metrics.jsonl: a `lab.training.loop.Row` without its empty fields."""

    step: Count
    seq_len: Count
    loss: float
    accuracy: Share
    learning_rate: Amount
    grad_norm: Amount
    seconds: Amount
    cpu_seconds: Amount
    validation_loss: NotRequired[float]
    validation_accuracy: NotRequired[Share]
    test_loss: NotRequired[float]
    test_accuracy: NotRequired[Share]
    test_interval: NotRequired[Interval]


@with_config(STRICT)
class ConstructionEntry(TypedDict):
    """What weights set by hand reach."""

    verdict: str
    accuracy: Share | None
    because: str


@with_config(STRICT)
class DiagnosisEntry(TypedDict):
    """Why a run is not solved."""

    kind: str
    because: str
    evidence: dict[str, Any]
    seq_len: Count


@with_config(STRICT)
class StageEntry(TypedDict):
    """Training at one row length."""

    seq_len: Count
    steps: Count
    seconds: Amount
    accuracy: Share | None


@with_config(STRICT)
class EvaluationEntry(TypedDict):
    """How a run does in a setting that it was not trained on, or why it cannot."""

    option: str
    value: bool | int | float | str | list[bool | int | float | str] | None
    step: Count
    error: NotRequired[str]
    accuracy: NotRequired[Share]
    interval: NotRequired[Interval]
    loss: NotRequired[float]
    rows: NotRequired[Count]
    scored: NotRequired[Count]
    chance: NotRequired[Share]
    seconds: NotRequired[Amount]


@with_config(STRICT)
class ResultFile(TypedDict):
    """The content of result.json."""

    task: str
    model: str
    stopped: Literal["solved", "budget", "diverged", "interrupted"]
    signal: Literal["SIGINT", "SIGTERM"] | None
    accuracy: Share | None
    interval: Interval | None
    loss: float | None
    perplexity: Amount | None
    steps: Count
    rows: Count
    seconds: Amount
    rows_per_second: Amount | None
    cpu_seconds: Amount
    parameters: Count
    state_bytes: NotRequired[Count | None]
    seq_len: Count
    stages: list[StageEntry]
    device: str
    machine: str
    precision: str
    baselines: dict[str, Share]
    set_by_hand: ConstructionEntry | None
    diagnosis: DiagnosisEntry | None
    evaluations: NotRequired[list[EvaluationEntry]]


@with_config(STRICT)
class CoverageFile(TypedDict):
    """What analysis.json says that it covers."""

    step: Count
    analyses: dict[str, Any]
    not_applicable: dict[str, Any]


@with_config(STRICT)
class LengthEntry(TypedDict):
    """The accuracy of a run at one row length."""

    seq_len: Count
    step: Count
    test: Share | None
    interval: Interval | None
    validation: Share | None
    loss: NotRequired[float | None]
    validation_loss: NotRequired[float | None]
    state_bytes: NotRequired[Count | None]


@with_config(STRICT)
class LengthsFile(TypedDict):
    """The content of lengths.json."""

    lengths: list[LengthEntry]


@with_config(STRICT)
class SpentFile(TypedDict):
    """The content of spent.json."""

    minutes: Amount
    error: str | None


@with_config(STRICT)
class LawEntry(TypedDict):
    """What a law found about a layer."""

    law: str
    verdict: Literal["holds", "fails", "not applicable", "not decided"]
    evidence: str
    counterexample: str | None
    tokens: Count
    note: str


@with_config(STRICT)
class LayerEntry(TypedDict):
    """What the laws found about the layers of some blocks that are alike."""

    layer: str
    blocks: list[Count]
    laws: list[LawEntry]
    note: NotRequired[str]


@with_config(STRICT)
class CertificateFile(TypedDict):
    """The content of certificate.json."""

    layers: list[LayerEntry]
    cpu_seconds: Amount


def validate(kind: type[T], content: object, where: str) -> T:
    """Return content that is of a kind; entries that the kind does not name stay as they are.

    Raises:
        RunError: naming `where` and the first entry that is not as it must be.
    """
    try:
        _get_adapter(kind).validate_python(content)
    except ValidationError as error:
        raise RunError(f"{where}: {_describe_violation(error)}") from error
    return content  # type: ignore[return-value]


def _check_order(ends: list[float]) -> list[float]:
    if ends[0] > ends[1]:
        raise ValueError("two numbers, the smaller first")
    return ends


def _describe_violation(error: ValidationError) -> str:
    """Describe the first thing that is wrong: entry, value, what it must be."""
    first = error.errors(include_url=False)[0]
    name = ".".join(map(str, first["loc"])) or "the whole"
    if first["type"] == "missing":
        return f"{name} is missing"
    value = shorten_message(ValueError(repr(first["input"])[:60]))
    what = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return f"{name}={value}: must be {what}"


@cache
def _get_adapter(kind: type) -> Any:
    return TypeAdapter(kind)


@dataclass(frozen=True)
class TrainedStage:
    """Training at one row length, as far as it went.

    Attributes:
        seq_len: tokens of a row.
        began: steps taken before the stage.
        steps: steps taken in it.
        seconds: time that they took.
        accuracy: the newest validation accuracy in it; None without an evaluation.
        loss: the newest validation loss, likewise.
    """

    seq_len: int
    began: int
    steps: int
    seconds: float
    accuracy: float | None
    loss: float | None


@dataclass(frozen=True)
class Metrics(Sequence[RowLine]):
    """The rows of metrics.jsonl at the time of reading, oldest first.

    A run that is still training grows its file, so read it again to see later rows.
    """

    rows: tuple[RowLine, ...] = ()

    @overload
    def __getitem__(self, index: int) -> RowLine: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RowLine]: ...
    def __getitem__(self, index: int | slice) -> RowLine | Sequence[RowLine]:
        """Return a row, or some rows."""
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def last_test(self) -> Mapping[str, Any]:
        """The newest row with a test of the model; empty if there is none."""
        return next((row for row in reversed(self.rows) if "test_accuracy" in row), {})

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The evaluations on validation rows of the length trained at, oldest first.

        Each has step, seq_len, split, loss and accuracy.
        """
        return [
            {
                "step": row["step"],
                "seq_len": row["seq_len"],
                "split": "validation",
                "loss": row["validation_loss"],
                "accuracy": row["validation_accuracy"],
            }
            for row in self.rows
            if "validation_loss" in row and "validation_accuracy" in row
        ]

    @property
    def stages(self) -> list[TrainedStage]:
        """The stages of training, shortest rows first."""
        starts = [
            n for n, (a, b) in enumerate(pairwise(self.rows), 1) if a["seq_len"] != b["seq_len"]
        ]
        ends = [*starts, len(self.rows)]
        found = []
        for start, end in zip([0, *starts], ends, strict=True) if self.rows else ():
            rows = self.rows[start:end]
            scores = [row["validation_accuracy"] for row in rows if "validation_accuracy" in row]
            losses = [row["validation_loss"] for row in rows if "validation_loss" in row]
            found.append(
                TrainedStage(
                    seq_len=rows[0]["seq_len"],
                    began=start,
                    steps=len(rows),
                    seconds=sum(row["seconds"] for row in rows),
                    accuracy=scores[-1] if scores else None,
                    loss=losses[-1] if losses else None,
                )
            )
        return found


def find_ending(result: Mapping[str, Any] | None) -> str:
    """Return how a run ended, as a key.

    It is `stopped` of result.json, but "out of time" for a run that its minutes ended, where
    result.json has "interrupted" without a signal.

    Args:
        result: the content of result.json; empty or None while there is none: "unfinished".
    """
    if not result:
        return "unfinished"
    stopped = result["stopped"]
    return "out of time" if stopped == "interrupted" and result["signal"] is None else stopped


def read_ending(text: str) -> str:
    """Return the key of an ending in words, with or without "not solved: "; other text stays."""
    keys = {words.removeprefix(NOT_SOLVED): key for key, words in ENDINGS.items()}
    return keys.get(text.removeprefix(NOT_SOLVED), text)


def name_ending(ending: str) -> str:
    """Return the words for how a run ended; what has no words of its own stays."""
    return ENDINGS.get(ending, ending)
