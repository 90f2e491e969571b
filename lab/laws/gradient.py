"""The law of gradient reach: every parameter and input that should move the output does."""

import math
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from lab.laws.law import Law, Verdict
from lab.laws.noise import relative_error
from lab.laws.probes import Probes, draw, is_constant, move_constants
from lab.laws.reproduction import write_program
from lab.laws.trace import Ties, Trace, explain_cuts, list_uses
from lab.seeding import fix_seed

Reach = Literal["alive", "zero", "tie-only", "none"]

SEEDS = 3
BREAKINGS = 8
"""Orders in which ties are broken; of k rows chosen among n, all 8 keep one with chance (k/n)⁸."""


def reach(module: nn.Module, inputs: Sequence[Tensor]) -> dict[str, Reach]:
    """Return for each trainable parameter whether any probe gives it a gradient.

    "none": no path leads from the output to it; "zero": a path does, but the gradient is rounding
    (less than 64 units in the last place of the largest of all gradients); otherwise "alive". Ties
    are broken as torch breaks them.
    """
    sizes = compute_gradients(module, inputs)
    floor = find_floor(sizes, inputs[0].dtype)
    return {name: classify(size, floor) for name, size in sizes.items()}


def compute_gradients(
    module: nn.Module,
    inputs: Sequence[Tensor],
    mode: Ties | None = None,
) -> dict[str, Tensor | None]:
    """Return for each trainable parameter the largest gradient of each entry over all probes.

    None where no path leads to it. The input requires a gradient too, as it does inside a network:
    otherwise a checkpointed module gives its parameters none.
    """
    parameters = {n: p for n, p in module.named_parameters() if p.requires_grad and p.numel()}
    largest: dict[str, Tensor | None] = dict.fromkeys(parameters)
    before = {name: p.grad for name, p in parameters.items()}
    try:
        for x in inputs if parameters else ():
            for seed in range(SEEDS):
                for p in parameters.values():
                    p.grad = None
                with fix_seed(seed, x.device), mode or nullcontext():
                    y = module(draw_input(x, seed))
                    if y.requires_grad:
                        # A sum, because backward(weights) imports sympy, which takes seconds.
                        (y * draw(y.shape, seed + SEEDS).to(y)).sum().backward()
                for name, p in parameters.items():
                    largest[name] = _take_larger(largest[name], p.grad)
    finally:
        for name, p in parameters.items():
            p.grad = before[name]
    return largest


def find_tie_only(module: nn.Module, inputs: Sequence[Tensor]) -> tuple[list[str], list[str]]:
    """Return parameters of which no row keeps a gradient however ties are broken, and the ties.

    A row is one index into all axes but the last; with one axis, an entry.
    """
    scan = Ties(0, id(sys._getframe()))
    try:
        with torch.no_grad(), fix_seed(0, inputs[0].device), scan:
            module(draw_input(inputs[0], 0))
        if not scan.places:
            return [], []
        built = _find_alive_rows(module, inputs)
        kept = built
        for order in range(BREAKINGS):
            rows = _find_alive_rows(module, inputs, Ties(order))
            kept = {name: kept[name] & rows[name] for name in kept if name in rows}
            if all(torch.equal(kept[name], built[name]) for name in kept):
                return [], scan.places
    except Exception:  # the module relies on torch's order: ties cannot be judged
        return [], []
    alone = [name for name in kept if built[name].any() and not kept[name].any()]
    return alone, scan.places


def _find_alive_rows(
    module: nn.Module, inputs: Sequence[Tensor], mode: Ties | None = None
) -> dict[str, Bool[Tensor, "..."]]:
    sizes = compute_gradients(module, inputs, mode=mode)
    floor = find_floor(sizes, inputs[0].dtype)
    alive = {name: size > floor for name, size in sizes.items() if size is not None}
    return {name: a.any(dim=-1) if a.ndim > 1 else a for name, a in alive.items()}


def draw_input(like: Tensor, seed: int) -> Tensor:
    """Return a probe that requires a gradient and may be written to."""
    return draw(like.shape, seed).to(like).requires_grad_().clone()


def _take_larger(largest: Tensor | None, grad: Tensor | None) -> Tensor | None:
    if grad is None:
        return largest
    size = (grad.to_dense() if grad.is_sparse else grad).abs()
    return size if largest is None else torch.maximum(largest, size)


def find_floor(sizes: dict[str, Tensor | None], dtype: torch.dtype) -> float:
    """Return the size below which a gradient is rounding."""
    largest = (size.max().item() for size in sizes.values() if size is not None)
    finite = [size for size in largest if math.isfinite(size)]
    return 64 * torch.finfo(dtype).eps * max(finite, default=0.0)


