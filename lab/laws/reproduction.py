"""A failure as a program of its own: what reproduces it without this project.

The program prints the very functions that found the failure, with all of this package that they
refer to, so that it cannot say anything else than the law did.
"""

import ast
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

OURS = "lab.laws"
FACTORY = "factory"


@dataclass(frozen=True)
class Origin:
    """How a module came to be what laws tried.

    Attributes:
        factory: "package.module:name", called without arguments but `options`; None where the
            module was handed over, which leaves a gap in the program.
        options: what the factory was called with; None where what is named is itself the target.
        seed: torch's, before it was called.
        recipe: the expression that makes of `module` what laws try: an adapter, the module in fp64.
        uses: the functions and classes that the recipe names.
    """

    factory: str | None = None
    options: tuple[tuple[str, Any], ...] | None = ()
    seed: int = 0
    recipe: tuple[str, ...] = ()
    uses: tuple[Callable[..., Any], ...] = ()


def written(origin: Origin, uses: tuple[Callable[..., Any], ...], body: str, words: str) -> str:
    """Return the program: the module as it came to be, then the body.

    Args:
        origin: of the module.
        uses: functions and classes of this package that the body names.
        body: lines that print what they find and end the program, with code 1 where the law fails.
        words: what the program shows.
    """
    printed = _closure([*origin.uses, *uses])
    lines = [
        f'"""{words[:1].upper()}{words[1:]}."""',
        "",
        "from __future__ import annotations",
        "",
        *_imports(printed),
        *([] if origin.factory is None else [_factory_import(origin.factory)]),
        "",
        *(f"\n{source}\n" for source in printed.sources.values()),
        "",
        f"torch.manual_seed({origin.seed})",
        f"module = {_made(origin)}",
        *origin.recipe,
        *textwrap.dedent(body).strip().splitlines(),
    ]
    return "\n".join(lines) + "\n"


@dataclass
class _Printed:
    """What a program prints of this package, by name, and which libraries that needs."""

    sources: dict[str, str]
    imports: dict[str, str]


def _closure(wanted: list[Callable[..., Any]]) -> _Printed:
    """Return the sources of functions and classes, after all of this package that they name."""
    printed = _Printed({}, {"sys": "import sys", "torch": "import torch"})

    def add(name: str, value: Any, home: ModuleType) -> None:
        if name in printed.sources or name in printed.imports:
            return
        plain = inspect.unwrap(value) if callable(value) else value
        if isinstance(value, ModuleType):
            printed.imports[name] = _import_of(value, name)
        elif getattr(plain, "__module__", "").startswith(OURS) and callable(plain):
            printed.sources[name] = ""
            needs = sys.modules[plain.__module__]
            for other in _names(plain):
                if hasattr(needs, other):
                    add(other, getattr(needs, other), needs)
            # Written after what it needs.
            del printed.sources[name]
            printed.sources[name] = _source(plain)
        elif callable(value) and hasattr(value, "__module__"):
            printed.imports[name] = f"from {value.__module__} import {name}"
        else:
            assigned = _assignment(home, name)
            printed.sources[name] = ""
            for other in _names_of(ast.parse(assigned)):
                if hasattr(home, other):
                    add(other, getattr(home, other), home)
            del printed.sources[name]
            printed.sources[name] = assigned

    for value in wanted:
        plain = inspect.unwrap(value)
        add(plain.__name__, value, sys.modules[plain.__module__])
    return printed


def _imports(printed: _Printed) -> list[str]:
    found = sorted(set(printed.imports.values()))
    return [line for line in found if line.startswith("import")] + [
        line for line in found if line.startswith("from")
    ]


def _import_of(module: ModuleType, name: str) -> str:
    if module.__name__ == name:
        return f"import {name}"
    parent, _, last = module.__name__.rpartition(".")
    return f"import {module.__name__} as {name}" if last != name else f"from {parent} import {name}"


def _source(value: Callable[..., Any]) -> str:
    """Return a definition as it was written, without the words on it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            if len(node.body) > 1 and ast.get_docstring(node) is not None:
                node.body = node.body[1:]
            # Annotations name what a program without this project lacks.
            if isinstance(node, ast.FunctionDef):
                node.returns = None
                for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                    argument.annotation = None
    return ast.unparse(tree)


def _assignment(home: ModuleType, name: str) -> str:
    """Return the lines that give a name its value in a module."""
    for node in ast.parse(inspect.getsource(home)).body:
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            node = ast.Assign([node.target], node.value, lineno=node.lineno)
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            return _assignment(importlib.import_module(str(node.module)), name)
        targets = node.targets if isinstance(node, ast.Assign) else ()
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return ast.unparse(node)
    raise LookupError(f"{home.__name__} does not assign {name}")


def _names(value: Callable[..., Any]) -> Iterator[str]:
    """Yield the names that a definition refers to outside its annotations."""
    yield from _names_of(ast.parse(_source(value)))


def _names_of(tree: ast.AST) -> Iterator[str]:
    yield from dict.fromkeys(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))


def _factory_import(path: str) -> str:
    # By a name of its own: the user's might be one of ours.
    module, _, name = path.partition(":")
    return f"from {module} import {name.partition('.')[0]} as {FACTORY}"


def _made(origin: Origin) -> str:
    if origin.factory is None:
        return "...  # the module that was certified"
    _, *rest = origin.factory.partition(":")[2].split(".")
    named = ".".join([FACTORY, *rest])
    if origin.options is None:
        return named
    return f"{named}({', '.join(f'{name}={value!r}' for name, value in origin.options)})"
