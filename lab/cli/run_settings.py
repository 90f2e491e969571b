"""What the options of a command describe: a task, a run, and the machine that it uses."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from lab.cli.messages import parse_assignments
from lab.cli.options import keep_ends, read, resolve_spans
from lab.config import ModelConfig, Runtime, TrainConfig, get_protocol_defaults
from tasks import TASKS
from tasks.bounds import check_choice

if TYPE_CHECKING:
    from lab.training.run import Run

PagePart = TypeVar("PagePart", ModelConfig, TrainConfig, Runtime)


def describe_run(
    name: str, given: Mapping[str, Any], out: Path | None, known: Mapping[str, Any] | None = None
) -> tuple["Run", Runtime]:
    """Return the run and the machine settings that the given options describe.

    A given option takes precedence over the known value, that over the protocol's, and that over
    the field's default.

    Args:
        name: of the task.
        given: options as typed, by field.
        out: the run folder; None: one named after the settings.
        known: settings from a file (`lab.cli.config_file`), by field.

    Raises:
        ValueError: naming the option, its value and its bound.
    """
    run, runtime = read_settings(name, given, out, known)
    try_on_machine(run, runtime)
    return run, runtime


def try_on_machine(run: "Run", runtime: Runtime) -> None:
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
) -> tuple["Run", Runtime]:
    """Return what `describe_run` does, before anything is tried on this machine or torch imported.

    Raises:
        ValueError: naming the option, its value and its bound.
    """
    from lab.training.run import Run

    known = known or {}
    typed = parse_assignments(given.get("options", []))
    values = {**known, **given, "options": {**known.get("options", {}), **typed}}
    if values.get("model") and "stack" not in values:
        values["stack"] = "UM*2"
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
