"""The settings of a run: as typed, from a file like config.json, or from Python.

Nothing here imports torch, so that settings are validated at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_origin, get_type_hints

from lab.config import ModelConfig, Runtime, TrainConfig, get_protocol_defaults
from lab.files import RunError, read_json
from lab.training.run import FORMAT, Run
from lab.trust import ask_for_trust, list_named
from tasks import TASKS
from tasks.bounds import check_choice, check_kind, find_kind, varies
from tasks.near_names import ask, suggest
from tasks.schedule import Schedule

PagePart = TypeVar("PagePart", ModelConfig, TrainConfig, Runtime)
TRUTHS = {"true": True, "false": False}


@dataclass(frozen=True)
class Span:
    """A schedule as typed: from one value to another over some steps (None: all)."""

    first: int | float
    last: int | float
    steps: int | None

    def schedule(self, max_steps: int, batch_size: int) -> Schedule:
        """Return the schedule over the rows of these steps."""
        return Schedule(self.first, self.last, (self.steps or max_steps) * batch_size)


def read(name: str, text: str, hint: Any) -> Any:
    """Read a value, "4,16,64" (a mixture), "4:64" or "4:64@500" (a schedule over 500 steps).

    Raises:
        ValueError: naming the option, the text, and what it may be.
    """
    kind = find_kind(hint)
    if kind is bool:
        if text not in TRUTHS:
            raise ValueError(f"{name}={text}: must be true or false")
        return TRUTHS[text]
    if not varies(hint):
        return text
    if get_origin(kind) is Literal:
        return tuple(text.split(",")) if "," in text else text
    number, what, several = (
        (int, "a whole number", "4,16,64") if kind is int else (float, "a number", "0.1,0.5,0.9")
    )
    span, at, steps = text.partition("@")
    try:
        if ":" in span:
            first, last = map(number, span.split(":"))
            return Span(first, last, int(steps) if at else None)
        if at:
            raise ValueError
        return tuple(map(number, text.split(","))) if "," in text else number(text)
    except ValueError:
        raise ValueError(
            f"{name}={text}: must be {what}, several ({several}), or a schedule (4:64, 4:64@500 "
            "for 500 steps)"
        ) from None


def read_evaluations(texts: Sequence[str], task: type[Any]) -> dict[str, tuple[Any, ...]]:
    """Read ["seq_len=512,1024", …]: values to evaluate at, by option of the task.

    Raises:
        ValueError: for text of another form, an unknown option, or a value that cannot be read.
    """
    hints = get_type_hints(task)
    known = [f.name for f in fields(task) if f.init]
    found: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not values:
            raise ValueError(f"eval={text}: must look like seq_len=512,1024")
        if name not in known:
            raise ValueError(
                f"eval={text}: {name} is not an option of {task.name}. {suggest(name, known)}"
            )
        value = read(name, values, hints[name])
        if isinstance(value, Span):
            raise ValueError(f"eval={text}: must be values, not a schedule")
        found[name] = found.get(name, ()) + (value if isinstance(value, tuple) else (value,))
    return found


def keep_ends(options: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each span by a mixture of its two ends, on which alone a task's sizes depend."""
    return {
        name: (value.first, value.last) if isinstance(value, Span) else value
        for name, value in options.items()
    }


def resolve_spans(options: Mapping[str, Any], max_steps: int, batch_size: int) -> dict[str, Any]:
    """Replace each span by a schedule.

    Raises:
        ValueError: for a span of no steps, or of more steps than training has.
    """
    found = {}
    for name, value in options.items():
        if isinstance(value, Span):
            if value.steps is not None and not 1 <= value.steps <= max_steps:
                raise ValueError(
                    f"{name}={value.first}:{value.last}@{value.steps}: steps must be in "
                    f"1 … {max_steps} (max_steps)"
                )
            value = value.schedule(max_steps, batch_size)
        found[name] = value
    return found


def parse_assignments(texts: Sequence[str]) -> dict[str, str]:
    """Parse ["S.d_state=64", …] into options by name."""
    options: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"option={text}: must look like S.d_state=64")
        if name in options:
            raise ValueError(f"option={text}: {name}={options[name]} is given too; choose one")
        options[name] = value
    return options


def describe_run(
    name: str, given: Mapping[str, Any], out: Path | None, known: Mapping[str, Any] | None = None
) -> tuple[Run, Runtime]:
    """Return the run and the machine settings that the given options describe.

    A given option takes precedence over the known value, that over the protocol's, and that over
    the field's default.

    Args:
        name: of the task.
        given: options as typed, by field.
        out: the run folder; None: one named after the settings.
        known: settings from a file (`read_config`), by field.

    Raises:
        ValueError: naming the option, its value and its bound.
    """
    run, runtime = read_settings(name, given, out, known)
    try_on_machine(run, runtime)
    return run, runtime


def try_on_machine(run: Run, runtime: Runtime) -> None:
    """Check that a run can be trained here: its model takes a row of each stage.

    Raises:
        ValueError: naming the option, its value and its bound.
    """
    from lab.machine import choose_device
    from lab.training.experiment import try_out
    from lab.training.loggers import check_installed

    device = choose_device(runtime.device)
    check_installed(runtime.log)
    try_out(run, device)


