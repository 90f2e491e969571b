"""The rules that the runs of a record keep: allowed mixers, known source code, one machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.cli.output import check_output
from lab.files import RunError, explain_write_errors, has_entries, read_json, write_json

if TYPE_CHECKING:
    from analysis.records.candidate import Candidate
    from analysis.records.entry import Entry
    from analysis.records.track import Track
    from lab.sweeps import Sweep
    from lab.training.run import Run

MACHINE = "machine.json"
SEVERAL = "several machines"


def build_record_sweep(
    track: "Track", candidate: "Candidate", holder: "Candidate | None", seeds: int
) -> "Sweep":
    """Return the sweep of a candidate's runs, in turns with those of the holder if one is given.

    Raises:
        ValueError: for options that no run has, or mixers that the track does not allow.
    """
    from analysis.records.track import FIRST_SEED
    from analysis.records.trials import FACTOR
    from lab.cli.run_settings import read_settings
    from lab.cli.sweep_settings import SweepSettings

    options = {each.name: each.options for each in (candidate, holder) if each is not None}
    name = f"{track.course}-{'-against-'.join(options)}"
    numbers = tuple(range(FIRST_SEED, FIRST_SEED + seeds))
    sweep = SweepSettings("mqar", {FACTOR: options}, track.options, numbers, (), name).build()
    try:
        run, _ = read_settings(sweep.cells[0].task, sweep.cells[0].options)
        if track.only_ssd:
            _check_mixers(run, track.name)
    except ValueError as error:
        raise ValueError(f"{candidate.name}: {error}") from error
    return sweep


def _check_mixers(run: "Run", track: str) -> None:
    from lab.layers.ssd import SSD

    for block in run.build().blocks:
        mixer: Any = block.mixer
        if mixer is not None and type(mixer) is not SSD:
            raise ValueError(
                f"stack={run.model.stack}: has {type(mixer).__name__}, but on {track} all mixers "
                "must be S, state space duality"
            )


def read_source(candidate: "Candidate", trust: bool) -> str | None:
    """Return the text of a candidate's own module; None if it has none, or it is the lab's.

    Raises:
        ValueError: for code that the user does not vouch for, or that cannot be imported.
    """
    from lab.trust import ask_for_trust
    from lab.user_modules import import_module

    if not candidate.is_foreign:
        return None
    named = str(candidate.model)
    if not trust:
        raise ValueError(ask_for_trust(candidate.name, [f"import and run {named}"]))
    try:
        module = import_module(named.partition(":")[0])
        return Path(module.__file__ or "").read_text(encoding="utf-8")
    except Exception as error:  # whatever the module raises
        raise ValueError(f"model={named}: cannot be imported: {error}") from error


def check_holder(entry: "Entry", file: Path, trust: bool) -> None:
    """Check that the holder's own module, if it has one, is here as it is in the records.

    Raises:
        ValueError: as `read_source`, or for another text.
    """
    try:
        found = read_source(entry.candidate, trust)
    except ValueError as error:
        raise ValueError(f"the holder is run again here: {error}") from error
    if found != entry.source:
        raise ValueError(
            f"model={entry.candidate.model}: differs from the holder's; its text is in {file}, "
            "as source"
        )


def note_machine(out: Path, measures_time: bool) -> str:
    """Return on which machine the runs of a folder are, this one's name if they are new.

    Args:
        out: the folder of the runs.
        measures_time: whether they must all be of one machine.

    Raises:
        RunError: when they must be, and others are there; or the note cannot be kept.
    """
    from lab.machine import describe_machine

    file, here = out / MACHINE, describe_machine()
    check_output("out", file, force=False, is_own=lambda file: has_entries(file, "machine"))
    known = read_json(file, f"{file}: cannot be read")["machine"] if file.exists() else here
    if known != here and measures_time:
        raise RunError(
            f"{out}: its runs were measured on another machine ({known}; this is {here}); "
            "choose another --out"
        )
    found = here if known == here else SEVERAL
    with explain_write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        write_json(file, {"machine": found})
    return found
