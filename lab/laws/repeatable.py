"""The law of repetition: the same input gives the same bits, and seeds reproduce training."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lab.laws.copying import copied
from lab.laws.probes import Probes, described, draw, relative
from lab.laws.reproduction import written
from lab.laws.verdict import Verdict, drawn


def deterministic(module: nn.Module, probes: Probes) -> Verdict:
    """Evaluating, the same input gives the same bits; training, the same input and seed do.

    Neither does a call before it, on another input, change an output.
    """
    law, random = "deterministic", False
    for training in (False, True):
        for x in probes.inputs:
            # A copy: what training leaves behind, statistics of batches, is for no other law.
            tried = copied(module).train(training)
            seed = 0 if training else None
            how = "training, a call with the same seed" if training else "a second call"
            for repeat, words in ((twice, how), (after_another, "a call after another input's")):
                if repeat is after_another and training:
                    continue
                first, second = repeat(tried, x, seed)
                if not same(first, second):
                    return _failure(probes, x, training, repeat, words, (first, second))
                # What a module remembers of the first input it sees, another copy has not seen.
                tried = copied(module).train(training)
            if training:
                random |= not same(*twice(tried, x, seed=None))
    evidence = f"two calls, evaluating, and training from one seed, {described(probes)}: equal bits"
    if random:
        evidence += "; in training calls differ, by their seed or by what they leave behind"
    return Verdict(law, "holds", evidence, measured=0.0, allowed=0.0)


@torch.no_grad()
def twice(module: nn.Module, x: Tensor, seed: int | None) -> tuple[Tensor, Tensor]:
    """Return the outputs of two calls, or of a call each of two copies after the seed.

    In training a module may keep averages: what a call leaves behind is no matter of seeds.
    """
    if seed is None:
        return module(x), module(x)
    other = copied(module)
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        torch.manual_seed(seed)
        first = module(x)
        torch.manual_seed(seed)
        return first, other(x)


@torch.no_grad()
def after_another(module: nn.Module, x: Tensor, seed: int | None) -> tuple[Tensor, Tensor]:
    """Return the outputs of a first call, and of one after another input of the same shape."""
    other = copied(module)
    other(draw(x.shape, seed=1).to(x))
    return module(x), other(x)


def same(first: Tensor, second: Tensor) -> bool:
    """Whether two outputs are equal, entry by entry, what is not a number included."""
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


def _failure(
    probes: Probes,
    x: Tensor,
    training: bool,
    repeat: Callable[..., tuple[Tensor, Tensor]],
    how: str,
    outputs: tuple[Tensor, Tensor],
) -> Verdict:
    law, error = "deterministic", relative(outputs[1] - outputs[0], outputs[0])
    words = f"length {x.shape[1]}: {how} gives another output"
    body = f"""
        {drawn(probes, x.shape[0], x.shape[1])}
        first, second = {repeat.__name__}(module.train({training}), x, {0 if training else None})
        print({words + ": relative difference"!r}, relative(second - first, first))
        sys.exit(not same(first, second))
    """
    snippet = written(probes.origin, (draw, relative, same, repeat), body, f"{law}: {words}")
    return Verdict(law, "fails", f"relative difference {error:.2g}", words, error, 0.0, snippet)
