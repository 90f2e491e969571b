"""The law of gradients: every parameter learns."""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from lab.laws.conditions import constant, moved
from lab.laws.cuts import cuts
from lab.laws.probes import Probes, described, draw, relative
from lab.laws.reproduction import written
from lab.laws.ties import Ties
from lab.laws.verdict import Verdict, drawn

Reach = Literal["alive", "zero", "tie-only", "none"]

Moves = dict[str, Tensor]
"""Which entries of parameters, by name, to move: bool."""

RANK: dict[Reach, int] = {"none": 0, "zero": 1, "tie-only": 2, "alive": 3}
SEEDS = 3
BREAKINGS = 8  # ways to break ties; the chance to keep one row of k chosen among n is (k / n)⁸
ROUNDS = 4  # of zeros behind zeros
TRIALS = 8  # parameters moved alone, to tell which one another waits for
SHOWN = 8  # dead parameters in a counterexample


def gradient_reach(module: nn.Module, probes: Probes) -> Verdict:
    """Every parameter gets a gradient, if not at once then when what is constant has moved.

    What stands behind a projection, a gate or keys of zero waits for those to move, and that is no
    fault: entries that get a gradient are moved where the parameter is constant, and the others
    looked at again. Two zeros in front of each other wait for ever.

    A row of a parameter that is chosen among equals has a gradient only because ties are broken so.
    If no row keeps one however they are broken, the parameter is "tie-only".
    """
    law, inputs = "gradient reach", probes.inputs
    built = _look(module, inputs)
    if not built.reach:
        return Verdict(law, "not applicable", "the module has no trainable parameter")
    if built.broken:
        return _not_finite(module, probes, built.broken)
    later, moves, tied = _look_again(module, inputs, built)
    waiting = [n for n, how in built.reach.items() if how != "alive" and later[n] == "alive"]
    dead = [n for n, how in later.items() if how != "alive"]
    n_alive = len(built.reach) - len(dead) - len(waiting)
    evidence = f"{n_alive} of {len(built.reach)} parameters alive, "
    if waiting:
        movers = _movers(module, moves, inputs, {n: built.reach[n] for n in waiting})
        evidence += f"{_listed(f'{n} {built.reach[n]}' for n in waiting)} until {movers}, "
    evidence += described(probes)
    cancelled = [n for n in dead if _cancels(module, n, later, inputs[-1])]
    dead = [n for n in dead if n not in cancelled]
    if cancelled:
        evidence += f"; {_listed(cancelled)} cancels out: no change of it moves the output"
    if not dead:
        return Verdict(law, "holds", evidence, measured=0, allowed=0)
    with _moved(module, moves):
        words = list(_words(module, inputs[-1], {n: later[n] for n in dead[:SHOWN]}, tied))
    more = f"; and {len(dead) - SHOWN} more" if len(dead) > SHOWN else ""
    snippet = _snippet(probes, probes.lengths[-1], dead[0], built.reach[dead[0]], words[0])
    return Verdict(law, "fails", evidence, "; ".join(words) + more, len(dead), 0, snippet)


def reach(module: nn.Module, inputs: Sequence[Tensor], seeds: int = SEEDS) -> dict[str, Reach]:
    """Return, for each trainable parameter, whether any probe gives it a gradient, as ties fall.

    "none": no path leads from the output to it; "zero": a path does, and carries nothing but
    rounding (less than 64 units in the last place of the largest gradient of all); "alive".
    """
    sizes = gradients(module, inputs, seeds)
    floor = _floor(sizes, inputs[0].dtype)
    return {name: _reached(size, floor) for name, size in sizes.items()}


def gradients(
    module: nn.Module,
    inputs: Sequence[Tensor],
    seeds: int = SEEDS,
    mode: Ties | None = None,
) -> dict[str, Tensor | None]:
    """Return, for each trainable parameter, its entries' largest gradient over all probes.

    None where no path leads to it. The input asks for a gradient too, as it does inside a network:
    without, a checkpointed module gives its parameters none.
    """
    parameters = {n: p for n, p in module.named_parameters() if p.requires_grad and p.numel()}
    largest: dict[str, Tensor | None] = dict.fromkeys(parameters)
    before = {name: p.grad for name, p in parameters.items()}
    try:
        for x in inputs if parameters else ():
            for seed in range(seeds):
                for p in parameters.values():
                    p.grad = None
                with _seeded(seed, x.device), mode or nullcontext():
                    y = module(_input(x, seed))
                    if y.requires_grad:
                        # A sum: to be given weights, torch imports sympy, which takes seconds.
                        (y * draw(y.shape, seed + seeds).to(y)).sum().backward()
                for name, p in parameters.items():
                    largest[name] = _larger(largest[name], p.grad)
    finally:
        for name, p in parameters.items():
            p.grad = before[name]
    return largest


