"""`lab TASK`: train a model on a task, or look at its rows; `lab resume`: go on with a run."""

import inspect
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_type_hints

import typer

from lab.api.options import make_force, make_trust
from lab.cli.command import annotate, set_parameters
from lab.cli.messages import refuse, report_failures, report_usage_errors, say, say_if_slow
from lab.config import ModelConfig, Runtime, TrainConfig
from lab.files import RunError, check_output
from tasks import TASKS
from tasks.bounds import option

if TYPE_CHECKING:
    from lab.training.run import Run
    from tasks.base import Task

ROWS_DEPEND_ON = frozenset(
    ("seed", "protocol", "batch_size", "max_steps", "train_rows", "d_model", "n_heads")
)
"""Training options that also determine the rows, or the size of a construction's model."""
LONG = 2**14
"""Tokens of a row from which on a note says what takes long."""
Action = Literal["show", "audit", "export"]
DOING = {
    "show": "making",
    "audit": "scoring predictors and weights set by hand on",
    "export": "writing",
}
"""What each action does with rows."""
MOST_SHOWN = 64
CONFIGS = {"Model": ModelConfig, "Training": TrainConfig, "Machine": Runtime}
"""The configurations by the section of the help that their fields are in."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The options of every task's command besides those of the configurations."""

    out: Path | None = option(
        None, "The run folder. A folder that holds an unfinished run resumes it."
    )
    as_json: bool = option(False, "Print the result as JSON.", flag="--json")
    preset: Literal["small", "published"] | None = option(
        None,
        "Sizes by name: small is learned in minutes, published is the literature's. Options that "
        "you give take precedence.",
        panel="Task",
    )
    config: Path | None = option(
        None,
        "Take the settings from a file like a run's config.json. Options that you give take "
        "precedence.",
        metavar="FILE",
    )
    trust: bool = make_trust()
    fresh: bool = option(False, "Train anew: remove the run that the folder holds first.")
    seeds: int | None = option(
        None,
        "Train this many runs, with the seeds 0, 1, …, several at a time and each with one thread, "
        "and compare them.",
        metavar="N",
        panel="Training",
    )
    evaluations: tuple[str, ...] = option(
        (),
        "Also evaluate at these values of one of the task's options.",
        flag="--eval",
        metavar="OPTION=VALUE,…",
    )


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """What to do with the rows of a task, without training."""

    show: int | None = option(
        None, f"Print N rows (1 to {MOST_SHOWN}), coloured by role.", metavar="N"
    )
    whole: bool = option(False, "Show long rows without folding them.")
    figure: Path | None = option(
        None,
        "Save a drawing of the rows that --show prints as this .html, .png or .svg file.",
    )
    force: bool = make_force()
    audit: bool = option(
        False,
        "Print the scores of chance, of shortcuts, of the oracle, and of models with weights set "
        "by hand.",
    )
    export: Path | None = option(
        None,
        "Write rows to a file, together with the settings that made them.",
        metavar="FILE.parquet",
    )
    rows: int | None = option(None, "Number of rows to export.", metavar="N")
    split: str | None = option(
        None, "Split of the rows: train, validation, test, …", "train; test with --audit"
    )

    def choose_action(self, training: Mapping[str, Any]) -> Action | None:
        """Return what to do with rows, or None if a model is to be trained.

        Args:
            training: values of options that only apply to training, by flag.

        Raises:
            ValueError: for options that contradict each other, or numbers out of bounds.
        """
        given = {f.name: value for f in fields(self) if (value := getattr(self, f.name))}
        if self.show is not None:  # 0 was given, too
            given["show"] = self.show
        actions: list[Action] = [a for a in ("show", "audit", "export") if a in given]
        if len(actions) > 1:
            raise ValueError(f"{' and '.join(f'--{a}' for a in actions)}: choose one")
        action = actions[0] if actions else None
        needs = {"whole": "show", "figure": "show", "force": "show", "rows": "export"}
        for name, needed in needs.items():
            if name in given and action != needed:
                raise ValueError(f"--{name}: works only with --{needed}")
        if action is None:
            if self.split is not None:
                raise ValueError("--split: works only with --show, --audit or --export")
            return None
        for flag, value in training.items():
            if value not in (None, ()):
                raise ValueError(f"--{flag}: has no effect with --{action}, which trains nothing")
        if self.show is not None and not 1 <= self.show <= MOST_SHOWN:
            raise ValueError(f"show={self.show}: must be in 1 … {MOST_SHOWN}")
        if self.figure is not None:
            check_output("figure", self.figure, self.force)
        if action == "export" and self.rows is None:
            raise ValueError("--export: needs --rows N")
        return action


