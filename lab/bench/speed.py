"""What a token costs a model in training and in decoding, by row length, beside other models."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from lab.bench.ratio import take_medians
from lab.machine import use_threads
from lab.models import LanguageModel

LENGTHS = 512, 2_048, 8_192
ROUNDS = 3
DECODED = 16
"""Tokens that are decoded in a round."""


@dataclass(frozen=True)
class Speed:
    """What a token of a row costs a model, by the processor's time on one thread.

    Attributes:
        name: of the model.
        length: of the row, and of what was read before a token is decoded.
        training: seconds a token, forward and backward.
        decoding: seconds a token; None for a model that cannot decode.
    """

    name: str
    length: int
    training: float
    decoding: float | None


def measure_speeds(models: Mapping[str, LanguageModel], lengths: Sequence[int]) -> list[Speed]:
    """Return what a token costs each model, measured in turns on one thread of the CPU."""
    found, take = [], partial(take_medians, repeats=ROUNDS, clock=time.process_time)
    with use_threads(1):
        for length in lengths:
            training = take([_prepare_training(model, length) for model in models.values()])
            decoding = [_prepare_decoding(model, length) for model in models.values()]
            known = iter(take([call for call in decoding if call is not None]))
            for name, call, seconds in zip(models, decoding, training, strict=True):
                decoded = None if call is None else next(known) / DECODED
                found.append(Speed(name, length, seconds / length, decoded))
    return found


def _prepare_training(model: LanguageModel, length: int) -> Callable[[], object]:
    tokens = torch.zeros(1, length, dtype=torch.int64)

    def train() -> None:
        model.zero_grad(set_to_none=True)
        model.hidden(tokens).square().mean().backward()

    return train


def _prepare_decoding(model: LanguageModel, length: int) -> Callable[[], object] | None:
    tokens = torch.zeros(1, length, dtype=torch.int64)
    try:
        with torch.no_grad():
            _, state = model.prefill(tokens)
    except ValueError:  # a mixer without step
        return None

    @torch.no_grad()
    def decode() -> None:
        after = state
        for _ in range(DECODED):
            _, after = model.step(tokens[:, 0], after)

    return decode
