"""The law of repetition: the same input gives the same bits, and seeds reproduce what is drawn."""

from copy import deepcopy

import torch
from torch import Tensor, nn

from lab.laws.probes import Probes, described, relative
from lab.laws.verdict import Verdict


def deterministic(module: nn.Module, probes: Probes) -> Verdict:
    """Evaluating, the same input gives the same bits; training, the same input and seed do."""
    for training in (False, True):
        # A copy: what training leaves behind, statistics of batches, is for no other law to see.
        tried = deepcopy(module).train(training)
        for x in probes.inputs:
            first, second = _outputs(tried, x, seed=0 if training else None)
            if not torch.equal(first, second):
                evidence = f"relative difference {relative(second - first, first):.2g}"
                how = "training, a second call with the same seed" if training else "a second call"
                counterexample = f"length {x.shape[1]}: {how} gives another output"
                return Verdict("deterministic", "fails", evidence, counterexample)
    evidence = f"two calls, evaluating, and training from one seed, {described(probes)}: equal bits"
    return Verdict("deterministic", "holds", evidence)


@torch.no_grad()
def _outputs(module: nn.Module, x: Tensor, seed: int | None) -> tuple[Tensor, Tensor]:
    """Return the outputs of two calls, after the seed each if there is one."""
    if seed is None:
        return module(x), module(x)
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        torch.manual_seed(seed)
        first = module(x)
        torch.manual_seed(seed)
        return first, module(x)
