"""`lab record`: the tracks, the holders of their records, and a candidate against one of them."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lab.cli.figures import check_figure, make_figure_option, save_figure
from lab.cli.messages import refuse, report_failures, report_usage_errors
from lab.cli.output import Force
from lab.cli.sweep_options import SweepOptions, make_runs_option, make_workers_option
from lab.cli.trust_option import Trust
from lab.config import RECORD_SEEDS

if TYPE_CHECKING:
    from analysis.records.candidate import Candidate
    from analysis.records.entry import Entry
    from analysis.records.track import Track

MOST_SEEDS = 1_000


def record(
    track: Annotated[
        str | None, typer.Argument(help="A track; without one, all are listed.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A candidate, as a .toml file: says and [options]."),
    ] = None,
    seeds: Annotated[
        int, typer.Option(help=f"Runs of the candidate; at least {RECORD_SEEDS}.")
    ] = RECORD_SEEDS,
    workers: Annotated[
        int | None, make_workers_option("one for each core; 1 on tracks of CPU seconds")
    ] = None,
    out: Annotated[Path | None, make_runs_option("runs/records/TRACK-NAME")] = None,
    records: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the records.", show_default="docs/results/records of the checkout"
        ),
    ] = None,
    figure: Annotated[Path | None, make_figure_option("a drawing of the track's history")] = None,
    force: Force = False,
    trust: Trust = False,
) -> None:
    """List the records, or run a candidate and judge it against the holder of a track.

    A candidate is certified, then trained with ten seeds or more. It takes the track if its median
    is lower than the holder's, with p below .01. On tracks of CPU seconds, the holder is run again,
    in turns with the candidate on this machine. The same command resumes what was interrupted.
    """
    from analysis.records.candidate import Candidate
    from analysis.records.entry import HOME
    from analysis.records.history import read_histories
    from analysis.records.track import TRACKS
    from lab.sweeps.pool import check_limits
    from tasks.near_names import suggest

    home = records or HOME
    with report_usage_errors():
        if track is not None and track not in TRACKS:
            raise ValueError(f"track={track!r}: is not a track. {suggest(track, TRACKS)}")
        if figure is not None:
            if track is None:
                raise ValueError(f"figure={figure}: shows one track; name it")
            check_figure(figure, force)
        if not home.is_dir():
            raise ValueError(f"records={home}: does not exist; use a checkout, or --records DIR")
        if not RECORD_SEEDS <= seeds <= MOST_SEEDS:
            raise ValueError(f"seeds={seeds}: must be in {RECORD_SEEDS} … {MOST_SEEDS:,}")
        check_limits(1 if workers is None else workers, None)
        candidate = None if file is None else Candidate.read(file)
    with report_failures():
        histories = read_histories(home)
    if track is None or candidate is None:
        _print_histories({name: histories[name] for name in ([track] if track else TRACKS)})
    else:
        options = SweepOptions(out=out, workers=workers)
        _attempt(TRACKS[track], candidate, histories[track], seeds, options, home, trust)
    if track is not None and figure is not None:
        _draw(home, TRACKS[track], figure)


def _print_histories(histories: "dict[str, list[Entry]]") -> None:
    from analysis.records.track import TRACKS
    from lab.cli.console import open_console, open_table_console
    from lab.cli.tables.records import build_records_table

    for name in histories:
        open_console().print(f"{name}: {TRACKS[name].says}")
    open_table_console().print(build_records_table(histories))


def _draw(home: Path, track: "Track", figure: Path) -> None:
    from analysis.plots.style import add_title
    from analysis.records.entry import read_history
    from analysis.records.history import draw

    with report_failures():
        entries = read_history(home, track)
    if not entries:
        raise refuse(f"figure={figure}: {track.name} has no entry yet, so nothing to draw", 2)
    count = "1 entry" if len(entries) == 1 else f"{len(entries)} entries"
    drawn = add_title(draw(entries, track), track.says[:1].upper() + track.says[1:], count)
    save_figure(drawn, figure)
    typer.echo(figure)


def _attempt(
    track: "Track",
    candidate: "Candidate",
    history: "list[Entry]",
    seeds: int,
    options: SweepOptions,
    home: Path,
    trust: bool,
) -> None:
    """Certify, run and judge a candidate; write an entry if it takes the track."""
    from dataclasses import replace

    from analysis.claims.card import digest_code, list_versions
    from analysis.records.entry import HOME, Entry
    from analysis.records.history import PAGE, build_table, read_histories, update_page
    from analysis.records.judgement import judge, verify_history
    from analysis.records.trials import read_trials
    from lab.cli import record_certificate, record_rules
    from lab.cli.run_settings import read_settings
    from lab.cli.sweep import run_sweep

    same = next((e for e in history if e.candidate.name == candidate.name), None)
    if same is not None and same.candidate.options == candidate.options:
        typer.echo(f"{candidate.name} is entry {same.number} of {track.name}.")
        return
    holder, on_time = history[-1] if history else None, track.measure == "cpu"
    with report_failures(), report_usage_errors():
        if same is not None:
            raise ValueError(f"{candidate.name}: entry {same.number} has this name; choose another")
        if holder is not None and holder.candidate.options == candidate.options:
            raise ValueError(f"{candidate.name}: has the options of {holder.candidate.name}")
        verify_history(history, track.measure)
        source = record_rules.read_source(candidate, trust)
        if holder is not None and on_time:
            record_rules.check_holder(holder, home / track.name, trust)
        again = holder.candidate if holder is not None and on_time else None
        sweep = record_rules.build_record_sweep(track, candidate, again, seeds)
        out = options.out or Path("runs") / "records" / sweep.name
        typer.echo(f"{candidate.name} for {track.name}, {track.says}; certifying …", err=True)
        first = sweep.cells[0]
        run, _ = read_settings(first.task, first.options)
        certificate = record_certificate.certify_model(run, source, out)
        typer.echo(f"certified: {certificate}", err=True)
        machine = record_rules.note_machine(out, on_time)
    if on_time and options.workers is None:
        options = replace(options, workers=1)
    run_sweep(sweep, replace(options, out=out))
    with report_failures():
        trials = read_trials(sweep, out, candidate.name)
        rerun = None if again is None else read_trials(sweep, out, again.name)
        against = rerun if rerun is not None or holder is None else holder.trials
        judged = judge(trials, against, track.measure)
        if not judged.is_record:
            typer.echo(f"no record: {judged.because}.")
            return
        entry = Entry(
            track=track.name,
            number=len(history) + 1,
            candidate=candidate,
            trials=trials,
            before=None if holder is None else holder.candidate.name,
            rerun=rerun,
            p=judged.p,
            certificate=certificate,
            source=source,
            code=digest_code(),
            machine=machine,
            versions=list_versions(),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        written = entry.write(home)
        if home == HOME:
            update_page(HOME.parents[1] / PAGE, build_table(read_histories(home)))
    typer.echo(f"a record: {judged.because}.\nentry: {written}")
