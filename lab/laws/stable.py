"""The law of stability: neither output nor state grows without end."""

import math
import time
from collections.abc import Iterable
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lab.laws.probes import Probes, draw, longest_input
from lab.laws.refusal import REFUSALS
from lab.laws.reproduction import written
from lab.laws.verdict import Verdict
from lab.layers.state import Decoder

BLOCKS = 32  # in which the whole length is read
FEWEST = 8  # to compare the last with
ENOUGH = 4  # to compare at all
GROWS, WANDERS = 2.8, 1.5
STATELESS_LEN = 8192  # longest sequence for a module that must read it at once


class _Size(NamedTuple):
    """The root mean square of a block's outputs, and of each tensor of the state after it."""

    tokens: int
    output: float
    state: tuple[float, ...] = ()


def stable(module: nn.Module, probes: Probes) -> Verdict:
    """Output and state stay bounded as the sequence grows.

    A decoder reads block after block from its state, another module one sequence of at most 8,192
    tokens. Over two doublings of the length the size (root mean square) of a bounded process
    hardly moves; that of a sum without forgetting doubles, of one that drifts grows four times, of
    an unstable one without limit. Up to 1.5 times holds; above 2.8 times, or not finite, fails.
    Between, where a memory longer than the sequence looks like an endless one, is not decided.

    A state's whole numbers, positions, are left out. Where the cost grows with the length the time
    that may be spent ends the sequence sooner, and a table of positions does at its end.
    """
    law = "stable"
    decodes = isinstance(module, Decoder)
    sizes = _read(module, probes) if decodes else _whole(module, probes)
    tokens = sizes[-1].tokens if sizes else 0
    for size in sizes:
        if not math.isfinite(size.output + sum(size.state)):
            evidence = f"output {size.output:.2g}, state {max(size.state, default=0):.2g}"
            words = f"not finite within {size.tokens} tokens"
            snippet = _snippet(probes, decodes, size.tokens, words)
            return Verdict(law, "fails", evidence, words, math.inf, GROWS, snippet)
    early = [size for size in sizes if tokens / 8 < size.tokens <= tokens / 4]
    late = [size for size in sizes if tokens / 2 < size.tokens]
    if not early:
        return Verdict(law, "not decided", f"{tokens} tokens are too few to see a growth")
    output = _mean(size.output for size in late) / _mean(size.output for size in early)
    state = max(
        (
            _mean(size.state[i] for size in late) / _mean(size.state[i] for size in early)
            for i in range(len(late[-1].state))
        ),
        default=1.0,
    )
    growth = max(output, state)
    sizes_of = f"output is {output:.2f}" + (f" and state {state:.2f}" if decodes else "")
    evidence = f"after {tokens} tokens {sizes_of} times what it was after a quarter of them"
    if tokens < probes.max_len:
        evidence += f" (its own limit, or the time for {probes.max_len} tokens)"
    if growth > GROWS:
        words = f"within {tokens} tokens it grows {growth:.2g} times over two doublings"
        shown = _state_snippet if state > output else _snippet
        snippet = shown(probes, decodes, tokens, words)
        return Verdict(law, "fails", evidence, words, growth, GROWS, snippet)
    outcome = "holds" if growth <= WANDERS else "not decided"
    return Verdict(law, outcome, evidence, measured=growth, allowed=WANDERS)


def _snippet(probes: Probes, decodes: bool, tokens: int, words: str) -> str:
    """Return the program: sizes after a quarter of the tokens, and after all of them."""
    size = f"({probes.batch if decodes else 1}, {tokens}, {probes.d_model})"
    read = "module.prefill(x)[0]" if decodes else "module(x)"
    body = f"""
        x = draw({size}, seed={tokens}).to({probes.device.type!r}, {probes.dtype})
        with torch.no_grad():
            squares = {read}.double().square().flatten(2).mean((0, 2))
        early = squares[{tokens // 8} : {tokens // 4}].mean().sqrt().item()
        late = squares[{tokens // 2} :].mean().sqrt().item()
        print("size of the output after a quarter of {tokens} tokens", early, "and of all", late)
        sys.exit(not late <= {GROWS} * early)
    """
    return written(probes.origin, (draw,), body, f"stable: {words}")


def _state_snippet(probes: Probes, decodes: bool, tokens: int, words: str) -> str:
    """Return the program: sizes of the state's tensors after a quarter of the tokens, and all."""
    body = f"""
        x = draw(({probes.batch}, {tokens}, {probes.d_model}), seed={tokens})
        x, sizes = x.to({probes.device.type!r}, {probes.dtype}), []
        for length in ({tokens // 4}, {tokens}):
            with torch.no_grad():
                _, state = module.prefill(x[:, :length])
            leaves = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
            sizes.append([_size(leaf) for leaf in leaves if leaf.is_floating_point()])
        print("sizes of the state after a quarter of {tokens} tokens, and after all", sizes)
        sys.exit(any(not late <= {GROWS} * early for early, late in zip(*sizes)))
    """
    return written(probes.origin, (draw, tree_leaves, _size), body, f"stable: {words}")


def _read(module: Decoder, probes: Probes) -> list[_Size]:
    """Return the sizes of block after block, shorter where a table or the time ends too soon."""
    length = max(1, probes.max_len // BLOCKS)
    while True:
        sizes = _blocks(module, probes, length)
        if len(sizes) >= ENOUGH or length == 1:
            return sizes
        length = max(1, length // FEWEST)


@torch.no_grad()
def _blocks(module: Decoder, probes: Probes, length: int) -> list[_Size]:
    """Return the sizes of blocks of a length, until the module refuses one or time is up."""
    like = probes.input(1)
    b, _, d = like.shape
    began, state, sizes = time.monotonic(), module.start(b), []
    for end in range(length, probes.max_len + 1, length):
        try:
            y, state = module.prefill(draw((b, length, d), seed=end).to(like), state)
        except REFUSALS:
            return sizes
        leaves = [x for x in tree_leaves(state) if isinstance(x, Tensor)]
        tensors = [x for x in leaves if x.is_floating_point()]
        sizes.append(_Size(end, _size(y), tuple(_size(x) for x in tensors)))
        if not math.isfinite(sizes[-1].output) or time.monotonic() - began > probes.seconds:
            break
    return sizes


@torch.no_grad()
def _whole(module: nn.Module, probes: Probes) -> list[_Size]:
    """Return the sizes of the parts of the longest sequence that there is time for."""
    longest, length = min(probes.max_len, STATELESS_LEN), 256
    while True:
        x = longest_input(module, probes.input(1, 1), min(length, longest))
        began = time.monotonic()
        y = module(x)
        spent = time.monotonic() - began
        # Twice the length may cost four times as much.
        if x.shape[1] < length or length >= longest or 4 * spent >= probes.seconds:
            break
        length *= 2
    part = max(1, y.shape[1] // FEWEST)
    return [_Size(end, _size(y[:, end - part : end])) for end in range(part, y.shape[1] + 1, part)]


def _size(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


def _mean(sizes: Iterable[float]) -> float:
    """Return a mean that can be divided by."""
    return max(fmean(sizes), 1e-300)
