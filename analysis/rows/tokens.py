"""One row, token by token: what the model answers, and where each head looks."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from analysis.base import Finding, Subject, Words, describe, draw
from analysis.links import find_links
from analysis.mixing import Mixer, collect_mixers
from analysis.record import deflate, figure_only
from analysis.scoring import scored
from lab.layers.mixer import MatrixMixer
from lab.palette import color_roles
from tasks.base import IGNORE

__all__ = ["TITLE", "TokenRow", "describe", "draw", "measure"]

TITLE = "One row, token by token"
MOST_TOKENS = 1024
"""Most tokens that are shown; of a longer row, those up to its last scored position."""
MOST_SOURCES, FEWEST_SOURCES = 64, 4
"""Sources that are kept of each row of a matrix: those of largest magnitude."""
ENTRIES = 2**18
"""Entries kept of all matrices, as far as `FEWEST_SOURCES` allows."""
FULL = 10_000
"""The integer that stands for a share of 1; the page shows tenths of a per cent."""


@dataclass(frozen=True)
class Looks:
    """Where one head looks from each token that is shown.

    Attributes:
        layer: index of the block.
        head: index in its layer.
        mixer: class of the layer's mixer.
        sources: positions that are looked at, counted from the first token that is shown.
        shares: of the row's magnitudes, in [−1, 1], with the sign of the entry.
    """

    layer: int
    head: int
    mixer: str
    sources: Int[np.ndarray, "t k"] = figure_only()
    shares: Float[np.ndarray, "t k"] = figure_only()


@dataclass(frozen=True)
class TokenRow(Finding):
    """A row of the task, the model's answers to it, and where its heads look.

    Attributes:
        row: its number in the test split.
        chosen: why this row was chosen.
        seq_len: positions of the row.
        scored: how many of them are scored.
        right: how many of these the model answers right.
        first: the first position that is shown; above 0 only where long rows are cut.
        role_names: the task's.
        heads: where they look; empty where no mixer offers a matrix.
        tokens: the row's, as text.
        roles: indices into role_names.
        answers: the model's, as text; empty where nothing is scored.
        targets: the right answers, as text; likewise.
        links: positions of query, key and value of each pair.
    """

    row: int
    chosen: str
    seq_len: int
    scored: int
    right: int
    first: int
    role_names: tuple[str, ...]
    heads: tuple[Looks, ...]
    tokens: tuple[str, ...] = figure_only()
    roles: tuple[int, ...] = figure_only()
    answers: tuple[str, ...] = figure_only()
    targets: tuple[str, ...] = figure_only()
    links: tuple[tuple[int, int, int], ...] = figure_only()

    def describe(self) -> Words:
        """Say how many answers of the row are right, and how to look around in it."""
        says = f"The model answers {self.right} of this row's {self.scored} questions right."
        reading = f"Row {self.row} of the test split, {self.chosen}. "
        if self.heads:
            reading += (
                "Point at a token, tap it or move with the arrow keys to see where the chosen "
                "head looks from there: the stronger the colour, the larger the entry's share of "
                "its row of the mixer's matrix. Negative entries are orange. "
            )
            kept = self.heads[0].shares.shape[1]
            if kept < len(self.tokens):
                reading += f"Only the {kept} largest entries of each row are shown. "
        else:
            reading += "No mixer offers a matrix, so where the heads look is not known. "
        if len(self.tokens) < self.seq_len:
            last = self.first + len(self.tokens) - 1
            reading += f"Only positions {self.first:,} to {last:,} are shown. "
        reading += "The line below a token has the colour of its role."
        alt = f"A row of tokens with the model's answers. {says}"
        return Words(f"Row {self.row}", says, reading, alt, tokens=self._embed())

    def draw(self) -> None:
        """Return None: the page shows the row as text."""

    def _embed(self) -> dict[str, object]:
        """Return what the page shows, as JSON."""
        return {
            "first": self.first,
            "tokens": self.tokens,
            "roles": self.roles,
            "role_names": self.role_names,
            "colors": color_roles(self.role_names),
            "answers": self.answers,
            "targets": self.targets,
            "links": self.links,
            "full": FULL,
            "heads": [
                {
                    "name": f"layer {looks.layer}, head {looks.head}",
                    "mixer": looks.mixer,
                    "sources": deflate(looks.sources.astype("<u2").tobytes()),
                    "shares": deflate(np.rint(looks.shares * FULL).astype("<i2").tobytes()),
                }
                for looks in self.heads
            ],
        }


@torch.no_grad()
def measure(subject: Subject) -> list[TokenRow]:
    """Lay out a row with the model's answers, and read each mixer's matrix on it."""
    found = scored(subject.model, subject.batch)
    wrong = (~found.right).cpu().numpy()
    row, chosen = _choose_row(found.rows.cpu().numpy(), wrong)
    batch = subject.batch[row : row + 1]
    seq_len = batch.inputs.shape[1]
    inputs, targets = (part[0].cpu().numpy() for part in (batch.inputs, batch.targets))
    end = seq_len
    if seq_len > MOST_TOKENS:
        last = int((targets != IGNORE).nonzero()[0].max(initial=0))
        end = max(MOST_TOKENS, last + 1)
    window = slice(max(0, end - MOST_TOKENS), end)
    here = found.rows == row
    answers = np.full(seq_len, IGNORE)
    answers[found.positions[here].cpu().numpy()] = found.answers[here].cpu().numpy()
    task = subject.task.list_tasks(batch)[0]

    def spell(tokens: Int[np.ndarray, " t"]) -> tuple[str, ...]:
        return tuple(
            "" if token == IGNORE else task.format_token(token) for token in tokens[window].tolist()
        )

    links = find_links(batch)
    pairs = np.stack([links.queries, links.keys, links.values], 1) if len(links.values) else None
    return [
        TokenRow(
            row=row,
            chosen=chosen,
            seq_len=seq_len,
            scored=int((targets != IGNORE).sum()),
            right=int((answers == targets)[targets != IGNORE].sum()),
            first=window.start,
            role_names=subject.task.role_names,
            heads=_read_heads(collect_mixers(subject.model, batch), window),
            tokens=spell(inputs),
            roles=tuple(batch.roles[0].cpu().numpy()[window].tolist()),
            answers=spell(answers),
            targets=spell(targets),
            links=()
            if pairs is None
            else tuple(tuple(pair) for pair in (pairs - window.start).tolist()),
        )
    ]


def _choose_row(rows: Int[np.ndarray, " q"], wrong: Bool[np.ndarray, " q"]) -> tuple[int, str]:
    """Return the first row with right and wrong answers, else the first row, and why."""
    for row in np.unique(rows).tolist():
        if 0 < wrong[rows == row].sum() < (rows == row).sum():
            return row, "the first with right and wrong answers"
    return 0, "the first; no row measured here has both right and wrong answers"


def _read_heads(mixers: list[Mixer], window: slice) -> tuple[Looks, ...]:
    """Return where each head of the mixers that offer a matrix looks in a window of the row."""
    offered = [mixer for mixer in mixers if isinstance(mixer.module, MatrixMixer)]
    size = window.stop - window.start
    heads = sum(len(mixer.matrix(0, slice(0, 1))) for mixer in offered)
    kept = min(size, MOST_SOURCES, max(FEWEST_SOURCES, ENTRIES // max(1, heads * size)))
    found = []
    for mixer in offered:
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        for rows, block in mixer.blocks(0):
            part = slice(max(rows.start, window.start), min(rows.stop, window.stop))
            if part.start < part.stop:
                picked = block[:, part.start - rows.start : part.stop - rows.start]
                parts.append(_keep_largest(picked.cpu().numpy(), window, part.start, kept))
        sources, shares = (np.concatenate(arrays, 1) for arrays in zip(*parts, strict=True))
        found += [
            Looks(mixer.layer, head, mixer.kind, sources[head], shares[head])
            for head in range(len(sources))
        ]
    return tuple(found)


def _keep_largest(
    block: Float[np.ndarray, "h t s"], window: slice, first: int, kept: int
) -> tuple[Int[np.ndarray, "h t k"], Float[np.ndarray, "h t k"]]:
    """Return sources and shares of the largest entries of rows first, first + 1, … of a matrix."""
    causal = np.tri(block.shape[1], block.shape[2], k=first, dtype=bool)
    block = np.where(causal, np.nan_to_num(block), 0.0)
    total = np.abs(block).sum(-1, keepdims=True)
    share = block / np.maximum(total, np.finfo(np.float32).tiny)
    share = share[..., window.start : window.stop]
    sources = np.argsort(-np.abs(share), axis=-1, kind="stable")[..., :kept]
    return sources, np.take_along_axis(share, sources, -1)
