"""Could it cheat? Whether answers depend on later tokens, and whether test rows were trained on."""

import math
from dataclasses import dataclass, replace

import torch

from analysis.base import Finding, NotApplicableError, Subject, Words, describe, draw
from analysis.scoring import scored
from analysis.words import capitalize, percent
from tasks.base import Batch, count_rows

__all__ = ["TITLE", "LeakCheck", "describe", "draw", "measure"]

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
        rows: test rows that were searched for among training rows.
        trained: training rows that were searched.
        repeated: how many of the test rows are among them.
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

    @property
    def leaks(self) -> bool:
        """Whether an answer depends on a later token."""
        return self.changed > 0 or not self.moved <= MOVED

    def describe(self) -> Words:
        """Say whether the model sees later tokens, and how many test rows it trained on."""
        if self.leaks:
            gist = (
                f"The model sees later tokens: replacing them changes {self.changed} of "
                f"{self.answers:,} answers before them, so its accuracy means nothing."
                if self.changed
                else "The model sees later tokens: replacing them changes hidden states before "
                f"them, though none of {self.answers:,} answers."
            )
        else:
            gist = "Replacing the tokens after an answer never changes it"
            if not self.replaced:
                gist = "No token after an answer was replaced, so a leak could not show"
            gist += f", and {self._describe_overlap()}."
        says = (
            f"Rows were cut at {self.cuts} {'place' if self.cuts == 1 else 'places'}, and the "
            "tokens after the cut replaced: "
            f"{self.changed} of {self.answers:,} answers before the cut change, and hidden states "
            f"move by at most {self.moved:.1g} of the largest one."
        )
        if self.leaks:
            says += f" {capitalize(self._describe_overlap())}."
        if not math.isnan(self.behind):
            says += f" Of the answers after the cut {percent(self.behind)} change."
        if self.repeated:
            says += " The task has few different rows, so that the splits share some."
        return Words("Leak check", says, "", says, gist=gist)

    def _describe_overlap(self) -> str:
        count = "none" if not self.repeated else f"{self.repeated:,}"
        verb = "is" if self.repeated <= 1 else "are"
        among = f"among the first {self.trained:,} training rows"
        return f"{count} of {self.rows:,} test rows {verb} {among}"

    def draw(self) -> None:
        """Return None: there is nothing to see."""


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
    before, differs, moved, replaced = [], [], 0.0, 0
    for cut in cuts:
        changed = _replace_tail(batch, cut)
        replaced += int((changed.inputs != batch.inputs).sum())
        other = scored(subject.model, changed)
        before.append(found.positions <= cut)
        differs.append(other.answers != found.answers)
        gap = (other.hidden - found.hidden)[before[-1]].abs().max()
        if gap != 0:  # also where hidden states are NaN, but not where all of them are 0
            moved = max(moved, (gap / found.hidden.abs().max()).nan_to_num(torch.inf).item())
    ahead, changes = torch.cat(before), torch.cat(differs)
    return [
        LeakCheck(
            cuts=len(cuts),
            replaced=replaced,
            answers=int(ahead.sum()),
            changed=int(changes[ahead].sum()),
            moved=moved,
            behind=changes[~ahead].double().mean().item(),
            **_count_repeated(subject),
        )
    ]


def _replace_tail(batch: Batch, cut: int) -> Batch:
    """Return a batch with other tokens after a position: another row's, in reverse order."""
    inputs = batch.inputs.clone()
    inputs[:, cut + 1 :] = batch.inputs.roll(1, 0).flip(1)[:, cut + 1 :]
    return replace(batch, inputs=inputs)


def _count_repeated(subject: Subject) -> dict[str, int]:
    """Count the subject's rows, the first training rows, and how many of the former are there."""
    rows = subject.batch.inputs
    trained = count_rows(TRAINED_TOKENS, rows.shape[1], fewest=1, most=TRAINED_ROWS)
    tested, seen = [row.tobytes() for row in rows.cpu().numpy()], set[bytes]()
    block = count_rows(BLOCK_TOKENS, rows.shape[1], fewest=1, most=trained)
    for start in range(0, trained, block):
        size = min(block, trained - start)
        batch = subject.task.batch(split="train", start=start, size=size, seed=subject.seed)
        seen |= {row.tobytes() for row in batch.inputs.numpy()} & set(tested)
    repeated = sum(row in seen for row in tested)
    return {"rows": len(rows), "trained": trained, "repeated": repeated}
