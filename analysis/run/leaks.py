"""Could it cheat? Whether answers depend on later tokens, and whether test rows were trained on."""

import math
from dataclasses import dataclass, replace

import torch

from analysis.base import Finding, NotApplicableError, Subject, Table
from analysis.scoring import scored
from analysis.words import percent
from tasks.base import count_rows

__all__ = ["TITLE", "LeakCheck", "measure"]

TITLE = "Could it cheat?"
CUTS = 4
"""Places at which rows are cut."""
ROWS = 16
"""Maximum number of rows that are cut."""
MOVED = 1e-3
"""Change of a hidden state, as a share of the largest, that rounding does not explain."""
TRAINED_TOKENS, TRAINED_ROWS = 2**20, 4096
"""Maximum number of tokens and rows of the training split that are searched for test rows."""
BLOCK_TOKENS = 2**15
"""Tokens of training rows in memory at once: as many as an analysis looks at."""


@dataclass(frozen=True)
class LeakCheck(Finding):
    """Whether answers leak from later tokens, or test rows from the training rows.

    Attributes:
        cuts: how many places rows were cut at.
        replaced: how many tokens after the cuts are others than before, all cuts together.
        answers: how many answers before a cut were compared.
        changed: how many of them change when the tokens after the cut are replaced.
        moved: largest change of a hidden state there, as a share of the largest hidden state.
        behind: share of the answers after a cut that change, in [0, 1]; NaN without any.
        repeated: how many test rows are among the training rows that were searched.
    """

    cuts: int
    replaced: int
    answers: int
    changed: int
    moved: float
    behind: float
    rows: int
    trained: int
    repeated: int

    title = "Leak check"

    @property
    def leaks(self) -> bool:
        """Whether an answer depends on a later token."""
        return self.changed > 0 or not self.moved <= MOVED

    @property
    def says(self) -> str:
        """Whether the model sees later tokens, and how many test rows it trained on."""
        verdict = (
            "The model sees later tokens" if self.leaks else "The model does not see later tokens"
        )
        if not self.replaced and not self.leaks:
            verdict = "No token after an answer was replaced, so a leak could not show"
        return (
            f"{verdict}: replacing them changes {self.changed} of {self.answers:,} earlier "
            f"answers; of {self.rows:,} test rows, {self.repeated:,} are among the first "
            f"{self.trained:,} training rows."
        )

    def numbers(self) -> Table:
        """Return what was replaced, and what that moves before and after it."""
        behind = "no answer" if math.isnan(self.behind) else percent(self.behind)
        rows = (
            ("places at which rows were cut", f"{self.cuts}"),
            ("tokens replaced after them", f"{self.replaced:,}"),
            ("largest change of a hidden state before them, of the largest", f"{self.moved:.1g}"),
            ("answers after the cut that change", behind),
        )
        return Table(("what", "found"), rows)


@torch.no_grad()
def measure(subject: Subject) -> list[LeakCheck]:
    """Replace the tokens after a cut, and search the training rows for test rows.

    Raises:
        NotApplicableError: where no position is scored.
    """
    batch = subject.batch[:ROWS]
    found = scored(subject.model, batch)
    if not len(found.positions):
        raise NotApplicableError("no position is scored")
    quantiles = torch.linspace(0, 1, CUTS + 2, dtype=torch.float64)[1:-1]
    cuts = sorted({int(cut) for cut in found.positions.cpu().double().quantile(quantiles)})
    others = batch.inputs.roll(1, 0).flip(1)  # of another row, in reverse order
    before, differs, moved, replaced = [], [], 0.0, 0
    for cut in cuts:
        inputs = torch.cat([batch.inputs[:, : cut + 1], others[:, cut + 1 :]], 1)
        replaced += int((inputs != batch.inputs).sum())
        other = scored(subject.model, replace(batch, inputs=inputs))
        before.append(found.positions <= cut)
        differs.append(other.answers != found.answers)
        gap = (other.hidden - found.hidden)[before[-1]].abs().max()
        if gap != 0:  # also where hidden states are NaN, but not where all of them are 0
            moved = max(moved, (gap / found.hidden.abs().max()).nan_to_num(torch.inf).item())
    ahead, changes = torch.cat(before), torch.cat(differs)
    rows = subject.batch.inputs
    trained = count_rows(TRAINED_TOKENS, rows.shape[1], fewest=1, most=TRAINED_ROWS)
    return [
        LeakCheck(
            cuts=len(cuts),
            replaced=replaced,
            answers=int(ahead.sum()),
            changed=int(changes[ahead].sum()),
            moved=moved,
            behind=changes[~ahead].double().mean().item(),
            rows=len(rows),
            trained=trained,
            repeated=_count_repeated(subject, trained),
        )
    ]


def _count_repeated(subject: Subject, trained: int) -> int:
    """Count the subject's rows that are among the first training rows."""
    rows = subject.batch.inputs
    tested, seen = [row.tobytes() for row in rows.cpu().numpy()], set[bytes]()
    block = count_rows(BLOCK_TOKENS, rows.shape[1], fewest=1, most=trained)
    for start in range(0, trained, block):
        size = min(block, trained - start)
        batch = subject.task.batch(split="train", start=start, size=size, seed=subject.seed)
        seen |= {row.tobytes() for row in batch.inputs.numpy()} & set(tested)
    return sum(row in seen for row in tested)
