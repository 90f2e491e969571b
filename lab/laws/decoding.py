"""Laws of decoding: steps, prefills, padding and a later start give what one call gives."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lab.abilities import Decoder
from lab.laws.adapters import PATTERNS
from lab.laws.causal import Special, list_special, name_special, put_special
from lab.laws.comparison import ROUNDINGS, run_trials
from lab.laws.documents import judge_mask
from lab.laws.law import Law, Trial, Trials, Verdict
from lab.laws.noise import lower_precision, noise_floor, relative_error
from lab.laws.probes import Probes, draw

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

    def start(self, batch: int, position: int = 0) -> Any:
        """Return the state before the first token."""
        return self.module.start(batch, position)

    def prefill(
        self, x: Tensor, state: Any = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Return the last output on each prefix of further tokens, and the state after all."""
        parts = [
            self.module.prefill(x[:, :end], state, None if keep is None else keep[:, :end])
            for end in range(1, x.shape[1] + 1)
        ]
        return torch.stack([y[:, -1] for y, _ in parts], 1), parts[-1][1]

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return the output of one further token, and the state after it."""
        return self.module.step(x, state)


FAR = 3
"""Steps taken from the state after a prefill."""
SHORT = 16
"""Longest input in which special ones are put."""
MANY = 130
"""Steps taken from the start."""


def judge_decoding(module: nn.Module, probes: Probes) -> Verdict:
    """Any split into prefills and steps gives the outputs of forward, and changes no state."""
    if not isinstance(module, Decoder):
        if probes.undecoded:
            return Verdict(DECODING.name, "not decided", probes.undecoded)
        missing = "the module has no start, prefill and step"
        return Verdict(DECODING.name, "not applicable", missing)
    found = run_trials(
        DECODING.name, module, probes, _list_decoding_trials, longer=_list_longer_trials
    )
    return attribute_to_leak(found, module, probes, _list_decoding_trials)


DECODING = Law("prefill = step", judge_decoding, conditions="evaluating", seeded=False)


def _list_decoding_trials(module: nn.Module, x: Tensor) -> Iterator[Trial]:
    t = x.shape[1]
    other = "moves output {position} of row {row}"
    words = f"decoding token by token from the start {other}"
    yield Trial(compare_steps, {"cut": 0, "end": min(t, MANY)}, words)
    for special in list_special(module) if 1 < t <= SHORT else ():
        words = (
            f"with {name_special(special)} at position {t // 2}, decoding token by token {other}"
        )
        yield Trial(compare_steps_with_special, {"s": t // 2, "special": special}, words)
    words = "after one step, row {row}'s state has a wrong position"
    yield Trial(check_step_position, {"cut": 0}, words)
    for cut in sorted({cut for cut in (1, t // 3, t // 2, t - 1) if 0 < cut < t}):
        end = min(cut + FAR, t)
        words = f"splitting forward into prefills of {cut} and {t - cut} tokens {other}"
        yield Trial(compare_two_prefills, {"cut": cut}, words)
        words = f"decoding token by token after a prefill of {cut} {other}"
        yield Trial(compare_steps, {"cut": cut, "end": end}, words)
        words = f"using the state after {cut} tokens a second time {other}"
        yield Trial(compare_second_use, {"cut": cut, "end": end}, words)
        words = f"after prefills of {cut} and {t - cut}, row {{row}}'s state has a wrong position"
        yield Trial(check_prefill_position, {"cut": cut}, words)
        middle = (cut + t) // 2
        if cut < middle:
            given = {"cut": cut, "middle": middle, "end": min(middle + FAR, t)}
            words = f"decoding token by token after prefills of {cut} and {middle - cut} {other}"
            yield Trial(compare_steps_after_two, given, words)


def _list_longer_trials(module: nn.Module, x: Tensor) -> Iterator[Trial]:
    """Yield the trials of long inputs, which may exceed a cache."""
    t = x.shape[1]
    words = f"decoding token by token after a prefill of {t - FAR} moves output {{position}} of "
    yield Trial(compare_steps, {"cut": t - FAR, "end": t}, f"{words}row {{row}}")
    words = f"splitting forward into prefills of {t // 2} and {t - t // 2} tokens moves output "
    yield Trial(compare_two_prefills, {"cut": t // 2}, f"{words}{{position}} of row {{row}}")


@torch.no_grad()
def compare_steps(module: Any, x: Tensor, cut: int, end: int) -> tuple[Tensor, Tensor]:
    """Return how outputs from a cut to an end move when each is computed by a step."""
    y = module(x)
    state = module.prefill(x[:, :cut])[1] if cut else module.start(x.shape[0])
    return take_steps(module, x, y, state, cut, end), y


def compare_steps_with_special(
    module: Any, x: Tensor, s: int, special: Special
) -> tuple[Tensor, Tensor]:
    """Return how outputs move when each is computed by a step and a special input is at s."""
    return compare_steps(module, put_special(x, special, slice(s, s + 1)), 0, x.shape[1])


@torch.no_grad()
def compare_two_prefills(module: Any, x: Tensor, cut: int) -> tuple[Tensor, Tensor]:
    """Return how outputs move when they are computed by two prefills."""
    head, state = module.prefill(x[:, :cut])
    tail, _ = module.prefill(x[:, cut:], state)
    y = module(x)
    return torch.cat([head, tail], 1) - y, y


@torch.no_grad()
def compare_second_use(module: Any, x: Tensor, cut: int, end: int) -> tuple[Tensor, Tensor]:
    """Return how steps move when the state that they start from has been used before."""
    y = module(x)
    _, state = module.prefill(x[:, :cut])
    elsewhere = 8 * draw((x.shape[0], 3, x.shape[2]), seed=cut).to(x)
    module.step(elsewhere[:, 0], state)
    module.prefill(elsewhere, state)
    return take_steps(module, x, y, state, cut, end), y


@torch.no_grad()
def compare_steps_after_two(
    module: Any, x: Tensor, cut: int, middle: int, end: int
) -> tuple[Tensor, Tensor]:
    """Return how steps move after two prefills, the second from the state of the first."""
    y = module(x)
    _, state = module.prefill(x[:, :cut])
    _, state = module.prefill(x[:, cut:middle], state)
    return take_steps(module, x, y, state, middle, end), y


def take_steps(module: Any, x: Tensor, y: Tensor, state: Any, cut: int, end: int) -> Tensor:
    """Return how outputs of steps differ from outputs y; zero where no step was taken."""
    difference = torch.zeros_like(y)
    for i in range(cut, end):
        out, state = module.step(x[:, i], state)
        difference[:, i] = out - y[:, i]
    return difference


@torch.no_grad()
def check_step_position(module: Any, x: Tensor, cut: int) -> tuple[Tensor, Tensor]:
    """Return by how many tokens a state's position is wrong after a step."""
    state = module.start(x.shape[0], cut)
    _, state = module.step(x[:, 0], state)
    return compare_position(state, cut + 1)


