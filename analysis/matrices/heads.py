"""What does each head look at, and how widely? Any mixer, attention and SSD alike, by its matrix.

    score        ⟨|M|, P⟩ / Σ|M|, P a 0/1 matrix of where a kind of head would look
    spread       H of |M| normalised, row by row, and e^H keys
    distance     Σ|M|(i − j) / Σ|M|

M is the matrix that the layer applies. It is signed for SSD, with D on its diagonal; here |M|.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
import plotly.graph_objects as go
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from analysis.base import Finding, NotApplicableError, Subject, Table
from analysis.figures import Axis, Dots, Pairs, draw_heads
from analysis.links import IN_PLACE, SHOWS, Offsets, find_offsets
from analysis.mixing import BLOCK_ENTRIES, BlockMixer, collect_mixers
from analysis.words import format_digits, format_range, name_head, name_place, percent, percents
from lab.files import RunError
from lab.hooks import run_with_cache
from lab.intervals import Z95
from lab.layers.mixer import MatrixMixer
from lab.layers.ssd import NORM_EPS, SSD

__all__ = ["PATTERNS", "TITLE", "HeadReach", "HeadScores", "measure"]

TITLE = "What each head looks at"
ENTRIES = 2**27
"""Matrix entries that are read in all; they decide how many rows of the batch are used."""
PLACES = {
    "previous token": "the token before",
    "duplicate token": "earlier positions of the same token, where there are any",
    "induction": "the token that followed an earlier copy of this one, in rows that have one",
    "first token": "the first token",
}
"""Where a head of each kind looks from position i: at i − 1; at earlier positions of the same
token; at the positions after those; at position 0, from all others."""
PATTERNS = tuple(PLACES)
NAMED = 6
"""Maximum number of patterns in the table."""
GATED_TARGETS = 128
"""Rows of a gated mixer's matrix whose entries are weighted by what they move: the gate belongs to
the target, so that every entry has a norm of its own."""
LINEAR = 1e-3
"""How far off a linear map may be, as a share of its largest output: fp32 is well below."""
Weigh = Callable[[Int[Tensor, " t"]], tuple[Int[Tensor, " n"], Float[Tensor, "h n s"]]]
"""Returns which of some targets have weighted entries, as indices, and the weights."""


@dataclass(frozen=True)
class HeadScores(Finding):
    """How much of each head's mass lies where a kind of head would look; p of `PATTERNS`.

    Attributes:
        layers: the block of each head.
        heads: its index in the block.
        patterns: the kinds, in the order of the columns.
        shares: ⟨|M|, P⟩ / Σ|M| over those rows of M in which P has a position; 1 for a pure head
            of that kind. NaN where no token of the batch has such a position.
        chance: the same of a uniform causal matrix.
        half_widths: of the shares' 95 % intervals, over rows of the batch.
        moved_shares: the shares when an entry weighs ‖M_ij v_j W_O‖; NaN for a mixer whose project
            is not linear.
        offsets: how far after its positions the pattern of induction lies, by layer.
    """

    layers: Int[np.ndarray, " h"]
    heads: Int[np.ndarray, " h"]
    patterns: tuple[str, ...]
    shares: Float[np.ndarray, "h p"]
    chance: Float[np.ndarray, " p"]
    half_widths: Float[np.ndarray, "h p"]
    moved_shares: Float[np.ndarray, "h p"]
    rows: int
    offsets: Offsets = IN_PLACE

    title = "Head scores, share of |M|"
    reading = (
        "The share of a head's mass |M| on a kind of position, over those rows of its matrix that "
        "have such a position; kinds without a panel do not occur. Whiskers are 95 % intervals "
        "over rows of the batch. Induction: positions after an earlier occurrence of the row's "
        "token, or as far after those as a convolution moves them. Diamonds weigh each entry by "
        "‖M_ij v_j W_O‖, what it moves in the residual stream: where the diamond is far from the "
        f"dot, the head looks where it moves little. Gated layers take {GATED_TARGETS} random rows "
        "of a long matrix for them; a mixer whose project is not linear has none."
    )

    def find_patterns(self) -> list[tuple[int, int]]:
        """Return which (head, pattern) surely hold more than chance, the clearest first.

        Surely: the low end of the interval lies at least `SHOWS` of the way from chance to 1. A
        single row of the batch has no interval, so it shows no pattern.
        """
        excess = (self.shares - self.chance) / (1 - self.chance)
        # Written so that NaN, which the interval of a single row is, shows no pattern.
        low = excess - self.half_widths / (1 - self.chance)
        order = np.argsort(-np.nan_to_num(excess, nan=-1.0), axis=None)
        found = zip(*np.unravel_index(order, excess.shape), strict=True)
        return [(int(h), int(p)) for h, p in found if low[h, p] >= SHOWS]

    @property
    def says(self) -> str:
        """Which head surely shows a pattern most clearly, or comes nearest."""
        if np.isnan(self.shares).all():
            return "No head has any mass."
        shown = self.find_patterns()
        excess = np.nan_to_num(self.shares - self.chance, nan=-1.0)
        nearest = np.unravel_index(int(excess.argmax()), excess.shape)
        head, pattern = shown[0] if shown else map(int, nearest)
        opening = f"Heads that surely show a pattern: {len({h for h, _ in shown})} of {len(excess)}"
        if self.rows == 1:
            opening = "Undecided, because one row of the batch has no interval"
        kind = self.patterns[pattern]
        offset = self.offsets.read.get(int(self.layers[head]), 0) if kind == "induction" else 0
        return (
            f"{opening}; at most, {name_head(self.layers[head], self.heads[head])} puts "
            f"{percent(float(self.shares[head, pattern]))} of its mass on "
            f"{name_place(offset, PLACES[kind])} (a uniform row: "
            f"{percent(float(self.chance[pattern]))})."
        )

    def numbers(self) -> Table | None:
        """Return the clearest of the patterns that surely show."""
        rows = []
        for h, p in self.find_patterns()[:NAMED]:
            share, half, moved = self.shares[h, p], self.half_widths[h, p], self.moved_shares[h, p]
            found, low, high = percents(share, share - half, share + half)
            moves = "–" if np.isnan(moved) else percent(moved)
            head, uniform = name_head(self.layers[h], self.heads[h]), percent(self.chance[p])
            rows.append((head, self.patterns[p], found, f"{low} to {high}", moves, uniform))
        columns = "head", "pattern", "share of |M|", "95 %", "of what moves", "a uniform row"
        return Table(columns, tuple(rows)) if rows else None

    def figure(self) -> go.Figure | None:
        """Draw one panel per pattern; None where no head has any mass."""
        if np.isnan(self.shares).all():
            return None
        ends = np.stack([self.shares - self.half_widths, self.shares + self.half_widths], 2)
        axis = Axis(unit="share", ends=(-0.08, 1.08), ticks={0: "0", 0.5: "50", 1: "100"})
        panels = [
            Pairs(
                [
                    Dots("|M|", self.shares[:, p], ends[:, p]),
                    Dots("moved", self.moved_shares[:, p]),
                ],
                axis,
                name.replace(" ", "\n") + ", %",
                {"a uniform row": float(self.chance[p])},
            )
            for p, name in enumerate(self.patterns)
            if not np.isnan(self.chance[p])
        ]
        return draw_heads(self.layers, self.heads, panels)


@dataclass(frozen=True)
class HeadReach(Finding):
    """How widely and how far each head looks.

    Attributes:
        layers, heads: as in `HeadScores`.
        effective_keys: e^H in [1, i + 1], H the entropy of a row of |M| normalised; mean over the
            matrix's rows and the batch's.
        distance: Σ|M|(i − j) / Σ|M|, tokens.
        uniform_keys, uniform_distance: of a uniform causal matrix.
    """

    layers: Int[np.ndarray, " h"]
    heads: Int[np.ndarray, " h"]
    effective_keys: Float[np.ndarray, " h"]
    distance: Float[np.ndarray, " h"]
    uniform_keys: float
    uniform_distance: float

    title = "Spread and distance of |M|"
    reading = (
        "Effective keys are e^H, H the entropy of a row of |M| normalised, mean over rows: 1 for a "
        "row of one entry. Distance is Σ|M|(i − j) / Σ|M|. An SSD matrix has D, the skip, on its "
        "diagonal, which sharpens it."
    )

    @property
    def says(self) -> str:
        """Over how many keys heads spread, and how far back they look."""
        with_mass = np.isfinite(self.effective_keys)
        if not with_mass.any():
            return "No head has any mass."
        return (
            f"Heads with mass, {with_mass.sum()} of {len(with_mass)}, spread over "
            f"{format_range(self.effective_keys)} effective keys (uniform rows: "
            f"{format_digits(self.uniform_keys)}) and look {format_range(self.distance)} tokens "
            f"back on average (uniform: {format_digits(self.uniform_distance)})."
        )

    def figure(self) -> go.Figure | None:
        """Draw one panel per quantity; None where no head has any mass."""
        if np.isnan(self.effective_keys).all():
            return None
        found = (
            ("effective keys", self.effective_keys, self.uniform_keys),
            ("mean distance, tokens", self.distance, self.uniform_distance),
        )
        panels = []
        for title, values, uniform in found:
            most = float(np.nanmax(values, initial=uniform))
            axis = Axis(ends=(-0.05 * most, 1.05 * most))
            panels.append(
                Pairs([Dots("heads", values)], axis, title, {"a uniform matrix": uniform})
            )
        return draw_heads(self.layers, self.heads, panels)


@torch.no_grad()
def measure(subject: Subject) -> list[HeadScores | HeadReach]:
    """Return the heads' scores, and their reach.

    Raises:
        NotApplicableError: where no block's mixer offers a matrix.
        RunError: when a mixer that is not the lab's own raises.
    """
    found = [
        mixer
        for mixer in collect_mixers(subject.model, subject.batch)
        if isinstance(mixer.module, MatrixMixer)
    ]
    if not found:
        raise NotApplicableError("no block has a mixer that offers a matrix")
    tokens = subject.batch.inputs
    count, seq_len = tokens.shape
    n_heads = [len(mixer.matrix(0, slice(0, 1))) for mixer in found]
    rows = range(min(count, max(1, ENTRIES // (sum(n_heads) * seq_len**2))))
    rng, offsets = np.random.default_rng(subject.seed), find_offsets(subject)
    by_layer = [
        [sum_row(mixer, row, tokens[row], rng, offsets.get(mixer.layer)[0]) for row in rows]
        for mixer in found
    ]

    def gather(name: str) -> np.ndarray:
        """Return a quantity of all heads, [row h …]."""
        layers = [torch.stack([sums[name] for sums in by_row]) for by_row in by_layer]
        return torch.cat(layers, dim=1).double().cpu().numpy()

    chance = torch.stack([compute_uniform_shares(tokens[row]) for row in rows]).cpu().numpy()
    with np.errstate(invalid="ignore"):
        shares = gather("on_patterns") / gather("with_patterns")
        moved = gather("moved_on_patterns") / gather("moved_with_patterns")
    # A row of the batch in which no token repeats says nothing about duplicates.
    shares, moved = (np.where(np.isnan(chance)[:, None], np.nan, z) for z in (shares, moved))
    share, half_widths = _average(shares)
    layers = np.repeat([mixer.layer for mixer in found], n_heads)
    heads = np.concatenate([np.arange(n) for n in n_heads])
    place = np.arange(seq_len)
    return [
        HeadScores(
            layers=layers,
            heads=heads,
            patterns=PATTERNS,
            shares=share,
            chance=_average(chance)[0],
            half_widths=half_widths,
            moved_shares=_average(moved)[0],
            rows=len(rows),
            offsets=offsets,
        ),
        HeadReach(
            layers=layers,
            heads=heads,
            effective_keys=_average(gather("effective_keys"))[0],
            distance=_average(gather("distance"))[0],
            uniform_keys=float((place + 1).mean()),
            uniform_distance=float((place / 2).mean()),
        ),
    ]


def _average(
    values: Float[np.ndarray, "n ..."],
) -> tuple[Float[np.ndarray, "..."], Float[np.ndarray, "..."]]:
    """Return the mean over rows of the batch that have a value, and half its 95 % interval's width.

    NaN is no value. Of fewer than two there is no interval, which is NaN then.
    """
    known = np.ma.masked_invalid(values)
    half = Z95 * known.std(0, ddof=1) / np.sqrt(known.count(0))
    return known.mean(0).filled(np.nan), half.filled(np.nan)


def sum_row(
    mixer: BlockMixer,
    row: int,
    tokens: Int[Tensor, " s"],
    rng: np.random.Generator,
    offset: int = 0,
) -> dict[str, Tensor]:
    """Sum over the entries of a mixer's matrix M on one row of the batch, block by block.

    Args:
        mixer: whose matrix.
        row: of the batch.
        tokens: of the row.
        rng: chooses the rows of M whose entries are weighted by what they move, of a gated mixer.
        offset: how far after its positions the pattern of induction lies.

    Returns:
        by name, for each head [h]:

        effective_keys     e^H of |M| normalised; mean over rows of M that have any mass
        distance           Σ|M|(i − j) / Σ|M|, tokens
        on_patterns        ⟨|M|, P⟩ for each of `PATTERNS` [h p]
        with_patterns      Σ|M| over the rows of M in which P has a position [h p]
        moved_…            both with entries weighted by the norm of what they move; NaN where
                           project is not linear

    Raises:
        RunError: when a mixer that is not the lab's own raises.
    """
    weigh = measure_moves(mixer, row, rng)
    total: dict[str, Tensor] = {}
    for rows, matrix in mixer.blocks(row):
        size = matrix.abs()
        targets = torch.arange(rows.start, rows.stop, device=size.device)
        sources = torch.arange(size.shape[-1], device=size.device).float()
        mass = size.sum(-1)
        # Σ|M| ln|M| / Σ|M| and ln Σ|M|; rounding may take the sum of a single entry's below 0.
        norm = mass.clamp(min=torch.finfo(size.dtype).tiny)
        entropy = (torch.special.entr(size).sum(-1) / norm + norm.log()).clamp(min=0)
        where = find_positions(tokens, targets, offset).to(size.dtype)
        # A row with an earlier copy counts for induction, whatever the offset.
        able = where[[0, 1, 1, 3]].amax(-1)
        chosen, norms = weigh(targets)
        moved = size[:, chosen] * norms
        found = {
            "mass": mass.sum(-1),
            "filled": (mass > 0).sum(-1),
            "effective_keys": torch.where(mass > 0, entropy.exp(), 0.0).sum(-1),
            "distance": (targets * mass - size @ sources).sum(-1),
            "on_patterns": torch.einsum("hts,pts->hp", size, where),
            "with_patterns": mass @ able.T,
            "moved_on_patterns": torch.einsum("hts,pts->hp", moved, where[:, chosen]),
            "moved_with_patterns": moved.sum(-1) @ able[:, chosen].T,
        }
        total = {name: total[name] + part if total else part for name, part in found.items()}
    filled = total.pop("filled")
    keys, distance = total["effective_keys"] / filled, total["distance"] / total.pop("mass")
    return {**total, "effective_keys": keys, "distance": distance}


def find_positions(
    tokens: Int[Tensor, " s"], targets: Int[Tensor, " t"], offset: int = 0
) -> Bool[Tensor, "p t s"]:
    """Return where each kind of head looks from the targets, P of `PATTERNS`.

    Induction looks at an `offset` after its positions, even where that is after the target.

    Source: TransformerLens's `head_detector`, except for the first token.
    """
    place = torch.arange(len(tokens), device=tokens.device)
    earlier = place < targets[:, None]
    same = (tokens[targets, None] == tokens) & earlier
    # The position after an earlier occurrence: the last may be the target's own.
    after = F.pad(same[:, : -1 - offset], (1 + offset, 0))
    return torch.stack([place == targets[:, None] - 1, same, after, earlier & (place == 0)])


def compute_uniform_shares(tokens: Int[Tensor, " s"]) -> Float[Tensor, " p"]:
    """Return the shares ⟨U, P⟩ / ΣU of a uniform causal matrix U over its rows with P.

    They are NaN where no row has a position of the pattern.
    """
    place = torch.arange(len(tokens), device=tokens.device)
    order = tokens.argsort(stable=True)
    # How many earlier positions hold the same token.
    copies = torch.empty_like(place)
    copies[order] = place - torch.searchsorted(tokens[order], tokens[order])
    counts = torch.stack([place > 0, copies, copies, place > 0], dim=-1).double()
    return (counts / (place[:, None] + 1)).sum(0) / (counts > 0).sum(0)


def is_gated(module: nn.Module) -> TypeGuard[SSD]:
    """Whether what an entry moves depends on the gate at its target position."""
    return isinstance(module, SSD) and module.z_proj is not None


def measure_moves(mixer: BlockMixer, row: int, rng: np.random.Generator) -> Weigh:
    """Return how much an entry M_ij = 1 moves in the residual stream: ‖W_O (g_i ⊙ v_j)‖, per head.

    W_O is what `project` does to the head's mixed values. Without a gate, g = 1, and the norm
    depends on the source alone; it is NaN where project is not linear in the mixed values.

    Raises:
        RunError: when a mixer that is not the lab's own raises.
    """
    module, x = mixer.module, mixer.x[row : row + 1]
    assert isinstance(module, MatrixMixer)
    if is_gated(module):
        return _measure_gated_moves(module, x, rng)
    try:
        by_source = _measure_heads(module, x).float()
    # A user's mixer may raise anything.
    except Exception as error:
        raise RunError(f"{mixer.kind}.project raised {type(error).__name__}: {error}") from error

    def weigh(targets: Int[Tensor, " t"]) -> tuple[Tensor, Tensor]:
        every = torch.arange(len(targets), device=targets.device)
        return every, by_source[:, None].expand(-1, len(targets), -1)

    return weigh


def _measure_heads(module: MatrixMixer, x: Float[Tensor, "1 t d"]) -> Float[Tensor, "h s"]:
    """Return ‖W_O v_j‖ of each head; NaN for a project that is not linear and position-wise.

    Two tests decide: the heads' parts must add up to the output, and the values times −2, shifted
    by one position, must give the output times −2, shifted by one position.
    """
    values = module.values(x)
    nothing = module.project(x, torch.zeros_like(values))
    whole = module.project(x, values) - nothing
    summed, norms = torch.zeros_like(whole), []
    for head in range(values.shape[1]):
        alone = torch.zeros_like(values)
        alone[:, head] = values[:, head]
        part = module.project(x, alone) - nothing
        summed = summed + part
        norms.append(part[0].norm(dim=-1))
    further = module.project(x, -2 * values.roll(1, dims=2)) - nothing
    off = torch.stack([summed - whole, further / 2 + whole.roll(1, dims=1)]).abs().max()
    linear = off <= LINEAR * whole.abs().max()
    return torch.stack(norms) * (1 if linear else torch.nan)


def _measure_gated_moves(module: SSD, x: Float[Tensor, "1 t d"], rng: np.random.Generator) -> Weigh:
    """Return the same for an SSD layer, whose gate g_i = silu(W_z x_i) belongs to the target.

    A gated norm's scale at i is held fixed at its value with all heads and sources present, as is
    usual in attribution; so the parts M_ij W_O (g_i ⊙ v_j) add up to the layer's output.
    """
    assert module.z_proj is not None
    values = module.values(x)[0]
    n_heads, seq_len, width = values.shape
    gate = F.silu(module.z_proj(x)[0].to(values.dtype))
    if module.norm_weight is not None:
        mixed = run_with_cache(module, x, "hook_ssm_out")[1]["hook_ssm_out"][0].flatten(-2)
        parts = (mixed * gate).unflatten(-1, (module.n_groups, -1))
        scale = (parts.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt()
        gate = gate * scale.expand_as(parts).flatten(-2) * module.norm_weight
    gate = gate.unflatten(-1, (n_heads, width)).transpose(0, 1)
    weight = module.out_proj.weight.to(values.dtype)
    maps = weight.unflatten(-1, (n_heads, width)).transpose(0, 1)
    drawn = rng.choice(seq_len, size=min(seq_len, GATED_TARGETS), replace=False)
    weighted = torch.from_numpy(drawn).to(x.device)
    part = max(1, BLOCK_ENTRIES // (n_heads * len(weight) * seq_len))

    def weigh(targets: Int[Tensor, " t"]) -> tuple[Tensor, Tensor]:
        chosen = torch.isin(targets, weighted).nonzero()[:, 0]
        norms = [
            (maps[:, None] * gate[:, at, None] @ values[:, None].mT).norm(dim=2)
            for at in targets[chosen].split(part)
        ]
        return chosen, torch.cat(norms, dim=1).float()

    return weigh