def classify(size: Tensor | None, floor: float) -> Reach:
    """Return how a parameter is reached, by the sizes of its gradient."""
    if size is None:
        return "none"
    return "alive" if (size > floor).any() else "zero"


def find_uncalled(
    module: nn.Module, inputs: Sequence[Tensor], names: Collection[str]
) -> dict[str, str]:
    """Return for each parameter of an uncalled submodule the path of the outermost such submodule.

    Neither the submodule nor any part of it is called, and no operation uses a parameter of it, on
    any probe. Two kinds are left out, since they are faults: a layer that holds no others, which
    `forward` must have forgotten, unless it is one branch of a `ModuleDict`; and a member of a
    `ModuleList` or a `Sequential` of which another is called, since lists are to be gone through.

    Args:
        module: as it is; it runs forward.
        inputs: what to try it on.
        names: of the parameters that are asked for.
    """
    parameters = dict(module.named_parameters())
    with _note_calls(module) as reached:
        for x in inputs:
            for seed in range(SEEDS):
                trace = Trace(id(sys._getframe()))
                with fix_seed(seed, x.device), trace:
                    module(draw_input(x, seed))
                # What holds parameters alone, such as a `ParameterList`, is used without a call.
                for n, parameter in parameters.items():
                    if any(list_uses(trace.operations, parameter)):
                        reached.update(_list_paths(n.rpartition(".")[0]))
    found = {n: _find_outermost(n, reached) for n in names}
    return {n: path for n, path in found.items() if path and not _is_forgotten(module, path)}


@contextmanager
def _note_calls(module: nn.Module) -> Iterator[set[str]]:
    """Collect, within a `with` block, the paths of submodules called and of all that hold them."""
    reached, handles = set[str](), []
    for path, part in module.named_modules(remove_duplicate=False):
        paths = _list_paths(path)
        handles.append(part.register_forward_pre_hook(lambda *_, p=paths: reached.update(p)))
    try:
        yield reached
    finally:
        for handle in handles:
            handle.remove()


def _find_outermost(name: str, reached: set[str]) -> str:
    """Return the outermost submodule around a parameter that is not reached, or ""."""
    paths = _list_paths(name.rpartition(".")[0])
    return next((path for path in paths if path and path not in reached), "")


def _list_paths(path: str) -> list[str]:
    """List the paths of a submodule and of all that hold it, the outermost first."""
    parts = path.split(".")
    return ["", *(".".join(parts[: n + 1]) for n in range(len(parts)))]


def _is_forgotten(module: nn.Module, path: str) -> bool:
    """Whether a submodule that is not reached, while its parent is, must be a fault."""
    parent = module.get_submodule(path.rpartition(".")[0])
    if isinstance(parent, nn.ModuleList | nn.Sequential):
        return True
    single = next(module.get_submodule(path).children(), None) is None
    return single and not isinstance(parent, nn.ModuleDict)


Moves = dict[str, Tensor]
"""Which entries of parameters, by name, to move: bool."""

RANK: dict[Reach, int] = {"none": 0, "zero": 1, "tie-only": 2, "alive": 3}
ROUNDS = 4
"""How many zero-initialised parameters in a chain are followed."""
TRIALS = 8
"""Parameters that are moved alone, to find the one that another waits for."""
SHOWN = 8
"""Dead parameters that a counter-example names."""


def judge(module: nn.Module, probes: Probes) -> Verdict:
    """Every parameter gets a gradient, at once or after constant parameters have moved.

    Parameters behind a projection, a gate or keys that are initialised to zero get no gradient
    until those move, which is not a fault. So constant parameters are moved at entries that get a
    gradient, and the gradients are computed again. Two zeros that wait for each other never move.

    Parameters of a part that no input calls are not judged (`find_uncalled`): a note names it, as
    long as any other parameter learns.

    A row that is chosen among equal candidates has a gradient only because of how ties are broken.
    If no row of a parameter keeps one however ties are broken, the parameter is "tie-only".
    """
    inputs = probes.inputs
    built = _inspect(module, inputs)
    if not built.reach:
        return Verdict(LAW.name, "not applicable", "the module has no trainable parameter")
    if built.broken:
        return _judge_not_finite(module, probes, built.broken)
    later, moves, tied = _follow_moves(module, inputs, built)
    waiting = [n for n, how in built.reach.items() if how != "alive" and later[n] == "alive"]
    dead = [n for n, how in later.items() if how != "alive"]
    n_alive = len(built.reach) - len(dead) - len(waiting)
    evidence = f"{n_alive} of {len(built.reach)} parameters get a gradient at once, "
    if waiting:
        movers = _name_movers(module, moves, inputs, {n: built.reach[n] for n in waiting})
        asleep = _join_three(f"{n} ({built.reach[n]})" for n in waiting)
        evidence += f"{asleep} only after {movers}, "
    evidence += probes.describe()
    cancelled = [n for n in dead if _cancels(module, n, later, inputs[-1])]
    dead = [n for n in dead if n not in cancelled]
    if cancelled:
        evidence += f"; {_join_three(cancelled)} cancels out: changing it never moves the output"
    note = ""
    if n_alive or waiting:
        uncalled = _find_uncalled(module, probes.inputs, moves, {n: later[n] for n in dead})
        dead = [n for n in dead if n not in uncalled]
        note = _describe_uncalled(uncalled)
    if not dead:
        return Verdict(LAW.name, "holds", evidence, measured=0, allowed=0, note=note)
    with _move(module, moves):
        words = list(_explain(module, inputs[-1], {n: later[n] for n in dead[:SHOWN]}, tied))
    more = f"; and {len(dead) - SHOWN} more" if len(dead) > SHOWN else ""
    snippet = _write_snippet(probes, probes.lengths[-1], dead[0], built.reach[dead[0]], words[0])
    evidence += f"; note: {note}" if note else ""
    return Verdict(LAW.name, "fails", evidence, "; ".join(words) + more, len(dead), 0, snippet)