@torch.no_grad()
def check_prefill_position(module: Any, x: Tensor, cut: int) -> tuple[Tensor, Tensor]:
    """Return by how many tokens a state's position is wrong after two prefills."""
    _, state = module.prefill(x[:, :cut])
    _, state = module.prefill(x[:, cut:], state)
    return compare_position(state, x.shape[1])


def compare_position(state: Any, position: int) -> tuple[Tensor, Tensor]:
    """Return by how many tokens a state's position differs from what it should be, and ones.

    A state that has no attribute `position` tells none, and is right.
    """
    if not hasattr(state, "position"):
        return torch.zeros(1, 1), torch.ones(1, 1)
    difference = (state.position - position).double()[:, None]
    return difference, torch.ones_like(difference)


def judge_padding(module: nn.Module, probes: Probes) -> Verdict:
    """Padding moves no real position, no state and no gradient, and nothing is NaN.

    Each row has its own number of tokens, and padding holds far larger numbers. A module that
    supports every pattern is also given a row of padding only, and goes on from a padded state
    through further padding.

    A module that does not decode, or not with a mask, is judged by the mask that its forward takes.

    Padding may take up positions where only their differences count. They differ by the rounding of
    a table of angles, which converting the module to fp64 does not undo.
    """
    patterns = getattr(module, "paddings", PATTERNS) if isinstance(module, Decoder) else ()
    if not patterns:
        missing = Verdict(PADDING.name, "not applicable", "the module takes no mask of padding")
        return judge_mask(PADDING.name, module, probes) or missing
    every = set(patterns) == set(PATTERNS)

    def trials(module: nn.Module, x: Tensor) -> Iterator[Trial]:
        for pattern in patterns:
            yield from _list_padding_trials(pattern, every)

    # There are five trials per pattern, so only every other length is tried, and the longest.
    few = sorted({*probes.lengths[::2], probes.lengths[-1]})
    few = probes.with_lengths(few)
    inside = lower_precision(probes.inside, probes.own) if _has_fixed_table(module) else None
    found = run_trials(PADDING.name, module, few, trials, inside=inside)
    return attribute_to_leak(found, module, few, trials)


