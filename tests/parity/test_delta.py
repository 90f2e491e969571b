"""The delta rule and its relatives against flash-linear-attention's forms in plain torch, 0.6.0.

They compute in fp32, and scale q by n^−1/2; ours computes in fp64, so that only their roundings
are between them. Each case says how a mixer of the family is written with the lab's op.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lab import peers
from lab.ops.delta import delta, delta_matrix
from tests.normal import draw_normal
from tests.parity.compare import deviation

CHUNK = 8
SEEDS = range(5)
TOLERANCE = 64 * 2**-24
"""Some tens of roundings, relative to the largest number in the tensor."""
Inputs = dict[str, Tensor]


def load(module: str, form: str) -> Callable[..., Any]:
    return getattr(peers.load(f"fla.ops.{module}.naive"), form)


def with_heads_first(form: Callable[..., Any], *tensors: Tensor, **options: Any):
    """Call a form that takes [b h t …] and returns (o [b h t p], state)."""
    o, state = form(*(z.transpose(1, 2) for z in tensors), **options)
    return o.transpose(1, 2), state


# Ours: from a mixer's own inputs to arguments of `delta`.


def decayed(q, k, v, g=None, **rest):
    return {"q": q, "k": k, "v": v, "log_decay": g, **rest}


def delta_rule(q, k, v, beta, g=None, **rest):
    return decayed(q, beta[..., None] * k, v, g, match=k, **rest)


def comba(q, k, v, match, beta, g, **rest):
    """The state is read before it decays, where `delta` reads it after."""
    return comba_after_decay(q, k, v, match * (-g).exp()[..., None], beta, g, **rest)


def comba_after_decay(q, k, v, match, beta, g, **rest):
    """fla 0.6.0: its recurrent form, unlike its chunks and its kernels, reads the decayed state."""
    return decayed(q, beta[..., None] * k, v, g, match=match, **rest)


def retention(q, k, v):
    heads = torch.arange(q.shape[2], dtype=q.dtype)
    g = torch.log1p(-(2.0 ** (-5 - heads))).expand(q.shape[:3])
    return decayed(q, k, v, g)


def low_rank(q, k, v, alpha, beta, g=None, **rest):
    """S ← (diag(w) + β αᵀ) S + k vᵀ, which reads the state before it decays."""
    match = alpha if g is None else alpha * (-g).exp()
    return decayed(q, k, v, g, match=match, erase=-beta, **rest)


def delta_product(q, k, v, beta, g=None, **rest):
    """As many virtual tokens a token as k has: the first decays, the last is read."""
    times = k.shape[1] // q.shape[1]

    def place(z: Tensor, at: int) -> Tensor:
        padded = z.new_zeros(*z.shape[:2], times, *z.shape[2:])
        return padded.index_copy(2, torch.tensor([at]), z[:, :, None]).flatten(1, 2)

    g = None if g is None else place(g, 0)
    return delta_rule(place(q, times - 1), k, v, beta, g, **rest)


# Theirs: (mixer's own inputs) → (o, state or None).


def their_delta_rule(form):
    def run(q, k, v, beta, initial_state=None):
        options = {} if initial_state is None else {"initial_state": initial_state}
        if form == "delta_rule_chunkwise":
            options["chunk_size"] = CHUNK
        return with_heads_first(load("delta_rule", form), q, k, v, beta, **options)

    return run


def their_parallel_delta_rule(q, k, v, beta):
    form = load("delta_rule", "delta_rule_parallel")
    return with_heads_first(form, q, k, v, beta, BM=2 * CHUNK, BN=CHUNK)[0], None


def theirs(module: str, form: str, **options: Any):
    """A form that takes [b t h …] by the names of `decayed`, and a state."""

    def run(match=None, g=None, **given):
        given |= {} if match is None else {"p": match}
        given |= {} if g is None else {"gk" if module == "gla" else "g": g}
        return load(module, form)(**given, **options)

    return run


def their_parallel_simple_gla(q, k, v, g):
    return load("simple_gla", "naive_parallel_simple_gla")(q, k, v, g)[0], None


def their_retention(q, k, v):
    form = load("retention", "naive_retention")
    return form(*(z.transpose(1, 2) for z in (q, k, v))).transpose(1, 2), None


def their_low_rank(kind, form, **options):
    def run(q, k, v, alpha, beta, g=None, initial_state=None):
        tensors = [q, k, v, alpha, beta] + ([] if g is None else [g])
        call = load(f"generalized_delta_rule.{kind}", form)
        return with_heads_first(call, *tensors, initial_state=initial_state, **options)

    return run


def their_delta_product(q, k, v, beta, g=None, initial_state=None):
    form = load("gated_delta_product", "naive_recurrent_gated_delta_product")
    times = k.shape[1] // q.shape[1]
    return form(
        q,
        k,
        v,
        g,
        beta,
        q.shape[-1] ** -0.5,
        initial_state=initial_state,
        output_final_state=True,
        num_householder=times,
    )


STATE: dict[str, Any] = {"output_final_state": True}
SIZED: dict[str, Any] = {**STATE, "chunk_size": CHUNK}
# name: (ours, theirs, its inputs besides q, k, v; "state" and "whole" chunks where it has them)
CASES = {
    "delta rule": (delta_rule, their_delta_rule("delta_rule_recurrence"), "beta state"),
    "delta rule, chunks": (delta_rule, their_delta_rule("delta_rule_chunkwise"), "beta whole"),
    "delta rule, parallel": (delta_rule, their_parallel_delta_rule, "beta whole"),
    "gated delta rule": (
        delta_rule,
        theirs("gated_delta_rule", "naive_recurrent_gated_delta_rule", **STATE),
        "beta g state",
    ),
    "gated delta rule, chunks": (
        delta_rule,
        theirs("gated_delta_rule", "naive_chunk_gated_delta_rule", **SIZED),
        "beta g state",
    ),
    "kda": (delta_rule, theirs("kda", "naive_recurrent_kda", **STATE), "beta gk state"),
    "kda, chunks": (delta_rule, theirs("kda", "naive_chunk_kda", **SIZED), "beta gk state whole"),
    "gla": (decayed, theirs("gla", "naive_recurrent_gla", **STATE), "gk state"),
    "simple gla": (
        decayed,
        theirs("simple_gla", "naive_recurrent_simple_gla", **STATE),
        "g state",
    ),
    "simple gla, chunks": (
        decayed,
        theirs("simple_gla", "naive_chunk_simple_gla", **SIZED),
        "g state",
    ),
    "simple gla, parallel": (decayed, their_parallel_simple_gla, "g"),
    "retention": (retention, their_retention, ""),
    "dplr": (low_rank, their_low_rank("dplr", "dplr_recurrence"), "rank gk state"),
    "dplr, chunks": (
        low_rank,
        their_low_rank("dplr", "dplr_chunkwise", chunk_size=CHUNK),
        "rank gk state whole",
    ),
    "iplr": (low_rank, their_low_rank("iplr", "iplr_recurrence"), "rank state"),
    "iplr, chunks": (
        low_rank,
        their_low_rank("iplr", "iplr_chunkwise", chunk_size=CHUNK),
        "rank state whole",
    ),
    "comba, recurrent": (
        comba_after_decay,
        theirs("comba", "naive_recurrent_comba", **STATE),
        "match beta g state",
    ),
    "comba, chunks": (comba, theirs("comba", "naive_chunk_comba", **SIZED), "match beta g state"),
    "gated delta product": (delta_product, their_delta_product, "times beta g state"),
    "delta product": (delta_product, their_delta_product, "times beta state"),
}


def draw(needs: str, seed: int) -> Inputs:
    """Draw a shape and a mixer's inputs of it, in fp32: unit keys, β < 2, any decays."""
    words, rng = needs.split(), random.Random(seed)
    b, h, n, p = rng.randint(1, 3), rng.randint(1, 4), rng.randint(1, 9), rng.randint(1, 9)
    t = 2 * CHUNK * rng.randint(1, 3) if "whole" in words else rng.randint(1, 40)
    writes = t * rng.randint(1, 3) if "times" in words else t
    seeds = iter(range(100 * seed, 100 * seed + 100))

    def normal(*shape: int) -> Tensor:
        return draw_normal(*shape, seed=next(seeds))

    k = F.normalize(normal(b, writes, h, n), dim=-1)
    inputs = {"q": normal(b, t, h, n), "k": k, "v": normal(b, writes, h, p)}
    strength = rng.choice([0.01, 0.3, 3.0])
    if "rank" in words:  # RWKV-7's: what a key holds is taken away by up to as much
        key = F.normalize(normal(b, t, h, n), dim=-1)
        inputs["alpha"], inputs["beta"] = -key, normal(b, t, h, n).sigmoid() * key
    if "beta" in words:
        inputs["beta"] = 2 * normal(b, writes, h).sigmoid()
    if "match" in words:
        inputs["match"] = k * normal(1, 1, h, 1).sigmoid()
    if "g" in words or "gk" in words:
        channels = [n] if "gk" in words else []
        inputs["g"] = -strength * normal(b, t, h, *channels).abs()
    if "state" in words:
        inputs["initial_state"] = normal(b, h, n, p)
    return {name: z.float() for name, z in inputs.items()}


