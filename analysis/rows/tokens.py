"""One row, token by token: what the model answers, and where each head looks."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from analysis.base import Finding, Subject, Table, TokenText
from analysis.links import find_links
from analysis.mixing import BlockMixer, collect_mixers
from analysis.plain import deflate, figure_only
from analysis.scoring import scored
from analysis.words import name_head
from lab.layers.mixer import MatrixMixer
from lab.palette import color_roles
from tasks.base import IGNORE

__all__ = ["TITLE", "TokenRow", "measure"]

TITLE = "One row, token by token"
MOST_TOKENS = 128
"""Maximum number of tokens that are shown."""
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
        sources: tokens that are looked at, as indices into those that are shown.
        shares: of the row's magnitudes, in [−1, 1], with the sign of the entry.
        hidden: the share of tokens that are not shown.
    """

    layer: int
    head: int
    mixer: str
    sources: Int[np.ndarray, "t k"] = figure_only()
    shares: Float[np.ndarray, "t k"] = figure_only()
    hidden: Float[np.ndarray, " t"] = figure_only()


@dataclass(frozen=True)
class TokenRow(Finding):
    """A row of the task, the model's answers to it, and where its heads look.

    Attributes:
        heads: where they look; empty where no mixer offers a matrix.
        tokens: those that are shown, as text.
        roles: indices into role_names.
        answers: the model's, as text; empty where nothing is scored.
        targets: the right answers, as text; likewise.
        links: query, key and value of each pair, as indices into what is shown.
    """

    seq_len: int
    scored: int
    right: int
    role_names: tuple[str, ...]
    heads: tuple[Looks, ...]
    positions: tuple[int, ...] = figure_only()
    tokens: tuple[str, ...] = figure_only()
    roles: tuple[int, ...] = figure_only()
    answers: tuple[str, ...] = figure_only()
    targets: tuple[str, ...] = figure_only()
    links: tuple[tuple[int, int, int], ...] = figure_only()

    title: str = figure_only()

    reading = (
        "Point at a token, tap it or move with the arrow keys to see where the chosen head looks "
        "from there, if its mixer offers a matrix: the stronger the colour, the larger the entry's "
        "share of its row of the matrix. Negative entries are orange. Of a long row, questions are "
        "shown with their keys and values, and the largest entries. The line below a token has the "
        "colour of its role."
    )

    @property
    def says(self) -> str:
        """How many answers of the row are right."""
        return f"The model answers {self.right} of {self.scored} questions of this row right."

    def numbers(self) -> Table | None:
        """Return how much of a long row, and of its matrices, is shown."""
        kept = self.heads[0].shares.shape[1] if self.heads else self.seq_len
        counts = {
            "tokens": (len(self.tokens), self.seq_len),
            "questions": (sum(map(bool, self.targets)), self.scored),
            "entries of a row of a matrix, at most": (kept, self.seq_len),
        }
        rows = ((name, f"{n:,}", f"{most:,}") for name, (n, most) in counts.items() if n < most)
        return Table(("", "shown", "of"), found) if (found := tuple(rows)) else None

    def figure(self) -> TokenText:
        """Return what the page shows."""
        heads = [
            {
                "name": name_head(looks.layer, looks.head),
                "mixer": looks.mixer,
                "sources": deflate(looks.sources.astype("<u2").tobytes()),
                "shares": deflate(np.rint(looks.shares * FULL).astype("<i2").tobytes()),
                "hidden": deflate(np.rint(looks.hidden * FULL).astype("<i2").tobytes()),
            }
            for looks in self.heads
        ]
        names = "positions", "tokens", "roles", "role_names", "answers", "targets", "links"
        row = {name: getattr(self, name) for name in names}
        return TokenText(
            {**row, "colors": color_roles(self.role_names), "full": FULL, "heads": heads}
        )


@torch.no_grad()
def measure(subject: Subject) -> list[TokenRow]:
    """Lay out a row with the model's answers, and read each mixer's matrix on it."""
    found = scored(subject.model, subject.batch)
    wrong = (~found.right).cpu().numpy()
    row, chosen = _choose_row(found.rows.cpu().numpy(), wrong)
    batch = subject.batch[row : row + 1]
    seq_len = batch.inputs.shape[1]
    inputs, here = batch.inputs[0].cpu().numpy(), found.rows == row
    answers, targets = np.full((2, seq_len), IGNORE)
    for line, tokens in ((answers, found.answers), (targets, found.targets)):
        line[found.positions[here].cpu().numpy()] = tokens[here].cpu().numpy()
    task = subject.task.list_tasks(batch)[0]

    def spell(tokens: Int[np.ndarray, " t"]) -> tuple[str, ...]:
        return tuple(
            "" if token == IGNORE else task.format_token(token) for token in tokens[shown].tolist()
        )

    links = find_links(batch)
    pairs = np.zeros((0, 3), np.int64)
    if len(links.values):
        pairs = np.stack([links.queries, links.keys, links.values], 1)
    shown = _choose_positions(pairs, answers, targets)
    pairs = pairs[np.isin(pairs, shown).all(1)]
    return [
        TokenRow(
            seq_len=seq_len,
            scored=int((targets != IGNORE).sum()),
            right=int((answers == targets)[targets != IGNORE].sum()),
            role_names=subject.task.role_names,
            heads=_read_heads(collect_mixers(subject.model, batch), shown),
            positions=tuple(shown.tolist()),
            tokens=spell(inputs),
            roles=tuple(batch.roles[0].cpu().numpy()[shown].tolist()),
            answers=spell(answers),
            targets=spell(targets),
            links=tuple(tuple(pair) for pair in np.searchsorted(shown, pairs).tolist()),
            title=f"Row {row} of the test split, {chosen}",
        )
    ]