PADDING = Law("padding", judge_padding, conditions="evaluating", seeded=False)


def _has_fixed_table(module: nn.Module) -> bool:
    """Whether a module has a table of numbers that does not learn."""
    frozen = (p for p in module.parameters() if not p.requires_grad)
    return any(
        x.is_floating_point() and x.ndim > 1 and len(x) > 1 for x in (*module.buffers(), *frozen)
    )


def _list_padding_trials(pattern: str, every: bool) -> Iterator[Trial]:
    given = {"pattern": pattern, "every": every}
    words = f"{pattern} padding gives NaN or infinity at position {{position}} of row {{row}}"
    yield Trial(find_not_finite, given, words)
    words = f"{pattern} padding moves the output of real token {{position}} in row {{row}}"
    yield Trial(compare_padded, given, words)
    words = f"through the state, {pattern} padding moves a later output of row {{row}}: at padding "
    words += "a recurrence must keep its state as it was, without decay"
    yield Trial(compare_after_padding, given, words)
    if every:
        words = f"a row of padding only moves the step after it ({pattern} padding in other rows)"
        yield Trial(compare_after_padding_only, {"pattern": pattern}, words)
    words = (
        f"{pattern} padding has a gradient that is not zero, or NaN, at {{position}} of row {{row}}"
    )
    yield Trial(measure_gradient_at_padding, given, words)


@torch.no_grad()
def find_not_finite(module: Any, x: Tensor, pattern: str, every: bool) -> tuple[Tensor, Tensor]:
    """Return infinity where an output, at a token or at padding, is not finite."""
    keep, _ = place_tokens(x, pattern, every)
    first, state = module.prefill(pad(x, keep), None, keep)
    tokens, keep = draw_further(x, pattern, every)
    second, _ = module.prefill(pad(tokens, keep), state, keep)
    y = torch.cat([first, second], 1)
    return torch.where(y.isfinite(), 0.0, torch.inf), torch.ones_like(y)


@torch.no_grad()
def compare_padded(module: Any, x: Tensor, pattern: str, every: bool) -> tuple[Tensor, Tensor]:
    """Return how the outputs of real tokens move when padding stands among them."""
    keep, counts = place_tokens(x, pattern, every)
    found, _ = module.prefill(pad(x, keep), None, keep)
    rows = [module(x[row : row + 1, :count]) for row, count in enumerate(counts)]
    difference = found.new_zeros(*x.shape[:2], found.shape[2])
    for row, count in enumerate(counts):
        difference[row, :count] = found[row][keep[row]] - rows[row][0]
    return difference, rows[0]


