"""Mixers of the delta rule, as the layers of flash-linear-attention compute them.

These call kernels that a CPU does not run; their steps are written out here, on their weights,
around its naive recurrences.
"""

from typing import Any

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
from tests.parity.compare import Comparison, Shape, compare_with


def make_theirs(s: Shape, name: str, cls: str, **options: Any) -> Any:
    layer = getattr(peers.load(f"fla.layers.{name}"), cls)
    return s.draw(layer(hidden_size=s.d, num_heads=s.h, **options))


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


def compare_deltanet(s: Shape) -> Comparison:
    negative = bool(s.seed % 2)
    theirs = make_theirs(s, "delta_net", "DeltaNet", allow_neg_eigval=negative)
    naive = peers.load("fla.ops.delta_rule.naive").delta_rule_recurrence

    def run(x: Tensor) -> Tensor:
        q, k, v = (s.heads(z) for z in convolve(theirs, x))
        beta = (1 + negative) * theirs.b_proj(x).sigmoid()
        o, _ = naive(*(z.transpose(1, 2) for z in (shorten(q), shorten(k), v, beta)))
        return finish(theirs, o.transpose(1, 2))

    ours = DeltaNet(s.d, s.h, negative=negative, chunk_len=8)
    return Comparison(ours, name_weights(theirs), theirs, run)


def compare_gdn(s: Shape) -> Comparison:
    negative = bool(s.seed % 2)
    options = {"head_dim": s.p, "expand_v": 1, "allow_neg_eigval": negative}
    theirs = make_theirs(s, "gated_deltanet", "GatedDeltaNet", **options)
    naive = peers.load("fla.ops.gated_delta_rule.naive").naive_recurrent_gated_delta_rule

    def run(x: Tensor) -> Tensor:
        q, k, v = (s.heads(z) for z in convolve(theirs, x))
        beta = (1 + negative) * theirs.b_proj(x).sigmoid()
        o, _ = naive(shorten(q), shorten(k), v, beta, decay(theirs, x))
        return finish(theirs, o, F.silu(theirs.g_proj(x)))

    ours = GatedDeltaNet(s.d, s.h, negative=negative, chunk_len=8)
    return Comparison(ours, name_weights(theirs, **DECAY, **GATE), theirs, run)


def compare_kda(s: Shape) -> Comparison:
    negative = bool(s.seed % 2)
    options = {"head_dim": s.p, "allow_neg_eigval": negative}
    theirs = make_theirs(s, "kda", "KimiDeltaAttention", **options)
    naive = peers.load("fla.ops.kda.naive").naive_recurrent_kda
    names = {"decay_down.weight": "f_proj.0.weight", "decay_up.weight": "f_proj.1.weight"}
    names |= {f"g_proj.{name}": f"g_proj.{name}" for name in ("0.weight", "1.weight", "1.bias")}
    weights = name_weights(theirs, **names, **{"decay_up.bias": "dt_bias", "A_log": "A_log"})

    def run(x: Tensor) -> Tensor:
        q, k, v = (s.heads(z) for z in convolve(theirs, x))
        beta = (1 + negative) * theirs.b_proj(x).sigmoid()
        g = F.softplus(s.heads(theirs.f_proj(x) + theirs.dt_bias))
        o, _ = naive(shorten(q), shorten(k), v, -theirs.A_log.exp()[:, None] * g, beta)
        return finish(theirs, o, theirs.g_proj(x).sigmoid())

    ours = KimiDeltaAttention(s.d, s.h, negative=negative, chunk_len=8)
    return Comparison(ours, weights, theirs, run)


def compare_deltaproduct(s: Shape) -> Comparison:
    negative, m = bool(s.seed % 2), 1 + s.seed % 3
    options = {"head_dim": s.p, "expand_v": 1, "allow_neg_eigval": negative, "num_householder": m}
    theirs = make_theirs(s, "gated_deltaproduct", "GatedDeltaProduct", **options)
    ops = peers.load("fla.ops.gated_delta_product.naive")

    def write(z: Tensor, pattern: str = "b t (m h n) -> b (t m) h n") -> Tensor:
        return rearrange(z, pattern, m=m, h=s.h)

    def run(x: Tensor) -> Tensor:
        q, k, v = convolve(theirs, x)
        beta = (1 + negative) * theirs.b_proj(x).sigmoid()
        o, _ = ops.naive_recurrent_gated_delta_product(
            shorten(s.heads(q)),
            shorten(write(k)),
            write(v),
            decay(theirs, x),
            write(beta, "b t (m h) -> b (t m) h"),
            scale=s.p**-0.5,
            num_householder=m,
        )
        return finish(theirs, o, F.silu(theirs.g_proj(x)))

    ours = GatedDeltaProduct(s.d, s.h, n_writes=m, negative=negative, chunk_len=8)
    return Comparison(ours, name_weights(theirs, **DECAY, **GATE), theirs, run)


