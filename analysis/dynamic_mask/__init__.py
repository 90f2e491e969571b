"""Which keys do the dynamic masks keep, do they remove noise or answers, and do they learn?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import plotly.graph_objects as go
import torch

from analysis.base import Finding, NotApplicableError, Subject, Table
from analysis.dynamic_mask.learning import measure_biases, measure_history
from analysis.dynamic_mask.masks import (
    BANDS,
    LIGHT,
    MOST,
    MaskedHead,
    auroc,
    disable_masks,
    find_masked_layers,
    measure_heads,
    pick_heads,
    record_masked_layers,
)
from analysis.figures import Axis, Colors, Dots, Map, Pairs, heat, pairs
from analysis.links import has_pairs
from analysis.plain import figure_only
from analysis.scoring import estimate_accuracy, scored, sum_by_row
from analysis.statistics.comparisons import SURE, westfall_young
from analysis.words import capitalize, format_ends, percent, round_percent
from lab.intervals import Estimate, estimate_ratio
from lab.layers.mask import LiteralMask, SoftMask
from lab.models.evaluation import find_stored_positions
from tasks.base import count_rows

__all__ = ["TITLE", "measure"]

TITLE = "What the dynamic masks do"
BEYOND_TOKENS = 2**13
"""Number of tokens of the rows that are twice as long as those trained on."""
LAYERS = 4
"""Maximum number of layers of a table."""
PAIRED = ("stored keys kept", "kept keys stored", "answers masked", "value to key", "AUROC")
"""Columns of a table for tasks with stored pairs."""
NOTES = {
    "nothing": "next to nothing",
    "noise": "attention to answers",
    "answers": "attention away from answers",
    "keys": "values away from their keys",
    "both": "to some answers, masks others",
    "neither": "attention among other keys",
    "undecided": "undecided",
}
"""What a mask moves, by `MaskedHead.removed`."""


def measure(subject: Subject) -> list[Finding]:
    """Return the biases, which keys the masks keep, and what that does to the answers.

    If some keys are masked, where those are; if the run kept its weights, also how the masks
    changed over training.

    Raises:
        NotApplicableError: if no block has a dynamic mask.
    """
    if not find_masked_layers(subject.model):
        raise NotApplicableError("no block has a dynamic mask")
    batch, names = subject.batch, subject.task.role_names
    layers = record_masked_layers(subject.model, batch)
    rng = np.random.default_rng(subject.seed)
    heads = tuple(head for layer in layers for head in measure_heads(layer, batch, len(names), rng))
    findings: list[Finding] = [measure_biases(subject, layers, heads), KeySelection(heads, names)]
    if min(head.kept for head in heads) < 1:
        findings.append(KeptByPosition(names, split_bands(batch.inputs.shape[1]), heads))
    findings.append(measure_effect(subject, heads, rng))
    if subject.run is not None and len(subject.run.list_steps()) > 1:
        findings += measure_history(subject.run, batch)
    return findings


@dataclass(frozen=True)
class KeySelection(Finding):
    """Which keys each head keeps, by role."""

    title = "Share of keys kept, by role"
    reading = (
        f"A key counts as masked for a query if its weight is below {round_percent(LIGHT)} of the "
        "weight of the most favoured key, or if it is outside the window. Above: share kept, over "
        "all queries and the keys before them. Below: mean weight relative to the most favoured "
        "key, which a soft mask can lower without masking. In the table, of the scored "
        "queries: what attention without the mask, A⁰, puts on masked keys, and how well the kept "
        "keys agree with the stored pairs; in brackets, what as many keys at random would give. "
        "Value to key: the attention of stored values on their own key, without the mask in "
        "brackets. AUROC: how well the bias tells stored keys from others (chance 0.5), with the "
        "95 % interval over rows. Of more than 8 heads, those that keep fewest keys are shown."
    )
    heads: tuple[MaskedHead, ...]
    role_names: tuple[str, ...]

    @property
    def says(self) -> str:
        """How many heads mask keys, and how many keys are kept at least."""
        masking = [head for head in self.heads if head.kept < 1]
        if not masking:
            return "No head masks any key."
        least = min(masking, key=lambda head: head.kept)
        return (
            f"Heads that mask keys: {len(masking)} of {len(self.heads)}; "
            f"{least.name} keeps fewest, {percent(least.kept)} of them."
        )

    def numbers(self) -> Table:
        """Return what masking loses, and how well kept keys agree with the stored pairs."""
        columns, rows = ("head", "attention lost"), []
        for head in pick_fewest(self.heads):
            row = (head.name, compare(head.lost))
            if (of := head.pairs) is not None:
                ends = format_ends(of.auroc.low, of.auroc.high, "{:.3f}".format)
                row += tuple(map(compare, (of.recall, of.precision, of.hidden, of.key)))
                row += (f"{of.auroc.value:.3f} {ends}",)
                columns = (*columns[:2], *PAIRED)
            rows.append(row)
        return Table(columns, tuple(rows))

    def figure(self) -> go.Figure:
        """Draw share kept above and mean weight below, by head and role."""
        heads = pick_fewest(self.heads)
        names = [head.name for head in heads]
        kept = np.array([[*head.kept_by_role, head.kept] for head in heads])
        weight = np.array([[*head.weight_by_role, math.nan] for head in heads])
        columns = [*self.role_names, "all"]
        maps = [Map(kept, names, columns, "share kept"), Map(weight, names, columns, "mean weight")]
        return heat(maps, Colors(unit="share", ends=(0, 1)), Axis(), Axis(), numbers=True)


@dataclass(frozen=True)
class KeptByPosition(Finding):
    """Where in the row keys are kept: `kept_by_band` of the heads.

    Attributes:
        bands: first position of each band, then the row's length.
    """

    title = "Share of keys kept, by role and band of positions"
    reading = (
        "The share of a role's keys in a band of positions that are kept, over all later queries; "
        "empty where no key has the role. Of more than 8 heads, those that keep fewest are shown."
    )
    role_names: tuple[str, ...]
    bands: tuple[int, ...]
    heads: tuple[MaskedHead, ...] = figure_only()

    @property
    def says(self) -> str:
        """Where the head that keeps fewest keys keeps least and most."""
        head = min(self.heads, key=lambda head: head.kept)
        shares = head.kept_by_band
        least, most = (
            f"{percent(shares.flat[place])} ({self.role_names[place // shares.shape[1]]} at "
            f"{self._span(place % shares.shape[1])})"
            for place in (int(np.nanargmin(shares)), int(np.nanargmax(shares)))
        )
        return f"{capitalize(head.name)} keeps fewest keys: from {least} to {most}."

    def figure(self) -> go.Figure:
        """Draw the kept share by role and band of positions, a panel per head."""
        heads = pick_fewest(self.heads)
        at = (np.arange(BANDS) + 0.5) * self.bands[-1] / BANDS - 0.5
        notes = [[f"{role} at {self._span(i)}" for i in range(BANDS)] for role in self.role_names]
        maps = [
            Map(head.kept_by_band, self.role_names, at, head.name, notes=notes) for head in heads
        ]
        colors, x = Colors(unit="share", ends=(0, 1)), Axis("position of the key, tokens")
        return heat(maps, colors, x, Axis(), across=2)

    def _span(self, band: int) -> str:
        return f"{self.bands[band]}–{self.bands[band + 1] - 1}"


def split_bands(seq_len: int) -> tuple[int, ...]:
    """Return the first position of each band of positions, then the length."""
    return tuple(-(-band * seq_len // BANDS) for band in range(BANDS + 1))


@dataclass(frozen=True)
class Beyond:
    """What the masks are past the length they were trained on.

    Attributes:
        entries: table entries per head past that length; 0 without tables.
        untouched: share of those that are exactly 1, as before training; NaN without any.
        weight: mean weight of such an entry relative to the most favoured trained one.
        accuracy: on rows of that length; chance: the same without the masks; None if not measured.
        auroc: of each head there, for stored keys; empty if not measured or without pairs.
        why: why nothing was measured there; empty if it was.
    """

    entries: int
    untouched: float
    weight: float
    seq_len: int
    accuracy: Estimate | None
    auroc: tuple[float, ...]
    why: str


@dataclass(frozen=True)
class MaskEffect(Finding):
    """How the masks change attention and answers.

    Attributes:
        accuracy: share of right answers; chance is the task's.
        removal: by layer, the change of accuracy when its biases are set to zero; a window then
            keeps the latest keys.
        harm: by layer, p that the largest of these changes is as high if no removal is a gain.
    """

    title = "What masking does to the attention on the answer"
    reading = (
        "A⁰ is the attention of the same queries and keys without the mask's bias and window. A "
        "mask moves attention to answers if their values get more with it than without it, however "
        "little. It moves stored values away from their keys if these attend more than evenly to "
        "their own key without the mask, and lose some of that. A layer's mask does harm if more "
        f"answers are right without it, p < {SURE} corrected for the number of layers. "
        "Whiskers: 95 % intervals over rows."
    )
    accuracy: Estimate
    layers: tuple[int, ...]
    removal: tuple[Estimate, ...]
    harm: tuple[float, ...]
    beyond: Beyond
    heads: tuple[MaskedHead, ...] = figure_only()

    @property
    def harmful(self) -> list[int]:
        """The layers without whose masks more answers are right."""
        return [layer for layer, p in zip(self.layers, self.harm, strict=True) if p < SURE]

    @property
    def says(self) -> str:
        """What the masks change in the answers, how many do harm, and how many take attention."""
        i = int(np.argmax([abs(change.value) for change in self.removal]))
        taking = sum(head.removed in ("answers", "keys") for head in self.heads)
        return (
            f"{percent(self.accuracy.value)} of the answers are right (chance "
            f"{percent(self.accuracy.chance)}); setting the biases of layer {self.layers[i]} to "
            f"zero changes that most, by {self.removal[i].points}; layers whose mask does harm: "
            f"{len(self.harmful)} of {len(self.layers)}; heads whose mask takes attention from "
            f"answers, or from a value to its key: {taking} of {len(self.heads)}."
        )

    def numbers(self) -> Table:
        """Return the answers without each layer's mask, and on rows of twice the length."""
        order = np.argsort([-abs(change.value) for change in self.removal], kind="stable")
        rows = [
            (
                f"layer {self.layers[i]} without its mask",
                self.removal[i].points,
                f"harm: p {self.harm[i]:.2g}",
            )
            for i in order[:LAYERS]
        ]
        far, place = self.beyond, f"rows of {self.beyond.seq_len:,} tokens"
        if far.entries:
            untouched = f"{far.entries:,}, {percent(far.untouched)} of them untouched"
            rows.append(("table entries past these rows", untouched, f"weight {far.weight:.2g}"))
        if far.accuracy is None:
            rows.append((place, "not measured", far.why))
        else:
            bare = f"without masks {percent(far.accuracy.chance)}"
            rows.append((f"{place}, answers right", percent(far.accuracy.value), bare))
        if far.auroc:
            ranked = ", ".join(f"{one:.2f}" for one in far.auroc[:MOST])
            rows.append((f"{place}, AUROC of the biases", ranked, "chance 0.5"))
        return Table(("what", "answers or masks", "compare"), tuple(rows))

    def figure(self) -> go.Figure | None:
        """Draw attention on the answer's value with and without mask, a line per head.

        None for a task without stored pairs.
        """
        heads = [(head, head.pairs.answer) for head in self.heads if head.pairs is not None]
        if not heads:
            return None
        masked = np.array([answer.value for _, answer in heads])
        free = np.array([answer.chance for _, answer in heads])
        ends = np.array([(answer.low, answer.high) for _, answer in heads])
        dots = Dots("with the mask, A", masked, ends), Dots("without it, A⁰", free, look="hollow")
        axis = Axis("attention of scored queries on their answer's value", "share")
        harm = [", harm" * (head.layer in self.harmful) for head, _ in heads]
        remarks = [NOTES[head.removed] + harm[i] for i, (head, _) in enumerate(heads)]
        names = [head.name for head, _ in heads]
        return pairs(names, Pairs(dots, axis), joined=True, remarks=remarks)


