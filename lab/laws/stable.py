"""The law of stability: neither output nor state grows without bound."""

import math
from collections.abc import Iterable
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lab.laws.causal import list_special, name_special, put_special
from lab.laws.law import Law
from lab.laws.probes import Probes, draw, draw_longest
from lab.laws.reproduction import write_program
from lab.laws.verdict import Verdict, read_clock
from lab.layers.state import Decoder

BLOCKS = 32
"""Blocks in which a decoder reads the whole length."""
FEWEST = 8
"""Parts into which the output of a module that does not decode is divided."""
ENOUGH = 4
"""Blocks that are needed to see a growth."""
GROWS, WANDERS = 2.8, 1.5
STATELESS_LEN = 8192
"""Longest sequence for a module that must read it at once."""


class _BlockSize(NamedTuple):
    """The root mean square of a block's outputs, and of each tensor of the state after it."""

    tokens: int
    output: float
    state: tuple[float, ...] = ()


def judge(module: nn.Module, probes: Probes) -> Verdict:
    """Output and state stay bounded as the sequence grows.

    A decoder reads block after block from its state; any other module reads one sequence of at most
    8,192 tokens. Over two doublings of the length, the size (root mean square) of a bounded process
    hardly changes. That of a sum without forgetting doubles, of one with a drift grows four times,
    of an unstable process without limit. Growth up to 1.5 times holds; above 2.8 times, or a number
    that is not finite, fails. Growth in between is not decided: a memory longer than the sequence
    looks like an endless one.

    Integers in a state, e.g. positions, are ignored. The sequence ends early where the time is up,
    if the cost grows with the length, or where a table of positions ends.
    """
    decodes = isinstance(module, Decoder)
    if found := _find_not_finite(module, probes):
        return found
    sizes = _read_blocks(module, probes) if decodes else _read_at_once(module, probes)
    tokens = sizes[-1].tokens if sizes else 0
    for size in sizes:
        if not math.isfinite(size.output + sum(size.state)):
            evidence = f"output {size.output:.2g}"
            if size.state:
                # A plain maximum would pass over NaN.
                largest = max(size.state, key=lambda each: math.inf if each != each else each)
                evidence += f", state {largest:.2g}"
            words = f"not finite within {size.tokens} tokens"
            write = _write_state_snippet if math.isfinite(size.output) else _write_snippet
            snippet = write(probes, decodes, size.tokens, words)
            return Verdict(LAW.name, "fails", evidence, words, math.inf, GROWS, snippet)
    early = [size for size in sizes if tokens / 8 < size.tokens <= tokens / 4]
    late = [size for size in sizes if tokens / 2 < size.tokens]
    if not early:
        words = f"{tokens} tokens are too few to see a growth"
        return Verdict(LAW.name, "not decided", words)
    output = _average(size.output for size in late) / _average(size.output for size in early)
    state = max(
        (
            _average(size.state[i] for size in late) / _average(size.state[i] for size in early)
            for i in range(len(late[-1].state))
        ),
        default=1.0,
    )
    growth = max(output, state)
    sizes_of = f"output is {output:.3g}" + (f" and state {state:.3g}" if decodes else "")
    evidence = f"after {tokens} tokens {sizes_of} times what it was after a quarter of them"
    max_len = probes.settings.max_len
    if tokens < max_len:
        evidence += f" (its own limit, or the time for {max_len} tokens)"
    if growth > GROWS:
        words = f"within {tokens} tokens it grows {growth:.2g} times over two doublings"
        write = _write_state_snippet if state > output else _write_snippet
        snippet = write(probes, decodes, tokens, words)
        return Verdict(LAW.name, "fails", evidence, words, growth, GROWS, snippet)
    outcome = "holds" if growth <= WANDERS else "not decided"
    return Verdict(LAW.name, outcome, evidence, measured=growth, allowed=WANDERS)


LAW = Law("stable", judge)