def compare_comba(s: Shape) -> Comparison:
    """Their kernels too read the state before it decays, as do their chunks in plain torch."""
    theirs = make_theirs(s, "comba", "Comba", head_dim=s.p, expand_v=1)
    naive = peers.load("fla.ops.comba.naive").naive_chunk_comba

    def run(x: Tensor) -> Tensor:
        q, k, v = (s.heads(z) for z in convolve(theirs, x))
        share = theirs.decay.sigmoid()[:, None]
        q, k = shorten(q - theirs.D[:, None] * share * k), shorten(k)
        beta = theirs.b_proj(x).sigmoid()
        o, _ = naive(q, k, v, share * k, decay(theirs, x), beta, chunk_size=8)
        return finish(theirs, o, theirs.g_proj(x).sigmoid())

    weights = name_weights(theirs, **DECAY, **GATE, feedback="decay", D="D")
    return Comparison(Comba(s.d, s.h, chunk_len=8), weights, theirs, run)


def compare_rwkv7(s: Shape) -> Comparison:
    """Their first layer: there no residual of values comes in. Their kernel scales q by 1."""
    rank, gate_rank = 1 + s.seed % 5, 1 + s.seed % 4
    ranks = {"decay_low_rank_dim": rank, "a_low_rank_dim": rank, "gate_low_rank_dim": gate_rank}
    options = {"head_dim": s.p, "layer_idx": 0, "num_hidden_layers": 2, **ranks}
    theirs = make_theirs(s, "rwkv7", "RWKV7Attention", **options)
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
        found, k = shorten(s.heads(k * theirs.k_k)), update(k, a, theirs.k_a)
        r, w, k, v, a = (s.heads(z) for z in (r, w, k, v, a))
        given = (z.transpose(1, 2) for z in (r * s.p**0.5, k, v, -found, a * found, w))
        o = rearrange(naive(*given)[0], "b h t p -> (b t) (h p)")
        o = F.group_norm(o, s.h, theirs.g_norm.weight, None, theirs.g_norm.eps)
        return theirs.o_proj(correct(o.view_as(x), r, k, theirs.r_k, v, theirs.g_lora(x)))

    ours = RWKV7(s.d, s.h, rank=rank, gate_rank=gate_rank, chunk_len=8)
    return Comparison(ours, weights, theirs, run)


class LikeTheirs(TTTLinear):
    """What the linear models give is added to its norm, where the paper adds q."""

    def complete(self, q: Tensor, z: Tensor) -> Tensor:
        return z + self.normalise(z)[0] * self.ln_weight + self.ln_bias


def compare_ttt(s: Shape) -> Comparison:
    """Its rates are the reader's, ours the writer's times 1/i: both are the same without x."""
    size = 1 + s.seed % 9
    reference = peers.load("fla.ops.ttt.naive").chunk_ttt_linear_ref
    ours = s.draw(LikeTheirs(s.d, s.h, batch_len=size))
    ours.rate.weight.data.zero_()
    ours.rate.weight.requires_grad_(False)
    ours.bias.data.zero_()

    def run(x: Tensor) -> Tensor:
        q, k, v = (s.heads(f(x)) for f in (ours.q, ours.k, ours.v))
        share = 1 / (torch.arange(s.t) % size + 1).to(x)
        eta = (ours.rate.bias.sigmoid() / s.p * share[:, None]).expand(s.b, s.t, s.h)[..., None]
        start = {"initial_state": ours.weight.expand(s.b, s.h, s.p, s.p)}
        start["initial_state_bias"] = ours.bias.expand(s.b, s.h, s.p)[:, :, None]
        given = q, k, v, ours.ln_weight, ours.ln_bias, eta
        o, *_ = reference(*given, scale=1.0, mini_batch_size=size, **start)
        return ours.out(ours.norm(rearrange(o, "b t h p -> b t (h p)")))

    named = dict(ours.named_parameters())
    theirs = nn.Module()
    theirs.__dict__["_parameters"] = {
        name.replace(".", "_"): z for name, z in named.items() if z.requires_grad
    }
    return Comparison(ours, named, theirs, run)


def define_ttt(s: Shape) -> Comparison:
    """Token by token, by the inner loss's own gradient."""
    size = 1 + s.seed % 5
    ours = s.draw(TTTLinear(s.d, s.h, batch_len=size))

    def apply(model: list[Tensor], z: Tensor) -> Tensor:
        z = torch.einsum("bhp,bhpr->bhr", z, model[0]) + model[1]
        return F.layer_norm(z, (s.p,), eps=1e-6) * ours.ln_weight + ours.ln_bias

    def run(x: Tensor) -> Tensor:
        q, k, v = (s.heads(f(x)) for f in (ours.q, ours.k, ours.v))
        rate, outputs = ours.rate(x).sigmoid() / s.p, []
        model = start = [1.0 * z.expand(s.b, *z.shape) for z in (ours.weight, ours.bias)]
        sums = [torch.zeros_like(z) for z in model]
        for i in range(s.t):
            if i % size == 0:
                start, sums = model, [torch.zeros_like(z) for z in model]
            loss = (k[:, i] + apply(start, k[:, i]) - v[:, i]).square().sum() / 2
            slopes = torch.autograd.grad(loss, start, create_graph=True)
            rates = rate[:, i, :, None, None], rate[:, i, :, None]
            sums = [z + r * g for z, r, g in zip(sums, rates, slopes, strict=True)]
            model = [z - y / (i % size + 1) for z, y in zip(start, sums, strict=True)]
            outputs.append(q[:, i] + apply(model, q[:, i]))
        return ours.out(ours.norm(rearrange(outputs, "t b h p -> b t (h p)")))

    return compare_with(ours, run)
