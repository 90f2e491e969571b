"""Submodules that a module never calls, such as an audio encoder when it reads tokens alone."""

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from lab.laws.cuts import list_uses
from lab.laws.reach import SEEDS, draw_input
from lab.laws.trace import Trace
from lab.seeding import fix_seed


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