@torch.no_grad()
def _find_not_finite(module: nn.Module, probes: Probes) -> Verdict | None:
    """Return the failure of a module that divides by the norm of a vector of zeros."""
    x = probes.input(min(probes.lengths, key=lambda length: abs(length - 7)))
    zeros = put_special(x, list_special(module)[0], slice(0, 1))
    if not module(x).isfinite().all() or module(zeros).isfinite().all():
        return None
    words = f"length {x.shape[1]}: {name_special(list_special(module)[0])} at position 0 give an "
    words += "output that is not finite"
    body = f"""
        {probes.print_input(*x.shape[:2])}
        x = put_special(x, {list_special(module)[0]}, slice(0, 1))
        finite = module(x).isfinite().all().item()
        print("the output is finite:", finite)
        sys.exit(not finite)
    """
    snippet = write_program(probes.origin, (draw, put_special), body, f"{LAW.name}: {words}")
    return Verdict(LAW.name, "fails", words, words, math.inf, GROWS, snippet)


def _write_snippet(probes: Probes, decodes: bool, tokens: int, words: str) -> str:
    """Write the program that prints output sizes after a quarter of the tokens and after all."""
    size = f"({probes.settings.batch if decodes else 1}, {tokens}, {probes.d_model})"
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
    return write_program(probes.origin, (draw,), body, f"{LAW.name}: {words}")


def _write_state_snippet(probes: Probes, decodes: bool, tokens: int, words: str) -> str:
    """Write the program that prints state sizes after a quarter of the tokens and after all."""
    body = f"""
        x = draw(({probes.settings.batch}, {tokens}, {probes.d_model}), seed={tokens})
        x, sizes = x.to({probes.device.type!r}, {probes.dtype}), []
        for length in ({tokens // 4}, {tokens}):
            with torch.no_grad():
                _, state = module.prefill(x[:, :length])
            leaves = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
            kept = [leaf for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]
            sizes.append([root_mean_square(leaf) for leaf in kept])
        print("sizes of the state after a quarter of {tokens} tokens, and after all", sizes)
        sys.exit(any(not late <= {GROWS} * early for early, late in zip(*sizes)))
    """
    uses = (draw, tree_leaves, root_mean_square)
    return write_program(probes.origin, uses, body, f"{LAW.name}: {words}")


def _read_blocks(module: Decoder, probes: Probes) -> list[_BlockSize]:
    """Return the sizes of blocks, which are shorter where a table or the time ends too soon."""
    length = max(1, probes.settings.max_len // BLOCKS)
    while True:
        sizes = _measure_blocks(module, probes, length)
        if len(sizes) >= ENOUGH or length == 1:
            return sizes
        length = max(1, length // FEWEST)


@torch.no_grad()
def _measure_blocks(module: Decoder, probes: Probes, length: int) -> list[_BlockSize]:
    """Return the sizes of blocks of a length, until the module refuses one or time is up."""
    like = probes.input(1)
    b, _, d = like.shape
    began, state, sizes = read_clock(), module.start(b), []
    for end in range(length, probes.settings.max_len + 1, length):
        try:
            y, state = module.prefill(draw((b, length, d), seed=end).to(like), state)
        except Exception:
            return sizes
        leaves = [x for x in tree_leaves(state) if isinstance(x, Tensor)]
        tensors = [x for x in leaves if x.is_floating_point() or x.is_complex()]
        state_sizes = tuple(root_mean_square(x) for x in tensors)
        y_size = root_mean_square(y)
        sizes.append(_BlockSize(end, y_size, state_sizes))
        late = read_clock() - began > probes.settings.seconds
        if not math.isfinite(y_size + sum(state_sizes)) or late:
            break
    return sizes


@torch.no_grad()
def _read_at_once(module: nn.Module, probes: Probes) -> list[_BlockSize]:
    """Return the sizes of the parts of the longest sequence that there is time for."""
    longest, length = min(probes.settings.max_len, STATELESS_LEN), 256
    while True:
        x = draw_longest(module, probes.input(1, 1), min(length, longest))
        began = read_clock()
        y = module(x)
        spent = read_clock() - began
        # Twice the length may cost four times as much.
        if x.shape[1] < length or length >= longest or 4 * spent >= probes.settings.seconds:
            break
        length *= 2
    part = max(1, y.shape[1] // FEWEST)
    ends = range(part, y.shape[1] + 1, part)
    return [_BlockSize(end, root_mean_square(y[:, end - part : end])) for end in ends]


def root_mean_square(x: Tensor) -> float:
    """Return the root mean square of all entries' sizes; 0 for an empty tensor."""
    return x.abs().double().square().mean().sqrt().item() if x.numel() else 0.0


def _average(sizes: Iterable[float]) -> float:
    """Return the mean, or a tiny number instead of 0, so that it can be a divisor."""
    return max(fmean(sizes), 1e-300)
