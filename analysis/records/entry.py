"""An entry of the records: a configuration that held a track, and the numbers that decided it.

Each is a file, TRACK/NUMBER-NAME.json, with enough to compute its p again.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Strict, with_config
from typing_extensions import TypedDict

from analysis.records.candidate import Candidate
from analysis.records.track import Measure, Track
from lab.files import RunError, explain_write_errors, read_json, write_json
from lab.training.records import validate

HOME = Path(__file__).parents[2] / "docs" / "results" / "records"
"""The records of the project, in a checkout."""
KNOWN = ConfigDict(allow_inf_nan=False, extra="forbid")
STRICT: ConfigDict = {**KNOWN, "strict": True}


# In a file, its fields must be of these types. As a whole it is not strict: it would have to be an
# instance of the class.
@with_config(KNOWN)
@dataclass(frozen=True)
class RecordTrial:
    """A run of a candidate with one seed.

    Attributes:
        seed: of rows and initial weights.
        solved: whether its test accuracy reached the track's.
        rows: of training, all lengths counted alike; until it was solved, or else until it ended.
        cpu_seconds: likewise, of the processor (`lab.training.loop.Row`).
        steps: likewise.
        accuracy: on test rows; None if it diverged.
    """

    seed: Annotated[int, Strict()]
    solved: Annotated[bool, Strict()]
    rows: Annotated[int, Strict()]
    cpu_seconds: Annotated[float, Strict()]
    steps: Annotated[int, Strict()]
    accuracy: Annotated[float, Strict()] | None

    def count(self, measure: Measure) -> float:
        """Return what a track counts."""
        return self.rows if measure == "rows" else self.cpu_seconds


@with_config(STRICT)
class _EntryFile(TypedDict):
    number: int
    name: str
    says: str
    options: dict[str, Any]
    trials: list[RecordTrial]
    before: str | None
    rerun: NotRequired[list[RecordTrial] | None]
    p: float | None
    certificate: str
    source: NotRequired[str | None]
    code: str
    machine: str
    versions: dict[str, str]
    date: str


@dataclass(frozen=True)
class Entry:
    """A record, past or present.

    Attributes:
        track: its name.
        number: of the entry on its track, from 1.
        candidate: what was run.
        trials: its runs.
        before: the name of the entry that it replaced; None for the first.
        rerun: runs of that entry's configuration in turns with these, on the same machine; None on
            tracks of rows, which are compared with the runs of that entry itself.
        p: of the one-sided test against the entry before; None for the first.
        certificate: how many laws had which outcome.
        source: the text of the candidate's own module; None if it has none or it is the lab's.
        code: digest of the source of the lab.
        machine: where it was run.
        versions: of libraries.
        date: when, UTC.
    """

    track: str
    number: int
    candidate: Candidate
    trials: tuple[RecordTrial, ...]
    before: str | None
    rerun: tuple[RecordTrial, ...] | None
    p: float | None
    certificate: str
    source: str | None
    code: str
    machine: str
    versions: dict[str, str]
    date: str

    def to_dict(self) -> dict[str, Any]:
        """Return the content of its file."""
        fields = {name: value for name, value in vars(self).items() if name != "track"}
        candidate = fields.pop("candidate")
        runs = {
            name: None if trials is None else [asdict(trial) for trial in trials]
            for name, trials in (("trials", self.trials), ("rerun", self.rerun))
        }
        return {"number": fields.pop("number"), **vars(candidate), **fields, **runs}

    @classmethod
    def read(cls, file: Path) -> "Entry":
        """Read the file of an entry.

        Raises:
            RunError: when it cannot be read or is not an entry.
        """
        held = read_json(file, f"{file}: cannot be read")
        validate(_EntryFile, held, f"{file}: is not an entry of the records")
        candidate = Candidate(*(held.pop(name) for name in ("name", "says", "options")))
        trials, rerun = (
            None if found is None else tuple(RecordTrial(**trial) for trial in found)
            for found in (held.pop("trials"), held.pop("rerun", None))
        )
        assert trials is not None
        rest = {"source": None, **held}
        return cls(track=file.parent.name, candidate=candidate, trials=trials, rerun=rerun, **rest)

    def write(self, home: Path) -> Path:
        """Write its file into the folder of the records, and return the file's path.

        Raises:
            RunError: when it cannot be written.
        """
        file = home / self.track / f"{self.number:02d}-{self.candidate.name}.json"
        with explain_write_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, self.to_dict())
        return file


def read_history(home: Path, track: Track) -> list[Entry]:
    """Return the entries of a track, the first one first; the last one holds it.

    Raises:
        RunError: for a file that is not an entry, or entries that do not follow one another.
    """
    entries = [Entry.read(file) for file in sorted((home / track.name).glob("*.json"))]
    entries.sort(key=lambda entry: entry.number)
    names: Sequence[str | None] = [None, *(entry.candidate.name for entry in entries)]
    for number, (entry, before) in enumerate(zip(entries, names, strict=False), 1):
        if (entry.number, entry.before) != (number, before):
            raise RunError(
                f"{home / track.name}: entry {entry.number}, {entry.candidate.name}, follows "
                f"{entry.before or 'none'}; must be entry {number} and follow {before or 'none'}"
            )
    return entries
