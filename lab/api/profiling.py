"""Profiling a mixer: train it on each ability, and set it beside all other mixers."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
import torch

from analysis.base import Finding, Subject
from analysis.examination import examine
from analysis.profile.card import ProfileCard
from analysis.profile.findings import Costs
from analysis.profile.scores import collect_scores, find_rate, find_window
from analysis.sweeps.settings import HAS_RESULT, RATE
from analysis.words import capitalize
from lab.api.options import ProfileOptions
from lab.api.progress import Display, show_nothing, show_sweep
from lab.api.run import Page
from lab.api.settings import read_settings
from lab.api.sweep_settings import read_seeds
from lab.api.sweeping import SweepJob
from lab.bench.speed import LENGTHS, measure_speeds
from lab.certification import RefusedError, certify_in_child
from lab.certify_settings import QUICK, parse_options
from lab.files import RunError, check_output, explain_write_errors, has_entries, write, write_json
from lab.machine import choose_device, describe_device
from lab.models import LanguageModel
from lab.models.mixers import MIXERS
from lab.studies.profile import ABILITIES, CHOOSER, WIDTH, Candidate, build_cell, build_study
from lab.sweeps import Sweep
from lab.sweeps.outcome import open_run
from lab.sweeps.table import list_columns, read_table

ATLAS = Path(__file__).parents[1] / "studies" / "atlas.csv"
"""Runs of the lab's own mixers that come with the lab, as a sweep's table."""
FACTORS = ("mixer", "scale", "ability", RATE, "seed")
MECHANISM = ("mechanism", "recall", "matrices")
"""Analyses of the run of recall that the card shows, as far as they apply."""
LAW_SECONDS, LAW_MEMORY = 60.0, 4.0
"""Limits of a law's process: seconds, and GiB."""


@dataclass(frozen=True)
class Profile:
    """A mixer's card and where it is; a notebook shows it.

    Attributes:
        card: what was found.
        page: the file of the card's page; its JSON is beside it.
    """

    card: ProfileCard
    page: Path

    def __repr__(self) -> str:
        return "\n".join([self.card.summarize(), self.card.to_markdown()])

    def _repr_html_(self) -> str:
        return Page(self.card.render(), str(self.page))._repr_html_()


def profile(mixer: str | type[torch.nn.Module], **options: Any) -> Profile:
    """Train a mixer on every ability, and return its card, beside all mixers of the lab.

    The same as the command `lab profile`. Calling it again runs what has not ended.

    Args:
        mixer: a word of `lab mixers`, "MODULE:CLASS", or a class that a module has.
        options: fields of `lab.api.options.ProfileOptions`, such as scale="quick".

    Raises:
        ValueError: for an unknown mixer or option, or a class of a notebook, which other processes
            cannot import; nothing is started then.
        RunError: when a folder cannot be used.
        InterruptedSweepError: when a signal stopped it; the same call goes on.
    """
    if isinstance(mixer, type):
        if mixer.__module__ == "__main__":
            raise ValueError(f"mixer={mixer.__name__}: must be in a module, which workers import")
        mixer = f"{mixer.__module__}:{mixer.__qualname__}"
    return make_profile(ProfileOptions(what=mixer, **options), show_sweep)


