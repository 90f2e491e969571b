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
    words = "RᵀR is off the identity by {:.1e}. The scores of q and k five positions apart should "
    words += "all be equal; they differ by up to {:.1e} of |q||k| (width 8, positions up to 2047)"
    return Erratum(
        row="R1",
        where="eq. rope_cb and the end of its proof: the matrix R",
        printed="The last 2 × 2 block has θ_{d/2} in one column and θ_{d/2−1} in the other.",
        meant="Each block has one angle, θ_m = base^(−2m/d) with m = 0 … d/2 − 1.",
        printed_evidence=words.format(stretched[0], moved[0]),
        meant_evidence=words.format(stretched[1], moved[1]),
        printed_option="--model lab.layers.printed:SkewedRotationAttention",
        meant_option=ROTARY,
        fails=stretched[0] > 0.1 and moved[0] > 0.1,
        holds=stretched[1] < 1e-12 and moved[1] < 1e-12,
        note="The set Θ beside the matrix counts i = 1 … d/2. So it lacks the matrix's first "
        "angle θ_0, and its θ_i is the matrix's θ_{i−1}.",
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
        printed_evidence=f"at j = 7, i = 3, θ = 1 the two sides differ by {errors[0]:.1e}",
        meant_evidence=f"the two sides differ by {errors[1]:.1e}. Three other forms agree with the "
        f"left side: the product one line earlier (to {errors[2]:.1e}), g in complex numbers (to "
        f"{errors[3]:.1e}) and the lab's rotation (to {errors[4]:.1e})",
        printed_option=None,
        meant_option=ROTARY,
        fails=errors[0] > 0.1,
        holds=max(errors[1:]) < 1e-14,
        note="The product in the line before is right; the sign is lost in the last line.",
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
        printed="The matrix rotates channels 2m and 2m + 1 together, the listing m and m + d/2.",
        meant="Both layouts are right, and equal after a permutation of channels.",
        printed_evidence=f"the two layouts differ by {apart:.1e} of the largest entry. If q is "
        "rotated in one and k in the other, the scores of q and k five positions apart differ by "
        f"up to {mixed:.1e} of |q||k|",
        meant_evidence=f"after the permutation they differ by {same:.1e}",
        printed_option="--option A.rope_layout=interleaved (also S and I)",
        meant_option="--option A.rope_layout=half (also S and I), the default",
        fails=apart > 0.1 and mixed > 0.1,
        holds=same < 1e-14,
        note="Scores depend only on distance as long as q and k use the same layout.",
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
        printed="The class registers a buffer but has no base class; fp32 frequencies are "
        "multiplied with integer position_ids; an exponent is dim/(dim − 2).",
        meant="Positions are converted to fp32, any even width works, and the base does not "
        "change.",
        printed_evidence=f"a class without a base class raises {refusals[0]}. fp32 @ int64 raises "
        f"{refusals[1]}. dim = 2 with 6 positions where 5 are foreseen raises {refusals[2]}",
        meant_evidence="at width 2 and int64 positions up to 2^24 − 1, the rotation in fp32 is "
        f"off the matrix in fp64 by {error:.1e}",
        printed_option=None,
        meant_option=ROTARY,
        fails=all(refusals),
        # The one pair of width 2 has θ = 1, so nothing rounds but the result.
        holds=error < 2**-22,
        note=f"{MINIATURE} The division by zero comes from the layer as printed, and only for "
        "sequences longer than max_position_embeddings.",
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
        printed="q and k have the axes b h t p, and are called with unsqueeze_dim = 2.",
        meant="unsqueeze_dim is the axis of the heads: 2 for b t h p, 1 for b h t p.",
        printed_evidence=f"one head and 6 tokens give {list(one.shape)}, i.e. [b t t p], on which "
        f"the output map raises {refused}. 4 heads and 6 tokens raise {other}. With 6 heads and "
        f"6 tokens, reordering the past moves the last output by only {blind:.1e}: the layer does "
        "not see positions",
        meant_evidence=f"reordering the past moves the last output by {seeing:.1e}. A head alone "
        f"and the same head among others differ by {alone:.1e}",
        printed_option="--model lab.layers.printed:HeadRotatedAttention, n_heads = seq_len",
        meant_option=ROTARY,
        fails=tuple(one.shape) == (2, t, t, p)
        and refused is not None
        and other is not None
        and blind < 1e-12,
        holds=seeing > 1e-3 and alone == 0,
        note="With as many heads as tokens, q and k of a head rotate by the same angle, which "
        "depends on the head's number and cancels in their product. C and B of the SSD listing "
        "have the axes b t h n, for which 2 is right.",
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
        printed="Beyond max_position_embeddings, the base depends on the batch's largest position.",
        meant="The base is fixed; or, with dynamic NTK, the cache holds keys that are not rotated "
        "yet.",
        printed_evidence=f"16 more tokens move the first 48 outputs by {moved:.1e}. The score of a "
        f"key that was cached at length 41 is off by {cached:.1e} at length 64. Shifting all "
        f"positions by 9 moves the attention pattern by {within:.1e}",
        meant_evidence=f"with a fixed base, 16 more tokens move the first 48 outputs by {kept:.1e}."
        " If all keys are rotated again with the base of the current call, scores depend only on "
        f"distance, to {relative:.1e}",
        printed_option="--model lab.layers.printed:DynamicBaseAttention",
        meant_option=ROTARY,
        fails=min(moved, cached, within) > 1e-3,
        holds=kept < 1e-12 and relative < 1e-12,
        note="The maximum is over the batch, so a row's outputs also depend on how long the other "
        "rows are.",
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
        printed="cos and sin have the type of x.",
        meant="Angles and rotation are computed in fp32 at least; only the result has the type of "
        "x.",
        printed_evidence=f"in bf16 with 2,048 positions, rounding the table alone puts "
        f"cos off by {table:.1e}. If the whole module is cast to bf16, its angles are off by "
        f"{radians:.1f} radians, cos by {all_low:.2f}, and rotated vectors by {printed:.1e} of the "
        "largest entry",
        meant_evidence=f"cos in fp32 is off by {single:.1e}, and rotated vectors in bf16 by "
        f"{meant:.1e}, which is the rounding of the result",
        printed_option="--model lab.layers.printed:RoundedRotationAttention --precision bf16",
        meant_option=ROTARY,
        fails=table > 1e-3 and all_low > 1.9 and radians > 2 and printed > 0.5,
        holds=single < 1e-4 and meant < 2**-8,
        note="As printed, only the table is rounded. But the product of frequencies and positions "
        "runs only after the module is cast, and then both are bf16 and the angles wrong.",
    )