def _choose_row(rows: Int[np.ndarray, " q"], wrong: Bool[np.ndarray, " q"]) -> tuple[int, str]:
    """Return the first row with right and wrong answers, else the first row, and why."""
    for row in np.unique(rows).tolist():
        if 0 < wrong[rows == row].sum() < (rows == row).sum():
            return row, "the first with right and wrong answers"
    return 0, "the first; no row measured here has both right and wrong answers"


def _choose_positions(
    pairs: Int[np.ndarray, "q 3"], answers: Int[np.ndarray, " t"], targets: Int[np.ndarray, " t"]
) -> Int[np.ndarray, " shown"]:
    """Return the positions of a row to show: all, or what belongs to some of its questions.

    Of a long row with pairs, those are query, key and value of the questions answered wrong, then
    of the first others, then what stands next to these. Of another long row, those are the
    positions up to its last question.
    """
    seq_len = len(targets)
    if seq_len <= MOST_TOKENS:
        return np.arange(seq_len)
    if not len(pairs):
        end = max(MOST_TOKENS, int((targets != IGNORE).nonzero()[0].max(initial=0)) + 1)
        return np.arange(end - MOST_TOKENS, end)
    queries = pairs[:, 0]
    by_interest = pairs[np.lexsort((queries, answers[queries] == targets[queries]))]
    chosen = by_interest[: MOST_TOKENS // 3].flatten()
    distance = np.abs(np.arange(seq_len)[:, None] - chosen).min(1)
    return np.sort(np.argsort(distance, kind="stable")[:MOST_TOKENS])


def _read_heads(mixers: list[BlockMixer], shown: Int[np.ndarray, " t"]) -> tuple[Looks, ...]:
    """Return where each head of the mixers that offer a matrix looks from the shown positions."""
    offered = [mixer for mixer in mixers if isinstance(mixer.module, MatrixMixer)]
    heads, size = sum(len(mixer.matrix(0, slice(0, 1))) for mixer in offered), len(shown)
    kept = min(size, MOST_SOURCES, max(FEWEST_SOURCES, ENTRIES // max(1, heads * size)))
    found = []
    for mixer in offered:
        parts: list[tuple[np.ndarray, ...]] = []
        for rows, block in mixer.blocks(0):
            targets = shown[(rows.start <= shown) & (shown < rows.stop)]
            if len(targets):
                picked = block[:, torch.as_tensor(targets - rows.start)]
                parts.append(_keep_largest(picked.cpu().numpy(), targets, shown, kept))
        looks = [np.concatenate(arrays, 1) for arrays in zip(*parts, strict=True)]
        found += [
            Looks(mixer.layer, head, mixer.kind, *(part[head] for part in looks))
            for head in range(len(looks[0]))
        ]
    return tuple(found)


def _keep_largest(
    block: Float[np.ndarray, "h t s"],
    targets: Int[np.ndarray, " t"],
    shown: Int[np.ndarray, " shown"],
    kept: int,
) -> tuple[Int[np.ndarray, "h t k"], Float[np.ndarray, "h t k"], Float[np.ndarray, "h t"]]:
    """Return sources and shares of the largest shown entries of a matrix's rows, and the rest.

    Args:
        block: the rows of the target positions.
        targets: those positions.
        kept: how many entries of each row.
    """
    causal = np.arange(block.shape[2]) <= targets[:, None]
    block = np.where(causal, np.nan_to_num(block), 0.0)
    total = np.abs(block).sum(-1, keepdims=True)
    share = block / np.maximum(total, np.finfo(np.float32).tiny)
    hidden = np.abs(np.delete(share, shown, -1)).sum(-1)
    share = share[..., shown]
    sources = np.argsort(-np.abs(share), axis=-1, kind="stable")[..., :kept]
    return sources, np.take_along_axis(share, sources, -1), hidden
