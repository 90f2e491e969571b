"""Laws of numbers: rounding explains errors, and neither output nor state grows without bound."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lab.abilities import Decoder
from lab.laws.causal import list_special, name_special, put_special
from lab.laws.law import Law, Verdict, describe_refusal, read_clock
from lab.laws.noise import (
    Exact,
    FixedAngles,
    RoundedAngles,
    RoundedResults,
    count_calls,
    relative_error,
)
from lab.laws.probes import Probes, copy_module, draw, draw_longest, name_precision
from lab.laws.reproduction import write_program

ROUNDINGS = 64
QUANTILES = (0.5, 0.9)
DTYPES = (torch.float32, torch.bfloat16)
SPREAD = 4
"""Times the effect of one draw of all roundings that another may have."""
LOOPED = 16
"""Tokens at which calls are counted, and at twice as many."""
ANGLE = 2.0**-14
"""How far angles of positions may be off, relative to the largest: 1,024 roundings in fp32, as a
filter's network of sines may add up; a single one in bf16 is 2⁻⁹."""
LARGEST = 1.0
"""Error from which on nothing is left of the right output, so a bound above it says nothing."""


def judge_precision(module: nn.Module, probes: Probes) -> Verdict:
    """In fp32 and bf16 the error against fp64, same weights and input, is that of rounding.

    A working precision with unit roundoff u rounds every intermediate result by up to u. The effect
    of rounding everything once is measured in fp64: each entry of the input and the parameters is
    moved by u times a normal number. Between two parameters a module rounds at most 64 times; the
    errors are nearly independent and add as a root: 8 times what was measured is allowed. Angles
    are no parameters, and lose more at later positions: the effect of rounding every angle to fp32,
    the argument of sin, cos, polar and complex exp, is measured too, and 8 times it is allowed. The
    output's own rounding adds u, where nothing else moves it, as in a saturated tanh.
    Angles of a module in bf16 must be as good as fp32 as well (erratum R7); those that do not
    depend on the input, so on positions alone, are compared with fp64's one by one.

    A module that loops over its tokens rounds more often than that: there, each result that depends
    on the input or the weights is moved by u times a normal number of mean 1/4, and 4 times
    the effect is allowed. Numbers in code are rounded to fp32 in the reference, as weights are.

    Errors are per token, |Δy_t| / |y_t|; their median and their 0.9 quantile must not exceed those
    allowed, because a choice that rounding flips moves a few tokens far, in both. The reference
    stays in fp64 where the module casts to a lower precision.

    Source: the first-order rule, error ≲ roundings · condition · u.
    """
    if probes.dtype != torch.float64:
        words = "the module does not run in fp64, so there is no reference"
        return Verdict(PRECISION.name, "not decided", words)
    x = draw_longest(module, probes.input(1, 1), probes.settings.rounding_len)
    measured = [_measure_precision(module, x, dtype) for dtype in DTYPES]
    failure = next((one for one in measured if one.failing), None)
    left = [one.left for one in measured if one.left]
    found = [words for one in measured for words in one.words]
    if failure is not None:
        words = f"length {x.shape[1]}: {failure.failing}"
        snippet = _write_precision_snippet(probes, x, failure, words)
        evidence = "; ".join((*found, *left))
        return Verdict(
            PRECISION.name, "fails", evidence, words, failure.error, failure.allowed, snippet
        )
    if not found or measured[0].left:
        return Verdict(PRECISION.name, "not decided", left[0])
    nearest = max(one.nearest for one in measured)
    evidence = "; ".join((f"relative errors at length {x.shape[1]}: {'; '.join(found)}", *left))
    return Verdict(
        PRECISION.name,
        "holds",
        evidence,
        measured=nearest,
        allowed=1.0,
        left="; ".join(left),
    )


PRECISION = Law("precision", judge_precision)