def make_profile(
    options: ProfileOptions,
    show: Callable[[], AbstractContextManager[Display]] = show_nothing,
    on_note: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Do what `profile` does.

    Args:
        options: which mixer, and how thoroughly.
        show: opens what shows how far the runs are; they are two sweeps, one after the other.
        on_note: called with a sentence before what takes long.

    Raises:
        ValueError, RunError, InterruptedSweepError: as `lab.api.sweeping.SweepJob.run`.
    """
    candidate = Candidate.of(options.what, options.options)
    for name in options.against:
        Candidate.from_name(name)
    out = options.out or Path("runs") / "profile"
    stem = re.sub(r"[^\w=.+-]+", "_", f"{candidate.name}-{options.scale}")
    page, data = out / f"{stem}.html", out / f"{stem}.json"
    check_output("out", page, options.force)
    check_output("out", data, options.force, lambda file: has_entries(file, "mixer", "abilities"))
    options = replace(options, table=options.table or out / "table.csv", out=out)
    table, rate = _train(candidate, options, show, on_note)
    card = _make_card(candidate, rate, table, options)
    if options.show and page.exists():  # it may have what was measured after the runs
        return Profile(card, page)
    if not options.show:
        card = _look_inside(card, candidate, options, on_note)
    with explain_write_errors(page):
        page.parent.mkdir(parents=True, exist_ok=True)
        write(page, card.render())
        write_json(data, card.to_dict())
    return Profile(card, page)


def _train(
    candidate: Candidate,
    options: ProfileOptions,
    show: Callable[[], AbstractContextManager[Display]],
    on_note: Callable[[str], None],
) -> tuple[pl.DataFrame, str]:
    """Run what has not ended; return the table of the mixer's runs and the chosen rate's name.

    The learning rate is chosen first, by the first seed's runs of recall.
    """
    seeds = () if options.seeds is None else read_seeds(options.seeds)
    tried = build_study([candidate], options.scale, abilities=[CHOOSER], seeds=[0])
    first = _run(tried, options, show)
    if first.filter(HAS_RESULT).is_empty() and options.show and options.table != ATLAS:
        return _train(candidate, replace(options, table=ATLAS), show, on_note)
    if first.filter(HAS_RESULT).is_empty():
        why = "; ".join(first["error"].drop_nulls().unique()) or "none was run"
        raise RunError(f"{options.out}: no run of {candidate.name} has a result: {why}")
    rate = find_rate(first, candidate.name)
    on_note(f"learning rate: {rate}")
    whole = build_study([candidate], options.scale, rates={candidate.name: [rate]}, seeds=seeds)
    found = _run(whole.select(options.only), options, show)
    keys = ["ability", RATE, "seed", "seq_len"]
    return pl.concat([found, first.join(found, on=keys, how="anti")]), rate


def _run(
    sweep: Sweep, options: ProfileOptions, show: Callable[[], AbstractContextManager[Display]]
) -> pl.DataFrame:
    assert options.out
    job = SweepJob(sweep, options.out, options)
    earlier = job.read_earlier()
    return job.tabulate(earlier) if options.show else job.run(show(), earlier)


def _make_card(
    candidate: Candidate, rate: str, table: pl.DataFrame, options: ProfileOptions
) -> ProfileCard:
    """Return the card with what the runs alone tell, beside what is known of other mixers."""
    assert options.table
    named = {candidate.name, *options.against}
    known, parts = {candidate.name}, [table]
    for file in (options.table, ATLAS):  # of a mixer that is in both, the user's own runs count
        others = read_comparable(file, options.scale, named)
        parts.append(others.filter(~pl.col("mixer").is_in(known)))
        known |= {*others["mixer"]}
    return ProfileCard(
        mixer=candidate.name,
        scale=options.scale,
        scores=tuple(collect_scores(pl.concat(parts, how="vertical_relaxed"))),
        against=tuple(name for name in options.against if name != candidate.name),
        rate=rate,
        window=find_window(table, candidate.name),
        unsolved=dict(_explain_failures(candidate, rate, table, options)),
    )


def read_comparable(file: Path, scale: str, named: Collection[str] = ()) -> pl.DataFrame:
    """Return the rows of a table whose runs had the settings that they would have today.

    Args:
        file: the table; where there is none, there are no rows.
        scale: of the runs.
        named: mixers that may be imported to find out; others must be of the lab.

    Raises:
        RunError: for a file that is not a table of profiles.
    """
    columns = list_columns(build_study([Candidate.of("attention")], scale))
    if not file.exists():
        return pl.DataFrame(schema=columns)
    table = read_table(file, columns)
    if {*table.columns} != {*columns}:
        raise RunError(f"table={file}: is not a table of profiles")
    table = table.select(pl.col(name).cast(kind) for name, kind in columns.items())
    kept = []
    for factors, run in table.group_by(*FACTORS, maintain_order=True):
        name, of, ability, rate, seed = factors
        if of != scale or (str(name).split()[0] not in MIXERS and name not in named):
            continue
        with suppress(ValueError, KeyError):  # one that cannot be run any more
            cell = build_cell(
                Candidate.from_name(str(name)), scale, str(ability), str(rate), int(str(seed))
            )
            if run["settings"][0] == read_settings(cell.task, cell.options)[0].settings:
                kept.append(run)
    return pl.concat([table.clear(), *kept])


def _explain_failures(
    candidate: Candidate, rate: str, table: pl.DataFrame, options: ProfileOptions
) -> Iterator[tuple[str, str]]:
    """Yield the title of each ability that the run of the first seed did not learn, and why."""
    assert options.out
    for ability in table["ability"].unique(maintain_order=True):
        run = open_run(options.out, build_cell(candidate, options.scale, ability, rate, 0))
        why = ((run and run.read_result()) or {}).get("diagnosis")
        if why is not None:
            yield ABILITIES[ability].title, f"{why['kind']}. {capitalize(why['because'])}."


def _look_inside(
    card: ProfileCard,
    candidate: Candidate,
    options: ProfileOptions,
    on_note: Callable[[str], None],
) -> ProfileCard:
    """Add to a card how the mixer recalls, what it costs, and which laws it obeys."""
    assert options.out
    cell = build_cell(candidate, options.scale, CHOOSER, card.rate, 0)
    run, mechanism = open_run(options.out, cell), list[Finding]()
    if run is not None and run.list_checkpoints():
        on_note("analyzing how it recalls")
        found = examine(Subject.of(run), MECHANISM, lenient=True).results
        mechanism = [finding for findings in found.values() for finding in findings]
    on_note("measuring what a token costs")
    models: dict[str, LanguageModel] = {}
    for each in (candidate, Candidate.of("attention")):
        cell = build_cell(each, options.scale, CHOOSER, card.rate, 0)
        models[each.name] = read_settings(cell.task, cell.options)[0].build()
    costs = Costs(tuple(measure_speeds(models, LENGTHS)))
    on_note("trying the laws")
    return replace(
        card,
        mechanism=mechanism,
        costs=costs,
        laws=_certify(options),
        machine=describe_device(choose_device("cpu")),
    )


def _certify(options: ProfileOptions) -> Sequence[Mapping[str, Any]]:
    """Return the verdicts of the laws on the mixer alone, or the reason why there are none."""
    target = options.what
    if target in MIXERS:
        cls = MIXERS[target].cls
        target = f"{cls.__module__}:{cls.__qualname__}"
    given = {"d_model": WIDTH, **parse_options(options.options)}
    settings = replace(QUICK, options=given, compiler="none")
    try:
        return certify_in_child(target, settings, LAW_MEMORY, LAW_SECONDS)["laws"]
    except RefusedError as error:
        return [{"law": "all", "verdict": "not decided", "evidence": str(error)}]