@dataclass(frozen=True)
class _Look:
    """What gradients say of every trainable parameter.

    Attributes:
        reach: ties considered.
        entries: that get a gradient.
        broken: whose gradient is not finite.
        tied: where equals were ranked.
    """

    reach: dict[str, Reach]
    entries: dict[str, Tensor]
    broken: list[str]
    tied: list[str]


def _look(module: nn.Module, inputs: Sequence[Tensor]) -> _Look:
    sizes = gradients(module, inputs)
    floor = _floor(sizes, inputs[0].dtype)
    found: dict[str, Reach] = {name: _reached(size, floor) for name, size in sizes.items()}
    alone, tied = _tie_only(module, inputs[-1:])
    for name in alone:
        found[name] = "tie-only"
    entries = {name: size > floor for name, size in sizes.items() if size is not None}
    broken = [n for n, size in sizes.items() if size is not None and not size.isfinite().all()]
    return _Look(found, entries, broken, tied)


def _look_again(
    module: nn.Module, inputs: Sequence[Tensor], look: _Look
) -> tuple[dict[str, Reach], Moves, list[str]]:
    """Let what is constant and gets a gradient move, until no more parameters come alive."""
    found, tied, moves = dict(look.reach), look.tied, _free(module, look.entries)
    for _ in range(ROUNDS):
        if not moves or all(how == "alive" for how in found.values()):
            break
        with _moved(module, moves):
            again = _look(module, inputs[-1:])
        tied = again.tied
        better = [n for n, how in again.reach.items() if RANK[how] > RANK[found[n]]]
        if not better:
            break
        found.update((name, again.reach[name]) for name in better)
        for name, entries in _free(module, again.entries).items():
            moves[name] = moves[name] | entries if name in moves else entries
    return found, moves, tied


def _free(module: nn.Module, entries: Moves) -> Moves:
    """Return the entries of constant parameters among those that get a gradient."""
    parameters = dict(module.named_parameters())
    return {n: e for n, e in entries.items() if e.any() and constant(parameters[n])}


@contextmanager
def _moved(module: nn.Module, moves: Moves) -> Iterator[None]:
    """Have noise on those entries for a while; a copy fails of a module that keeps an output."""
    parameters = {n: p for n, p in module.named_parameters() if n in moves}
    before = [p.detach().clone() for p in parameters.values()]
    noisy = moved(nn.ParameterList(parameters.values()), seed=0).parameters()
    try:
        with torch.no_grad():
            for (name, p), there in zip(parameters.items(), noisy, strict=True):
                p.copy_(torch.where(moves[name], there, p))
        yield
    finally:
        with torch.no_grad():
            for p, was in zip(parameters.values(), before, strict=True):
                p.copy_(was)


def _movers(
    module: nn.Module, moves: Moves, inputs: Sequence[Tensor], waiting: dict[str, Reach]
) -> str:
    """Say which parameters the waiting ones wait for, by moving one at a time."""
    built = dict(module.named_parameters())
    zeros_first = sorted(moves, key=lambda name: bool(built[name].any()))
    left, movers = set(waiting), []
    for name in zeros_first[:TRIALS]:
        if not left or len(moves) == 1:
            break
        with _moved(module, {name: moves[name]}):
            found = reach(module, inputs[-1:])
            if "tie-only" in waiting.values():
                found = _look(module, inputs[-1:]).reach
        freed = {n for n in left if found[n] == "alive"}
        movers += [name] if freed else []
        left -= freed
    movers = list(moves) if left else movers
    return f"{_listed(movers)} {'moves' if len(movers) == 1 else 'move'}"


