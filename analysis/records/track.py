"""The tracks of the records: what is to be solved, and what is counted until it is."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

Measure = Literal["rows", "cpu"]
WORDS: dict[Measure, str] = {"rows": "training rows", "cpu": "CPU seconds"}
SOLVED_AT = 0.99
"""Test accuracy at which a run is solved."""
TEST_ROWS = 1024
FIRST_SEED = 1000
"""First seed of the runs: settings are tuned on the seeds 0, 1, 2, …, and judged on others."""


@dataclass(frozen=True)
class Track:
    """What is to be solved in as little as possible.

    Attributes:
        measure: what is counted: rows of training, or processor time.
        seq_len: tokens of a row.
        n_pairs: key–value pairs of a row.
        only_ssd: whether all mixers must be state space duality.
        vocab_size: of the rows.
    """

    measure: Measure
    seq_len: int
    n_pairs: int
    only_ssd: bool = False
    vocab_size: int = 8192

    @property
    def course(self) -> str:
        """The name of what is to be solved; runs of one course serve both measures."""
        return f"{self.seq_len}{'-ssd' * self.only_ssd}"

    @property
    def name(self) -> str:
        """The name of the track."""
        return f"{self.measure}-{self.course}"

    @property
    def says(self) -> str:
        """What the track asks for, in words."""
        stacks = ", SSD alone" if self.only_ssd else ""
        return (
            f"least {WORDS[self.measure]} until {SOLVED_AT:.0%} on rows of {self.seq_len:,} "
            f"tokens with {self.n_pairs:,} pairs{stacks}"
        )

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of `lab mqar` that the track sets for all entries."""
        fixed = {"seq_len": self.seq_len, "n_pairs": self.n_pairs, "vocab_size": self.vocab_size}
        return fixed | {"test_rows": TEST_ROWS, "solved_at": SOLVED_AT, "device": "cpu"}


_COURSES = ((256, 64, False), (2048, 512, False), (256, 64, True))
_MEASURES: tuple[Measure, ...] = ("rows", "cpu")
TRACKS = {track.name: track for c, m in product(_COURSES, _MEASURES) for track in (Track(m, *c),)}
"""The tracks by name."""
