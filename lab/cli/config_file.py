"""Reading the settings of a run from a file: `lab TASK --config FILE`."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from lab.config import ModelConfig, TrainConfig
from tasks import TASKS
from tasks.near_names import ask, suggest


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
    from lab.files import RunError, read_json
    from lab.training.run import FORMAT
    from lab.trust import ask_for_trust, list_named

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
    _check_names(f"config={file}", content, kinds)
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
        _check_names(f"config={file}: {part}", values, known)
        for option, value in values.items():
            settings[option] = (
                _read_varying(value) if part == "task" else _check(option, value, hints[option])
            )
    return settings


def _check_names(where: str, found: Mapping[str, Any], known: Any) -> None:
    for name in found:
        if name not in known:
            raise ValueError(f"{where}: unknown name {name!r}. {suggest(name, known)}")


def _read_varying(value: Any) -> Any:
    """Return an option of a task, which may be a schedule; the task itself checks its type."""
    from tasks.schedule import Schedule

    if not isinstance(value, dict):
        return value
    try:
        return Schedule(**value)
    except TypeError as error:
        raise ValueError(f"{value}: a schedule has first, last and rows") from error


def _check(option: str, value: Any, hint: Any) -> Any:
    """Return a value of the model or the training if it has the type of its field."""
    from tasks.bounds import check_kind

    if get_origin(hint) is dict and not isinstance(value, dict):
        raise ValueError(f"{option}={value!r}: must be an object")
    check_kind(option, value, hint)
    return value
