"""What one head's matrix looks at: which tokens, how many, how far away, and what it moves."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from analysis.mixing import BLOCK_ENTRIES, Mixer
from lab.files import RunError
from lab.hooks import run_with_cache
from lab.laws import MatrixMixer
from lab.layers.ssd import NORM_EPS, SSD

PATTERNS = ("previous token", "duplicate token", "induction", "first token")
"""Where a head may look from position i: i − 1; earlier positions of the same token; those after
them; position 0, from the others."""
GATED_TARGETS = 128
"""Rows of a gated mixer's matrix whose entries are weighted by what they move: the gate is the
target's, so that every entry has a norm of its own."""

LINEAR = 1e-3
"""How far a map may be off what is linear, as a share of its largest output: fp32 is well below."""


@dataclass(frozen=True)
class Looked:
    """One row of the batch through one mixer's matrix M: sums over its entries, per head.

    Attributes:
        mass: Σ|M|.
        on_patterns: ⟨|M|, P⟩ of each of `PATTERNS`.
        with_patterns: Σ|M| over the rows of M in which the pattern has a position.
        moved_on_patterns: `on_patterns` of entries weighted by the norm of what they move; NaN
            where project is not linear.
        moved_with_patterns: likewise.
        entropy: of |M| normalised, nats; mean over rows of M that have any mass.
        effective_keys: mean of e^H.
        distance: Σ|M|(i − j) / Σ|M|, tokens.
    """

    mass: Float[Tensor, " h"]
    on_patterns: Float[Tensor, "h p"]
    with_patterns: Float[Tensor, "h p"]
    moved_on_patterns: Float[Tensor, "h p"]
    moved_with_patterns: Float[Tensor, "h p"]
    entropy: Float[Tensor, " h"]
    effective_keys: Float[Tensor, " h"]
    distance: Float[Tensor, " h"]


def looked(mixer: Mixer, row: int, tokens: Int[Tensor, " s"], rng: np.random.Generator) -> Looked:
    """Measure a mixer's matrix on one row of the batch, by row blocks.

    Raises:
        RunError: when a mixer that is not the lab's own raises.
    """
    moves = Moves.of(mixer, row, rng)
    total: dict[str, Tensor] = {}
    filled = torch.zeros(())

    def add(name: str, part: Tensor) -> None:
        total[name] = total[name] + part if name in total else part

    for rows, matrix in mixer.blocks(row):
        size = matrix.abs()
        targets = torch.arange(rows.start, rows.stop, device=size.device)
        mass = size.sum(-1)
        entropy = row_entropy(size, mass)
        add("mass", mass.sum(-1))
        add("entropy", entropy.sum(-1))
        add("effective_keys", torch.where(mass > 0, entropy.exp(), 0.0).sum(-1))
        filled = filled + (mass > 0).sum(-1)
        back = targets * mass - size @ torch.arange(size.shape[-1], device=size.device).float()
        add("distance", back.sum(-1))
        on, within = pattern_mass(size, tokens, targets)
        add("on_patterns", on)
        add("with_patterns", within)
        chosen, norms = moves.norms(targets)
        on, within = pattern_mass(size[:, chosen] * norms, tokens, targets[chosen])
        add("moved_on_patterns", on)
        add("moved_with_patterns", within)
    for name in ("entropy", "effective_keys"):
        total[name] = total[name] / filled
    total["distance"] = total["distance"] / total["mass"]
    return Looked(**total)


def row_entropy(size: Float[Tensor, "h t s"], mass: Float[Tensor, "h t"]) -> Float[Tensor, "h t"]:
    """Return H = −Σ p ln p of p = |M| / Σ|M|, nats, from |M| and its row sums; 0 for a row of 0."""
    least = torch.finfo(size.dtype).tiny
    spread = torch.special.entr(size).sum(-1) / mass.clamp(min=least)
    # Rounding may take the entropy of a single entry below 0.
    return torch.where(mass > 0, spread + mass.clamp(min=least).log(), 0.0).clamp(min=0)


def pattern_mass(
    size: Float[Tensor, "h t s"], tokens: Int[Tensor, " s"], targets: Int[Tensor, " t"]
) -> tuple[Float[Tensor, "h p"], Float[Tensor, "h p"]]:
    """Return ⟨|M|, P⟩ of each of `PATTERNS`, and Σ|M| over rows in which P has a position.

    Args:
        size: |M|, or some of its rows.
        tokens: of the whole row of the batch.
        targets: the rows' positions.

    Source: TransformerLens's `head_detector`, error measure "mul", but for the first token.
    """
    earlier = torch.arange(tokens.shape[0], device=tokens.device) < targets[:, None]
    same = ((tokens[targets, None] == tokens) & earlier).to(size.dtype)
    later = targets > 0
    place = torch.arange(len(targets), device=targets.device)
    on = [
        size[:, place, (targets - 1).clamp(min=0)] * later,
        torch.einsum("hts,ts->ht", size, same),
        # The position after an earlier occurrence: the last may be the target's own.
        torch.einsum("hts,ts->ht", size[..., 1:], same[:, :-1]),
        size[..., 0] * later,
    ]
    repeated = same.any(-1)
    where = torch.stack([later, repeated, repeated, later], dim=-1).to(size.dtype)
    return torch.stack(on, -1).sum(1), size.sum(-1) @ where