@torch.no_grad()
def compare_after_padding(
    module: Any, x: Tensor, pattern: str, every: bool
) -> tuple[Tensor, Tensor]:
    """Return how outputs after padding move: of a prefill, with padding if `every`, and a step."""
    keep, counts = place_tokens(x, pattern, every)
    _, state = module.prefill(pad(x, keep), None, keep)
    tokens, keep = draw_further(x, pattern, every)
    second, state = module.prefill(pad(tokens, keep), state, keep)
    third, _ = module.step(draw_last(x, every), state)
    difference, references = [], []
    for row, count in enumerate(counts):
        one = slice(row, row + 1)
        _, state = module.prefill(x[one, :count])
        y, state = module.prefill(tokens[one], state)
        z, _ = module.step(draw_last(x, every)[one], state)
        references.append(torch.cat([y, z[:, None]], 1))
        found = torch.cat([second[row][keep[row]][None], third[one, None]], 1)
        difference.append(found - references[-1])
    return torch.cat(difference), torch.cat(references)


@torch.no_grad()
def compare_after_padding_only(module: Any, x: Tensor, pattern: str) -> tuple[Tensor, Tensor]:
    """Return how a step moves after a row of padding only."""
    keep, _ = place_tokens(x, pattern, True)
    _, state = module.prefill(pad(x, keep), None, keep)
    token = draw_last(x, True)
    found, _ = module.step(token, state)
    y, _ = module.step(token[-1:], module.start(1))
    return (found[-1:] - y)[:, None], y


