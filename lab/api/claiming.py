"""Deciding a claim: run the sweep that decides it, and judge what came out."""

import contextlib
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
import torch
from pydantic import with_config
from typing_extensions import TypedDict

from analysis.claims.card import CARD, PAGE, Card, digest_code, digest_configuration, digest_data
from analysis.claims.claim import LOOKS, TUNING, Claim, Statistic
from analysis.claims.verdict import (
    ClaimVerdict,
    Floor,
    collect_costs,
    compute_power,
    decide,
    decide_costs,
    find_rates,
)
from analysis.pages.page import Shown, show_finding
from analysis.pages.sweep import show_figures
from analysis.sweeps.results import SweepResults
from analysis.sweeps.settings import RATE, name_values
from analysis.words import join_names
from lab.api.options import ClaimOptions, SweepOptions
from lab.api.progress import Display, show_nothing
from lab.api.settings import read_settings
from lab.api.sweep_settings import parse
from lab.api.sweeping import run_sweep
from lab.bench.costs import measure_costs
from lab.files import RunError, check_output, has_entries, read_json
from lab.machine import choose_device, describe_device
from lab.models.anatomy import dissect
from lab.suite.audit import audit, measure_bits
from lab.sweeps import Cell, Sweep
from lab.sweeps.outcome import open_run
from lab.sweeps.table import is_table, read_table, save_table
from lab.training.records import STRICT, validate
from tasks.base import Task
from tasks.near_names import suggest

HOME = Path(__file__).parents[1] / "claims"
"""The claims that come with the lab."""
ENOUGH = 0.8
"""A power below this is too low to learn from an undecided verdict."""
ROWS = 64
"""Rows on which shortcuts are scored."""


@with_config(STRICT)
class CardFile(TypedDict):
    """What is read of an earlier claim.json."""

    machines: list[str]


@dataclass(frozen=True)
class Judgement:
    """Whether a claim holds.

    Attributes:
        card: the verdict, and all that it rests on.
        page: the file of the card's page.
        results: of the claim's sweep; None for a claim about costs.
    """

    card: Card
    page: Path
    results: SweepResults | None


def list_claims() -> list[Claim]:
    """Return the claims that come with the lab."""
    return [Claim.read(file) for file in sorted(HOME.glob("*.toml"))]


def judge(
    options: ClaimOptions,
    show: Callable[[], AbstractContextManager[Display]] = show_nothing,
    on_note: Callable[[str], None] = lambda text: None,
) -> Judgement:
    """Run or complete the sweep of a claim, and judge whether the claim holds.

    Args:
        options: which claim, and how to run its sweep.
        show: opens what shows how far the sweep is; a claim with several looks opens it for each.
        on_note: called with sentences on what is claimed and compared, before the sweep.

    Raises:
        ValueError: for an unknown claim, a sweep that cannot be built, or options that do not
            apply to it.
        RunError: when a file cannot be read or written.
        InterruptedSweepError: when a signal stopped it; the same call goes on.
    """
    stated = Claim.read(_find_file(options.what))
    built = build_sweep(stated, options.scale)
    counted = check_parameters(stated.equal, stated.statistic, built)
    out, runs = (
        options.out or Path("runs") / "claims" / f"{name}-{options.scale}"
        for name in (stated.name, stated.sweeps_of)
    )
    check_output(
        "out", out / CARD, options.force, lambda file: has_entries(file, "verdict", "digests")
    )
    check_output("out", out / PAGE, options.force)
    how = SweepOptions(
        out=runs,
        workers=options.workers,
        ray=options.ray,
        max_minutes=options.max_minutes,
        table=out / "table.parquet",
        force=options.force,
        show=options.show,
    )
    for line in (f"{stated.says} {stated.source}", *counted):
        on_note(line)
    power, results = None, None
    if stated.power is None:
        verdict, shown = judge_costs(built, stated.statistic, how, on_note)
        seeds, looks = verdict.estimate.seeds, ()
        machines = _list_measuring_machines(out, options.show)
    else:
        seeds = len({cell.factors["seed"] for cell in built.cells})
        looks = stated.list_looks(options.scale) or (seeds,)
        power = compute_power(stated.statistic, stated.power, looks)
        counts = join_names([str(look) for look in looks], "or")
        on_note(
            f"power: {power:.2f}, with {counts} seeds, a true effect of {stated.power.effect:g} "
            f"and a spread of {stated.power.spread:g} between seeds"
            + ("; more seeds would decide more often" if power < ENOUGH else "")
        )
        verdict, seeds, results, built = _look_until_decided(
            stated, options.scale, built, looks, how, show, on_note
        )
        shown = show_figures(results, stated.name)
        machines = _list_training_machines(built, runs)
    card = Card(
        claim=stated,
        scale=options.scale,
        verdict=verdict,
        power=power,
        seeds=seeds,
        digests=_compute_digests(stated, options.scale, built),
        machines=machines,
        looks=looks,
    )
    return Judgement(card, card.write(out, shown, results.errors if results else {}), results)


