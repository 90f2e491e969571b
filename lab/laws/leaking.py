"""Failures of other laws that a leak explains.

An output that depends on later tokens can be repeated neither by decoding nor beside padding.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lab.laws.comparison import ROUNDINGS, run_trials
from lab.laws.noise import noise_floor, relative_error
from lab.laws.probes import Probes
from lab.laws.trial import Trials
from lab.laws.verdict import Verdict
from lab.layers.state import State

PREFIXES = 33
"""Longest input of which each prefix is read by itself."""


def attribute_to_leak(found: Verdict, module: nn.Module, probes: Probes, trials: Trials) -> Verdict:
    """Return a law's verdict on a decoder; not decided if the law fails because of a leak alone.

    That is so if the same trials hold with every output computed from the tokens up to it. Where
    they do not, but the module leaks, the evidence says so.
    """
    if found.verdict != "fails" or not _leaks(module, probes):
        return found
    short = [length for length in probes.lengths if length <= PREFIXES] or probes.lengths[:1]
    again = run_trials(found.law, OnPrefixes(module), probes.with_lengths(short), trials)
    leak = "outputs depend on later tokens, which causal judges"
    if again.verdict != "holds":
        return replace(found, evidence=f"{found.evidence}; besides, {leak}")
    words = f"{leak}; without them the law holds: {again.evidence}"
    return Verdict(found.law, "not decided", words)


@torch.no_grad()
def _leaks(module: nn.Module, probes: Probes) -> bool:
    """Whether an output on a prefix differs from that on the whole input."""
    x = probes.input(max(n for n in (*probes.lengths, 1) if n <= max(PREFIXES, probes.lengths[0])))
    y = module(x)
    bound = ROUNDINGS * noise_floor(module, x, probes.inside)
    cuts = {1, x.shape[1] // 2, x.shape[1] - 1} - {0}
    return any(relative_error(module(x[:, :cut]) - y[:, :cut], y) > bound for cut in cuts)


class OnPrefixes(nn.Module):
    """A decoder whose every output is computed without the tokens after it."""

    def __init__(self, module: Any):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """Return the last output on each prefix."""
        return torch.stack([self.module(x[:, : i + 1])[:, i] for i in range(x.shape[1])], 1)

    def start(self, batch: int, position: int = 0) -> State:
        """Return the state before the first token."""
        return self.module.start(batch, position)

    def prefill(
        self, x: Tensor, state: State | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Return the last output on each prefix of further tokens, and the state after all."""
        parts = [
            self.module.prefill(x[:, :end], state, None if keep is None else keep[:, :end])
            for end in range(1, x.shape[1] + 1)
        ]
        return torch.stack([y[:, -1] for y, _ in parts], 1), parts[-1][1]

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the output of one further token, and the state after it."""
        return self.module.step(x, state)