@dataclass(frozen=True, kw_only=True)
class ResumeOptions:
    """Which run to go on with."""

    path: Path = option(MISSING, "A run folder.", argument=True)
    max_steps: int | None = option(
        None, "New limit of steps, counting those already taken.", "the run's own"
    )
    trust: bool = make_trust()
    as_json: bool = option(False, "Print the result as JSON.", flag="--json")


Options = TypeVar("Options", TrainOptions, RowOptions, ResumeOptions)


def build_trainer(name: str) -> Callable[..., None]:
    """Return a function with every field of the task and the configurations in its signature."""
    task_class = TASKS[name]
    known = ", ".join(
        f"{option}={','.join(map(str, values))}"
        for option, values in task_class.evaluations.items()
    )
    words = {"out": f"runs/{name}-DIGEST", "evaluations": known or None}
    parts = {"Task": task_class, "Rows, shown without training": RowOptions, **CONFIGS}
    annotations = _annotate_all(TrainOptions, shown=words)
    for panel, part in parts.items():
        of_config = part is not RowOptions
        annotations |= _annotate_all(part, panel, optional=of_config, several=panel == "Task")
    defaults = {
        f.name: f.default
        for part in (TrainOptions, RowOptions)
        for f in fields(part)
        if f.default != ()
    }

    def train(**given: Any) -> None:
        with report_usage_errors():
            asked = _take(TrainOptions, given)
            looking = _take(RowOptions, given)
            chosen = {key: value for key, value in given.items() if value not in (None, [])}
            if asked.preset is not None:
                chosen["preset"] = asked.preset
            action = looking.choose_action(_list_training_options(asked, chosen))
            known = _read_known(asked, name, chosen)
        if action is not None:
            _show_rows(action, name, {**known, **chosen}, looking, asked.as_json)
        elif asked.seeds is not None:
            _train_seeds(name, asked, chosen, known)
        else:
            _train(name, asked, chosen, known)

    set_parameters(train, annotations, defaults)
    return train


def _take(part: type[Options], given: dict[str, Any]) -> Options:
    """Take the fields of a dataclass out of what is given, and return an instance with them."""
    values = {f.name: given.pop(f.name) for f in fields(part)}
    return part(**{name: value for name, value in values.items() if value not in (None, [])})


def _annotate_all(
    part: type[Any],
    panel: str | None = None,
    *,
    shown: Mapping[str, str | None] | None = None,
    optional: bool = False,
    several: bool = False,
) -> dict[str, Any]:
    hints, words = get_type_hints(part), shown or {}
    return {
        f.name: annotate(
            f,
            hints[f.name],
            panel=panel,
            shown=words.get(f.name),
            optional=optional,
            several=several,
        )
        for f in fields(part)
        if f.init
    }