LAW = Law("gradient reach", judge)


@dataclass(frozen=True)
class _Inspection:
    """The gradients of all trainable parameters.

    Attributes:
        reach: of each parameter, with ties taken into account.
        entries: of each parameter, those that get a gradient.
        broken: names of parameters whose gradient is not finite.
        tied: functions that ranked equal entries, with their lines.
    """

    reach: dict[str, Reach]
    entries: dict[str, Tensor]
    broken: list[str]
    tied: list[str]


def _inspect(module: nn.Module, inputs: Sequence[Tensor]) -> _Inspection:
    sizes = compute_gradients(module, inputs)
    floor = find_floor(sizes, inputs[0].dtype)
    found: dict[str, Reach] = {name: classify(size, floor) for name, size in sizes.items()}
    alone, tied = find_tie_only(module, inputs[-1:])
    for name in alone:
        found[name] = "tie-only"
    entries = {name: size > floor for name, size in sizes.items() if size is not None}
    broken = [n for n, size in sizes.items() if size is not None and not size.isfinite().all()]
    return _Inspection(found, entries, broken, tied)


def _follow_moves(
    module: nn.Module, inputs: Sequence[Tensor], first: _Inspection
) -> tuple[dict[str, Reach], Moves, list[str]]:
    """Move constant entries that get a gradient, until no more parameters come alive."""
    found, tied, moves = dict(first.reach), first.tied, _find_free(module, first.entries)
    for _ in range(ROUNDS):
        if not moves or all(how == "alive" for how in found.values()):
            break
        with _move(module, moves):
            again = _inspect(module, inputs[-1:])
        tied = again.tied
        better = [n for n, how in again.reach.items() if RANK[how] > RANK[found[n]]]
        if not better:
            break
        found.update((name, again.reach[name]) for name in better)
        for name, entries in _find_free(module, again.entries).items():
            moves[name] = moves[name] | entries if name in moves else entries
    return found, moves, tied


def _find_free(module: nn.Module, entries: Moves) -> Moves:
    """Return the entries of constant parameters among those that get a gradient."""
    parameters = dict(module.named_parameters())
    return {n: e for n, e in entries.items() if e.any() and is_constant(parameters[n])}


@contextmanager
def _move(module: nn.Module, moves: Moves) -> Iterator[None]:
    """Put noise on entries within a `with` block; modules that keep an output cannot be copied."""
    parameters = {n: p for n, p in module.named_parameters() if n in moves}
    before = [p.detach().clone() for p in parameters.values()]
    noisy = move_constants(nn.ParameterList(parameters.values()), seed=0).parameters()
    try:
        with torch.no_grad():
            for (name, p), there in zip(parameters.items(), noisy, strict=True):
                p.copy_(torch.where(moves[name], there, p))
        yield
    finally:
        with torch.no_grad():
            for p, was in zip(parameters.values(), before, strict=True):
                p.copy_(was)


def _name_movers(
    module: nn.Module, moves: Moves, inputs: Sequence[Tensor], waiting: dict[str, Reach]
) -> str:
    """Name the parameters that the waiting ones wait for, by moving one at a time."""
    built = dict(module.named_parameters())
    zeros_first = sorted(moves, key=lambda name: bool(built[name].any()))
    left, movers = set(waiting), []
    for name in zeros_first[:TRIALS]:
        if not left or len(moves) == 1:
            break
        with _move(module, {name: moves[name]}):
            found = reach(module, inputs[-1:])
            if "tie-only" in waiting.values():
                found = _inspect(module, inputs[-1:]).reach
        freed = {n for n in left if found[n] == "alive"}
        movers += [name] if freed else []
        left -= freed
    movers = list(moves) if left else movers
    return f"{_join_three(movers)} {'has' if len(movers) == 1 else 'have'} moved"


