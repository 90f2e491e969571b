"""R: the rotation of queries and keys, or of C and B."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lab.errata.erratum import MINIATURE, Erratum, catch_refusal
from lab.errata.probes import build_seeded, draw_normal, measure_gap
from lab.layers.printed.attention import PlainAttention
from lab.layers.printed.rotation import (
    DynamicBaseAttention,
    HeadRotatedAttention,
    dynamic_base,
    rotate_skewed,
)
from lab.ops.rope import apply_rotary, rotary_table, rotate, rotate_by_matrix

ROTARY = "lab.ops.rope.rotate; position='rope' of A, S and I"


def _build_matrices(
    turn: Callable[[Tensor, Tensor], Tensor], positions: Int[Tensor, " t"], n: int
) -> Float[Tensor, "t n n"]:
    """Return R_j of a rotation x [1 t n n] → R_j x, by turning the basis."""
    basis = torch.eye(n, dtype=torch.float64).expand(1, len(positions), n, n)
    return turn(basis, positions)[0].mT


def r1() -> Erratum:
    """The printed matrix is no rotation: its last block has two angles."""
    n, positions = 8, torch.arange(2048)
    q, k = draw_normal(n), draw_normal(n, seed=1)
    stretched, moved = [], []
    for turn in (
        rotate_skewed,
        lambda x, positions: rotate(x, positions, layout="interleaved"),
    ):
        R = _build_matrices(turn, positions, n)
        stretched.append((R.mT @ R - torch.eye(n)).abs().max().item())
        scores = (R[5:] @ q * (R[:-5] @ k)).sum(-1)
        moved.append(((scores - scores[0]).abs().max() / (q.norm() * k.norm())).item())
    words = "RᵀR is off the identity by {:.1e}, and a score at distance 5 moves by {:.1e} of |q||k|"
    words += ", n = 8, positions to 2047"
    return Erratum(
        row="R1",
        where="eq. rope_cb and the end of its proof: the matrix R",
        printed="the last 2 × 2 block has θ_{d/2} in one column and θ_{d/2−1} in the other",
        meant="one angle a block, θ_m = base^(−2m/d), m = 0 … d/2 − 1",
        printed_evidence=words.format(stretched[0], moved[0]),
        meant_evidence=words.format(stretched[1], moved[1]),
        printed_option="--model lab.layers.printed:SkewedRotationAttention",
        meant_option=ROTARY,
        fails=stretched[0] > 0.1 and moved[0] > 0.1,
        holds=stretched[1] < 1e-12 and moved[1] < 1e-12,
        note="the Θ next to it counts i = 1 … d/2, so the matrix's first angle θ_0 is not in Θ, "
        "and Θ's θ_i is the matrix's θ_{i−1}",
    )


def r2() -> Erratum:
    """The last matrix of the proof turns the wrong way."""
    (c, b), (j, i) = draw_normal(2, 2), (7, 3)
    # Width 2 has the one frequency θ = 1.
    angle = torch.tensor([j, i, j - i], dtype=torch.float64)
    (cos_j, cos_i, cos), (sin_j, sin_i, sin) = angle.cos(), angle.sin()

    def matrix(*entries: Tensor) -> Tensor:
        return torch.stack(entries).view(2, 2)

    R_j, R_i = matrix(cos_j, -sin_j, sin_j, cos_j), matrix(cos_i, -sin_i, sin_i, cos_i)
    right = (R_j @ c) @ (R_i @ b)
    printed = c @ matrix(cos, -sin, sin, cos) @ b
    meant = c @ matrix(cos, sin, -sin, cos) @ b
    expanded = c @ (R_j.T @ R_i) @ b
    as_complex = (torch.complex(*c) * torch.complex(*b).conj() * torch.complex(cos, sin)).real
    c_j, b_i = (rotate(z.view(1, 1, 1, 2), torch.tensor([m])) for z, m in ((c, j), (b, i)))
    ours = (c_j * b_i).sum()
    errors = [(y - right).abs().item() for y in (printed, meant, expanded, as_complex, ours)]
    return Erratum(
        row="R2",
        where="the end of the proof of eq. rope_cb, d = 2",
        printed="⟨f(c, j), f(b, i)⟩ = cᵀ [[cos δ, −sin δ], [sin δ, cos δ]] b, δ = (j − i)θ",
        meant="cᵀ [[cos δ, sin δ], [−sin δ, cos δ]] b",
        printed_evidence=f"off by {errors[0]:.1e} at j, i, θ = 7, 3, 1",
        meant_evidence=f"off by {errors[1]:.1e}; the product before it by {errors[2]:.1e}, "
        f"g in complex numbers by {errors[3]:.1e}, the lab's rotation by {errors[4]:.1e}",
        printed_option=None,
        meant_option=ROTARY,
        fails=errors[0] > 0.1,
        holds=max(errors[1:]) < 1e-14,
        note="the sign is lost between the product, which is right, and its last line",
    )


def r3() -> Erratum:
    """The matrix pairs neighbours, the listing halves: one permutation of channels apart."""
    x, positions, n = draw_normal(1, 32, 1, 8), torch.arange(32), 8
    neighbours, halves = (rotate(x, positions, layout=y) for y in ("interleaved", "half"))
    order = torch.arange(n).view(n // 2, 2).T.flatten()
    permuted = rotate(x[..., order], positions, layout="half")
    q, k = (draw_normal(n, seed=seed).expand(1, 32, 1, n) for seed in (1, 2))
    scores = (rotate(q, positions + 5, layout="interleaved") * rotate(k, positions)).sum(-1)
    mixed = ((scores - scores[:, :1]).abs().max() / (q[0, 0].norm() * k[0, 0].norm())).item()
    apart, same = measure_gap(neighbours, halves), measure_gap(permuted, neighbours[..., order])
    return Erratum(
        row="R3",
        where="eq. rope_cb against lst:rope",
        printed="the matrix pairs channels 2m and 2m + 1, the listing m and m + d/2",
        meant="two layouts, equal after a permutation of channels",
        printed_evidence=f"the two differ by {apart:.1e} of the largest entry; q by one and k by "
        f"the other, a score at distance 5 moves by {mixed:.1e} of |q||k|",
        meant_evidence=f"with the channels permuted they differ by {same:.1e}",
        printed_option="--option A.rope_layout=interleaved (also S and I)",
        meant_option="--option A.rope_layout=half (also S and I), the default",
        fails=apart > 0.1 and mixed > 0.1,
        holds=same < 1e-14,
        note="each layout is right by itself; q in one and k in the other is not relative",
    )


def r4() -> Erratum:
    """The rotary listing does not start."""

    class Plain:
        """As printed: no base class."""

        def __init__(self):
            self.register_buffer("inv_freq", torch.ones(1))  # type: ignore[attr-defined]

    positions = torch.arange(6)
    refusals = [
        catch_refusal(AttributeError, Plain),
        catch_refusal(RuntimeError, lambda: torch.ones(1, 4, 1) @ positions[None, None]),
        catch_refusal(ZeroDivisionError, lambda: dynamic_base(10000.0, 6, n=2, max_position=5)),
    ]
    narrow, far = draw_normal(1, 6, 1, 2), positions + 2**24 - 6
    error = measure_gap(rotate(narrow.float(), far), rotate_by_matrix(narrow, far))
    return Erratum(
        row="R4",
        where="lst:rope",
        printed="a class of no base that registers a buffer; frequencies @ position_ids; an "
        "exponent dim/(dim − 2)",
        meant="positions turned into fp32; any even width; a base that stays",
        printed_evidence=f"without a base class {refusals[0]}; fp32 @ int64 {refusals[1]}; "
        f"dim = 2, 6 positions where 5 are foreseen: {refusals[2]}",
        meant_evidence="width 2, int64 positions up to 2^24 − 1, fp32: "
        f"off the fp64 matrix by {error:.1e}",
        printed_option=None,
        meant_option=ROTARY,
        fails=all(refusals),
        # The one pair of width 2 has θ = 1, so nothing rounds but the result.
        holds=error < 2**-22,
        note=f"{MINIATURE}. The division, which only sequences longer than "
        "max_position_embeddings reach, is that of a printed layer",
    )


def r5() -> Erratum:
    """The angles get their new axis where the heads do not stand."""
    t, p = 6, 8
    cos = torch.cat(2 * [rotary_table(torch.arange(t), p, dtype=torch.float64)[0]], -1)
    cos = cos.expand(2, t, p).unsqueeze(2)
    one = torch.ones(2, 1, t, p).double() * cos
    other = catch_refusal(RuntimeError, lambda: torch.ones(2, 4, t, p) * cos)
    joined = one.transpose(1, 2).flatten(2)
    refused = catch_refusal(RuntimeError, lambda: joined @ torch.ones(p, p).double())
    layer = build_seeded(lambda: HeadRotatedAttention(t * p, t))
    x = draw_normal(2, t, t * p)
    order = torch.tensor([3, 0, 4, 2, 1, 5])
    blind = measure_gap(layer(x[:, order])[:, -1], layer(x)[:, -1])
    rotated = build_seeded(lambda: PlainAttention(t * p, t))
    rotated.load_state_dict(layer.state_dict())
    seeing = measure_gap(rotated(x[:, order])[:, -1], rotated(x)[:, -1])
    y, positions = draw_normal(2, t, t, p), torch.arange(t)
    alone = measure_gap(rotate(y, positions)[:, :, :1], rotate(y[:, :, :1], positions))
    return Erratum(
        row="R5",
        where="lst:rope as lst:innerfuncattn calls it",
        printed="unsqueeze_dim = 2 for q and k laid out b h t p",
        meant="the axis of the heads decides: 2 for b t h p, 1 for b h t p",
        printed_evidence=f"one head: {list(one.shape)}, [b t t p], which the output map refuses: "
        f"{refused}; 4 heads of 6 tokens: {other}; "
        f"6 heads: reordering the past moves the last output by {blind:.1e}: no positions at all",
        meant_evidence=f"reordering moves it by {seeing:.1e}; a head alone and beside others "
        f"differ by {alone:.1e}",
        printed_option="--model lab.layers.printed:HeadRotatedAttention, n_heads = seq_len",
        meant_option=ROTARY,
        fails=tuple(one.shape) == (2, t, t, p)
        and refused is not None
        and other is not None
        and blind < 1e-12,
        holds=seeing > 1e-3 and alone == 0,
        note="with as many heads as tokens, q and k of a head turn by the same angle, the head's "
        "number, and their product cancels it; C and B of the SSD listing are b t h n: 2 is right",
    )


def r6() -> Erratum:
    """Dynamic NTK changes the past when the sequence grows."""
    x, cut = draw_normal(1, 64, 16), 48
    dynamic = build_seeded(lambda: DynamicBaseAttention(16, max_position=32))
    fixed = build_seeded(lambda: PlainAttention(16))
    moved, kept = (measure_gap(f(x)[:, :cut], f(x[:, :cut])) for f in (dynamic, fixed))
    within = (dynamic.matrix(x) - dynamic.matrix(x, start=9)).abs().max().item()
    # In one call the base is that of the last position; hold it, and positions are relative.
    base = dynamic_base(10000.0, 64, 16, 32)
    q, k = draw_normal(1, 1, 1, 16), draw_normal(1, 1, 1, 16, seed=1)

    def score(j: int, i: int, base_i: float) -> Tensor:
        return (rotate(q, torch.tensor([j]), base) * rotate(k, torch.tensor([i]), base_i)).sum()

    relative = (score(63, 40, base) - score(23, 0, base)).abs().item()
    cached = (score(63, 40, base) - score(63, 40, dynamic_base(10000.0, 41, 16, 32))).abs().item()
    return Erratum(
        row="R6",
        where="lst:rope",
        printed="past max_position_embeddings the base follows the batch's largest position",
        meant="one base; or, with dynamic NTK, a cache of keys not yet turned",
        printed_evidence=f"16 more tokens move the first 48 outputs by {moved:.1e}; a key cached "
        f"at length 41 scores {cached:.1e} off at 64; all positions shifted by 9, the pattern "
        f"moves by {within:.1e}",
        meant_evidence=f"one base: they move by {kept:.1e}; keys turned anew by one call's base "
        f"score by distance, to {relative:.1e}",
        printed_option="--model lab.layers.printed:DynamicBaseAttention",
        meant_option=ROTARY,
        fails=min(moved, cached, within) > 1e-3,
        holds=kept < 1e-12 and relative < 1e-12,
        note="the maximum is over the batch: a row's outputs depend on how long its neighbours are",
    )


def r7() -> Erratum:
    """cos and sin in the input's type."""
    t, n, low = 2048, 64, torch.bfloat16
    positions = torch.arange(t)
    theta = 10000.0 ** -(torch.arange(0, n, 2, dtype=torch.float64) / n)
    angles = positions[:, None] * theta
    rough = positions[:, None].to(low) * theta.to(low)
    radians = (rough.double() - angles).abs().max().item()
    all_low = (rough.cos().double() - angles.cos()).abs().max().item()
    fine = rotary_table(positions, n)[0]
    table = (fine.to(low).double() - angles.cos()).abs().max().item()
    single = (fine.double() - angles.cos()).abs().max().item()
    x = draw_normal(1, t, 1, n).to(low)
    y = apply_rotary(x, *rotary_table(positions, n, dtype=low), "half")
    right = rotate(x.double(), positions)
    printed, meant = (
        measure_gap(y.double(), right),
        measure_gap(rotate(x, positions).double(), right),
    )
    return Erratum(
        row="R7",
        where="lst:rope",
        printed="cos and sin in x's type",
        meant="angles and rotation in fp32 at least; only the result in x's type",
        printed_evidence=f"bf16, T = 2048: cos off by {table:.1e} where the table alone is "
        f"rounded; in a module all bf16 its angles are off by {radians:.1f} radians and cos by "
        f"{all_low:.2f}, turned vectors by {printed:.1e} of the largest entry",
        meant_evidence=f"cos in fp32 off by {single:.1e}, turned vectors by {meant:.1e}, the "
        "rounding of the result",
        printed_option="--model lab.layers.printed:RoundedRotationAttention --precision bf16",
        meant_option=ROTARY,
        fails=table > 1e-3 and all_low > 1.9 and radians > 2 and printed > 0.5,
        holds=single < 1e-4 and meant < 2**-8,
        note="as printed only the table is rounded; positions and frequencies become bf16, and "
        "angles wrong, when the module is cast, as it must be for its product with them to run",
    )
