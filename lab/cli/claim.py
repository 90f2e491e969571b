"""`lab claim`: run what decides a claim, and print whether it holds."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lab.cli.equal_parameters import check_parameters
from lab.cli.messages import report_failures, report_usage_errors
from lab.cli.output import Force, check_output
from lab.cli.sweep import report_failed_runs, run_sweep
from lab.cli.sweep_options import (
    MaxMinutes,
    RayAddress,
    SweepOptions,
    Workers,
    make_runs_option,
)

if TYPE_CHECKING:
    from analysis.claims.claim import Claim, Power
    from lab.sweeps import Sweep

HOME = Path(__file__).parents[1] / "claims"
"""The claims that come with the lab."""
ENOUGH = 0.8
"""A power below this is too low to learn from an undecided verdict."""


def claim(
    what: Annotated[
        str | None,
        typer.Argument(metavar="NAME|FILE", help="A claim of --list, or a .toml file."),
    ] = None,
    listing: Annotated[
        bool, typer.Option("--list", help="List the claims that come with the lab.")
    ] = False,
    scale: Annotated[
        Literal["smoke", "small", "paper"],
        typer.Option(
            help="Size of the sweep: smoke takes minutes, small an hour or two on two cores, and "
            "paper needs a larger machine."
        ),
    ] = "small",
    out: Annotated[Path | None, make_runs_option("runs/claims/NAME-SCALE")] = None,
    workers: Workers = None,
    ray: RayAddress = None,
    max_minutes: MaxMinutes = None,
    show: Annotated[
        bool, typer.Option("--show", help="Judge the results so far and run nothing.")
    ] = False,
    force: Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the card as JSON.")] = False,
) -> None:
    """Run or complete the sweep of a claim, and print whether the claim holds.

    The verdict is "holds", "fails" or "undecided", with an interval and the number of seeds. A run
    that fails or is missing leaves the claim undecided. The card, claim.json and claim.html, has
    digests of data, code and configuration.
    """
    from analysis.claims.card import CARD, PAGE, Card
    from analysis.claims.claim import Claim
    from analysis.claims.verdict import compute_power, decide
    from analysis.pages.sweep import show_figures
    from lab.cli.claim_costs import judge_costs
    from lab.cli.claim_floor import measure_floor
    from lab.cli.console import open_table_console
    from lab.cli.tables.claims import build_claims_list
    from lab.files import has_entries

    if listing:
        known = [Claim.read(file) for file in sorted(HOME.glob("*.toml"))]
        open_table_console().print(build_claims_list(known))
        return
    with report_usage_errors():
        stated = Claim.read(_find_file(what))
        built = build_sweep(stated, scale)
        counted = check_parameters(stated.equal, stated.statistic, built)
        out = out or Path("runs") / "claims" / built.name
        check_output("out", out / CARD, force, lambda file: has_entries(file, "verdict", "digests"))
        check_output("out", out / PAGE, force)
    options = SweepOptions(
        out=out,
        workers=workers,
        ray=ray,
        max_minutes=max_minutes,
        table=out / "table.parquet",
        force=force,
        show=show,
    )
    typer.echo(f"{stated.says} {stated.source}", err=True)
    for line in counted:
        typer.echo(line, err=True)
    seeds, power, results = len({cell.factors["seed"] for cell in built.cells}), None, None
    if stated.power is None:
        verdict, shown = judge_costs(built, stated.statistic, options)
        seeds = verdict.estimate.seeds
    else:
        power = compute_power(stated.statistic, stated.power, seeds)
        _say_power(stated.power, seeds, power)
        table, results = run_sweep(built, options)
        with report_failures():
            floor = measure_floor(stated.statistic, built)
            verdict = decide(table, stated.statistic, built.factors, floor)
            shown = show_figures(results, stated.name)
    with report_failures():
        card = Card(
            claim=stated,
            scale=scale,
            verdict=verdict,
            power=power,
            seeds=seeds,
            digests=_compute_digests(stated, scale, built),
            machines=_list_measuring_machines(out, show)
            if results is None
            else _list_training_machines(built, out),
        )
        page = card.write(out, shown, results.errors if results else {})
    typer.echo(json.dumps(card.to_dict()) if as_json else card.summarize())
    typer.echo(f"card: {page}", err=True)
    if results is not None:
        report_failed_runs(results)


def _find_file(what: str | None) -> Path:
    """Return the file of a claim.

    Raises:
        ValueError: for none, or an unknown name.
    """
    from tasks.near_names import suggest

    known = [file.stem for file in sorted(HOME.glob("*.toml"))]
    if what is None:
        raise ValueError(f"name a claim or a file. {suggest('', known)}")
    if what.endswith(".toml"):
        return Path(what)
    if what not in known:
        raise ValueError(f"claim={what!r}: is not a claim of the lab. {suggest(what, known)}")
    return HOME / f"{what}.toml"


def build_sweep(stated: "Claim", scale: str) -> "Sweep":
    """Return the sweep of a claim at a scale.

    Raises:
        ValueError: for a scale that the claim does not have, a sweep that cannot be built, or a
            statistic of factors or values that the sweep does not have.
    """
    from lab.cli.sweep_settings import parse

    if scale not in stated.sweeps:
        known = ", ".join(stated.sweeps)
        raise ValueError(f"scale={scale}: {stated.name} has no such sweep; it has {known}")
    name = f"{stated.name}-{scale}"
    built = parse(stated.sweeps[scale], f"{stated.name}.{scale}", name).build()
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
    return replace(built, question=stated.says)


def _say_power(assumed: "Power", seeds: int, power: float) -> None:
    typer.echo(
        f"power: {power:.2f}, with {seeds} seeds, a true effect of {assumed.effect:g} and a "
        f"spread of {assumed.spread:g} between seeds"
        + ("; more seeds would decide more often" if power < ENOUGH else ""),
        err=True,
    )


def _list_training_machines(sweep: "Sweep", out: Path) -> tuple[str, ...]:
    """Return the machines on which runs of a sweep ended; older runs do not tell."""
    from lab.sweeps.outcome import open_run

    runs = [open_run(out / cell.name) for cell in sweep.cells]
    results = [run.read_result() for run in runs if run is not None]
    known = {result.get("machine", "not recorded") for result in results if result}
    return tuple(sorted(known)) or ("not recorded",)


def _list_measuring_machines(out: Path, show: bool) -> tuple[str, ...]:
    """Return the machine on which costs were taken: this one, unless earlier ones are shown."""
    from analysis.claims.card import CARD
    from lab.files import has_entries, read_json
    from lab.machine import choose_device, describe_device

    if not show:
        return (describe_device(choose_device("auto")),)
    if not has_entries(out / CARD, "machines"):
        return ("not recorded",)
    return tuple(read_json(out / CARD, "the card cannot be read")["machines"])


def _compute_digests(stated: "Claim", scale: str, sweep: "Sweep") -> dict[str, str]:
    """Return the digests of the rows, the source and the configuration behind a verdict."""
    from analysis.claims.card import digest_code, digest_configuration, digest_data
    from lab.cli.run_settings import read_settings

    runs = [read_settings(cell.task, cell.options)[0] for cell in sweep.cells]
    rows_of = {(repr(run.task), run.train.seed): (run.task, run.train.seed) for run in runs}
    return {
        "data": digest_data(list(rows_of.values())),
        "code": digest_code(),
        "configuration": digest_configuration(stated, scale),
    }
