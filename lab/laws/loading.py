"""Loading a target by name, "package.module:factory", and building the module."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lab.files import describe_error
from lab.laws.small_models import SmallModel, is_config_class
from lab.user_modules import import_object
from tasks.near_names import suggest


def load(path: str) -> Any:
    """Import the object named "package.module:name"; the name may have dots.

    The name of a configuration of transformers, alone or after "transformers:", stands for a small
    model of that kind with random weights.

    Raises:
        ValueError: when the path has another form, cannot be imported, or names nothing.
    """
    if path.isidentifier() and path.endswith("Config"):
        path = f"transformers:{path}"
    module, colon, name = path.partition(":")
    if not (module and colon and name) or module.startswith("."):
        raise ValueError(f"target={path}: must look like package.module:factory")
    try:
        found = import_object(module, name)
    # A user's module may raise anything when it is imported.
    except Exception as error:
        raise ValueError(f"target={path}: {describe_error(error)}") from error
    return SmallModel(found) if is_config_class(found) else found


def is_target(found: Any, options: Mapping[str, Any]) -> bool:
    """Whether the object loaded is itself the target: a module, or a function of one argument."""
    if isinstance(found, nn.Module):
        return True
    return inspect.isfunction(found) and not options and len(_list_required(found)) == 1


def build(factory: Callable[..., Any], options: Mapping[str, Any], seed: int) -> Any:
    """Call a factory after seeding torch, and return what it makes.

    Raises:
        ValueError: for arguments that are missing or unknown; when the factory raises, or makes
            something that cannot be called.
    """
    name = getattr(factory, "__qualname__", repr(factory))
    if not callable(factory):
        raise ValueError(f"the target is a {type(factory).__name__}, must be a class or a function")
    missing = [argument for argument in _list_required(factory) if argument not in options]
    if missing:
        given = " ".join(f"--option {argument}=…" for argument in missing)
        raise ValueError(f"{name} needs {', '.join(missing)}: give {given}")
    known = _list_known(factory)
    for argument in options:
        if known is not None and argument not in known:
            raise ValueError(f"{name} has no argument {argument}. {suggest(argument, known)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            made = factory(**options)
        except Exception as error:
            raise ValueError(f"{name} raised {describe_error(error)}") from error
    if not callable(made):
        raise ValueError(f"{name} returned {made!r:.100}, must return a module or a function")
    return made


def _list_known(function: Callable[..., Any]) -> list[str] | None:
    """Return the arguments that a function names; None if it takes others too."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of some built-in classes
        return None
    others = inspect.Parameter.VAR_KEYWORD
    return None if any(p.kind is others for p in parameters) else [p.name for p in parameters]


def _list_required(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of some built-in classes
        return []
    positional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in positional]