def read_settings(
    name: str,
    given: Mapping[str, Any],
    out: Path | None = None,
    known: Mapping[str, Any] | None = None,
) -> tuple[Run, Runtime]:
    """Return what `describe_run` does, before anything is tried on this machine or torch imported.

    Raises:
        ValueError: naming the option, its value and its bound.
    """
    known = known or {}
    typed = parse_assignments(given.get("options", []))
    values = {**known, **given, "options": {**known.get("options", {}), **typed}}
    if values.get("model"):
        values = {"stack": "UM*2", "n_heads": None, **values}
    task, train, values = configure(name, values)
    run = Run(Path("runs"), task, build_config(ModelConfig, values), train)
    path = out or Path("runs") / f"{name}-{run.digest}"
    return replace(run, path=path), build_config(Runtime, values)


def configure(name: str, given: Mapping[str, Any]) -> tuple[Any, TrainConfig, dict[str, Any]]:
    """Return the task, its training configuration, and all values, the protocol's included.

    Raises:
        ValueError: naming the option, its value and its bound.
    """
    task_class = TASKS[name]
    hints = get_type_hints(task_class)
    if "preset" in given:
        check_choice("preset", given["preset"], task_class.presets)
    preset = task_class.presets[given["preset"]] if "preset" in given else None
    typed = {f.name: given[f.name] for f in fields(task_class) if f.init and f.name in given}
    options = {
        **(preset.options if preset else {}),
        **{
            name: read(name, value, hints[name]) if isinstance(value, str) else value
            for name, value in typed.items()
        },
    }
    d_model = given.get("d_model", ModelConfig.d_model)
    # The row length decides how many rows make a step, and so over how many rows a schedule goes.
    sizes = task_class(**keep_ends(options))
    protocol = given.get("protocol", "lab")
    defaults = get_protocol_defaults(protocol, sizes.seq_len, sizes.vocab_size, d_model)
    values = {**defaults, **given}
    if preset and preset.stack and "stack" not in given:
        layers = {**preset.layers, **given.get("options", {})}
        values |= {"stack": preset.stack, "options": layers}
    train = build_config(TrainConfig, values)
    task = task_class(**resolve_spans(options, train.max_steps, train.batch_size))
    return task, train, values


def build_config(part: type[PagePart], values: Mapping[str, Any]) -> PagePart:
    """Build one configuration from the values that are its fields."""
    return part(**{f.name: values[f.name] for f in fields(part) if f.name in values})


def read_config(
    file: Path, name: str, given: Mapping[str, Any] | None = None, *, trust: bool = True
) -> dict[str, Any]:
    """Return the settings in a file like a run's config.json, by option.

    The file may leave out parts (task, model, train) and fields; these keep their defaults.

    Args:
        file: the file.
        name: of the task.
        given: options that are typed as well, and so take precedence.
        trust: whether the file may name code to import and a text to read although it is not known
            to come from a command of this user.

    Raises:
        ValueError: for a file that cannot be read, is of another task or a newer format, or has
            unknown parts or fields, or values of the wrong type.
    """

    if file.is_dir():
        its = file / "config.json"
        near = f" {ask([str(its)])}" if its.is_file() else ""
        raise ValueError(f"config={file}: is a folder, must be a file.{near}")
    try:
        content = read_json(file, f"config={file}")
    except RunError as error:
        raise ValueError(error) from error
    if content.pop("format", FORMAT) != FORMAT:
        raise ValueError(f"config={file}: its format is newer than this lab's {FORMAT}")
    content.pop("source", None)
    kinds = {"task": TASKS[name], "model": ModelConfig, "train": TrainConfig}
    _refuse_unknown(f"config={file}", content, kinds)
    for part, values in content.items():
        if not isinstance(values, dict):
            raise ValueError(f"config={file}: {part} holds no object")
    if not trust:
        used = {
            part: {key: value for key, value in values.items() if key not in (given or {})}
            for part, values in content.items()
        }
        if list_named(used):
            raise ValueError(ask_for_trust(f"config={file}", list_named(used)))
    of = content.get("task", {}).pop("name", name)
    if of != name:
        raise ValueError(f"config={file}: is of the task {of}; use `lab {of} --config {file}`")
    settings: dict[str, Any] = {}
    for part, values in content.items():
        hints = get_type_hints(kinds[part])
        known = [f.name for f in fields(kinds[part]) if f.init]
        _refuse_unknown(f"config={file}: {part}", values, known)
        for option, value in values.items():
            settings[option] = (
                _read_varying(value)
                if part == "task"
                else _check_value(option, value, hints[option])
            )
    return settings


def _refuse_unknown(where: str, found: Mapping[str, Any], known: Any) -> None:
    for name in found:
        if name not in known:
            raise ValueError(f"{where}: unknown name {name!r}. {suggest(name, known)}")


def _read_varying(value: Any) -> Any:
    """Return an option of a task, which may be a schedule; the task itself checks its type."""
    if not isinstance(value, dict):
        return value
    try:
        return Schedule(**value)
    except TypeError as error:
        raise ValueError(f"{value}: a schedule has first, last and rows") from error


def _check_value(option: str, value: Any, hint: Any) -> Any:
    """Return a value of the model or the training if it has the type of its field."""
    if get_origin(hint) is dict and not isinstance(value, dict):
        raise ValueError(f"{option}={value!r}: must be an object")
    check_kind(option, value, hint)
    return value