@dataclass(frozen=True)
class _Rounding:
    """What rounding does in a precision.

    Attributes:
        dtype: the precision.
        words: the errors and their bounds.
        failing: the one that exceeds its bound, in words; empty if none does.
        error: that one.
        allowed: its bound.
        check: computes both in a program, as an expression.
        nearest: the largest error relative to its bound.
        left: why nothing was decided; empty if something was.
    """

    dtype: torch.dtype
    words: tuple[str, ...] = ()
    failing: str = ""
    error: float = 0.0
    allowed: float = 0.0
    check: str = ""
    nearest: float = 0.0
    left: str = ""


def _measure_precision(
    module: nn.Module, x: Float[Tensor, "1 t d"], dtype: torch.dtype
) -> _Rounding:
    """Measure errors and angles in a precision, and compare them with their bounds."""
    name, t = name_precision(dtype), x.shape[1]
    try:
        errors, allowed = measure_rounding(module, x, dtype)
        angle = measure_angles(module, x, dtype)
    except Exception as error:
        left = f"the module does not run in {name}: {describe_refusal(error)}"
        return _Rounding(dtype, left=left)
    if not all(map(math.isfinite, allowed)):
        left = f"in {name}, or in fp64, the output of length {t} is not finite"
        return _Rounding(dtype, left=left)
    words = [
        f"{name}, quantile {q}: {e:.2g} ({a:.2g} allowed)"
        for e, a, q in zip(errors, allowed, QUANTILES, strict=True)
    ]
    if not angle <= ANGLE:
        failing = (
            f"{name}, angles of positions: off by {angle:.2g} of the largest ({ANGLE:.2g} allowed)"
        )
        check = f"[measure_angles(module, x, {dtype})], [{ANGLE}]"
        return _Rounding(dtype, (*words, failing), failing, angle, ANGLE, check)
    if min(allowed) >= LARGEST and all(map(math.isfinite, errors)):
        left = f"in {name}, rounding alone may move half of the outputs by {min(allowed):.2g}"
        return _Rounding(dtype, left=f"{left} at length {t}")
    for e, a, told in zip(errors, allowed, words, strict=True):
        if not e <= a:  # NaN is above any bound
            check = f"measure_rounding(module, x, {dtype})"
            return _Rounding(dtype, tuple(words), told, e, a, check)
    shares = [e / a for e, a in zip(errors, allowed, strict=True) if a]
    return _Rounding(dtype, tuple(words), nearest=max(shares, default=0.0))


def _write_precision_snippet(probes: Probes, x: Tensor, failure: _Rounding, words: str) -> str:
    body = f"""
        x = draw((1, {x.shape[1]}, {x.shape[2]}), seed={x.shape[1]})
        errors, allowed = {failure.check}
        print("relative errors", errors, "of", allowed, "allowed")
        sys.exit(not all(e <= a for e, a in zip(errors, allowed)))
    """
    uses = (draw, measure_rounding if "rounding" in failure.check else measure_angles)
    return write_program(probes.origin, uses, body, f"{PRECISION.name}: {words}")


def measure_angles(module: nn.Module, x: Float[Tensor, "1 t d"], dtype: torch.dtype) -> float:
    """Return by how much the arguments of cos and sin are off that do not depend on the input.

    It is relative to the largest, and 0 where none can be compared.
    """
    low = copy_module(module).to(dtype).requires_grad_(False)
    given = x.to(dtype)
    with FixedAngles() as rounded:
        low(given.clone().requires_grad_())
    with FixedAngles() as exact:
        call_exactly(copy_module(low).double(), given.double().requires_grad_())
    pairs = zip(rounded.angles, exact.angles, strict=False)
    if [a.shape for a in rounded.angles] != [a.shape for a in exact.angles]:
        return 0.0
    return max((relative_error(a - b, b) for a, b in pairs if b.any()), default=0.0)