def _look_until_decided(
    stated: Claim,
    scale: str,
    built: Sweep,
    looks: Sequence[int],
    how: SweepOptions,
    show: Callable[[], AbstractContextManager[Display]],
    on_note: Callable[[str], None],
) -> tuple[ClaimVerdict, int, SweepResults, Sweep]:
    """Run the sweep of a claim with more and more seeds until they decide it.

    Where not all runs of a later look have ended, the verdict of the last whole look stays. Where
    only some seeds try all learning rates, they run first, and the others at the best of these.

    Args:
        built: the sweep of the first look.

    Returns:
        the verdict, the number of seeds behind it, and the sweep that was run last.
    """
    floor, last = measure_floor(stated.statistic, built), None
    tuning, rates = stated.count_tuning_seeds(scale), set[tuple[Any, ...]]()
    if tuning is not None:
        tried = _leave_out(built, tuning, rates)
        table, results = run_sweep(tried, how, show(), on_note)
        verdict = decide(table, stated.statistic, tried.factors, floor, len(looks))
        if verdict.operational:
            because = f"of the runs that choose learning rates, {verdict.because}"
            return replace(verdict, because=because), tuning, results, tried
        rates = find_rates(table, stated.statistic, _list_settings(tried))
    for seeds in looks:
        if last is not None:
            built = build_sweep(stated, scale, seeds)
        if tuning is not None:
            built = _leave_out(built, tuning, rates)
        table, results = run_sweep(built, how, show(), on_note)
        verdict = decide(table, stated.statistic, built.factors, floor, len(looks))
        if last is not None and verdict.operational:
            because = f"{last[0].because}; with more seeds, {verdict.because}"
            return (replace(last[0], because=because, unended=verdict.unended), *last[1:])
        last = verdict, seeds, results, built
        if verdict.outcome != "undecided" or verdict.operational:
            break
    assert last is not None
    return last


def _list_settings(sweep: Sweep) -> list[str]:
    return [factor for factor in sweep.factors if factor not in (RATE, "seed")]


def _leave_out(sweep: Sweep, tuning_seeds: int, rates: Container[tuple[Any, ...]]) -> Sweep:
    """Return the sweep with its first seeds at all learning rates, and the others at some.

    Args:
        rates: a setting's values and the learning rate at which the others run.
    """
    names = (*_list_settings(sweep), RATE)
    seeds = [*dict.fromkeys(cell.factors["seed"] for cell in sweep.cells)][:tuning_seeds]
    return replace(
        sweep,
        cells=tuple(
            cell
            for cell in sweep.cells
            if cell.factors["seed"] in seeds or tuple(cell.factors[name] for name in names) in rates
        ),
    )


def _find_file(what: str | None) -> Path:
    """Return the file of a claim.

    Raises:
        ValueError: for none, or an unknown name.
    """
    known = [file.stem for file in sorted(HOME.glob("*.toml"))]
    if what is None:
        raise ValueError(f"name a claim or a file. {suggest('', known)}")
    if what.endswith(".toml"):
        return Path(what)
    if what not in known:
        raise ValueError(f"claim={what!r}: is not a claim of the lab. {suggest(what, known)}")
    return HOME / f"{what}.toml"


def build_sweep(stated: Claim, scale: str, seeds: int | None = None) -> Sweep:
    """Return the sweep of a claim at a scale, with its first seeds.

    Args:
        stated: the claim.
        scale: of `SCALES`.
        seeds: how many; None: those of its first look, or all where it has no looks.

    Raises:
        ValueError: for a scale that the claim does not have, a sweep that cannot be built, or a
            statistic of factors or values that the sweep does not have.
    """
    if scale not in stated.sweeps:
        known = ", ".join(stated.sweeps)
        raise ValueError(f"scale={scale}: {stated.name} has no such sweep; it has {known}")
    name = f"{stated.name}-{scale}"
    content = {
        part: value for part, value in stated.sweeps[scale].items() if part not in (LOOKS, TUNING)
    }
    if looks := stated.list_looks(scale):
        content["seeds"] = seeds or looks[0]
    built = parse(content, f"{stated.name}.{scale}", name).build()
    if (tuning := stated.count_tuning_seeds(scale)) is not None:
        _check_tuning(built, tuning, f"{scale}.{TUNING}={tuning}")
    lengths = {length for cell in built.cells for length in cell.lengths}
    values = {n: {cell.factors[n] for cell in built.cells} for n in built.factors}
    for part in (stated.statistic.of, stated.statistic.than, stated.statistic.at):
        for factor, value in part.items():
            known = {**values, "seq_len": lengths}.get(factor, set())
            if value not in known:
                raise ValueError(
                    f"statistic: {factor}={value} is not a value of the sweep {name}; "
                    f"it has {', '.join(map(str, sorted(known, key=str))) or 'no such factor'}"
                )
    return replace(built, question=stated.says, cells=tuple(_select(built.cells, stated)))


