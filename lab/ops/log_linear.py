"""Linear attention over levels: the farther back a token is, the coarser the group it is read in.

    y_t = Σ_{s≤t} λ_t^{(ℓ)} exp(Σ_{s<r≤t} g_r) (q_t·k_s) v_s,   ℓ = bits of (t xor s)

The tokens before t fall into groups of sizes that are powers of two, one for each bit that t has: a
Fenwick tree. Level 0 is the token itself, level ℓ the group of 2^{ℓ−1} tokens; λ has a scale for
each, and the last one for all groups beyond. So a state for each level is enough, log₂ t of them.

Source: Guo et al. 2025 (2506.04761), § 3.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lab.ops.precision import keep_dtypes, promote
from lab.ops.ssd_decay import FORGOTTEN, decay_matrix


@keep_dtypes
def log_linear(
    q: Float[Tensor, "b t h n"],
    k: Float[Tensor, "b t h n"],
    v: Float[Tensor, "b t h p"],
    log_decay: Float[Tensor, "b t h"],
    scales: Float[Tensor, "b t h l"],
) -> Float[Tensor, "b t h p"]:
    """Return the outputs, level by level: t log t.

    In a pair of neighbouring groups of 2^{ℓ−1} tokens, the second one reads the first at level ℓ.

    Args:
        q: what tokens read.
        k: where they write.
        v: what they write.
        log_decay: g ≤ 0.
        scales: λ, of at least two levels.
    """
    t, n = q.shape[1], q.shape[-1]
    missing = (1 << (t - 1).bit_length()) - t
    high = promote(q)
    q, k, values, scales, log_decay = (
        F.pad(z.to(high).transpose(1, 2), (0, 0, 0, missing))
        for z in (q, k, v, scales, log_decay[..., None])
    )
    sums = log_decay.double().clamp(min=FORGOTTEN).cumsum(2)
    y = (q * k).sum(-1, keepdim=True) * scales[..., :1] * values
    half, level = 1, 1
    while half < t:
        at = min(level, scales.shape[-1] - 1)
        sooner, later = (
            [z.unflatten(2, (-1, 2, half))[:, :, :, part] for z in (q, k, values, sums)]
            for part in (0, 1)
        )
        end = sooner[3][..., -1:, :]
        scale = scales[..., at : at + 1].unflatten(2, (-1, 2, half))[:, :, :, 1]
        read = later[0] * scale * (later[3] - end).to(high).exp()
        written = sooner[1] * (end - sooner[3]).to(high).exp()
        few = half <= n  # the order of the products that is cheaper
        added = read @ written.mT @ sooner[2] if few else read @ (written.mT @ sooner[2])
        y = y + F.pad(added, (0, 0, half, 0)).flatten(2, 3)
        half, level = 2 * half, level + 1
    return y[:, :, :t].transpose(1, 2).to(v.dtype)


@keep_dtypes
def log_linear_matrix(
    q: Float[Tensor, "b t h n"],
    k: Float[Tensor, "b t h n"],
    log_decay: Float[Tensor, "b t h"],
    scales: Float[Tensor, "b t h l"],
) -> Float[Tensor, "b h t s"]:
    """Return the matrix M with y = M v: the definition; quadratic."""
    high, t = promote(q), torch.arange(q.shape[1], device=q.device)
    levels = find_level(t[:, None], t, scales.shape[-1])
    scale = scales.to(high).transpose(1, 2).take_along_dim(levels[None, None], -1)
    products = torch.einsum("bthn,bshn->bhts", q.to(high), k.to(high))
    return products * decay_matrix(log_decay.to(high).mT) * scale


@keep_dtypes
def collect_levels(
    k: Float[Tensor, "b t h n"],
    v: Float[Tensor, "b t h p"],
    log_decay: Float[Tensor, "b t h"],
    n_levels: int,
    length: Int[Tensor, " b"],
) -> Float[Tensor, "b l h n p"]:
    """Return the state of each level but 0 after rows of some lengths; what follows is padding."""
    high = promote(k)
    sums = log_decay.double().clamp(min=FORGOTTEN).cumsum(1)
    left = (sums[:, -1:] - sums).to(high).exp()
    at = torch.arange(k.shape[1], device=k.device)
    levels = find_level(at, length[:, None], n_levels)
    among = levels[..., None] == torch.arange(1, n_levels, device=k.device)
    return torch.einsum("btl,bthn,bthp->blhnp", among.to(high), k * left[..., None], v.to(high))


@keep_dtypes
def log_linear_step(
    k: Float[Tensor, "b h n"],
    v: Float[Tensor, "b h p"],
    log_decay: Float[Tensor, "b h"],
    scales: Float[Tensor, "b h l"],
    levels: Float[Tensor, "b l_1 h n p"],
    at: Int[Tensor, " b"],
) -> tuple[Float[Tensor, "b h n p"], Float[Tensor, "b l_1 h n p"]]:
    """Return the state that one token reads, and those of each level after it.

    Args:
        k: where it writes.
        v: what it writes.
        log_decay: g ≤ 0.
        scales: λ.
        levels: the states of each level but 0.
        at: how many tokens came before.
    """
    levels = levels * log_decay.to(levels).exp()[:, None, :, None, None]
    own = k.to(levels)[..., None] * v.to(levels)[..., None, :]
    joint = torch.cat([own[:, None], levels], 1)
    read = torch.einsum("bhl,blhnp->bhnp", scales.to(levels), joint)
    target = find_level(at, at + 1, joint.shape[1])[:, None]
    number = torch.arange(joint.shape[1], device=k.device)
    merged = (joint * _spread(number <= target, joint)).sum(1, keepdim=True)
    after = torch.where(_spread(number == target, joint) > 0, merged, joint)
    return read, (after * _spread(number >= target, joint))[:, 1:]


def find_level(t: Int[Tensor, "..."], s: Int[Tensor, "..."], n_levels: int) -> Int[Tensor, "..."]:
    """Return the level at which token t reads token s."""
    return (t ^ s).double().frexp().exponent.long().clamp(max=n_levels - 1)


def _spread(mask, like):
    return mask.to(like)[..., None, None, None]