def _list_training_options(asked: TrainOptions, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of options that only apply to training, by flag; None: not given."""
    found = {
        "seeds": asked.seeds,
        "out": asked.out,
        "fresh": asked.fresh or None,
        "eval": asked.evaluations or None,
    }
    for part in CONFIGS.values():
        for f in fields(part):
            if f.name not in ROWS_DEPEND_ON:
                found[f.name.replace("_", "-")] = chosen.get(f.name)
    return found


def _read_known(asked: TrainOptions, name: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the file, unless a given option stands for many of them.

    Raises:
        ValueError: for --preset or --protocol beside the file; or as `read_config`.
    """
    if asked.config is None:
        return {}
    from lab.api.settings import read_config

    for many in ("preset", "protocol"):
        if many in chosen:
            raise ValueError(f"--config and --{many}: both choose many settings; choose one")
    return read_config(asked.config, name, chosen, trust=asked.trust)


def _describe_reading(settings: Mapping[str, Any]) -> str:
    """Say what is read before anything else where a task's text is in a folder; else ""."""
    path = settings.get("path")
    return (
        f"reading the files below {path}" if isinstance(path, str) and Path(path).is_dir() else ""
    )


def _train(name: str, asked: TrainOptions, given: dict[str, Any], known: dict[str, Any]) -> None:
    from lab.api.settings import read_evaluations, read_settings, try_on_machine
    from lab.training.evaluation import list_default_settings, vary_settings

    with report_usage_errors(), say_if_slow(_describe_reading({**known, **given})):
        run, runtime = read_settings(name, given, asked.out, known)
        if asked.evaluations:
            wanted = read_evaluations(asked.evaluations, TASKS[name])
            vary_settings(run, wanted)
        else:
            wanted = list_default_settings(run)
    if asked.fresh:
        with report_failures():
            run.begin_anew()
    if _show_finished(run, wanted, asked.as_json):
        return
    with say_if_slow("loading PyTorch" if sys.stderr.isatty() else ""):
        import lab.training.experiment  # noqa: F401

    with report_usage_errors():
        try_on_machine(run, runtime)
    _train_and_report(run, runtime, wanted, asked.as_json)


def _train_seeds(
    task: str, asked: TrainOptions, given: dict[str, Any], known: dict[str, Any]
) -> None:
    """Train a run for each of several seeds, or go on with them, and print how they compare."""
    from analysis.sweeps.seeds import summarize_seeds
    from lab.api.options import SweepOptions
    from lab.api.sweeping import PAGE, build_seeds
    from lab.cli.sweep import report_failed_runs, run_shown
    from lab.cli.tables.runs import build_seeds_table
    from lab.console import open_table_console

    assert asked.seeds is not None
    with report_usage_errors():
        for name, value in (("seed", given.get("seed")), ("eval", asked.evaluations or None)):
            if value is not None:
                raise ValueError(f"--{name}: is for a single run; leave it out, or --seeds")
        built = build_seeds(task, asked.seeds, given, known)
    out = asked.out or Path("runs") / built.name
    options = SweepOptions(out=out, max_minutes=given.get("max_minutes"), fresh=asked.fresh)
    table, results = run_shown(built, options)
    found = summarize_seeds(table)
    if asked.as_json:
        typer.echo(json.dumps({"task": task, "out": str(out), **found.to_dict()}))
    else:
        open_table_console().print(build_seeds_table(found))
        typer.echo(found.describe())
    typer.echo(f"page: {out / PAGE}", err=asked.as_json)
    typer.echo(f"One run: `lab analyze {out / built.cells[0].name}`", err=True)
    report_failed_runs(results)


def _train_and_report(
    run: "Run", runtime: Runtime, wanted: Mapping[str, Sequence[Any]], as_json: bool
) -> None:
    """Train, evaluate at further settings, print the result, and write the report.

    Args:
        run: what to train; a finished run is only shown.
        runtime: device, minutes, logger.
        wanted: values to evaluate at, by option of the task.
        as_json: print the result as JSON and nothing else.
    """
    from lab.api.progress import show_count, show_progress
    from lab.machine import keep_freed_memory
    from lab.training.evaluation import evaluate_settings
    from lab.training.experiment import carry_out

    keep_freed_memory()
    with report_failures(), report_usage_errors(), show_progress(run) as shown:
        before = run.read_result()
        result = carry_out(run, runtime, shown.on_plan, shown.on_row, shown.on_note)
    found = []
    if wanted and not result["signal"]:
        with report_failures():
            found = evaluate_settings(
                run, wanted, runtime.device, lambda text: say(f"evaluating {text}", err=True)
            )
            result = run.read_result() or result
    _show_result(result, found, as_json)
    if result["signal"]:
        say(
            f"`{run.resume_command}` goes on, as does the same command; `lab analyze {run.path}` "
            "writes a report.",
            err=True,
        )
        raise typer.Exit(128 + signal.Signals[result["signal"]])
    from analysis import QUICK
    from analysis.pages.report import write_quick
    from analysis.pages.report_files import find_page, is_complete

    notes: list[str] = []
    with report_failures():
        report = find_page(run) if result == before else None
        if report is None:
            with show_count(QUICK, "writing the report") as on_begin:
                report = write_quick(run, on_begin, notes.append).page
    for note in notes:
        say(note, err=True)
    _show_report(run.path, report, is_complete(run), as_json)


def _show_finished(run: "Run", wanted: Mapping[str, Sequence[Any]], as_json: bool) -> bool:
    """Print what there is of a run that has ended and has all that is wanted of it.

    This touches no file, and does not import torch.

    Args:
        run: the run.
        wanted: values to evaluate at, by option of the task.
        as_json: print the result as JSON and nothing else.

    Returns:
        Whether it was printed. If not, `_train_and_report` does what is missing, or says why not.
    """
    from analysis import ANALYSES
    from lab.training.evaluation import list_evaluations, undo_json, vary_settings

    try:
        run.compare()
        result = run.read_final_result()
        covered = None if result is None else run.read_coverage(result["steps"])
    except RunError:
        return False
    page = run.path / "report.html"
    if result is None or covered is None or not page.is_file():
        return False
    entries = list_evaluations(result, result["steps"])
    asked = [(option, undo_json(value)) for option, value, _ in vary_settings(run, wanted)]
    if any(setting not in entries for setting in asked):
        return False
    _show_result(result, [entries[setting] for setting in asked], as_json)
    _show_report(run.path, page, covered >= {*ANALYSES}, as_json)
    return True


def _show_result(result: dict[str, Any], found: list[dict[str, Any]], as_json: bool) -> None:
    """Print the result of a run, and its accuracy in other settings."""
    if as_json:
        typer.echo(json.dumps(result))
        return
    from lab.api.results import describe_ending, name_measure
    from lab.cli.tables.runs import build_evaluations_table, build_result_table
    from lab.console import open_console

    console = open_console()
    console.print(build_result_table(result))
    if found:
        console.print(build_evaluations_table(found, name_measure(result)))
    console.print(describe_ending(result))


def _show_report(run: Path, page: Path, complete: bool, as_json: bool) -> None:
    """Name the page of a run's report, and how to get all analyses where some are missing."""
    say(f"report: {page}", err=as_json)
    if not complete:
        say(f"For every analysis: `lab analyze {run}`", err=True)


def resume(**given: Any) -> None:
    """Go on with an unfinished run, or with one that reached its limit of steps, up to a later one.

    A schedule that ends at the limit, such as cosine, follows the curve of the later limit from
    here on.
    """
    from lab.api.results import open_run

    asked = _take(ResumeOptions, given)
    with report_failures(), report_usage_errors():
        run = open_run(asked.path, asked.trust, lambda note: say(note, err=True))
        runtime = Runtime(**{name: v for name, v in given.items() if v is not None})
        if asked.max_steps is not None:
            run = run.set_limit(asked.max_steps)
        if _show_finished(run, {}, asked.as_json):
            return
        from lab.training.loggers import check_installed

        check_installed(runtime.log)
    _train_and_report(run, runtime, {}, asked.as_json)


set_parameters(
    resume,
    _annotate_all(ResumeOptions) | _annotate_all(Runtime, "Machine", optional=True),
    {
        f.name: inspect.Parameter.empty if f.default is MISSING else f.default
        for f in fields(ResumeOptions)
    },
)


def _show_rows(
    action: Action, name: str, settings: Mapping[str, Any], asked: RowOptions, as_json: bool
) -> None:
    """Show, audit or export the rows of a task."""
    from lab.api.settings import configure

    with report_usage_errors(), say_if_slow(_describe_reading(settings)):
        task, training, _ = configure(name, settings)
    slow = f"{DOING[action]} rows of {task.seq_len:,} tokens" if task.seq_len >= LONG else ""
    split, seed = asked.split or ("test" if action == "audit" else "train"), training.seed
    with say_if_slow(slow), report_failures(), report_usage_errors():
        task.batch(split=split, size=1, seed=seed)
        match action:
            case "show":
                _print_rows(task, split, seed, asked, as_json)
            case "audit":
                _audit_rows(task, split, seed, settings, as_json)
            case "export":
                _export_rows(task, split, seed, asked, as_json)


def _print_rows(task: "Task", split: str, seed: int, asked: RowOptions, as_json: bool) -> None:
    """Print the first rows of a split, and draw them into a file if one is given."""
    assert asked.show is not None
    if asked.figure is not None:
        from analysis.figures.theme import add_title
        from analysis.pages.export import save
        from analysis.rows import lay_out
        from lab.files import explain_write_errors

        layout = lay_out(task, task.batch(split=split, size=asked.show, seed=seed))
        with explain_write_errors(asked.figure):
            save(add_title(layout.figure(), layout.title, f"{split}, seed {seed}"), asked.figure)
    if as_json:
        for number in range(asked.show):
            batch = task.batch(split=split, start=number, size=1, seed=seed)
            found = {"inputs": batch.inputs, "targets": batch.targets, "roles": batch.roles}
            row = {name: tensor[0].tolist() for name, tensor in found.items()}
            links = {name: link[0].tolist() for name, link in batch.links.items()}
            typer.echo(json.dumps({"row": number, **row, "links": links}))
    else:
        from lab.cli.tables.rows import print_rows
        from lab.console import open_table_console

        print_rows(
            open_table_console(),
            task,
            split=split,
            seed=seed,
            count=asked.show,
            whole=asked.whole,
        )
    if asked.figure is not None:
        say(f"figure: {asked.figure}", err=as_json)


def _audit_rows(
    task: "Task", split: str, seed: int, settings: Mapping[str, Any], as_json: bool
) -> None:
    """Print what predictors and models set by hand reach; exit with 1 if the oracle is unsound."""
    from lab.constructions import ladder
    from lab.machine import explain_lack_of_memory
    from lab.suite.audit import audit, measure_bits

    sizes = {n: settings.get(n, getattr(ModelConfig, n)) for n in ("d_model", "n_heads")}
    with explain_lack_of_memory(f"an audit, seq_len={task.seq_len}"):
        found = audit(task, split=split, seed=seed)
        bits = measure_bits(task, split=split, seed=seed)
        rungs = ladder(task, **sizes, seed=seed)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "task": task.describe(),
                    "split": split,
                    "seed": seed,
                    "rows": found.rows,
                    "scored": found.scored,
                    "scores": [asdict(score) for score in found.best_first],
                    "bits": bits,
                    "models": [asdict(rung) for rung in rungs],
                }
            )
        )
    else:
        from lab.cli.tables.suite import build_audit_table, build_ladder_table
        from lab.console import open_table_console

        console = open_table_console()
        title = f"{task.name}: {task.measure} of predictors, {split}, seed {seed}"
        console.print(build_audit_table(found, bits, title, task.measure))
        if rungs:
            console.print(build_ladder_table(rungs))
    if not found.sound:
        less = "no better than a shortcut" if task.stochastic else "not always right"
        raise refuse(f"{task.name}: its oracle is {less}", 1)


def _export_rows(task: "Task", split: str, seed: int, asked: RowOptions, as_json: bool) -> None:
    """Write the first rows of a split to a file, with the recipe that makes them again."""
    from lab.files import explain_write_errors
    from lab.suite.parquet import Recipe, export

    path, rows = asked.export, asked.rows
    assert path is not None
    assert rows is not None
    with explain_write_errors(path):
        export(Recipe(task, split, seed, rows), path)
    summary = {"path": str(path), "rows": rows, "bytes": path.stat().st_size}
    typer.echo(
        json.dumps(summary) if as_json else f"{path}: {rows:,} rows, {summary['bytes']:,} bytes"
    )