def _check_tuning(sweep: Sweep, tuning_seeds: int, name: str) -> None:
    """Check that a sweep has learning rates to choose among, and so many seeds."""
    seeds, rates = ({cell.factors.get(key) for cell in sweep.cells} for key in ("seed", RATE))
    if len(rates) < 2:
        raise ValueError(f"{name}: must be of a sweep with several values of {RATE}")
    if "seq_len" in sweep.factors:
        raise ValueError(f"{name}: must be of a sweep without seq_len in its grid")
    if tuning_seeds > len(seeds):
        raise ValueError(f"{name}: must be ≤ {len(seeds)}, the seeds of the first verdict")


def _select(cells: Sequence[Cell], stated: Claim) -> Iterator[Cell]:
    """Yield the cells that a claim runs: of another claim's sweep, those that it compares."""
    compared = [stated.statistic.of, stated.statistic.than]
    shares = stated.sweeps_of != stated.name and stated.statistic.kind == "difference"
    for cell in cells:
        if not shares or any(setting.items() <= cell.factors.items() for setting in compared):
            yield cell


def judge_costs(
    sweep: Sweep,
    statistic: Statistic,
    options: SweepOptions,
    on_note: Callable[[str], None] = lambda text: None,
) -> tuple[ClaimVerdict, list[tuple[str, Shown]]]:
    """Measure the cells of a sweep, unless earlier costs are only shown, and judge them.

    Returns:
        the verdict, and the figures of its page.

    Raises:
        ValueError: for options that costs do not have, more than one seed, nothing to show, or a
            table that the lab did not make.
        RunError: when the table cannot be written.
    """
    file = options.table
    assert file is not None
    for name, value in (("workers", options.workers), ("ray", options.ray)):
        if value is not None:
            raise ValueError(f"{name}={value}: costs are measured in one process, one at a time")
    if options.max_minutes is not None:
        raise ValueError(f"max_minutes={options.max_minutes:g}: nothing is trained")
    seeds = len({cell.factors["seed"] for cell in sweep.cells})
    if seeds > 1:
        raise ValueError(f"seeds={seeds}: must be 1, since costs are measured in rounds of turns")
    if options.show and not file.exists():
        raise ValueError(f"show: nothing has been measured yet: there is no {file}")
    check_output(
        "out", file, options.force, lambda path: is_table(path, ("seq_len", "round", "cost"))
    )
    table = read_table(file) if options.show else _measure(sweep, statistic, on_note)
    save_table(table, file)
    found = collect_costs(table, statistic.cost)
    return decide_costs(table, statistic), [("costs", show_finding(found, sweep.name))]


def _measure(sweep: Sweep, statistic: Statistic, on_note: Callable[[str], None]) -> pl.DataFrame:
    """Return the costs of all cells; those of one place, such as a row length, take turns."""
    assert statistic.cost
    compared = {*statistic.of, *statistic.than}
    places: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in sweep.cells:
        key = tuple(value for name, value in cell.factors.items() if name not in compared)
        places.setdefault(key, []).append(cell)
    rows = []
    for number, cells in enumerate(places.values(), 1):
        runs = [read_settings(cell.task, cell.options)[0] for cell in cells]
        on_note(f"measuring {len(cells)} settings, {number} of {len(places)} places")
        costs = measure_costs(runs, statistic.cost)
        for cell, run, taken in zip(cells, runs, costs, strict=True):
            factors = {name: v for name, v in cell.factors.items() if name != "seed"}
            at = {"seq_len": run.task.seq_len} | factors
            rows += [at | {"round": i, "cost": cost} for i, cost in enumerate(taken)]
    return pl.DataFrame(rows)


def measure_floor(statistic: Statistic, sweep: Sweep) -> Floor:
    """Return chance and the best shortcut, averaged over the settings that a difference compares
    and their row lengths; zeros where there is none, or for a statistic that they do not decide.
    """
    if statistic.kind != "difference":
        return Floor()
    known: dict[str, dict[str, float]] = {}
    found = []
    settings = [{**setting, **statistic.at} for setting in (statistic.of, statistic.than)]
    for cell in sweep.cells:
        task = read_settings(cell.task, cell.options)[0].task
        for length in cell.lengths:
            named = {**cell.factors, "seq_len": length}
            if any(setting.items() <= named.items() for setting in settings):
                at = task if length == task.seq_len else task.resize(length)
                known[repr(at)] = known.get(repr(at)) or _score(at, statistic.measure)
                found.append(known[repr(at)])
    if not found:
        return Floor()
    means = {name: sum(scores[name] for scores in found) / len(found) for name in found[0]}
    chance = means.pop("chance")
    name = max(means, key=means.__getitem__, default="")
    return Floor(chance, name, means.get(name, chance))


