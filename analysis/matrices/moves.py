"""How much one entry of a head's matrix moves in the residual stream."""

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

GATED_TARGETS = 128
"""Rows of a gated mixer's matrix whose entries are weighted by what they move: the gate belongs to
the target, so that every entry has a norm of its own."""
LINEAR = 1e-3
"""How far off a linear map may be, as a share of its largest output: fp32 is well below."""


def is_gated(module: nn.Module) -> TypeGuard[SSD]:
    """Whether what an entry moves depends on the gate at its target position."""
    return isinstance(module, SSD) and module.z_proj is not None


@dataclass(frozen=True)
class Moves:
    """How much an entry M_ij = 1 moves in the residual stream: ‖W_O (g_i ⊙ v_j)‖, per head.

    W_O is what `project` does to the head's mixed values. Without a gate, g = 1, and the norm
    depends on the source alone. The gate of an SSD layer, silu(W_z x_i), belongs to the target. A
    gated norm's scale at i is held fixed at its value with all heads and sources present, as is
    usual in attribution; so the parts M_ij W_O (g_i ⊙ v_j) add up to the layer's output.

    Attributes:
        by_source: the norms without a gate; NaN where project is not linear in the mixed values.
        maps: W_O of each head, [h d p], where there is a gate.
        gate: g, [h t p].
        values: v, [h s p].
        targets: the positions i whose entries are weighted; None (all) where there is no gate.
    """

    by_source: Float[Tensor, "h s"] | None
    maps: Float[Tensor, "h d p"] | None = None
    gate: Float[Tensor, "h t p"] | None = None
    values: Float[Tensor, "h s p"] | None = None
    targets: Int[Tensor, " n"] | None = None

    @classmethod
    def of(cls, mixer: Mixer, row: int, rng: np.random.Generator) -> "Moves":
        """Return what the entries of the matrix move on one row of the batch.

        Raises:
            RunError: when a mixer that is not the lab's own raises.
        """
        module, x = mixer.module, mixer.x[row : row + 1]
        assert isinstance(module, MatrixMixer)
        if is_gated(module):
            return cls._build_gated(module, x, rng)
        try:
            parts = list(_split_heads(module, x))
        # A user's mixer may raise anything.
        except Exception as error:
            raise RunError(
                f"{mixer.kind}.project raised {type(error).__name__}: {error}"
            ) from error
        return cls(torch.stack(parts).float())

    @classmethod
    def _build_gated(
        cls, module: SSD, x: Float[Tensor, "1 t d"], rng: np.random.Generator
    ) -> "Moves":
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

    def compute_norms(
        self, targets: Int[Tensor, " t"]
    ) -> tuple[Int[Tensor, " n"], Float[Tensor, "h n s"]]:
        """Return which of the targets have weighted entries, as indices, and the weights."""
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


def _split_heads(module: MatrixMixer, x: Float[Tensor, "1 t d"]) -> Iterator[Float[Tensor, " s"]]:
    """Yield ‖W_O v_j‖ head by head; NaN for a project that is not linear and position-wise.

    Two tests decide: the heads' parts must add up to the output, and the values times −2, shifted
    by one position, must give the output times −2, shifted by one position.
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
