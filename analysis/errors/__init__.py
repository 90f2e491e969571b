"""Which mistakes does it make? Every wrong answer, with its cause, and random answers beside them.

Axis letter of this file, besides the package's: w wrong answer.
"""

import math
from dataclasses import dataclass
from itertools import chain, zip_longest

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int

from analysis.base import Finding, NotApplicableError, Subject, Table
from analysis.dynamic_mask.masks import find_masked_layers
from analysis.errors import causes as why
from analysis.errors.causes import (
    CAUSES,
    DECAYED,
    DECOY,
    IN_ROW,
    MASKED,
    OTHER_PAIR,
    OUTRANKED,
    UNKNOWN,
    Questions,
    Reader,
)
from analysis.figures import Axis, Bars, Dots, bars
from analysis.links import has_pairs
from analysis.scoring import PART_ENTRIES, Scored, scored
from analysis.words import format_ends, name_head, percent
from lab.intervals import bound_share

__all__ = ["TITLE", "measure"]

TITLE = "Errors"
REDRAWN = 8
"""Random answers drawn for each wrong one, to see what chance attributes to a cause."""
EXAMPLES = 12
TOP = 5
"""An error is outranked, not unknown, when the right value is among this many best tokens."""
FEW = 20
"""Below this many errors the words give counts instead of shares."""
TICKS = {0: "0 %", 0.5: "50 %", 1: "100 %"}


@dataclass(frozen=True)
class Cause:
    """A cause of errors.

    Attributes:
        interval: 95 % interval of the share over rows (`bound_share`).
        chance: the share among random answers, which are other targets of the batch; for masks,
            the share of errors where lifting them gives the value of a random pair. NaN for the
            last two causes, which depend only on the rank of the right value.
    """

    name: str
    count: int
    share: float
    interval: tuple[float, float]
    chance: float

    def quote(self) -> str:
        """Return its share beside that of random answers, where they have one."""
        chance = "" if math.isnan(self.chance) else f" (random answers {percent(self.chance)})"
        return f"{self.name} {percent(self.share)}{chance}"


@dataclass(frozen=True)
class Ledger(Finding):
    """All errors at scored positions of some rows.

    Attributes:
        interval: 95 % interval over rows of the share that is wrong.
        causes: those that can be detected on this task and model, in the order of precedence.
        neighbours: of answers that are another pair's value, the share from the pair stored next
            to the right one; NaN where there are none.
        neighbours_interval: its 95 % interval over rows.
        by_chance: what `neighbours` would be if all other pairs were equally likely.
        masked: errors whose key or value a dynamic mask hides, whether or not lifting it helps.
        reader: the SSD head by which decay is judged; None where no head reads the value.
        rank: median rank of the right answer among the errors.
    """

    scored: int
    wrong: int
    interval: tuple[float, float]
    causes: tuple[Cause, ...]
    neighbours: float
    neighbours_interval: tuple[float, float]
    by_chance: float
    masked: int
    reader: Reader | None
    rank: float

    title = "Errors by cause"
    reading = (
        f"Each error counts once, under the first cause that applies: {', '.join(CAUSES)}. Causes "
        "that the task or the model cannot have are left out. Whiskers are 95 % intervals over "
        "rows. A diamond is the share that random answers, other targets of these rows, would have "
        f"by the same rules. Outranked means that the right value is among the {TOP} best tokens; "
        "this does not depend on the answer, so it has no diamond; nor does unknown. An error "
        "counts as masked away if the answer is right once the mask is lifted there; the diamond "
        "is how often lifting it gives the value of a random pair."
    )

    @property
    def says(self) -> str:
        """The most frequent causes, where there are enough errors to tell."""
        share = percent(self.wrong / self.scored)
        says = f"Wrong answers: {self.wrong:,} of {self.scored:,} ({share})"
        if self.wrong < FEW:
            return f"{says}, too few to say how common each cause is."
        top = sorted((c for c in self.causes if c.count), key=lambda cause: -cause.count)[:3]
        return f"{says}; the most frequent causes: {', '.join(cause.quote() for cause in top)}."

    def numbers(self) -> Table:
        """Return how many answers are wrong, and what is known of single causes."""
        rows = {"wrong, 95 % interval over rows": format_ends(*self.interval, percent)}
        if self.wrong:
            rows["median rank of the right answer"] = f"{self.rank:,.0f}"
        if not math.isnan(self.neighbours):
            near = f"{percent(self.neighbours)} {format_ends(*self.neighbours_interval, percent)}"
            name = "of other pairs' values, those stored next to the right one"
            rows[name] = f"{near}, by chance {percent(self.by_chance)}"
        if self.masked:
            rows["errors whose key or value a mask hides"] = f"{self.masked:,}"
        if self.reader is not None:
            head, contrast = name_head(self.reader.layer, self.reader.head), self.reader.contrast
            rows["decay is judged in"] = f"{head}: right values weigh {contrast:.1f} times others"
        return Table(("what", "found"), tuple(rows.items()))

    def figure(self) -> go.Figure | None:
        """Draw a bar a cause, the first in precedence on top; None where there is no error."""
        if not self.wrong:
            return None
        names = [cause.name for cause in self.causes]
        share = np.array([cause.share for cause in self.causes])
        texts = [f"<b>{percent(cause.share)}</b> ({cause.count:,})" for cause in self.causes]
        errors = Bars("errors", share, np.array([c.interval for c in self.causes]), texts=texts)
        random = Dots("random answers", np.array([cause.chance for cause in self.causes]))
        axis = Axis("share of errors", "share", ends=(0, 1.6), ticks=TICKS)
        return bars(names, [errors], axis, marks=random)


