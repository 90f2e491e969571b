"""The delta rule and its cases against fla 0.6.0's plain forms: values and gradients.

Most of fla's forms compute in fp32 whatever they are given; the two that keep fp64 are compared in
fp64. Its Comba reads p before the decay in chunks, after it in the loop: both are cases of ours.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lab import peers
from lab.ops.delta import delta
from tests.parity.compare import deviation

Outputs = tuple[Tensor, Tensor | None]
CHUNK = 16
SEEDS = range(50)


def naive(kind: str, name: str, module: str = "naive") -> Callable[..., Any]:
    return getattr(peers.load(f"fla.ops.{kind}.{module}"), name)


def heads_first(*tensors: Tensor) -> list[Tensor]:
    return [z.transpose(1, 2) for z in tensors]


def scaled(q: Tensor) -> Tensor:
    return q * q.shape[-1] ** -0.5


def add_writes(z: Tensor, q: Tensor) -> Tensor:
    """Return [b t m …] of fla's [b t*m …]."""
    return z.unflatten(1, (q.shape[1], -1))


def spread_heads(k: Tensor, beta: Tensor) -> Tensor:
    """Return each value head's copy of the key of its group."""
    return k.repeat_interleave(beta.shape[-1] // k.shape[-2], -2)


def own_key(q, k, v, beta, g=None, state=None):
    return delta(
        scaled(q), spread_heads(k, beta) * beta[..., None], v, g, match=k, initial_state=state
    )


def delta_rule(q, k, v, beta, state):
    form = naive("delta_rule", "delta_rule_recurrence")
    y, last = form(*heads_first(q, k, v, beta), initial_state=state)
    return y.transpose(1, 2), last


def delta_rule_chunk(q, k, v, beta):
    form = naive("delta_rule", "delta_rule_chunkwise")
    y, last = form(*heads_first(q, k, v, beta), chunk_size=CHUNK)
    return y.transpose(1, 2), last


def gated_delta_rule(q, k, v, beta, g, state):
    form = naive("gated_delta_rule", "naive_recurrent_gated_delta_rule")
    return form(q, k, v, beta, g, initial_state=state, output_final_state=True)


def gated_delta_rule_chunk(q, k, v, beta, g, state):
    form = naive("gated_delta_rule", "naive_chunk_gated_delta_rule")
    return form(q, k, v, g, beta, CHUNK, initial_state=state, output_final_state=True)


def kda(q, k, v, beta, g, state):
    form = naive("kda", "naive_recurrent_kda")
    return form(q, k, v, g, beta, initial_state=state, output_final_state=True)


def kda_chunk(q, k, v, beta, g, state):
    form = naive("kda", "naive_chunk_kda")
    options = {"initial_state": state, "output_final_state": True, "chunk_size": CHUNK}
    return form(q, k, v, g, beta, **options)


def comba(q, k, v, beta, g, p, state):
    form = naive("comba", "naive_recurrent_comba")
    return form(q, k, v, p, beta, g, initial_state=state, output_final_state=True)


def comba_chunk(q, k, v, beta, g, p, state):
    form = naive("comba", "naive_chunk_comba")
    return form(q, k, v, p, g, beta, CHUNK, initial_state=state, output_final_state=True)


def our_comba(q, k, v, beta, g, p, state, before=False):
    options = {"match_before_decay": before, "initial_state": state}
    return delta(scaled(q), beta[..., None] * k, v, g, match=p, **options)


def gated_delta_product(q, k, v, beta, g, state):
    form = naive("gated_delta_product", "naive_recurrent_gated_delta_product")
    m = k.shape[1] // q.shape[1]
    options = {"initial_state": state, "output_final_state": True, "num_householder": m}
    return form(q, k, v, g, beta, q.shape[-1] ** -0.5, **options)


def our_delta_product(q, k, v, beta, g, state):
    k, v, beta = (add_writes(z, q) for z in (k, v, beta))
    return own_key(q, k, v, beta, g, state)


def gla(q, k, v, g, state):
    form = naive("gla", "naive_recurrent_gla")
    return form(q, k, v, g, initial_state=state, output_final_state=True)


def simple_gla(q, k, v, g, state):
    form = naive("simple_gla", "naive_recurrent_simple_gla")
    return form(q, k, v, g, initial_state=state, output_final_state=True)


def simple_gla_chunk(q, k, v, g, state):
    form = naive("simple_gla", "naive_chunk_simple_gla")
    return form(q, k, v, g, initial_state=state, output_final_state=True, chunk_size=CHUNK)


def additive(q, k, v, g, state):
    return delta(scaled(q), k, v, g, initial_state=state)


def retention(q, k, v):
    return naive("retention", "naive_retention")(*heads_first(q, k, v)).transpose(1, 2), None


def our_retention(q, k, v):
    rates = torch.log1p(-(2.0 ** (-5 - torch.arange(q.shape[2], dtype=torch.float64))))
    return delta(scaled(q), k, v, rates.to(q).expand(q.shape[:3]))


def dplr(q, k, v, g, alpha, beta, state):
    form = naive("generalized_delta_rule.dplr", "dplr_recurrence")
    y, last = form(*heads_first(q, k, v, alpha, beta, g), initial_state=state)
    return y.transpose(1, 2), last


def dplr_chunk(q, k, v, g, alpha, beta, state):
    form = naive("generalized_delta_rule.dplr", "dplr_chunkwise")
    given = heads_first(q, k, v, alpha, beta, g)
    y, last = form(*given, initial_state=state, chunk_size=CHUNK)
    return y.transpose(1, 2), last


def our_dplr(q, k, v, g, alpha, beta, state):
    """RWKV-7 has alpha = −κ̂ and beta = a ∘ κ̂."""
    options = {"match_before_decay": True, "initial_state": state}
    return delta(scaled(q), k, v, g, match=-alpha, erase=beta, **options)


def iplr(q, k, v, alpha, beta, state):
    form = naive("generalized_delta_rule.iplr", "iplr_recurrence")
    y, last = form(*heads_first(q, k, v, alpha, beta), initial_state=state)
    return y.transpose(1, 2), last


def iplr_chunk(q, k, v, alpha, beta, state):
    form = naive("generalized_delta_rule.iplr", "iplr_chunkwise")
    y, last = form(*heads_first(q, k, v, alpha, beta), initial_state=state, chunk_size=CHUNK)
    return y.transpose(1, 2), last


def our_iplr(q, k, v, alpha, beta, state):
    return delta(scaled(q), k, v, match=-alpha, erase=beta, initial_state=state)


def rwkv6(q, k, v, g, u, state):
    form = naive("rwkv6", "naive_recurrent_rwkv6", "recurrent_naive")
    given = heads_first(q, k, v, g)
    y, last = form(*given, u, initial_state=state, output_final_state=True)
    return y.transpose(1, 2), last


def our_rwkv6(q, k, v, g, u, state):
    return delta(scaled(q), k, v, g, own=(scaled(q) * u * k).sum(-1), initial_state=state)


class Pair(NamedTuple):
    """A form of fla's, ours, and which arguments both take.

    Attributes:
        theirs: the form.
        ours: the same by `delta`.
        names: of the arguments.
        channel: whether the decay has a number for each key channel.
        whole: whether rows must be whole chunks.
        writes: whether a token may write several times.
        exact: whether theirs keeps fp64.
        groups: whether several value heads may share a key head.
    """

    theirs: Callable[..., Outputs]
    ours: Callable[..., Outputs]
    names: str
    channel: bool = False
    whole: bool = False
    writes: bool = False
    exact: bool = False
    groups: bool = False


def our_delta_rule(q, k, v, beta, state=None):
    return own_key(q, k, v, beta, None, state)


PAIRS = {
    "delta_rule": Pair(delta_rule, our_delta_rule, "q k v beta state"),
    "delta_rule chunk": Pair(
        delta_rule_chunk, our_delta_rule, "q k v beta", whole=True, exact=True
    ),
    "gated_delta_rule": Pair(gated_delta_rule, own_key, "q k v beta g state"),
    "gated_delta_rule chunk": Pair(gated_delta_rule_chunk, own_key, "q k v beta g state"),
    "kda": Pair(kda, own_key, "q k v beta g state", channel=True, groups=True),
    "kda chunk": Pair(kda_chunk, own_key, "q k v beta g state", channel=True, whole=True),
    "comba": Pair(comba, our_comba, "q k v beta g p state"),
    "comba chunk": Pair(comba_chunk, partial(our_comba, before=True), "q k v beta g p state"),
    "gated_delta_product": Pair(
        gated_delta_product, our_delta_product, "q k v beta g state", writes=True
    ),
    "gla": Pair(gla, additive, "q k v g state", channel=True),
    "simple_gla": Pair(simple_gla, additive, "q k v g state"),
    "simple_gla chunk": Pair(simple_gla_chunk, additive, "q k v g state"),
    "retention": Pair(retention, our_retention, "q k v"),
    "dplr, which is RWKV-7": Pair(dplr, our_dplr, "q k v g alpha beta_k state", channel=True),
    "dplr chunk": Pair(
        dplr_chunk, our_dplr, "q k v g alpha beta_k state", channel=True, whole=True
    ),
    "iplr": Pair(iplr, our_iplr, "q k v alpha beta_k state"),
    "iplr chunk": Pair(iplr_chunk, our_iplr, "q k v alpha beta_k state", whole=True, exact=True),
    "rwkv6": Pair(rwkv6, our_rwkv6, "q k v g u state", channel=True),
}


def draw(pair: Pair, seed: int) -> dict[str, Tensor]:
    """Draw a shape, and arguments under which states neither explode nor vanish at once."""
    generator = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    b, heads, n, p = integer(1, 2), integer(1, 3), integer(2, 8), integer(1, 8)
    t = CHUNK * integer(1, 3) if pair.whole else integer(1, 40)
    writes = t * integer(1, 3) if pair.writes else t
    keys = heads
    heads = heads * integer(1, 2) if pair.groups else heads
    k = F.normalize(normal(b, writes, keys, n), dim=-1)
    alpha = -F.normalize(normal(b, t, keys, n), dim=-1)
    drawn = {
        "q": normal(b, t, keys, n),
        "k": k,
        "v": normal(b, writes, heads, p),
        "beta": 2 * normal(b, writes, heads).sigmoid(),
        "g": -0.5 * F.softplus(normal(b, t, heads, *([n] if pair.channel else []))),
        "p": k * normal(b, t, keys, 1).sigmoid() if "p" in pair.names.split() else k,
        "alpha": alpha,
        "beta_k": -alpha * normal(b, t, keys, n).sigmoid(),
        "u": normal(heads, n),
        "state": normal(b, heads, n, p),
    }
    return {name: drawn[name] for name in pair.names.split()}


def differentiate(form: Callable[..., Outputs], given: dict[str, Tensor], dtype: torch.dtype):
    """Return y, the last state where there is one, and all gradients of a weighted sum."""
    leaves = {name: z.detach().to(dtype).requires_grad_() for name, z in given.items()}
    y, last = form(*leaves.values())
    outputs = {"y": y} if last is None else {"y": y, "state": last}
    loss = torch.zeros((), dtype=torch.float64)
    for z in (outputs["y"], *([last] if "state" in given and last is not None else [])):
        loss = loss + (z.double() * torch.arange(z.numel()).double().cos().view_as(z)).sum()
    found = torch.autograd.grad(loss, list(leaves.values()))
    gradients = {f"gradient of {name}": z for name, z in zip(leaves, found, strict=True)}
    return {**outputs, **gradients}


@pytest.mark.parametrize("kind", PAIRS)
def test_values_and_gradients(kind):
    pair = PAIRS[kind]
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12))[: 1 + pair.exact]:
        for seed in SEEDS:
            given = draw(pair, seed)
            ours = differentiate(pair.ours, given, dtype)
            theirs = differentiate(pair.theirs, given, dtype)
            names = ours.keys() & theirs.keys()
            far = {name: deviation(ours[name], theirs[name]) for name in names}
            far = {name: value for name, value in far.items() if not value <= tolerance}
            shape = {name: list(z.shape) for name, z in given.items()}
            assert not far, f"seed {seed}, {dtype}, {shape}: {far}"