@torch.no_grad()
def _cancels(module: nn.Module, name: str, found: dict[str, Reach], x: Tensor) -> bool:
    """Whether a map's bias learns nothing because all its outputs have it alike.

    A bias of keys, say, which softmax does not see: the map learns, and outputs that move apart do
    move what the module returns.
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
    return relative(moved - y, y) > torch.finfo(torch.float32).eps


def _words(
    module: nn.Module, like: Tensor, dead: dict[str, Reach], tied: list[str]
) -> Iterator[str]:
    """Yield each dead parameter with what cuts it, where that can be told."""
    none, zero = ([n for n, how in dead.items() if how == cut] for cut in ("none", "zero"))
    with _seeded(0, like.device):
        told = cuts(module, _input(like, 0), none, zero)
    for name, how in dead.items():
        words = f"chosen among equals by {_listed(tied)}" if how == "tie-only" else told.get(name)
        yield f"{name}: {how}, {words}" if words else f"{name}: {how}"


def _not_finite(module: nn.Module, probes: Probes, broken: list[str]) -> Verdict:
    """Judge gradients of NaN: of a finite output they are a fault, else another law's matter."""
    law, evidence = "gradient reach", f"{len(broken)} gradients are not finite, {described(probes)}"
    for x in probes.inputs:
        with torch.no_grad():
            finite = all(module(_input(x, seed)).isfinite().all() for seed in range(SEEDS))
        if not finite:
            return Verdict(law, "not decided", f"{evidence}, and neither is the output")
        if found := _look(module, [x]).broken:
            words = f"length {x.shape[1]}: the gradient of {_listed(found)} is not finite"
            snippet = _snippet(probes, x.shape[1], found[0], "not finite", words)
            return Verdict(law, "fails", evidence, words, len(broken), 0, snippet)
    return Verdict(law, "not decided", evidence)


def _snippet(probes: Probes, length: int, name: str, how: str, words: str) -> str:
    """Return the program that shows one parameter's gradient on an input of a length."""
    if how == "tie-only":
        body = f"""
            {drawn(probes, probes.batch, length)}
            alone, places = _tie_only(module, [x])
            print("no row keeps its gradient however ties are broken:", alone, places)
            sys.exit({name!r} in alone)
        """
        return written(probes.origin, (draw, _tie_only), body, f"gradient reach: {words}")
    body = f"""
        {drawn(probes, probes.batch, length)}
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
    return written(probes.origin, (draw,), body, f"gradient reach: {words}")


def _tie_only(module: nn.Module, inputs: Sequence[Tensor]) -> tuple[list[str], list[str]]:
    """Return the parameters no row of which keeps a gradient as ties are broken, and where.

    A row is all axes but the last; of one axis, an entry.
    """
    scan = Ties(0, id(sys._getframe()))
    try:
        with torch.no_grad(), _seeded(0, inputs[0].device), scan:
            module(_input(inputs[0], 0))
        if not scan.places:
            return [], []
        built = _alive_rows(module, inputs)
        kept = built
        for order in range(BREAKINGS):
            rows = _alive_rows(module, inputs, Ties(order))
            kept = {name: kept[name] & rows[name] for name in kept if name in rows}
            if all(torch.equal(kept[name], built[name]) for name in kept):
                return [], scan.places
    except Exception:  # an order that only holds unbroken: then ties cannot be judged
        return [], []
    alone = [name for name in kept if built[name].any() and not kept[name].any()]
    return alone, scan.places


def _alive_rows(
    module: nn.Module, inputs: Sequence[Tensor], mode: Ties | None = None
) -> dict[str, Bool[Tensor, "..."]]:
    sizes = gradients(module, inputs, mode=mode)
    floor = _floor(sizes, inputs[0].dtype)
    alive = {name: size > floor for name, size in sizes.items() if size is not None}
    return {name: a.any(dim=-1) if a.ndim > 1 else a for name, a in alive.items()}


def _input(like: Tensor, seed: int) -> Tensor:
    """Return a probe that asks for a gradient and may be written to."""
    return draw(like.shape, seed).to(like).requires_grad_().clone()


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw a module's own random numbers, of dropout say, alike each time."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _larger(largest: Tensor | None, grad: Tensor | None) -> Tensor | None:
    if grad is None:
        return largest
    size = (grad.to_dense() if grad.is_sparse else grad).abs()
    return size if largest is None else torch.maximum(largest, size)


def _floor(sizes: dict[str, Tensor | None], dtype: torch.dtype) -> float:
    """Return what a gradient must exceed to be more than rounding."""
    largest = (size.max().item() for size in sizes.values() if size is not None)
    finite = [size for size in largest if math.isfinite(size)]
    return 64 * torch.finfo(dtype).eps * max(finite, default=0.0)


def _reached(size: Tensor | None, floor: float) -> Reach:
    if size is None:
        return "none"
    return "alive" if (size > floor).any() else "zero"


def _listed(names: Iterable[str]) -> str:
    """Join the first three, and count the others."""
    names = list(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
