"""Laws of agreement: again, row by row, compiled, or by its matrix, the output is the same."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lab.abilities import MatrixMixer
from lab.files import describe_error
from lab.laws.causal import compare_beside_special, list_special, name_special
from lab.laws.comparison import NOISY, ROUNDINGS, run_in_half, run_trials
from lab.laws.law import Law, Trial, Verdict
from lab.laws.noise import count_calls, noise_floor, relative_error
from lab.laws.probes import Probes, copy_module, draw
from lab.laws.reproduction import write_program
from lab.seeding import fix_seed


def judge_repeats(module: nn.Module, probes: Probes) -> Verdict:
    """In evaluation the same input gives the same bits; in training the same input and seed do.

    Nor does an output depend on earlier calls, on whether gradients are computed, or on the input's
    strides; nor does a call change its input, an earlier output, or torch's random generator.
    """
    random = False
    few = {probes.lengths[0], probes.lengths[len(probes.lengths) // 2], probes.lengths[-1]}
    for x in probes.inputs:
        tried = copy_module(module).train()
        ways = [(call_twice, "a second call returns another output", True)]
        ways += OTHER_WAYS if x.shape[1] in few else OTHER_WAYS[:1]
        for repeat, words, exact in ways:
            found = _repeat(module.eval(), probes, x, repeat, words, exact)
            if found is not None:
                return found
        words = "in training, a call with the same seed returns another output"
        found = _repeat(tried, probes, x, call_twice_seeded, words)
        if found is not None:
            return found
        random |= not same(*call_twice(tried, x))
    evidence = f"two calls (in training, with one seed) return equal bits, {probes.describe()}"
    if random:
        evidence += "; in training, calls without a seed differ"
    return Verdict(REPEATS.name, "holds", evidence, measured=0.0, allowed=0.0)


REPEATS = Law("deterministic", judge_repeats, seeded=False)


def _repeat(
    module: nn.Module,
    probes: Probes,
    x: Tensor,
    repeat: Callable[..., tuple[Tensor, Tensor]],
    words: str,
    exact: bool = True,
) -> Verdict | None:
    """Return the failure if two outputs differ: by a bit, or, if not exact, by more than rounding.

    A fresh copy is called: it has seen no input that it could remember, and calls in training may
    change it, e.g. its running statistics.
    """
    try:
        first, second = repeat(copy_module(module), x)
    except Exception:
        if repeat is call_twice:
            raise
        return None  # e.g. strides that it refuses
    error = relative_error((second - first).detach(), first.detach())
    if same(first, second):
        return None
    allowed = 0.0
    if not exact:
        allowed = ROUNDINGS * noise_floor(copy_module(module), x, probes.inside)
        if error <= allowed or not allowed < NOISY:
            return None
    words = f"length {x.shape[1]}: {words}"
    body = f"""
        {probes.print_input(x.shape[0], x.shape[1])}
        module.train({module.training})
        for _ in range(20):  # what differs by chance may agree at first
            first, second = {repeat.__name__}(module, x)
            if not same(first, second):
                break
        error = relative_error((second - first).detach(), first.detach())
        print({words + ": relative difference"!r}, error, "of {allowed:.2g} allowed")
        sys.exit(not (same(first, second) or error <= {allowed!r}))
    """
    uses = (draw, relative_error, same, repeat)
    snippet = write_program(probes.origin, uses, body, f"{REPEATS.name}: {words}")
    evidence = f"relative difference {error:.2g}"
    return Verdict(REPEATS.name, "fails", evidence, words, error, allowed, snippet)


@torch.no_grad()
def call_twice(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of two calls."""
    return module(x.clone()).clone(), module(x.clone())


