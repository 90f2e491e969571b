"""Writing a program that reproduces a failure without this project.

The program contains the source of the functions that found the failure and of everything in this
package that they refer to, so it computes exactly what the law computed.
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

from lab.laws.loading import SmallModel

OURS = ("lab.laws", "lab.seeding")
"""Modules whose functions a program holds instead of importing them."""
FACTORY = "factory"


@dataclass(frozen=True)
class Origin:
    """How the module that laws tried was made.

    Attributes:
        factory: "package.module:name", called with `options` only; None where the caller passed a
            module, which leaves a gap in the program.
        options: arguments of the factory; None where the name is that of the target itself.
        seed: torch's seed before the factory was called.
        recipe: lines that make what laws try from `module`: an adapter, other weights, fp64.
        uses: the functions and classes that the recipe names.
        small: the builder of a small model, where the factory is a class of configurations.
    """

    factory: str | None = None
    options: tuple[tuple[str, Any], ...] | None = ()
    seed: int = 0
    recipe: tuple[str, ...] = ()
    uses: tuple[Callable[..., Any], ...] = ()
    small: SmallModel | None = None


def write_program(
    origin: Origin, uses: tuple[Callable[..., Any], ...], body: str, words: str
) -> str:
    """Write the program: it makes the module, then runs the body.

    Args:
        origin: how the module was made.
        uses: functions and classes of this package that the body names.
        body: lines that print what they find and end the program, with code 1 where the law fails
            and 0 where it holds; a program that raises ends with code 2.
        words: what the program shows.
    """
    printed = _collect_sources([*origin.uses, *uses])
    shown = [
        # What cannot be imported shows nothing, which is code 2.
        *([] if origin.factory is None else [_import_factory(origin.factory)]),
        f"torch.manual_seed({origin.seed})",
        f"module = {_call_factory(origin)}",
        *origin.recipe,
        *textwrap.dedent(body).strip().splitlines(),
    ]
    lines = [
        f'"""{words[:1].upper()}{words[1:]}.',
        "",
        "A program of lab certify (wonderful-lab).",
        '"""',
        "",
        "from __future__ import annotations",
        "",
        *_sort_imports(printed),
        *([] if origin.small is None else [origin.small.IMPORT]),
        "",
        *(f"\n{source}\n" for source in printed.sources.values()),
        "",
        "try:",
        *(f"    {line}" for line in shown),
        "except Exception:",
        "    traceback.print_exc()",
        "    sys.exit(2)",
    ]
    return "\n".join(lines) + "\n"


@dataclass
class _Printed:
    """The definitions that a program contains, by name, and the imports that they need."""

    sources: dict[str, str]
    imports: dict[str, str]


def _collect_sources(wanted: list[Callable[..., Any]]) -> _Printed:
    """Return the sources of functions and classes, each after what it names of this package."""
    always = ("sys", "torch", "traceback")
    printed = _Printed({}, {name: f"import {name}" for name in always})

    def add(name: str, value: Any, home: ModuleType) -> None:
        if name in printed.sources or name in printed.imports:
            return
        plain = inspect.unwrap(value) if callable(value) else value
        if isinstance(value, ModuleType):
            printed.imports[name] = _write_import(value, name)
        elif getattr(plain, "__module__", "").startswith(OURS) and callable(plain):
            printed.sources[name] = ""
            needs = sys.modules[plain.__module__]
            for other in _list_names(ast.parse(_get_source(plain))):
                if hasattr(needs, other):
                    add(other, getattr(needs, other), needs)
            # Moved to the end, after what it needs.
            del printed.sources[name]
            printed.sources[name] = _get_source(plain)
        elif callable(value) and hasattr(value, "__module__"):
            printed.imports[name] = f"from {value.__module__} import {name}"
        elif not _find_home(home, name).__name__.startswith(OURS):
            printed.imports[name] = f"from {_find_home(home, name).__name__} import {name}"
        else:
            home = _find_home(home, name)
            assignment = _find_assignment(home, name)
            printed.sources[name] = ""
            for other in _list_names(ast.parse(assignment)):
                if hasattr(home, other):
                    add(other, getattr(home, other), home)
            del printed.sources[name]
            printed.sources[name] = assignment

    for value in wanted:
        plain = inspect.unwrap(value)
        add(plain.__name__, value, sys.modules[plain.__module__])
    return printed


def _sort_imports(printed: _Printed) -> list[str]:
    found = sorted(set(printed.imports.values()))
    return [line for line in found if line.startswith("import")] + [
        line for line in found if line.startswith("from")
    ]


def _write_import(module: ModuleType, name: str) -> str:
    if module.__name__ == name:
        return f"import {name}"
    parent, _, last = module.__name__.rpartition(".")
    return f"import {module.__name__} as {name}" if last != name else f"from {parent} import {name}"


def _get_source(value: Callable[..., Any]) -> str:
    """Return the source of a definition without its docstrings."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            if len(node.body) > 1 and ast.get_docstring(node) is not None:
                node.body = node.body[1:]
            # Annotations may name types that the program does not import.
            if isinstance(node, ast.FunctionDef):
                node.returns = None
                for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                    argument.annotation = None
    return ast.unparse(tree)


def _find_home(user: ModuleType, name: str) -> ModuleType:
    """Return the module that assigns a name which another module uses, and may import."""
    for node in ast.parse(inspect.getsource(user)).body:
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            home = importlib.import_module(str(node.module))
            return _find_home(home, name) if home.__name__.startswith(OURS) else home
    return user


def _find_assignment(home: ModuleType, name: str) -> str:
    """Return the lines that assign a name in a module."""
    for node in ast.parse(inspect.getsource(home)).body:
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            node = ast.Assign([node.target], node.value, lineno=node.lineno)
        targets = node.targets if isinstance(node, ast.Assign) else ()
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return ast.unparse(node)
    raise LookupError(f"{home.__name__} does not assign {name}")


def _list_names(tree: ast.AST) -> Iterator[str]:
    yield from dict.fromkeys(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))


def _import_factory(path: str) -> str:
    # Under another name, because the user's might be one of ours.
    module, _, name = path.rpartition(":")
    module = module or "transformers"
    return f"from {module} import {name.partition('.')[0]} as {FACTORY}"


def _call_factory(origin: Origin) -> str:
    if origin.factory is None:
        return "...  # the module that was certified"
    _, *rest = origin.factory.rpartition(":")[2].split(".")
    named = ".".join([FACTORY, *rest])
    if origin.options is None:
        return named
    called = f"{named}({', '.join(f'{name}={value!r}' for name, value in origin.options)})"
    return called if origin.small is None else origin.small.WRITTEN.format(called)
