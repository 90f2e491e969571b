"""C: the cross domain mixture of experts."""

from math import isqrt, sqrt

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import Tensor

from lab.errata.erratum import MINIATURE, Erratum, catch_refusal
from lab.errata.probes import build_seeded, compute_gradients, draw_normal, measure_gap
from lab.hooks import hooks
from lab.layers.cdmoe import CDMoE
from lab.layers.printed.cdmoe import FloorSquareCDMoE
from lab.ops.product_keys import factor, naive_product_topk, product_topk

RETRIEVAL = ("query.weight", "row_keys", "column_keys", "down", "up")


def _build_small(**options) -> CDMoE:
    sizes = {"n_experts": 12, "n_retrieval_heads": 2, "k": 3, "d_retrieval": 6, "d_ff": 5}
    return build_seeded(lambda: CDMoE(8, **{**sizes, **options}))


def c1() -> Erratum:
    """Keys without the two halves of product keys."""
    h, n_experts, d_retrieval = 2, 64, 8
    side = isqrt(n_experts)
    queries = draw_normal(1, 5, h, d_retrieval)
    g = einsum(queries, draw_normal(h, side, d_retrieval, seed=1), "b t h r, h e r -> b t h e")
    reached = g.shape[-1]
    halves = queries.unflatten(-1, (2, d_retrieval // 2))
    keys = draw_normal(h, side, 2, d_retrieval // 2, seed=2)
    rows, columns = einsum(halves, keys, "b t h half r, h e half r -> half b t h e")
    _, experts = product_topk(rows, columns, n_experts)
    meant = len(experts[0, 0, 0].unique())
    return Erratum(
        row="C1",
        where="θ_eK of § Efficient Retrieval Experts",
        printed="θ_eK has the shape [h, √N, d_ret].",
        meant="θ_eK has the shape [h, √N, 2, d_ret/2]: one half for rows, the other for columns.",
        printed_evidence=f"the scores have the shape {list(g.shape)}, without the leading 2 that "
        f"the text gives g. So the top k can only be among {reached} of {n_experts} experts",
        meant_evidence=f"there are 2 scores of shape {list(rows.shape)}, and their sums reach "
        f"{meant} of {n_experts} experts",
        printed_option=None,
        meant_option="the state transform E",
        fails=g.shape == (1, 5, h, side) and reached == side,
        holds=meant == n_experts,
        note="The listing has the 2.",
    )


def c2() -> Erratum:
    """An undefined width, and a square root as a size."""
    n_experts = 1024
    refusals = [
        catch_refusal(
            NameError, lambda: eval("Linear(d_ff, d_ff_private)", {"Linear": None, "d_ff": 4})
        ),
        catch_refusal(TypeError, lambda: torch.zeros(2, sqrt(n_experts), 2, 4)),  # type: ignore[arg-type]
    ]
    layer = _build_small(n_experts=n_experts)
    keys = [tuple(half.shape) for half in (layer.row_keys, layer.column_keys)]
    y, width = layer(draw_normal(1, 3, 8)), layer.cross_domain.down.out_features
    return Erratum(
        row="C2",
        where="lst:cdmoe",
        printed="Linear(d_ff, d_ff_private), and num_keys = math.sqrt(n_experts), a float",
        meant="Linear(d_ff, d_model), and math.isqrt(n_experts) or two factors of n_experts",
        printed_evidence="; ".join(r or "runs" for r in refusals),
        meant_evidence=f"with {n_experts} experts, row and column keys have the shapes "
        f"{list(keys[0])} and {list(keys[1])}. φ is {width} wide, like x, and y has the shape "
        f"{list(y.shape)}",
        printed_option=None,
        meant_option="the state transform E",
        fails=all(refusals),
        holds=keys == [(2, 32, 3)] * 2 and width == 8 and y.shape == (1, 3, 8),
        note=MINIATURE,
    )


def c3() -> Erratum:
    """Zero keys under a score inside σ: experts that add nothing."""
    x = draw_normal(4, 16, 8)
    added, live = {}, {}
    for activation in ("silu", "relu"):
        layer = _build_small(score="inside", key_init="zeros", activation=activation)
        added[activation] = (layer(x) - layer.cross_domain(x)).abs().max().item()
        live[activation] = [n for n in RETRIEVAL if compute_gradients(layer, x)[n] != 0]
    meant = _build_small()
    sizes = compute_gradients(meant, x)
    least = min(sizes[name] or 0.0 for name in RETRIEVAL)
    adds = (meant(x) - meant.cross_domain(x)).abs().max().item()
    return Erratum(
        row="C3",
        where="lst:cdmoe, the fifth step of § Efficient Retrieval Experts",
        printed="Keys start at zero, and an expert's weight is σ(x · d × s).",
        meant="Keys start normally distributed, and the weight is σ(x · d) · softmax(s).",
        printed_evidence=f"the experts add exactly {added['silu']:g}. Of the retrieval's "
        f"parameters, {', '.join(live['silu'])} get a gradient with SiLU, and "
        f"{', '.join(live['relu']) or 'none'} with ReLU",
        meant_evidence=f"the experts add up to {adds:.1e}. Every parameter of the retrieval has a "
        f"gradient: the largest entry of each is at least {least:.1e}",
        printed_option="--option E.score=inside --option E.key_init=zeros",
        meant_option="--option E.score=outside --option E.key_init=normal, the defaults",
        fails=added == {"silu": 0.0, "relu": 0.0}
        and live == {"silu": ["row_keys", "column_keys"], "relu": []},
        holds=adds > 0.1 and least > 1e-4,
        note="φ always has a gradient, so with ReLU the layer trains, but stays an MLP.",
    )


def c4() -> Erratum:
    """Numbers of experts that are no squares."""
    printed, meant, factors = [], [], []
    for n_experts in (3072, 8192):
        layer = build_seeded(lambda n=n_experts: FloorSquareCDMoE(4, n_experts=n, k=1))
        printed.append(n_experts - layer.shape[0] * layer.shape[1])
        shape = factor(n_experts)
        _, experts = product_topk(torch.zeros(shape[0]), torch.zeros(shape[1]), shape[0] * shape[1])
        meant.append(n_experts - len(experts.unique()))
        factors.append(f"{n_experts} = {shape[0]} × {shape[1]}")
    # Every one of 12 experts is one query's best, if anything can reach it.
    layer = build_seeded(
        lambda: FloorSquareCDMoE(8, n_experts=12, n_retrieval_heads=1, k=3, d_retrieval=4)
    )
    indices: list[Tensor] = []
    with hooks(layer, [("hook_expert_indices", lambda chosen, _: indices.append(chosen))]):
        layer(draw_normal(8, 64, 8))
    chosen = indices[0].unique().tolist()
    return Erratum(
        row="C4",
        where="lst:cdmoe; n_experts of tab:downstream_evaluation:model",
        printed="3,072 and 8,192 experts have √n_experts keys for rows, and as many for columns.",
        meant="n_experts = rows · columns, with that many row and column keys; else an error.",
        printed_evidence=f"⌊√n⌋² leaves {printed[0]} of 3072 and {printed[1]} of 8192 experts "
        f"unreachable. With 12 experts, inputs choose only numbers 0 to {chosen[-1]}",
        meant_evidence=f"{' and '.join(factors)} leave {meant[0]} and {meant[1]} unreachable",
        printed_option="--model lab.layers.printed:FloorSquareCDMoE",
        meant_option="--option E.n_experts=…: any number that factors",
        fails=printed == [47, 92] and chosen == list(range(9)),
        holds=meant == [0, 0] and catch_refusal(ValueError, lambda: factor(3067)) is not None,
    )


def c5() -> Erratum:
    """Two equations, a listing that is neither, and a gate that is argued away."""
    x = draw_normal(2, 6, 8)

    def experts(layer: CDMoE, z: torch.Tensor) -> torch.Tensor:
        halves = rearrange(layer.query(z), "b t (half h r) -> half b t h r", half=2, h=2)
        rows, columns = (
            einsum(half, keys, "b t h r, h e r -> b t h e")
            for half, keys in zip(halves, (layer.row_keys, layer.column_keys), strict=True)
        )
        scores, chosen = naive_product_topk(rows, columns, 3)
        affinity = einsum(z, layer.down[chosen], "b t d, b t h k d -> b t h k")
        weights = F.silu(affinity) * scores.softmax(-1)
        return einsum(weights, layer.up[chosen], "b t h k, b t h k d -> b t d")

    one, two, gated = _build_small(form="one"), _build_small(form="two"), _build_small(gated=True)
    phi = two.cross_domain(x)
    form_one, equation_two = experts(one, x) + one.cross_domain(x), experts(two, phi)
    listing = equation_two + phi
    apart = [measure_gap(form_one, listing), measure_gap(equation_two, listing)]
    same = [measure_gap(one(x), form_one), measure_gap(two(x), listing)]
    more = sum(p.numel() for p in gated.parameters()) - sum(p.numel() for p in two.parameters())
    return Erratum(
        row="C5",
        where="eq. cdmoe, § Cross Domain, lst:cdmoe",
        printed="The equation has two forms, Σ e(x) + φ(x) and Σ e(φ(x)); the steps and the "
        "listing have Σ e(φ(x)) + φ(x).",
        meant="Both forms add φ(x), and φ may be gated or not.",
        printed_evidence=f"with the same weights, form one is off the listing by {apart[0]:.1e} of "
        f"its largest entry, and form two, which lacks φ(x), by {apart[1]:.1e}",
        meant_evidence=f"the lab's form one equals its equation to {same[0]:.1e}, and its form two "
        f"the listing to {same[1]:.1e}. A gate adds {more} = d_model · d_ff parameters",
        printed_option="--option E.form=one",
        meant_option="--option E.form=two, the default; --option E.gated=true",
        fails=min(apart) > 1e-2,
        holds=max(same) < 1e-12 and more == 8 * 5,
        note="Form two of the equation, without φ(x), is not offered.",
    )