def _score(task: Task, measure: str) -> dict[str, float]:
    """Return the accuracy of chance and of each shortcut, or minus their bits."""
    if measure == "bits" and task.vectors:
        raise ValueError(f"measure=bits: {task.name}'s answers are numbers, which have no bits")
    if measure == "bits":
        known = measure_bits(task, rows=ROWS).items()
        saved = {name: -bits for name, bits in known if name != "oracle"}
        return {"chance": -math.log2(task.vocab_size), **saved}
    scores = audit(task, rows=ROWS).scores
    return {score.name: score.accuracy for score in scores if score.name != "oracle"}


def check_parameters(equal: Mapping[str, float], statistic: Statistic, sweep: Sweep) -> list[str]:
    """Return the parameters of the settings at each place, in words; none if they may differ.

    A place is a combination of values of the factors that the statistic does not compare. The
    settings are all values of those that it does compare, including values that it does not name.

    Args:
        equal: by how large a share of the least they may differ, for total and active parameters.
        statistic: of the claim.
        sweep: of the claim at a scale.

    Raises:
        ValueError: for settings that differ by more; their numbers are in the message.
    """
    if not equal:
        return []
    compared = {*statistic.of, *statistic.than}
    counts: dict[str, dict[str, dict[str, int]]] = {}
    models: dict[str, dict[str, int]] = {}
    for cell in sweep.cells:
        if cell.factors["seed"] != sweep.cells[0].factors["seed"]:
            continue
        place = {n: v for n, v in cell.factors.items() if n not in {*compared, RATE, "seed"}}
        setting = name_values({n: v for n, v in cell.factors.items() if n in compared})
        found = counts.setdefault(name_values(place) if place else "", {})
        if setting not in found:  # the learning rate changes nothing
            found[setting] = _count(cell, models)
    return [
        _compare_counts(kind, share, {name: found[kind] for name, found in settings.items()}, place)
        for place, settings in counts.items()
        for kind, share in equal.items()
    ]


def _count(cell: Cell, models: dict[str, dict[str, int]]) -> dict[str, int]:
    """Return the parameters of a cell's model; `models` keeps them, as many cells have the same."""
    run, _ = read_settings(cell.task, cell.options)
    model = f"{run.model}, {run.task.sizes}"
    if model not in models:
        with torch.device("meta"):  # no weights are drawn
            found = dissect(run.build())
        models[model] = {"total": found.total, "active": found.active}
    return models[model]


def _compare_counts(kind: str, share: float, counts: Mapping[str, int], place: str) -> str:
    least, most = min(counts.values()), max(counts.values())
    numbers = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    line = f"{kind} parameters{f' at {place}' if place else ''}: {numbers}"
    if most - least > share * least:
        raise ValueError(
            f"equal.{kind}={share:g}: the settings differ by {(most - least) / least:.2%}: {line}"
        )
    return line


def _list_training_machines(sweep: Sweep, out: Path) -> tuple[str, ...]:
    """Return the machines on which runs of a sweep ended."""
    known = set[str]()
    for cell in sweep.cells:
        with contextlib.suppress(RunError):  # a damaged run has failed, which the verdict says
            run = open_run(out, cell)
            result = run.read_result() if run is not None else None
            known |= {result["machine"]} if result else set()
    return tuple(sorted(known)) or ("not recorded",)


def _list_measuring_machines(out: Path, show: bool) -> tuple[str, ...]:
    """Return the machine on which costs were taken: this one, unless earlier ones are shown."""
    if not show:
        return (describe_device(choose_device("auto")),)
    if not has_entries(out / CARD, "machines"):
        return ("not recorded",)
    where = f"{out / CARD}: cannot be read; remove it"
    return tuple(validate(CardFile, read_json(out / CARD, where), where)["machines"])


def _compute_digests(stated: Claim, scale: str, sweep: Sweep) -> dict[str, str]:
    """Return the digests of the rows, the source and the configuration behind a verdict."""
    runs = [read_settings(cell.task, cell.options)[0] for cell in sweep.cells]
    rows_of = {(repr(run.task), run.train.seed): (run.task, run.train.seed) for run in runs}
    return {
        "data": digest_data(list(rows_of.values())),
        "code": digest_code(),
        "configuration": digest_configuration(stated, scale),
    }
