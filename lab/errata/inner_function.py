"""I: inner function attention."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.errata.erratum import Erratum, catch_refusal
from lab.errata.probes import build_seeded, compute_gradients, draw_normal, measure_gap
from lab.hooks import hooks
from lab.layers.inner_function import InnerFunctionAttention
from lab.layers.printed.attention import SoftSumAttention


def i1() -> Erratum:
    """The retrieval of values has no gradient, and zero keys no choice."""
    x = draw_normal(3, 12, 8)
    printed = build_seeded(lambda: InnerFunctionAttention(8, retrieval="literal", key_init="zeros"))
    retrieval = ("value_query.weight", "value_keys")
    found = compute_gradients(printed, x)
    none = [name for name, grad in found.items() if grad is None]
    v = printed.values(x)[:, 0]
    one_row = min(measure_gap(v, x * row) for row in printed.value_rows)
    alive = {}
    for kind in ("softmax", "sigmoid", "straight-through"):
        layer = build_seeded(lambda kind=kind: InnerFunctionAttention(8, retrieval=kind))
        alive[kind] = min(compute_gradients(layer, x)[name] or 0.0 for name in retrieval)
    return Erratum(
        row="I1",
        where="lst:innerfuncattn, the steps below eq. inner_function_V",
        printed="Only the indices of the top k are used, and keys start at zero.",
        meant="Values are weighted by their scores, or straight-through, and keys start with "
        "different values.",
        printed_evidence=f"there is no gradient (None) for {' and '.join(none)}. All tokens "
        f"choose the same w in V = x ∘ w, to {one_row:.1e}",
        meant_evidence="both have a gradient; the largest entry of each is at least "
        + ", ".join(f"{size:.1e} ({kind})" for kind, size in alive.items()),
        printed_option="--option I.retrieval=literal --option I.key_init=zeros",
        meant_option="--option I.retrieval=softmax, the default, =sigmoid or =straight-through",
        fails=sorted(none) == sorted(retrieval) and one_row < 1e-12,
        holds=min(alive.values()) > 1e-4,
    )


def _count_rows_read(n_heads: int, n_values: int) -> int:
    """Return how many of the printed table's n_heads rows a gradient reaches.

    The layer chooses among n_values keys, as in the listing, and its choices are looked up there.
    """
    layer = build_seeded(lambda: InnerFunctionAttention(2 * n_heads, n_heads, n_values=n_values))
    indices: list[Tensor] = []
    with hooks(layer, [("hook_value_indices", lambda chosen, _: indices.append(chosen))]):
        layer(draw_normal(8, 64, 2 * n_heads))
    table = draw_normal(n_heads, 2 * n_heads, seed=1).requires_grad_()
    rows = F.embedding(indices[0], table)
    (grad,) = torch.autograd.grad(rows, table, draw_normal(*rows.shape, seed=2))
    return int(grad.any(-1).sum())


def i2() -> Erratum:
    """A table of values with a row for each head."""
    n_heads, n_values = 1, 2
    index = torch.tensor([n_values - 1])
    past = catch_refusal(IndexError, lambda: F.embedding(index, torch.zeros(n_heads, 8)))
    large = {heads: _count_rows_read(heads, values) for heads, values in ((12, 6), (32, 16))}
    unread = {heads: heads - read for heads, read in large.items()}
    layer = build_seeded(lambda: InnerFunctionAttention(8, n_heads, n_values=n_values))
    rows = layer.value_rows.shape[0]
    x = draw_normal(4, 32, 8)
    grad = torch.autograd.grad(layer(x), layer.value_rows, draw_normal(4, 32, 8, seed=1))[0]
    reached = int(grad.any(-1).sum())
    return Erratum(
        row="I2",
        where="lst:innerfuncattn",
        printed="Embedding(n_heads, d_model)",
        meant="Embedding(n_v, d_model)",
        printed_evidence=f"with 1 head and n_v = 2, looking up value 1 raises {past}. With 12 and "
        f"32 heads (n_v = 6 and 16), {unread[12]} and {unread[32]} are never read: of the table's "
        f"rows, a gradient reaches {large[12]} and {large[32]}",
        meant_evidence=f"for n_v = {n_values} there are {rows} rows, and {reached} of them have a "
        "gradient",
        printed_option=None,
        meant_option="--option I.n_values=…",
        fails=past is not None and large == {12: 6, 32: 16},
        holds=rows == n_values == reached,
        note="I1 can hide this: with keys of zero all scores tie, the same row is always chosen, "
        "and the error may not appear.",
    )


def i3() -> Erratum:
    """An equation whose shapes do not meet, and which has no top k."""
    b, t, d, n_v, d_retrieval = 1, 6, 8, 3, 4
    x, W_q = draw_normal(b, t, d), draw_normal(d, d_retrieval, seed=1)
    keys, W_V = draw_normal(n_v, d_retrieval, seed=2), draw_normal(n_v, d, seed=3)
    scores = x @ W_q @ keys.T
    shapes = catch_refusal(RuntimeError, lambda: scores @ W_V.T)
    soft = x * (scores @ W_V)
    hard = x * W_V[scores.argmax(-1)]
    apart = measure_gap(soft, hard)
    layers = (
        build_seeded(lambda: SoftSumAttention(d, n_values=n_v)),
        build_seeded(
            lambda: InnerFunctionAttention(d, n_values=n_v, k=1, retrieval="straight-through")
        ),
    )
    # Twice the input doubles a choice's values and quadruples a quadratic form's.
    powers = [(f.values(2 * x).norm() / f.values(x).norm()).log2().item() for f in layers]
    return Erratum(
        row="I3",
        where="eq. inner_function_V, against the steps below it",
        printed="V = (x W_vQ θ_vKᵀ) W_Vᵀ × x, where W_V has the shape n_v × d_model",
        meant="V is x times the k rows of W_V with the highest scores.",
        printed_evidence=f"[{t} {n_v}] @ [{d} {n_v}] raises {shapes}. With W_V in place of W_Vᵀ, "
        f"the equation sums all rows: it is off the top 1 by {apart:.1e}, and V grows as x to the "
        f"power {powers[0]:.2f}",
        meant_evidence=f"with the top 1, V grows as x to the power {powers[1]:.2f}",
        printed_option="--model lab.layers.printed:SoftSumAttention, with W_V for W_Vᵀ",
        meant_option="--option I.k=…",
        fails=shapes is not None and apart > 0.1 and abs(powers[0] - 2) < 1e-9,
        holds=abs(powers[1] - 1) < 1e-9,
    )


def i4() -> Erratum:
    """d_innerV is the width of a query in one place, of a value in another."""
    d, width = 128, 64
    clash = catch_refusal(RuntimeError, lambda: torch.ones(2, d) * torch.ones(2, width))
    by_query = build_seeded(lambda: InnerFunctionAttention(d, d_retrieval=width))
    by_value = build_seeded(lambda: InnerFunctionAttention(d, value_map="linear", d_value=width))
    shapes = [tuple(f.value_rows.shape) for f in (by_query, by_value)]
    counts = [sum(p.numel() for p in f.parameters()) for f in (by_query, by_value)]
    y = [f(draw_normal(1, 3, d)).isfinite().all().item() for f in (by_query, by_value)]
    return Erratum(
        row="I4",
        where="tab:multi_query_associative_recall:model against § Effect of Modules",
        printed="d_innerV = d_model / 2 is the retrieval width in the listing, but '64 dimensions "
        "for each V' in the text.",
        meant="The paper does not decide this, so both are offered.",
        printed_evidence=f"if it is a value's width at d_model = 128, x ∘ w multiplies widths {d} "
        f"and {width}, which raises {clash}",
        meant_evidence=f"queries of width 64 give values of shape {list(shapes[0])} and "
        f"{counts[0]:,} parameters; values of width 64 give {list(shapes[1])} and {counts[1]:,}",
        printed_option="--option I.value_map=linear --option I.d_value=64, a value's width",
        meant_option="--option I.d_retrieval=64, a query's width; d_model / 2 is the default",
        fails=clash is not None,
        holds=all(y) and shapes == [(2, d), (2, width)],
        note="In all rows of the table, n_v · d_innerV = d_model, so it may also mean two values "
        "side by side.",
    )