def measure_gradient_at_padding(
    module: Any, x: Tensor, pattern: str, every: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradient of real outputs at padding, and any gradient that is not finite.

    A mask that meets an infinity can give NaN in the backward pass while the output looks right.
    """
    keep, _ = place_tokens(x, pattern, every)
    inputs = pad(x, keep).requires_grad_()
    y = module.prefill(inputs, None, keep)[0][keep]
    if not y.requires_grad:
        return torch.zeros_like(inputs), inputs
    (grad,) = torch.autograd.grad((y * draw(y.shape, seed=0).to(y)).sum(), inputs)
    return grad.where(~keep[..., None] | ~grad.isfinite(), 0), grad


def place_tokens(x: Tensor, pattern: str, every: bool) -> tuple[Tensor, list[int]]:
    """Return a mask of where each row's tokens stand among padding, and each row's token count.

    The mask is t + 1 + t // 2 long. The first row has all t tokens of x, each further row fewer, at
    least one. With `every`, one more row without a token is last.
    """
    b, t, _ = x.shape
    counts = [t - row * (t - 1) // b for row in range(b)]
    keep = torch.zeros(b + every, t + 1 + t // 2, dtype=torch.bool)
    generator = torch.Generator().manual_seed(t)
    for row, count in enumerate(counts):
        at = torch.arange(count)
        if pattern == "left":
            at = keep.shape[1] - 1 - at
        elif pattern == "scattered":
            at = torch.randperm(keep.shape[1], generator=generator)[:count]
        keep[row, at] = True
    return keep.to(x.device), counts


def pad(x: Tensor, keep: Tensor) -> Tensor:
    """Return each row's first tokens where `keep` is True, and large numbers elsewhere."""
    y = 30 * draw((*keep.shape, x.shape[-1]), seed=keep.shape[1]).to(x)
    for row in range(len(x)):
        y[row, keep[row]] = x[row, : int(keep[row].sum())]
    return y


def draw_further(x: Tensor, pattern: str, every: bool) -> tuple[Tensor, Tensor]:
    """Return three further tokens per row, and a mask of where they stand among padding."""
    b, _, d = x.shape
    tokens = draw((b, 3, d), seed=x.shape[1]).to(x)
    if not every:
        return tokens, torch.ones(b, 3, dtype=torch.bool, device=x.device)
    places = {"left": [2, 3, 4], "right": [0, 1, 2], "scattered": [0, 2, 3]}
    keep = torch.zeros(b + 1, 5, dtype=torch.bool, device=x.device)
    keep[:b, places[pattern]] = True
    return tokens, keep


def draw_last(x: Tensor, every: bool) -> Tensor:
    """Return one more token per row."""
    return draw((x.shape[0] + every, x.shape[2]), seed=x.shape[1] + 1).to(x)


SHIFTS = (1, 1_000, 2_040, 32_760, 100_000)
ENDS = (2_040, 32_760)
"""Shifts just below the largest positions that fp16 and int16 hold exactly."""
BEYOND = 9
"""Least length that goes beyond them from there."""


def judge_shifts(module: nn.Module, probes: Probes) -> Verdict:
    """Starting at a later position gives the same outputs, where the module claims so.

    At position j a module in precision u knows an angle jθ, θ ≤ 1, to jθ·2u (θ and the product
    round). A rotated query and key err by 2u·j of their norms each, so their product errs by four
    roundings of its factors for each of the s + t positions passed. The outputs from the start err
    as well, which makes eight. How far a rounding of the input moves the output is the noise floor.

    Source: the bound of the RoPE properties, |Δ| ≤ ‖c‖‖b‖u·2θΣpositions, in the output's terms.
    """
    if not (isinstance(module, Decoder) and hasattr(module, "relative")):
        missing = "the module has no start, prefill and step, or does not declare `relative`"
        return Verdict(RELATIVE.name, "not applicable", missing)
    if not module.relative:
        words = "the module says that its positions are absolute"
        return Verdict(RELATIVE.name, "not applicable", words)
    found = []
    for shift in SHIFTS:

        def trials(module: nn.Module, x: Tensor, shift: int = shift) -> Iterator[Trial]:
            words = f"starting at position {shift} moves output {{position}} of row {{row}}"
            yield Trial(compare_shifted, {"shift": shift}, words)
            yield Trial(compare_shifted_step, {"shift": shift}, f"{words}, computed by a step")
            words = f"starting at position {shift}, the state ends at a wrong one in row {{row}}"
            yield Trial(check_shifted_position, {"shift": shift}, words)

        roundings = max(ROUNDINGS, 8 * (shift + probes.lengths[-1]))
        beyond = [n for n in probes.lengths if n >= BEYOND][:1] or probes.lengths[-1:]
        tried = probes.with_lengths(beyond) if shift in ENDS else probes
        found.append(run_trials(RELATIVE.name, module, tried, trials, roundings, probes.angles))
        if found[-1].verdict == "fails":
            return found[-1]
    decided = [v for v in found if v.verdict == "holds"]
    shifted = [(f"shifted by {s}", v) for s, v in zip(SHIFTS, found, strict=True)]
    if not decided:
        words = f"shifted by {SHIFTS[0]}: {found[0].evidence}; none of the larger shifts is decided"
        return Verdict(RELATIVE.name, "not decided", words)
    evidence = "; ".join(f"{how}: {v.evidence}" for how, v in shifted)
    left = "; ".join(how for how, v in shifted if v not in decided)
    worst = max(decided, key=lambda v: v.measured or 0.0)
    return replace(worst, evidence=evidence, left=left)


RELATIVE = Law("relative", judge_shifts, conditions="evaluating", seeded=False)


@torch.no_grad()
def compare_shifted(module: Any, x: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """Return how outputs move when the first token stands at a later position.

    Both are computed from a state, because a leak makes those differ from forward's.
    """
    y, _ = module.prefill(x, module.start(x.shape[0]))
    shifted, _ = module.prefill(x, module.start(x.shape[0], shift))
    return shifted - y, y


@torch.no_grad()
def compare_shifted_step(module: Any, x: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """Return how the first output moves when it is a step at a later position."""
    y, _ = module.step(x[:, 0], module.start(x.shape[0]))
    out, _ = module.step(x[:, 0], module.start(x.shape[0], shift))
    return (out - y)[:, None], y[:, None]


@torch.no_grad()
def check_shifted_position(module: Any, x: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """Return by how many tokens a state's position is wrong after a prefill that started later."""
    _, state = module.prefill(x, module.start(x.shape[0], shift))
    return compare_position(state, shift + x.shape[1])