@torch.no_grad()
def call_twice_seeded(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of one call each of two copies, with the same seed.

    A module in training may keep averages, which a call changes; the seed is not to blame for that.
    """
    other = copy_module(module)
    with fix_seed(0, x.device):
        first = module(x.clone())
    with fix_seed(0, x.device):
        return first, other(x.clone())


@torch.no_grad()
def call_after_another(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of a first call, and of one after another input of the same shape."""
    other = copy_module(module)
    other(draw(x.shape, seed=1).to(x))
    return module(x.clone()), other(x.clone())


@torch.no_grad()
def call_after_others(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of a first call, and of one after a longer input and a larger batch."""
    (b, t, d), other = x.shape, copy_module(module)
    for shape in ((b, 2 * t + 1, d), (2 * b + 1, t, d)):
        with suppress(Exception):  # e.g. longer than a table of positions
            other(draw(shape, seed=1).to(x))
    return module(x.clone()), other(x.clone())


@torch.no_grad()
def keep_output(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a copy of an output, and the output itself after a call with another input."""
    y = module(x)
    before = y.clone()
    module(draw(x.shape, seed=1).to(x))
    return before, y


@torch.no_grad()
def keep_input(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return an input before and after a call."""
    given = x.clone()
    module(given)
    return x, given


@torch.no_grad()
def keep_generator(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state of torch's generator before and after a second call, as numbers."""
    module(x)  # the first may make what it needs
    with fix_seed(0, x.device):
        before = torch.get_rng_state()
        module(x)
        return before.double(), torch.get_rng_state().double()


def call_with_gradients(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of a call with gradients and of one without."""
    first = module(x.clone().requires_grad_())
    with torch.no_grad():
        return first, module(x.clone())


@torch.no_grad()
def call_strided(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs for an input and for one whose time stands before its rows in memory."""
    return module(x), module(x.transpose(0, 1).contiguous().transpose(0, 1))


OTHER_WAYS = [
    (call_after_another, "a call after one with another input returns another output", True),
    (
        call_after_others,
        "a call after a longer input and a larger batch returns another output",
        False,
    ),
    (keep_output, "a later call overwrites the output that was returned", True),
    (keep_input, "a call changes its input", True),
    (keep_generator, "a call draws random numbers or sets their seed", True),
    (call_with_gradients, "with gradients the output is another than without (no_grad)", False),
    (call_strided, "the same input with other strides in memory gives another output", False),
]
"""Calls that must return the same, in evaluation mode, and whether to the bit."""


def same(first: Tensor, second: Tensor) -> bool:
    """Whether two outputs are equal, entry by entry; NaN equals NaN."""
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


MOST_ROWS = 32
MANY_ROWS = (32, 65, 130, 520)
"""Batches of short rows: sizes that exceed blocks of rows."""
NEAR = 0.01
"""Distance of similar tokens, which are routed alike, so that experts overflow."""


def judge_batches(module: nn.Module, probes: Probes) -> Verdict:
    """A row gives the same output alone, beside other rows, and in another order."""

    short = min((n for n in probes.lengths if n > 1), default=probes.lengths[0])

    def trials(module: nn.Module, x: Tensor) -> Iterator[Trial]:
        yield from _list_batches(x, probes.same_shape)
        if x.shape[1] == short and not probes.same_shape:
            yield from _list_many_rows(probes.most_rows)
        for special in list_special(module) if x.shape[1] == short and len(x) > 1 else ():
            s = x.shape[1] // 2
            words = f"beside rows that end in {name_special(special)} from position {s} on, output "
            given = {"s": s, "special": special}
            yield Trial(compare_beside_special, given, f"{words}{{position}} of row 0 moves")

    # Calls with inputs of the same shape round alike.
    inside = probes.dtype if probes.same_shape else None
    found = run_trials(BATCHES.name, module, probes, trials, inside=inside)
    if found.verdict != "holds":
        return found
    found = run_in_half(BATCHES.name, module, probes, _list_half_batches) or found
    if found.verdict != "holds" or probes.same_shape:
        return found
    rows = max(n for n in MANY_ROWS if n <= probes.most_rows)
    return replace(found, evidence=f"{found.evidence}; up to {rows} rows of {short} tokens")


BATCHES = Law("batch-invariant", judge_batches, conditions="all")


def _list_batches(x: Tensor, same_shape: bool) -> Iterator[Trial]:
    if not same_shape:
        words = "reversing the batch moves output {position} of row {row}"
        yield Trial(compare_reversed_rows, {}, words)
        if x.shape[1] <= MOST_ROWS:
            # With as many rows as tokens, axes that are mistaken for each other fit.
            words = "with as many rows as tokens, output {position} of row {row} moves"
            yield Trial(compare_square_batch, {}, words, refusable=True)
    for row in range(x.shape[0]):
        if not same_shape:
            words = f"without the other rows, output {{position}} of row {row} moves"
            yield Trial(compare_row_alone, {"row": row}, words, refusable=True)
        words = f"beside other rows, output {{position}} of row {row} moves"
        yield Trial(compare_among_others, {"row": row}, words)


def _list_half_batches(module: nn.Module, x: Tensor) -> Iterator[Trial]:
    return (trial for trial in _list_batches(x, True) if trial.given["row"] == 0)


def _list_many_rows(most: int) -> Iterator[Trial]:
    for rows in (n for n in MANY_ROWS if n <= most):
        words = f"in a batch of {rows}, output {{position}} of a row moves"
        yield Trial(compare_many_rows, {"rows": rows, "spread": 1.0}, words, refusable=True)
    rows = max(n for n in MANY_ROWS if n <= most)
    words = f"in a batch of {rows} similar rows, output {{position}} of a row moves"
    yield Trial(compare_many_rows, {"rows": rows, "spread": NEAR}, words, refusable=True)


@torch.no_grad()
def compare_many_rows(
    module: nn.Module, x: Tensor, rows: int, spread: float
) -> tuple[Tensor, Tensor]:
    """Return how the first, middle and last outputs of a large batch move in a batch of three.

    A spread below 1 is the distance of all tokens from the first token of x.
    """
    many = spread * draw((rows, *x.shape[1:]), seed=rows).to(x)
    if spread < 1:
        many += x[0, 0]
    y = module(many)
    few = [0, rows // 2, rows - 1]
    return module(many[few]) - y[few], y


@torch.no_grad()
def compare_reversed_rows(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return how outputs move when the rows come in reverse order."""
    y = module(x)
    return module(x.flip(0)).flip(0) - y, y


@torch.no_grad()
def compare_row_alone(module: nn.Module, x: Tensor, row: int) -> tuple[Tensor, Tensor]:
    """Return how a row's output moves when the row is alone."""
    y = module(x)
    return module(x[row : row + 1]) - y[row : row + 1], y


@torch.no_grad()
def compare_among_others(module: nn.Module, x: Tensor, row: int) -> tuple[Tensor, Tensor]:
    """Return how a row's output moves when all other rows change."""
    y = module(x)
    others = 8 * draw(x.shape, seed=row + 1).to(x)
    others[row] = x[row]
    return (module(others) - y)[row : row + 1], y


@torch.no_grad()
def compare_square_batch(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return how outputs move when there are as many rows as tokens."""
    y = module(x)
    rows = draw((x.shape[1], *x.shape[1:]), seed=1).to(x)
    n = min(len(rows), len(x))
    rows[:n] = x[:n]
    return module(rows)[:n] - y[:n], y


MOST_CALLS = 1500
"""Calls of torch functions in what is compiled, at most."""


def judge_forms(module: nn.Module, probes: Probes) -> Verdict:
    """The compiled module has the same outputs and gradients as the eager one.

    Other forms have their own laws: "prefill = step" compares the recurrence of `step` with
    forward's chunks, "matrix applies" the matrix applied to values. Compiling takes seconds, so
    this law is not decided where no compiler is named.
    """
    compiler = probes.settings.compiler
    if compiler in (None, "none"):
        return Verdict(FORMS.name, "not decided", "no compiler was chosen")
    # Every length is compiled anew, so only the longest is tried, which has the most chunks; but a
    # loop over tokens is compiled token by token, which limits the length.
    few = [n for n in probes.lengths if count_calls(module, probes.input(n)) <= MOST_CALLS]
    longest = probes.with_lengths([max(few, default=probes.lengths[0])])
    refusals = []
    # Where a backend cannot compile the module, tracing alone may already differ from eager code.
    for backend in dict.fromkeys((compiler, "eager")):
        try:
            found = run_trials(FORMS.name, module, longest, partial(_list_forms, backend))
        except Exception as error:
            refusals.append(f"{backend} does not compile it: {describe_error(error)}")
            continue
        if found.verdict != "not decided":
            evidence = "; ".join([f"{backend}: {found.evidence}", *refusals])
            return replace(found, evidence=evidence)
        refusals.append(f"{backend}: {found.evidence}")
    return Verdict(FORMS.name, "not decided", "; ".join(refusals))


FORMS = Law("forms agree", judge_forms)


def _list_forms(backend: str, module: nn.Module, x: Tensor) -> Iterator[Trial]:
    words = "compiling moves output or gradient {position} of row {row}"
    yield Trial(compare_compiled, {"backend": backend}, words)


def compare_compiled(module: nn.Module, x: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """Return how outputs and gradients at the input, side by side, move when a copy is compiled.

    Each is relative to its own largest entry.
    """
    # Slow to import, and only this law needs it.
    from torch._dynamo.utils import counters

    # Compiled code is cached by class. An earlier module of the same class must neither lend its
    # code nor use up the allowed recompilations, after which torch silently runs eager code.
    torch._dynamo.reset()
    compiled = torch.compile(deepcopy(module), backend=backend)
    counters.clear()
    (y, grad), (compiled_y, compiled_grad) = (
        _differentiate(form, x) for form in (module, compiled)
    )
    if not counters["stats"]["unique_graphs"]:
        raise RuntimeError("torch.compile compiled no part of it")
    torch._dynamo.reset()
    tiny = torch.finfo(x.dtype).tiny
    moved = [
        (compiled_y - y).flatten(2) / y.abs().max().clamp(min=tiny),
        (compiled_grad - grad).flatten(2) / grad.abs().max().clamp(min=tiny),
    ]
    return torch.cat(moved, -1), torch.ones_like(x)


def _differentiate(form: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a form's output and the gradient at the input, zero if there is none."""
    inputs = x.clone().requires_grad_()
    y = form(inputs)
    if not y.requires_grad:
        return y, torch.zeros_like(x)
    against = draw(y.shape, seed=0).to(y)
    (grad,) = torch.autograd.grad(y, inputs, against, materialize_grads=True)
    return y.detach(), grad


def judge_matrix(module: nn.Module, probes: Probes) -> Verdict:
    """forward(x) = project(x, matrix(x) @ values(x))."""
    if not isinstance(module, MatrixMixer):
        missing = "the module has no matrix, values and project"
        return Verdict(MATRIX.name, "not applicable", missing)
    return run_trials(MATRIX.name, module, probes, _list_matrix)


MATRIX = Law("matrix applies", judge_matrix, conditions="evaluating", seeded=False)


def _list_matrix(module: nn.Module, x: Tensor) -> Iterator[Trial]:
    words = "forward(x) is not project(x, matrix(x) @ values(x)) at output {position} of row {row}"
    yield Trial(compare_matrix, {}, words)


@torch.no_grad()
def compare_matrix(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return how outputs move when the returned matrix is applied."""
    y = module(x)
    return module.project(x, module.matrix(x) @ module.values(x)) - y, y
