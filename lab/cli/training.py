"""`lab TASK`: train a model on a task. Every field of the configurations is an option."""

import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from lab.cli import rows
from lab.cli.command import TYPE_NAMES, set_parameters
from lab.cli.config_file import read_config
from lab.cli.messages import report_failures, report_usage_errors
from lab.cli.options import find_kind, read_settings, varies
from lab.cli.patience import say_if_slow
from lab.cli.run_settings import configure, try_on_machine
from lab.cli.run_settings import read_settings as read_run
from lab.cli.seeds import train_seeds
from lab.cli.trust_option import Trust
from lab.config import ModelConfig, Runtime, TrainConfig
from tasks import TASKS

ROWS_DEPEND_ON = frozenset(
    ("seed", "protocol", "batch_size", "max_steps", "train_rows", "d_model", "n_heads")
)
"""Training options that also determine the rows, or the size of a construction's model."""
LONG = 2**14
"""Tokens of a row from which on a note says what takes long."""
DOING = {
    "show": "making",
    "audit": "scoring predictors and weights set by hand on",
    "export": "writing",
}
"""What each action does with rows."""


def build_trainer(name: str) -> Callable[..., None]:
    """Return a function with every field of the task and the configurations in its signature."""
    task_class = TASKS[name]
    parts = {"Task": task_class, "Model": ModelConfig, "Training": TrainConfig, "Machine": Runtime}
    known = ", ".join(
        f"{option}={','.join(map(str, values))}"
        for option, values in task_class.evaluations.items()
    )
    annotations: dict[str, Any] = {
        "out": Annotated[
            Path | None,
            typer.Option(
                help="The run folder. A folder that holds an unfinished run resumes it.",
                show_default=f"runs/{name}-DIGEST",
            ),
        ],
        "as_json": Annotated[bool, typer.Option("--json", help="Print the result as JSON.")],
        "preset": Annotated[
            Literal["small", "published"] | None,
            typer.Option(
                help="Sizes by name: small is learned in minutes, published is the literature's. "
                "Options that you give take precedence.",
                rich_help_panel="Task",
            ),
        ],
        "config": Annotated[
            Path | None,
            typer.Option(
                metavar="FILE",
                help="Take the settings from a file like a run's config.json. Options that you "
                "give take precedence.",
                show_default=False,
            ),
        ],
        "trust": Trust,
        "fresh": Annotated[
            bool,
            typer.Option("--fresh", help="Train anew: remove the run that the folder holds first."),
        ],
        "seeds": Annotated[
            int | None,
            typer.Option(
                metavar="N",
                help="Train this many runs, with the seeds 0, 1, …, several at a time and each "
                "with one thread, and compare them.",
                rich_help_panel="Training",
                show_default=False,
            ),
        ],
        "evaluations": Annotated[
            list[str] | None,
            typer.Option(
                "--eval",
                metavar="OPTION=VALUE,…",
                help="Also evaluate at these values of one of the task's options.",
                show_default=known or False,
            ),
        ],
    }
    for panel, part in parts.items():
        hints = get_type_hints(part)
        for f in fields(part):
            if f.init:
                annotations[f.name] = annotate_option(panel, hints[f.name], f, panel == "Task")
        if panel == "Task":
            annotations.update(rows.OPTIONS)

    def train(
        out: Path | None,
        as_json: bool,
        config: Path | None,
        trust: bool,
        fresh: bool,
        seeds: int | None,
        evaluations: list[str] | None,
        **given: Any,
    ) -> None:
        looking = {option: given.pop(option) for option in rows.OPTIONS}
        chosen = {key: value for key, value in given.items() if value not in (None, [])}
        with report_usage_errors():
            training = {
                f.name.replace("_", "-"): chosen.get(f.name)
                for part in (ModelConfig, TrainConfig, Runtime)
                for f in fields(part)
                if f.name not in ROWS_DEPEND_ON
            }
            action = rows.choose_action(
                looking,
                {"seeds": seeds, "out": out, "fresh": fresh or None, "eval": evaluations}
                | training,
            )
            known = {} if config is None else _read_known(config, name, chosen, trust)
        if action is None and seeds is not None:
            train_seeds(name, seeds, chosen, known, out, evaluations, fresh=fresh, as_json=as_json)
            return
        if action is None:
            _train(name, chosen, known, out, as_json, evaluations, fresh=fresh)
            return
        settings = {**known, **chosen}
        with report_usage_errors(), say_if_slow(describe_reading(settings)):
            task, training_config, _ = configure(name, settings)
        sizes = {size: settings[size] for size in ("d_model", "n_heads") if size in settings}
        slow = f"{DOING[action]} rows of {task.seq_len:,} tokens" if task.seq_len >= LONG else ""
        with say_if_slow(slow):
            rows.act(action, task, training_config.seed, looking, sizes=sizes, as_json=as_json)

    set_parameters(train, annotations, {"trust": False, "fresh": False, "as_json": False})
    return train


def describe_reading(settings: dict[str, Any]) -> str:
    """Say what is read before anything else where a task's text is in a folder; else ""."""
    path = settings.get("path")
    return (
        f"reading the files below {path}" if isinstance(path, str) and Path(path).is_dir() else ""
    )


def annotate_option(panel: str, hint: Any, field: Any, of_task: bool) -> Any:
    """Return a Typer annotation for a dataclass field; None stands for "not given"."""
    default = None if field.default is MISSING else field.default
    shown = field.metadata.get("shown") or default
    kind, flag, metavar = find_kind(hint), None, None
    if of_task and varies(hint):
        # Several values, or a schedule, are read as text first.
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        metavar = "|".join(choices) if choices else f"{TYPE_NAMES[kind]},…"
        kind = str
    elif get_origin(kind) is dict:
        kind, flag, shown, metavar = list[str], "--option", None, "LAYER.NAME=VALUE"
    settings = typer.Option(
        *([flag] if flag else []),
        help=field.metadata.get("help", ""),
        rich_help_panel=panel,
        metavar=metavar,
        show_default=False if shown is None else str(shown),
    )
    return Annotated[kind | None, settings]


def _read_known(file: Path, name: str, given: dict[str, Any], trust: bool) -> dict[str, Any]:
    """Return the settings of a file, unless a given option stands for many of them.

    Raises:
        ValueError: for --preset or --protocol beside the file; or as `read_config`.
    """
    for option in ("preset", "protocol"):
        if option in given:
            raise ValueError(f"--config and --{option}: both choose many settings; choose one")
    return read_config(file, name, given, trust=trust)


def _train(
    name: str,
    given: dict[str, Any],
    known: dict[str, Any],
    out: Path | None,
    as_json: bool,
    evaluations: list[str] | None,
    *,
    fresh: bool,
) -> None:
    from lab.cli.outcome import show_finished, train_and_report
    from lab.training.evaluation import list_default_settings, vary_settings

    with report_usage_errors(), say_if_slow(describe_reading({**known, **given})):
        run, runtime = read_run(name, given, out, known)
        if evaluations is None:
            wanted = list_default_settings(run)
        else:
            wanted = read_settings(evaluations, TASKS[name])
            vary_settings(run, wanted)
    if fresh:
        with report_failures():
            run.begin_anew()
    if show_finished(run, wanted, as_json):
        return
    with say_if_slow("loading PyTorch" if sys.stderr.isatty() else ""):
        import lab.training.experiment  # noqa: F401

    with report_usage_errors():
        try_on_machine(run, runtime)
    train_and_report(run, runtime, wanted, as_json)
