"""The law of repetition: the same input gives the same bits, and seeds reproduce training."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lab.laws.copying import copy_module
from lab.laws.law import Law
from lab.laws.noise import relative_error
from lab.laws.probes import Probes, draw
from lab.laws.reproduction import write_program
from lab.laws.verdict import Verdict
from lab.seeding import fix_seed


def judge(module: nn.Module, probes: Probes) -> Verdict:
    """In evaluation the same input gives the same bits; in training the same input and seed do.

    Nor does an earlier call with another input change an output.
    """
    random = False
    for training in (False, True):
        for x in probes.inputs:
            seed = 0 if training else None
            how = "in training, a call with the same seed" if training else "a second call"
            ways = ((call_twice, how), (call_after_another, "a call after one with another input"))
            for repeat, words in ways:
                if repeat is call_after_another and training:
                    continue
                # A fresh copy: it has seen no input that it could remember, and calls in training
                # may change it, e.g. its running statistics.
                tried = copy_module(module).train(training)
                first, second = repeat(tried, x, seed)
                if not same(first, second):
                    return _report_failure(probes, x, training, repeat, words, (first, second))
            if training:
                tried = copy_module(module).train(training)
                random |= not same(*call_twice(tried, x, seed=None))
    evidence = f"two calls (in training, with one seed) return equal bits, {probes.describe()}"
    if random:
        evidence += "; in training, calls without a seed differ"
    return Verdict(LAW.name, "holds", evidence, measured=0.0, allowed=0.0)


LAW = Law("deterministic", judge, seeded=False)


@torch.no_grad()
def call_twice(module: nn.Module, x: Tensor, seed: int | None) -> tuple[Tensor, Tensor]:
    """Return the outputs of two calls; with a seed, of one call each of two copies.

    A module in training may keep averages, which a call changes; the seed is not to blame for that.
    """
    if seed is None:
        return module(x), module(x)
    other = copy_module(module)
    with fix_seed(seed, x.device):
        first = module(x)
    with fix_seed(seed, x.device):
        return first, other(x)


@torch.no_grad()
def call_after_another(module: nn.Module, x: Tensor, seed: int | None) -> tuple[Tensor, Tensor]:
    """Return the outputs of a first call, and of one after another input of the same shape."""
    other = copy_module(module)
    other(draw(x.shape, seed=1).to(x))
    return module(x), other(x)


def same(first: Tensor, second: Tensor) -> bool:
    """Whether two outputs are equal, entry by entry; NaN equals NaN."""
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


def _report_failure(
    probes: Probes,
    x: Tensor,
    training: bool,
    repeat: Callable[..., tuple[Tensor, Tensor]],
    how: str,
    outputs: tuple[Tensor, Tensor],
) -> Verdict:
    error = relative_error(outputs[1] - outputs[0], outputs[0])
    words = f"length {x.shape[1]}: {how} returns another output"
    body = f"""
        {probes.print_input(x.shape[0], x.shape[1])}
        first, second = {repeat.__name__}(module.train({training}), x, {0 if training else None})
        print({words + ": relative difference"!r}, relative_error(second - first, first))
        sys.exit(not same(first, second))
    """
    uses = (draw, relative_error, same, repeat)
    snippet = write_program(probes.origin, uses, body, f"{LAW.name}: {words}")
    evidence = f"relative difference {error:.2g}"
    return Verdict(LAW.name, "fails", evidence, words, error, 0.0, snippet)