def differentiate(inputs: Inputs, results: tuple[Tensor, Tensor | None]) -> list[Tensor]:
    """Return the gradients of a sum in which each number has a weight of its own."""
    loss = sum(
        (z * draw_normal(*z.shape, seed=i, dtype=z.dtype)).sum()
        for i, z in enumerate(results)
        if z is not None
    )
    assert isinstance(loss, Tensor)
    return list(torch.autograd.grad(loss, list(inputs.values())))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name, seed):
    translate, form, needs = CASES[name]
    single = {key: z.requires_grad_() for key, z in draw(needs, seed).items()}
    inputs = {key: z.detach().double().requires_grad_() for key, z in single.items()}
    t, n = inputs["q"].shape[1], inputs["q"].shape[3]
    given = translate(**{**inputs, "q": inputs["q"] * n**-0.5})
    y, state = delta(**given, chunk_len=random.Random(seed).choice([4, 16, 64]))
    times = y.shape[1] // t
    y = y[:, times - 1 :: times]
    expected, last = form(**single)
    far = {"y": deviation(expected, y)}
    if last is not None:
        far["state"] = deviation(last, state)
    ours = differentiate(inputs, (y, None if last is None else state))
    for key, a, b in zip(inputs, ours, differentiate(single, (expected, last)), strict=True):
        far[f"gradient of {key}"] = deviation(b, a)
    assert all(value <= TOLERANCE for value in far.values()), far


@pytest.mark.parametrize("seed", SEEDS)
def test_the_matrix_is_that_of_the_parallel_form(seed):
    inputs = draw("beta whole", seed)
    form = load("delta_rule", "delta_rule_parallel")
    _, expected = form(*(z.transpose(1, 2) for z in inputs.values()), BM=2 * CHUNK, BN=CHUNK)
    given = delta_rule(**{**inputs, "q": inputs["q"] * inputs["q"].shape[-1] ** -0.5})
    M = delta_matrix(given["q"], given["k"], match=given["match"])
    # Theirs is of β v, ours of v, so that a column of theirs lacks its β.
    beta = inputs["beta"].transpose(1, 2)[..., None, :]
    assert deviation(M, expected * beta) <= TOLERANCE
