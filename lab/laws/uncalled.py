"""Submodules that a module never calls, such as an audio encoder when it reads tokens alone."""

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from lab.laws.cuts import list_uses
from lab.laws.reach import SEEDS, draw_input
from lab.laws.seeding import fix_seed
from lab.laws.trace import Trace


def find_uncalled(
    module: nn.Module, inputs: Sequence[Tensor], names: Collection[str]
) -> dict[str, str]:
    """Return for each parameter of an uncalled submodule the path of the outermost such submodule.

    Neither the submodule nor any part of it is called, and no operation uses the parameter, on any
    probe. Left out, since they are faults, are a layer that holds no others, which `forward` must
    have forgotten, unless it is one branch of a `ModuleDict`; and a member of a `ModuleList` or a
    `Sequential` of which another member is called, since lists are there to be gone through.

    Args:
        module: as it is; it runs forward.
        inputs: what to try it on.
        names: of the parameters that are asked for.
    """
    parameters, used = dict(module.named_parameters()), set[str]()
    with _note_calls(module) as reached:
        for x in inputs:
            for seed in range(SEEDS):
                trace = Trace(id(sys._getframe()))
                with fix_seed(seed, x.device), trace:
                    module(draw_input(x, seed))
                used |= {n for n in names if any(list_uses(trace.operations, parameters[n]))}
    found = {n: _find_outermost(n, reached) for n in names if n not in used}
    return {n: path for n, path in found.items() if path and not _is_forgotten(module, path)}


@contextmanager
def _note_calls(module: nn.Module) -> Iterator[set[str]]:
    """Collect, within a `with` block, the paths of submodules called and of all that hold them."""
    reached, handles = set[str](), []
    for path, part in module.named_modules(remove_duplicate=False):
        parts = path.split(".")
        paths = {"", *(".".join(parts[: n + 1]) for n in range(len(parts)))}
        handles.append(part.register_forward_pre_hook(lambda *_, p=paths: reached.update(p)))
    try:
        yield reached
    finally:
        for handle in handles:
            handle.remove()


def _find_outermost(name: str, reached: set[str]) -> str:
    """Return the outermost submodule around a parameter that is not reached, or ""."""
    parts = name.split(".")[:-1]
    paths = (".".join(parts[: n + 1]) for n in range(len(parts)))
    return next((path for path in paths if path not in reached), "")


def _is_forgotten(module: nn.Module, path: str) -> bool:
    """Whether a submodule that is not reached, while its parent is, must be a fault."""
    parent = module.get_submodule(path.rpartition(".")[0])
    if isinstance(parent, nn.ModuleList | nn.Sequential):
        return True
    single = next(module.get_submodule(path).children(), None) is None
    return single and not isinstance(parent, nn.ModuleDict)