@torch.no_grad()
def measure_rounding(
    module: nn.Module, x: Float[Tensor, "1 t d"], dtype: torch.dtype
) -> tuple[list[float], list[float]]:
    """Return the quantiles of the tokens' errors in a precision, and their bounds."""
    low = copy_module(module).to(dtype)
    # The reference has the weights and the input after one rounding.
    exact, rounded_x = copy_module(low).double(), x.to(dtype).double()
    y = call_exactly(exact, rounded_x)
    error = measure_tokens(low(x.to(dtype)), y)
    with RoundedAngles():
        from_angles = measure_tokens(call_exactly(exact, rounded_x), y)
    unit = torch.finfo(dtype).eps / 2
    moved = copy_module(exact)
    tensors = [*moved.parameters(), *(b for b in moved.buffers() if b.is_floating_point())]
    for seed, tensor in enumerate(tensors, 1):
        tensor.mul_(1 + unit * draw(tensor.shape, seed).to(tensor))
    moved_x = rounded_x * (1 + unit * draw(x.shape, seed=0).to(rounded_x))
    from_one = measure_tokens(call_exactly(moved, moved_x), y)
    quantiles = torch.tensor(QUANTILES, dtype=y.dtype, device=y.device)
    inside = ROUNDINGS**0.5 * (from_one.quantile(quantiles) + from_angles.quantile(quantiles))
    if loops_over_tokens(exact, rounded_x):
        with torch.enable_grad(), RoundedResults(unit):
            from_each = measure_tokens(call_exactly(exact, rounded_x.requires_grad_()), y).detach()
        inside = torch.maximum(inside, SPREAD * from_each.quantile(quantiles))
    allowed = inside + unit  # of the output itself, which is rounded even where nothing moves it
    return error.quantile(quantiles).tolist(), allowed.tolist()


def loops_over_tokens(module: nn.Module, x: Float[Tensor, "1 t d"]) -> bool:
    """Whether a module calls more torch functions for more tokens, so its roundings are more."""
    few, more = (count_calls(module, x[:, :n]) for n in (LOOPED, 2 * LOOPED))
    return x.shape[1] >= 2 * LOOPED <= LOOPED + more - few


def call_exactly(module: nn.Module, x: Tensor) -> Tensor:
    """Return the output computed in fp64 throughout, or as it is where the module refuses that."""
    try:
        with Exact():
            return module(x)
    # A tensor that stayed in fp64 meets one that the module created in a lower precision.
    except Exception:
        return module(x)


def measure_tokens(y: Float[Tensor, "b t d"], reference: Float[Tensor, "b t d"]) -> Tensor:
    """Return each token's error relative to the norm of its own output."""
    difference, scale = (y - reference).norm(dim=-1), reference.norm(dim=-1)
    return (difference / scale).where(difference != 0, 0).flatten()


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


def judge_stable(module: nn.Module, probes: Probes) -> Verdict:
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
            return Verdict(STABLE.name, "fails", evidence, words, math.inf, GROWS, snippet)
    early = [size for size in sizes if tokens / 8 < size.tokens <= tokens / 4]
    late = [size for size in sizes if tokens / 2 < size.tokens]
    if not early:
        words = f"{tokens} tokens are too few to see a growth"
        return Verdict(STABLE.name, "not decided", words)
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
        return Verdict(STABLE.name, "fails", evidence, words, growth, GROWS, snippet)
    outcome = "holds" if growth <= WANDERS else "not decided"
    return Verdict(STABLE.name, outcome, evidence, measured=growth, allowed=WANDERS)


STABLE = Law("stable", judge_stable)


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
    snippet = write_program(probes.origin, (draw, put_special), body, f"{STABLE.name}: {words}")
    return Verdict(STABLE.name, "fails", words, words, math.inf, GROWS, snippet)


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
    return write_program(probes.origin, (draw,), body, f"{STABLE.name}: {words}")


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
    return write_program(probes.origin, uses, body, f"{STABLE.name}: {words}")


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