def _find_uncalled(
    module: nn.Module, inputs: Sequence[Tensor], moves: Moves, dead: dict[str, Reach]
) -> dict[str, str]:
    """Return the parameters of submodules that are called neither as built nor after moves."""
    names = [n for n, how in dead.items() if how == "none" and "." in n]
    found = find_uncalled(module, inputs, names) if names else {}
    if not (found and moves):
        return found
    with _move(module, moves):
        return find_uncalled(module, inputs[-1:], list(found))


def _describe_uncalled(uncalled: dict[str, str]) -> str:
    """Name submodules that are not called, with how many parameters each has."""
    counts = Counter(uncalled.values())
    words = [
        f"{path} ({n} {'parameter' if n == 1 else 'parameters'})" for path, n in counts.items()
    ]
    if not words:
        return ""
    verb = "is" if len(words) == 1 else "are"
    return f"{_join_three(words)} {verb} not called, so not judged"


@torch.no_grad()
def _cancels(module: nn.Module, name: str, found: dict[str, Reach], x: Tensor) -> bool:
    """Whether a linear map's bias learns nothing because it shifts all its outputs alike.

    For example a bias of keys, which softmax ignores: the map's weight learns, and moving its
    outputs apart moves the module's output.
    """
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    learns = found.get(f"{path}.weight".removeprefix(".")) == "alive"
    if last != "bias" or found[name] != "zero" or not isinstance(owner, nn.Linear) or not learns:
        return False
    y = module(x)
    handle = owner.register_forward_hook(lambda _, args, out: out + draw(out.shape, 1).to(out))
    moved = module(x)
    handle.remove()
    return relative_error(moved - y, y) > torch.finfo(torch.float32).eps


def _explain(
    module: nn.Module, like: Tensor, dead: dict[str, Reach], tied: list[str]
) -> Iterator[str]:
    """Yield each dead parameter with what cuts it, where a trace shows it."""
    none, zero = ([n for n, how in dead.items() if how == cut] for cut in ("none", "zero"))
    reasons = explain_cuts(module, draw_input(like, 0), none, zero)
    for name, how in dead.items():
        words = reasons.get(name)
        if how == "tie-only":
            words = f"chosen among equals by {_join_three(tied)}"
        yield f"{name}: {how}, {words}" if words else f"{name}: {how}"


def _judge_not_finite(module: nn.Module, probes: Probes, broken: list[str]) -> Verdict:
    """Judge gradients that are not finite: a fault only where the output is finite."""
    evidence = f"{len(broken)} gradients are not finite, {probes.describe()}"
    for x in probes.inputs:
        with torch.no_grad():
            finite = all(module(draw_input(x, seed)).isfinite().all() for seed in range(SEEDS))
        if not finite:
            return Verdict(LAW.name, "not decided", f"{evidence}, and neither is the output")
        if found := _inspect(module, [x]).broken:
            words = f"length {x.shape[1]}: the gradient of {_join_three(found)} is not finite"
            snippet = _write_snippet(probes, x.shape[1], found[0], "not finite", words)
            return Verdict(LAW.name, "fails", evidence, words, len(broken), 0, snippet)
    return Verdict(LAW.name, "not decided", evidence)


def _write_snippet(probes: Probes, length: int, name: str, how: str, words: str) -> str:
    """Write the program that shows one parameter's gradient on an input of a length."""
    title, line = f"{LAW.name}: {words}", probes.print_input(probes.settings.batch, length)
    if how == "tie-only":
        body = f"""
            {line}
            alone, places = find_tie_only(module, [x])
            print("no row keeps its gradient however ties are broken:", alone, places)
            sys.exit({name!r} in alone)
        """
        return write_program(probes.origin, (draw, find_tie_only), body, title)
    body = f"""
        module.get_parameter({name!r})
        {line}
        y = module(x.requires_grad_().clone())
        if y.requires_grad:
            (y * draw(y.shape, seed={SEEDS}).to(y)).sum().backward()
        grads = {{n: p.grad for n, p in module.named_parameters() if p.grad is not None}}
        sizes = {{n: grad.abs().max().item() for n, grad in grads.items()}}
        size, largest = sizes.pop({name!r}, None), max(sizes.values(), default=0.0)
        print({name!r}, "has a gradient of at most", size, "and the others of", largest)
        alive = size is not None and 64 * torch.finfo(x.dtype).eps * largest < size
        sys.exit(not (alive and size < float("inf")))
    """
    return write_program(probes.origin, (draw,), body, title)


def _join_three(names: Iterable[str]) -> str:
    """Join the first three names and count the others."""
    names = list(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