@dataclass(frozen=True)
class Example:
    """An error.

    Attributes:
        row: number of the row in the test split.
        rank: of the right answer among all tokens, from 1; above 1, since the answer is wrong.
    """

    row: int
    position: int
    token: int
    right: int
    answered: int
    cause: str
    rank: int
    probability: float


@dataclass(frozen=True)
class Examples(Finding):
    """A few errors of every cause.

    Attributes:
        errors: the first of each cause, then the second of each, and so on.
    """

    errors: tuple[Example, ...]

    title = "Errors, one by one"
    reading = (
        "The first errors of each cause. Rank is the rank of the right answer among all tokens; p "
        "is the probability that the model gives it, to three decimals."
    )

    @property
    def says(self) -> str:
        """The first error."""
        [e, *_] = self.errors
        return (
            f"For example, after token {e.token} at position {e.position} of row {e.row} it "
            f"answers {e.answered} instead of {e.right} ({e.cause})."
        )

    def numbers(self) -> Table:
        """Return a line for each error."""
        columns = ("row", "position", "token", "right", "given", "rank", "p", "cause")
        rows = [
            (e.row, e.position, e.token, e.right, e.answered, f"{e.rank:,}", f"{e.probability:.3f}")
            for e in self.errors
        ]
        named = zip(rows, self.errors, strict=True)
        return Table(columns, tuple((*map(str, row), error.cause) for row, error in named))


def measure(subject: Subject) -> list[Ledger | Examples]:
    """Return the causes of a subject's errors, and examples if there are any errors.

    Raises:
        NotApplicableError: when no position is scored.
    """
    ledger, examples = attribute_errors(subject)
    return [ledger, examples] if ledger.wrong else [ledger]