def pick_fewest(heads: Sequence[MaskedHead]) -> list[MaskedHead]:
    """Return the `MOST` heads that keep fewest keys, in their own order."""
    return [heads[i] for i in pick_heads([head.kept for head in heads])]


def compare(share: Estimate) -> str:
    """Return a share, and in brackets its value by chance."""
    return f"{percent(share.value)} ({percent(share.chance)})"


def measure_effect(
    subject: Subject, heads: tuple[MaskedHead, ...], rng: np.random.Generator
) -> MaskEffect:
    """Measure the answers with the masks, without those of each layer, and on longer rows."""
    layers = tuple(find_masked_layers(subject.model))
    masked = scored(subject.model, subject.batch)
    removal, gains = [], []
    for layer in layers:
        with disable_masks(subject.model, [layer]):
            bare = scored(subject.model, subject.batch)
        change = bare.right.double() - masked.right.double()
        sums, counts = sum_by_row(masked, change)
        removal.append(estimate_ratio(sums, counts, 0.0, rng))
        gains.append(sums.cpu().numpy())
    right = estimate_accuracy(masked, subject.task.chance, rng)
    harm = tuple(westfall_young(-np.stack(gains, 1), rng).tolist())
    return MaskEffect(right, layers, tuple(removal), harm, measure_beyond(subject, rng), heads)


