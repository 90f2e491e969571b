"""Mixers of the delta rule, against the layers of flash-linear-attention.

These call kernels that a CPU does not run; their steps are written out here, on their weights,
around its naive recurrences.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from lab import peers
from lab.layers.family.comba import Comba
from lab.layers.family.deltanet import DeltaNet
from lab.layers.family.deltaproduct import GatedDeltaProduct
from lab.layers.family.gated_deltanet import GatedDeltaNet
from lab.layers.family.kda import KimiDeltaAttention
from lab.layers.family.rwkv7 import RWKV7
from lab.layers.family.ttt import TTTLinear
from tests.normal import draw_normal
from tests.parity.compare import SHAPES as SEEDS
from tests.parity.compare import assert_agree, draw_parameters, draw_shape

ROUNDINGS = 256
"""Their recurrence is in fp32, token by token."""
SHAPES = [(0, 1, 1, 5, 4), (1, 2, 2, 16, 6), (2, 1, 4, 33, 8)]
"""(seed, batch, heads, tokens, width of a head)."""
Comparison = tuple[nn.Module, nn.Module, dict[str, Tensor], Callable[[Tensor], Tensor]]


def heads(z: Tensor, h: int) -> Tensor:
    return rearrange(z, "b t (h n) -> b t h n", h=h)


def make_theirs(name: str, cls: str, h: int, p: int, **options: Any) -> nn.Module:
    layer = getattr(peers.load(f"fla.layers.{name}"), cls)
    return draw_parameters(layer(hidden_size=h * p, num_heads=h, **options), torch.float32)


def name_weights(theirs: nn.Module, **names: str) -> dict[str, Tensor]:
    """Return their parameters by our names, those that all of these layers have among them."""
    parameter = theirs.get_parameter
    same = {f"{name}_proj.weight": f"{name}_proj.weight" for name in "qkvb"}
    same |= {"out_proj.weight": "o_proj.weight", "norm_weight": "o_norm.weight"} | names
    weights = {ours: parameter(name) for ours, name in same.items()}
    convolutions = [parameter(f"{name}_conv1d.weight").squeeze(1) for name in "qkv"]
    return weights | {"conv.weight": torch.cat(convolutions)}


DECAY = {"a_proj.weight": "a_proj.weight", "a_proj.bias": "dt_bias", "A_log": "A_log"}
GATE = {"g_proj.weight": "g_proj.weight"}


def convolve(theirs: Any, x: Tensor) -> list[Tensor]:
    """Return their q, k and v after convolution and SiLU."""
    found = []
    for name in "qkv":
        z = getattr(theirs, f"{name}_proj")(x).mT
        weight = theirs.get_parameter(f"{name}_conv1d.weight")
        z = F.conv1d(F.pad(z, (weight.shape[-1] - 1, 0)), weight, groups=len(weight))
        found.append(F.silu(z.mT))
    return found


def shorten(z: Tensor) -> Tensor:
    """Divide by the length, as their kernels do."""
    return z / (z.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def decay(theirs: Any, x: Tensor) -> Tensor:
    return -theirs.A_log.exp() * F.softplus(theirs.a_proj(x) + theirs.dt_bias)


def finish(theirs: Any, o: Tensor, gate: Tensor | None = None) -> Tensor:
    o = F.rms_norm(o, o.shape[-1:], theirs.o_norm.weight, theirs.o_norm.eps)
    o = rearrange(o, "b t h p -> b t (h p)")
    return theirs.o_proj(o if gate is None else o * gate)


def compare_deltanet(h: int, p: int, negative: bool) -> Comparison:
    theirs: Any = make_theirs("delta_net", "DeltaNet", h, p, allow_neg_eigval=negative)
    naive = peers.load("fla.ops.delta_rule.naive").delta_rule_recurrence

    def run(x: Tensor) -> Tensor:
        q, k, v = (heads(z, h) for z in convolve(theirs, x))
        beta = (1 + negative) * theirs.b_proj(x).sigmoid()
        o, _ = naive(*(z.transpose(1, 2) for z in (shorten(q), shorten(k), v, beta)))
        return finish(theirs, o.transpose(1, 2))

    return DeltaNet(h * p, h, negative=negative, chunk_len=8), theirs, name_weights(theirs), run


def compare_gdn(h: int, p: int, negative: bool) -> Comparison:
    options = {"head_dim": p, "expand_v": 1, "allow_neg_eigval": negative}
    theirs: Any = make_theirs("gated_deltanet", "GatedDeltaNet", h, p, **options)
    naive = peers.load("fla.ops.gated_delta_rule.naive").naive_recurrent_gated_delta_rule

    def run(x: Tensor) -> Tensor:
        q, k, v = (heads(z, h) for z in convolve(theirs, x))
        beta = (1 + negative) * theirs.b_proj(x).sigmoid()
        o, _ = naive(shorten(q), shorten(k), v, beta, decay(theirs, x))
        return finish(theirs, o, F.silu(theirs.g_proj(x)))

    ours = GatedDeltaNet(h * p, h, negative=negative, chunk_len=8)
    return ours, theirs, name_weights(theirs, **DECAY, **GATE), run


def compare_kda(h: int, p: int, negative: bool) -> Comparison:
    options = {"head_dim": p, "allow_neg_eigval": negative}
    theirs: Any = make_theirs("kda", "KimiDeltaAttention", h, p, **options)
    naive = peers.load("fla.ops.kda.naive").naive_recurrent_kda
    names = {"decay_down.weight": "f_proj.0.weight", "decay_up.weight": "f_proj.1.weight"}
    names |= {f"g_proj.{name}": f"g_proj.{name}" for name in ("0.weight", "1.weight", "1.bias")}
    weights = name_weights(theirs, **names, **{"decay_up.bias": "dt_bias", "A_log": "A_log"})

    def run(x: Tensor) -> Tensor:
        q, k, v = (heads(z, h) for z in convolve(theirs, x))
        beta = (1 + negative) * theirs.b_proj(x).sigmoid()
        g = F.softplus(heads(theirs.f_proj(x) + theirs.dt_bias, h))
        o, _ = naive(shorten(q), shorten(k), v, -theirs.A_log.exp()[:, None] * g, beta)
        return finish(theirs, o, theirs.g_proj(x).sigmoid())

    ours = KimiDeltaAttention(h * p, h, negative=negative, chunk_len=8)
    return ours, theirs, weights, run


def compare_deltaproduct(h: int, p: int, negative: bool) -> Comparison:
    m = 3 if negative else 2
    options = {"head_dim": p, "expand_v": 1, "allow_neg_eigval": negative, "num_householder": m}
    theirs: Any = make_theirs("gated_deltaproduct", "GatedDeltaProduct", h, p, **options)
    ops = peers.load("fla.ops.gated_delta_product.naive")

    def write(z: Tensor, pattern: str = "b t (m h n) -> b (t m) h n") -> Tensor:
        return rearrange(z, pattern, m=m, h=h)

    def run(x: Tensor) -> Tensor:
        q, k, v = convolve(theirs, x)
        beta = (1 + negative) * theirs.b_proj(x).sigmoid()
        o, _ = ops.naive_recurrent_gated_delta_product(
            shorten(heads(q, h)),
            shorten(write(k)),
            write(v),
            decay(theirs, x),
            write(beta, "b t (m h) -> b (t m) h"),
            scale=p**-0.5,
            num_householder=m,
        )
        return finish(theirs, o, F.silu(theirs.g_proj(x)))

    ours = GatedDeltaProduct(h * p, h, n_writes=m, negative=negative, chunk_len=8)
    return ours, theirs, name_weights(theirs, **DECAY, **GATE), run


def compare_comba(h: int, p: int) -> Comparison:
    """Their kernels too read the state before it decays, as do their chunks in plain torch."""
    theirs: Any = make_theirs("comba", "Comba", h, p, head_dim=p, expand_v=1)
    naive = peers.load("fla.ops.comba.naive").naive_chunk_comba

    def run(x: Tensor) -> Tensor:
        q, k, v = (heads(z, h) for z in convolve(theirs, x))
        share = theirs.decay.sigmoid()[:, None]
        q, k = shorten(q - theirs.D[:, None] * share * k), shorten(k)
        beta = theirs.b_proj(x).sigmoid()
        o, _ = naive(q, k, v, share * k, decay(theirs, x), beta, chunk_size=8)
        return finish(theirs, o, theirs.g_proj(x).sigmoid())

    weights = name_weights(theirs, **DECAY, **GATE, feedback="decay", D="D")
    return Comba(h * p, h, chunk_len=8), theirs, weights, run


def compare_rwkv7(h: int, p: int) -> Comparison:
    """Their first layer: there no residual of values comes in. Their kernel scales q by 1."""
    ranks = {"decay_low_rank_dim": 3, "a_low_rank_dim": 3, "gate_low_rank_dim": 5}
    options = {"head_dim": p, "layer_idx": 0, "num_hidden_layers": 2, **ranks}
    theirs: Any = make_theirs("rwkv7", "RWKV7Attention", h, p, **options)
    del theirs.g_norm.bias, theirs.x_g  # which ours does not have
    naive = peers.load("fla.ops.generalized_delta_rule.dplr.naive").dplr_recurrence
    correct = peers.load("fla.ops.rwkv7.gate_output_correction").gate_output_correction_ref
    update = peers.load("fla.ops.rwkv7.fused_k_update").k_update_ref
    shift = peers.load("fla.modules.token_shift").token_shift_ref
    names = {
        "match_scale": "k_k",
        "key_rate": "k_a",
        "bonus": "r_k",
        "norm_weight": "g_norm.weight",
    }
    names |= {"q_proj.weight": "r_proj.weight", "out_proj.weight": "o_proj.weight"}
    names |= {f"{name}_proj.weight": f"{name}_proj.weight" for name in "kv"}
    for ours, lora in (("decay", "w_lora"), ("rate", "a_lora")):
        names[f"{ours}_down.weight"] = f"{lora}.lora.0.weight"
        names |= {f"{ours}_up.{name}": f"{lora}.lora.2.{name}" for name in ("weight", "bias")}
    names |= {"gate_down.weight": "g_lora.lora.0.weight", "g_proj.weight": "g_lora.lora.2.weight"}
    weights = {name: theirs.get_parameter(their) for name, their in names.items()}
    weights["mix"] = torch.cat([theirs.get_parameter(f"x_{name}")[0] for name in "rkvwa"])

    def run(x: Tensor) -> Tensor:
        change = shift(x)
        r, k, v, w, a = (x + change * theirs.get_parameter(f"x_{name}") for name in "rkvwa")
        r, k, v = theirs.r_proj(r), theirs.k_proj(k), theirs.v_proj(v)
        w, a = -0.6065306597126334 * theirs.w_lora(w).sigmoid(), theirs.a_lora(a).sigmoid()
        found, k = shorten(heads(k * theirs.k_k, h)), update(k, a, theirs.k_a)
        r, w, k, v, a = (heads(z, h) for z in (r, w, k, v, a))
        given = (z.transpose(1, 2) for z in (r * p**0.5, k, v, -found, a * found, w))
        o = rearrange(naive(*given)[0], "b h t p -> (b t) (h p)")
        o = F.group_norm(o, h, theirs.g_norm.weight, None, theirs.g_norm.eps)
        return theirs.o_proj(correct(o.view_as(x), r, k, theirs.r_k, v, theirs.g_lora(x)))

    return RWKV7(h * p, h, rank=3, gate_rank=5, chunk_len=8), theirs, weights, run


COMPARISONS: dict[str, Callable[[int, int], Comparison]] = {
    "comba": compare_comba,
    "deltanet": partial(compare_deltanet, negative=False),
    "deltanet negative": partial(compare_deltanet, negative=True),
    "gdn": partial(compare_gdn, negative=False),
    "gdn negative": partial(compare_gdn, negative=True),
    "kda": partial(compare_kda, negative=False),
    "kda negative": partial(compare_kda, negative=True),
    "deltaproduct of two": partial(compare_deltaproduct, negative=False),
    "deltaproduct of three, negative": partial(compare_deltaproduct, negative=True),
    "rwkv7": compare_rwkv7,
}


@pytest.mark.filterwarnings("ignore:According to Bo")
@pytest.mark.filterwarnings("ignore:The correction_factor")
@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize(("seed", "b", "h", "t", "p"), SHAPES)
def test_same_values_and_gradients(name: str, seed: int, b: int, h: int, t: int, p: int):
    ours, theirs, weights, run = COMPARISONS[name](h, p)
    x = draw_normal(b, t, h * p, dtype=torch.float32, seed=seed)
    assert_agree(ours, weights, theirs, run, x, ROUNDINGS)


class LikeTheirs(TTTLinear):
    """What the linear models give is added to its norm, where the paper adds q."""

    def complete(self, q: Tensor, z: Tensor) -> Tensor:
        return z + self.normalise(z)[0] * self.ln_weight + self.ln_bias


@pytest.mark.parametrize("seed", SEEDS)
def test_ttt_is_the_reference_of_flash_linear_attention(seed: int):
    """Its rates are the reader's, ours the writer's times 1/i: both are the same without x."""
    b, h, t, p = draw_shape(seed)
    p, size = p + 3, 1 + seed % 9  # norms of two channels are steps
    reference = peers.load("fla.ops.ttt.naive").chunk_ttt_linear_ref
    ours = draw_parameters(LikeTheirs(h * p, h, batch_len=size), torch.float32)
    ours.rate.weight.data.zero_()
    ours.rate.weight.requires_grad_(False)
    ours.bias.data.zero_()

    def run(x: Tensor) -> Tensor:
        q, k, v = (heads(f(x), h) for f in (ours.q, ours.k, ours.v))
        share = 1 / (torch.arange(t) % size + 1)
        eta = (ours.rate.bias.sigmoid() / p * share[:, None]).expand(b, t, h)[..., None]
        start = {"initial_state": ours.weight.expand(b, h, p, p)}
        start["initial_state_bias"] = ours.bias.expand(b, h, p)[:, :, None]
        o, *_ = reference(
            *(q, k, v, ours.ln_weight, ours.ln_bias, eta),
            scale=1.0,
            mini_batch_size=size,
            **start,
        )
        return ours.out(ours.norm(rearrange(o, "b t h p -> b t (h p)")))

    x = draw_normal(b, t, h * p, dtype=torch.float32, seed=seed)
    named = dict(ours.named_parameters())
    theirs = nn.Module()
    theirs.__dict__["_parameters"] = {
        name.replace(".", "_"): z for name, z in named.items() if z.requires_grad
    }
    assert_agree(ours, named, theirs, run, x, ROUNDINGS)


@pytest.mark.parametrize("seed", SEEDS)
def test_ttt_is_its_definition(seed: int):
    """Token by token, by the inner loss's own gradient."""
    b, h, t, p = draw_shape(seed)
    t, p, size = min(t, 12), p + 3, 1 + seed % 5
    ours = draw_parameters(TTTLinear(h * p, h, batch_len=size))

    def norm(z: Tensor, head: int) -> Tensor:
        return F.layer_norm(z, (p,), ours.ln_weight[head], ours.ln_bias[head], 1e-6)

    def run(x: Tensor) -> Tensor:
        q, k, v = (heads(f(x), h) for f in (ours.q, ours.k, ours.v))
        rate, outputs = ours.rate(x).sigmoid() / p, torch.zeros(b, t, h, p, dtype=x.dtype)
        for row, head in [(row, head) for row in range(b) for head in range(h)]:
            model = start = [ours.weight[head], ours.bias[head]]
            sums = [0.0, 0.0]
            for i in range(t):
                if i % size == 0:
                    start, sums = [1.0 * z for z in model], [0.0, 0.0]
                key, value = k[row, i, head], v[row, i, head]
                loss = (key + norm(key @ start[0] + start[1], head) - value).square().sum() / 2
                slopes = torch.autograd.grad(loss, start, create_graph=True)
                sums = [s + rate[row, i, head] * g for s, g in zip(sums, slopes, strict=True)]
                model = [z - s / (i % size + 1) for z, s in zip(start, sums, strict=True)]
                query = q[row, i, head]
                outputs[row, i, head] = query + norm(query @ model[0] + model[1], head)
        return ours.out(ours.norm(rearrange(outputs, "b t h p -> b t (h p)")))

    x = draw_normal(b, t, h * p, seed=seed)
    assert_agree(ours, dict(ours.named_parameters()), ours, run, x, 4096)