@torch.no_grad()
def attribute_errors(subject: Subject) -> tuple[Ledger, Examples]:
    """Attribute a subject's errors: the counts by cause, and up to `EXAMPLES` of them.

    Raises:
        NotApplicableError: when no position is scored.
    """
    batch, model = subject.batch, subject.model
    rng = np.random.default_rng(subject.seed)
    found = scored(model, batch)
    everyone = why.find_questions(batch)
    if not len(everyone):
        raise NotApplicableError("no position is scored")
    wrong_at = np.flatnonzero(~found.right.cpu().numpy())
    wrong = everyone[wrong_at]
    inputs = batch.inputs.cpu().numpy()
    given = found.answers.cpu().numpy()[wrong_at]
    # Set 0 is what the model answered; the others are random.
    random = why.draw_wrong_answers(wrong, everyone.targets, REDRAWN, rng)
    answers = np.concatenate([given[None], random])
    places = [why.search_rows(batch, wrong, row) for row in answers]
    decoys, pairs, seen = (np.stack(parts) for parts in zip(*places, strict=True))
    hidden = why.detect_masked(model, batch, wrong)
    relieved = np.zeros(answers.shape, bool)
    if hidden.any():
        without = why.answer_unmasked(model, batch).cpu().numpy()[wrong_at]
        others = [why.draw_other_values(batch, wrong, rng) for _ in range(REDRAWN)]
        tokens = [np.where(at >= 0, inputs[wrong.rows, at], -1) for at in others]
        relieved = hidden & (without == np.stack([wrong.targets, *tokens]))
    reader, faded = None, np.zeros(answers.shape, bool)
    if has_pairs(batch) and len(wrong):
        stored = why.find_values(batch)[wrong.rows, np.maximum(pairs, 0)]
        rivals = np.where(pairs >= 0, stored, seen)
        placebo = why.draw_other_values(batch, everyone, rng)
        reader, faded = why.detect_decayed(model, batch, everyone, placebo, wrong, rivals)
    rank, probability = _rank_right_answers(found, wrong_at)
    flags = {
        DECOY: decoys,
        MASKED: relieved,
        DECAYED: faded,
        OTHER_PAIR: pairs >= 0,
        IN_ROW: seen >= 0,
        OUTRANKED: np.broadcast_to(rank <= TOP, answers.shape),
        UNKNOWN: np.ones(answers.shape, bool),
    }
    cause = np.select([flags[name] for name in CAUSES], list(range(len(CAUSES))))
    beside, by_chance = why.find_neighbours(batch, wrong, pairs[0])
    missing: dict[str, bool] = {DECAYED: reader is None, MASKED: not find_masked_layers(model)}
    if not has_pairs(batch):
        missing |= dict.fromkeys((DECOY, MASKED, OTHER_PAIR), True)
    detectable = [name for name in CAUSES if not missing.get(name) and len(wrong)]
    ledger = Ledger(
        scored=len(everyone),
        wrong=len(wrong),
        interval=bound_share(~found.right.cpu().numpy(), everyone.rows, rng),
        causes=tuple(_count_cause(name, cause, wrong, rng) for name in detectable),
        neighbours=float(beside.mean()) if len(beside) else math.nan,
        neighbours_interval=bound_share(beside, wrong.rows[pairs[0] >= 0], rng)
        if len(beside)
        else (math.nan, math.nan),
        by_chance=by_chance,
        masked=int(hidden.sum()),
        reader=reader,
        rank=float(np.median(rank)) if len(rank) else math.nan,
    )
    examples = _choose_examples(cause[0], wrong, inputs, given, rank, probability)
    return ledger, Examples(examples)


def _rank_right_answers(
    found: Scored, at: Int[np.ndarray, " w"]
) -> tuple[Int[np.ndarray, " w"], Float[np.ndarray, " w"]]:
    """Return rank and probability of the right answers at some of the scored positions."""
    chosen = torch.from_numpy(at).to(found.hidden.device)
    ranks, probabilities = [np.zeros(0, np.int64)], [np.zeros(0)]
    for part in chosen.split(max(1, PART_ENTRIES // len(found.head))):
        logits = found.hidden[part] @ found.head.T
        right = logits.gather(1, found.targets[part, None])
        ranks.append((logits > right).sum(1).cpu().numpy() + 1)
        log_p = right[:, 0] - logits.logsumexp(1)
        probabilities.append(log_p.double().exp().cpu().numpy())
    return np.concatenate(ranks), np.concatenate(probabilities)


def _count_cause(
    name: str, cause: Int[np.ndarray, "n w"], wrong: Questions, rng: np.random.Generator
) -> Cause:
    index = CAUSES.index(name)
    mine = cause[0] == index
    return Cause(
        name=name,
        count=int(mine.sum()),
        share=float(mine.mean()),
        interval=bound_share(mine, wrong.rows, rng),
        chance=math.nan if name in (OUTRANKED, UNKNOWN) else float((cause[1:] == index).mean()),
    )


def _choose_examples(
    cause: Int[np.ndarray, " w"],
    wrong: Questions,
    inputs: Int[np.ndarray, "b t"],
    given: Int[np.ndarray, " w"],
    rank: Int[np.ndarray, " w"],
    probability: Float[np.ndarray, " w"],
) -> tuple[Example, ...]:
    """Return the first errors of each cause in turn."""
    of_cause = [np.flatnonzero(cause == i).tolist() for i in range(len(CAUSES))]
    in_turn = [i for i in chain(*zip_longest(*of_cause)) if i is not None]
    return tuple(
        Example(
            row=int(wrong.rows[i]),
            position=int(wrong.positions[i]),
            token=int(inputs[wrong.rows[i], wrong.positions[i]]),
            right=int(wrong.targets[i]),
            answered=int(given[i]),
            cause=CAUSES[cause[i]],
            rank=int(rank[i]),
            probability=float(probability[i]),
        )
        for i in in_turn[:EXAMPLES]
    )
