"""Laws of agreement: again, row by row, compiled, or by its matrix, the output is the same."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lab.abilities import MatrixMixer
from lab.files import describe_error
from lab.laws.causal import compare_beside_special, list_special, name_special
from lab.laws.comparison import run_trials
from lab.laws.law import Law, Trial, Verdict
from lab.laws.noise import count_calls, relative_error
from lab.laws.probes import Probes, copy_module, draw
from lab.laws.reproduction import write_program
from lab.seeding import fix_seed


def judge_repeats(module: nn.Module, probes: Probes) -> Verdict:
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
    return Verdict(REPEATS.name, "holds", evidence, measured=0.0, allowed=0.0)


REPEATS = Law("deterministic", judge_repeats, seeded=False)


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
    snippet = write_program(probes.origin, uses, body, f"{REPEATS.name}: {words}")
    evidence = f"relative difference {error:.2g}"
    return Verdict(REPEATS.name, "fails", evidence, words, error, 0.0, snippet)


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
