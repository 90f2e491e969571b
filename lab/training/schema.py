"""What the JSON files of a run folder must look like, checked whole by pydantic when they are read.

Files of older versions of the lab have fewer entries, so only those that are read must be there.
"""

from functools import cache
from typing import Annotated, Any, Literal, NotRequired, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from lab.files import RunError, shorten_message

T = TypeVar("T")

STRICT = ConfigDict(strict=True, allow_inf_nan=False)
Count = Annotated[int, Field(ge=0, le=2**53)]
"""A count that JSON, a table and a float can hold."""

Share = Annotated[float, Field(ge=0, le=1)]


@with_config(STRICT)
class ConfigFile(TypedDict):
    """The content of config.json; `ModelConfig`, `TrainConfig` and the task check their parts."""

    format: Count
    task: dict[str, Any]
    model: dict[str, Any]
    train: dict[str, Any]
    signature: NotRequired[str | None]
    source: NotRequired[str | None]


@with_config(STRICT)
class RowLine(TypedDict):
    """A line of metrics.jsonl."""

    step: Count
    loss: float
    accuracy: float
    seconds: float
    seq_len: NotRequired[Count]
    learning_rate: NotRequired[float]
    grad_norm: NotRequired[float]
    validation_loss: NotRequired[float]
    validation_accuracy: NotRequired[float]
    test_loss: NotRequired[float]
    test_accuracy: NotRequired[float]
    test_interval: NotRequired[list[float]]
    cpu_seconds: NotRequired[float]


@with_config(STRICT)
class ConstructionEntry(TypedDict):
    """What weights set by hand reach."""

    verdict: str
    accuracy: float | None
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
    seconds: float
    accuracy: float | None


@with_config(STRICT)
class EvaluationEntry(TypedDict):
    """How a run does in a setting that it was not trained on, or why it cannot."""

    option: str
    value: bool | int | float | str | list[bool | int | float | str] | None
    step: Count
    error: NotRequired[str]
    accuracy: NotRequired[float]
    interval: NotRequired[list[float]]
    loss: NotRequired[float]
    rows: NotRequired[Count]
    scored: NotRequired[Count]
    chance: NotRequired[float]
    seconds: NotRequired[float]


@with_config(STRICT)
class ResultFile(TypedDict):
    """The content of result.json."""

    stopped: Literal["solved", "budget", "diverged", "interrupted"]
    accuracy: float | None
    steps: Count
    seconds: float
    baselines: dict[str, float]
    interval: NotRequired[list[float] | None]
    loss: NotRequired[float | None]
    perplexity: NotRequired[float | None]
    rows: NotRequired[Count]
    rows_per_second: NotRequired[float | None]
    cpu_seconds: NotRequired[float | None]
    parameters: NotRequired[Count]
    seq_len: NotRequired[Count]
    stages: NotRequired[list[StageEntry]]
    signal: NotRequired[Literal["SIGINT", "SIGTERM"] | None]
    device: NotRequired[str]
    machine: NotRequired[str]
    precision: NotRequired[str]
    task: NotRequired[str]
    model: NotRequired[str]
    set_by_hand: NotRequired[ConstructionEntry | None]
    diagnosis: NotRequired[DiagnosisEntry | None]
    evaluations: NotRequired[list[EvaluationEntry]]


@with_config(STRICT)
class AnnealingEntry(TypedDict):
    """What `lab.training.annealing.Annealing` has seen."""

    wrong: Share
    least: Share
    waits: Count
    halvings: Count


@with_config(STRICT)
class StateFile(TypedDict):
    """The content of a checkpoint's state.json."""

    format: Count
    step: Count
    first_loss: float | None
    sha256: dict[str, str]
    rows: NotRequired[Count]
    stage: NotRequired[Count]
    stage_step: NotRequired[Count]
    precision: NotRequired[Literal["", "fp32", "bf16"]]
    threads: NotRequired[Count]
    wrong: NotRequired[Share]
    annealing: NotRequired[AnnealingEntry]
    shared: NotRequired[bool]


def validate(kind: type[T], content: object, where: str) -> T:
    """Return content that is of a kind; entries that the kind does not name stay as they are.

    Raises:
        RunError: naming `where` and the first entry that is not as it must be.
    """
    try:
        _get_adapter(kind).validate_python(content)
    except ValidationError as error:
        raise RunError(f"{where}: {describe_violation(error)}") from error
    return content  # type: ignore[return-value]


def is_valid(kind: type, content: object) -> bool:
    """Whether content is of a kind."""
    try:
        _get_adapter(kind).validate_python(content)
    except ValidationError:
        return False
    return True


def describe_violation(error: ValidationError) -> str:
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