def uniform_share(tokens: Int[Tensor, " s"]) -> tuple[Float[Tensor, " p"], Float[Tensor, " p"]]:
    """Return what a uniform causal matrix has: ⟨U, P⟩ / ΣU, and over rows in which P has any.

    NaN where no row has a position of the pattern.
    """
    place = torch.arange(len(tokens), device=tokens.device)
    earlier = (place < place[:, None]) & (tokens[:, None] == tokens)
    counts = torch.stack([place > 0, earlier.sum(-1), earlier.sum(-1), place > 0], dim=-1).double()
    share = (counts / (place[:, None] + 1)).sum(0)
    return share / len(tokens), share / (counts > 0).sum(0)


def gated(module: nn.Module) -> TypeGuard[SSD]:
    """Whether what an entry moves depends on the target's gate."""
    return isinstance(module, SSD) and module.z_proj is not None


@dataclass(frozen=True)
class Moves:
    """How much an entry M_ij = 1 moves in the residual stream: ‖W_O (g_i ⊙ v_j)‖, head by head.

    W_O is what `project` does to the head's mixed values. Without a gate, g = 1, it depends on
    the source alone. The gate of an SSD layer, silu(W_z x_i), is the target's; of a gated norm
    the scale at i is kept as it is with all heads and sources there, as is usual in attributing
    an output to its parts: so the parts M_ij W_O (g_i ⊙ v_j) add up to the layer's output.

    Attributes:
        by_source: the norms without a gate; NaN where project is not linear in what is mixed.
        maps: W_O's head by head, [h d p], where there is a gate.
        gate: g, [h t p].
        values: v, [h s p].
        targets: the positions i whose entries are weighted; all of them where there is no gate.
    """

    by_source: Float[Tensor, "h s"] | None
    maps: Float[Tensor, "h d p"] | None = None
    gate: Float[Tensor, "h t p"] | None = None
    values: Float[Tensor, "h s p"] | None = None
    targets: Int[Tensor, " n"] | None = None

    @classmethod
    def of(cls, mixer: Mixer, row: int, rng: np.random.Generator) -> "Moves":
        """Return what the entries of one row's matrix move.

        Raises:
            RunError: when a mixer that is not the lab's own raises.
        """
        module, x = mixer.module, mixer.x[row : row + 1]
        assert isinstance(module, MatrixMixer)
        if gated(module):
            return cls._gated(module, x, rng)
        try:
            parts = list(_apart(module, x))
        # A user's mixer may raise anything.
        except Exception as error:
            raise RunError(
                f"{mixer.kind}.project raised {type(error).__name__}: {error}"
            ) from error
        return cls(torch.stack(parts).float())

    @classmethod
    def _gated(cls, module: SSD, x: Float[Tensor, "1 t d"], rng: np.random.Generator) -> "Moves":
        assert module.z_proj is not None
        values = module.values(x)[0]
        n_heads, seq_len, width = values.shape
        gate = F.silu(module.z_proj(x)[0].to(values.dtype))
        if module.norm_weight is not None:
            mixed = run_with_cache(module, x, "hook_ssm_out")[1]["hook_ssm_out"][0].flatten(-2)
            parts = (mixed * gate).unflatten(-1, (module.n_groups, -1))
            scale = (parts.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt()
            gate = gate * scale.expand_as(parts).flatten(-2) * module.norm_weight
        chosen = rng.choice(seq_len, size=min(seq_len, GATED_TARGETS), replace=False)
        weight = module.out_proj.weight.to(values.dtype)
        return cls(
            None,
            maps=weight.unflatten(-1, (n_heads, width)).transpose(0, 1),
            gate=gate.unflatten(-1, (n_heads, width)).transpose(0, 1),
            values=values,
            targets=torch.from_numpy(chosen).sort().values.to(x.device),
        )

    def norms(self, targets: Int[Tensor, " t"]) -> tuple[Int[Tensor, " n"], Float[Tensor, "h n s"]]:
        """Return which of some targets' entries are weighted, and by what."""
        every = torch.arange(len(targets), device=targets.device)
        if self.by_source is not None:
            return every, self.by_source[:, None].expand(-1, len(targets), -1)
        assert self.maps is not None
        assert self.gate is not None
        assert self.values is not None
        assert self.targets is not None
        chosen = every[torch.isin(targets, self.targets)]
        n_heads, d_model, _ = self.maps.shape
        part = max(1, BLOCK_ENTRIES // (n_heads * d_model * self.values.shape[1]))
        norms = [
            (self.maps[:, None] * self.gate[:, at, None] @ self.values[:, None].mT).norm(dim=2)
            for at in targets[chosen].split(part)
        ]
        return chosen, torch.cat(norms, dim=1).float()


def _apart(module: MatrixMixer, x: Float[Tensor, "1 t d"]) -> Iterator[Float[Tensor, " s"]]:
    """Yield ‖W_O v_j‖ head by head; NaN for a project that is not linear and position-wise.

    Told by trial: the heads' parts must add up, and a multiple of the values, one position
    further, must give that multiple of the output, one position further.
    """
    values = module.values(x)
    nothing = module.project(x, torch.zeros_like(values))
    whole = module.project(x, values) - nothing
    summed, parts = torch.zeros_like(whole), []
    for head in range(values.shape[1]):
        alone = torch.zeros_like(values)
        alone[:, head] = values[:, head]
        part = module.project(x, alone) - nothing
        summed = summed + part
        parts.append(part[0].norm(dim=-1))
    further = module.project(x, -2 * values.roll(1, dims=2)) - nothing
    off = torch.stack([summed - whole, further / 2 + whole.roll(1, dims=1)]).abs().max()
    linear = off <= LINEAR * whole.abs().max()
    yield from parts if linear else (part * torch.nan for part in parts)