def measure_beyond(subject: Subject, rng: np.random.Generator) -> Beyond:
    """Measure the masks past the length of the subject's rows, and on rows of twice that length."""
    layers, seq_len = find_masked_layers(subject.model), subject.batch.inputs.shape[1]
    masks = [m for of in layers.values() if isinstance(m := of.mask, LiteralMask | SoftMask)]
    past, weights = [], []
    for mask in masks:
        bias = mask.bias(mask.l.detach())
        if bias.shape[1] > seq_len:
            past.append(mask.l.detach()[:, seq_len:])
            best = bias[:, :seq_len].amax(-1, keepdim=True)
            weights.append((bias[:, seq_len:] - best).exp().mean())
    entries = sum(table.numel() for table in past)
    found = Beyond(
        entries=max((table.shape[1] for table in past), default=0),
        untouched=sum(float((t == 1).sum()) for t in past) / entries if entries else math.nan,
        weight=float(torch.tensor(weights).mean()),
        seq_len=2 * seq_len,
        accuracy=None,
        auroc=(),
        why="",
    )
    short = [mask.l.shape[1] for mask in masks if mask.l.shape[1] < 2 * seq_len]
    if short:
        return replace(found, why=f"a table ends at {min(short)} positions")
    try:
        task = subject.task.replace(seq_len=2 * seq_len)
    except ValueError as error:
        return replace(found, why=str(error))
    size = count_rows(BEYOND_TOKENS, 2 * seq_len, most=len(subject.batch.inputs))
    device = subject.batch.inputs.device
    batch = task.batch(split="test", size=size, seed=subject.seed, device=device)
    masked = scored(subject.model, batch)
    with disable_masks(subject.model, layers):
        bare = scored(subject.model, batch)
    ranked: tuple[float, ...] = ()
    if has_pairs(batch):
        stored = find_stored_positions(batch)[:, None]
        for layer in record_masked_layers(subject.model, batch):
            keep = stored.expand_as(layer.bias)
            ranked += tuple(auroc(layer.bias, keep, ~keep).nanmean(0).tolist())
    return replace(found, accuracy=estimate_accuracy(masked, bare.accuracy, rng), auroc=ranked)
