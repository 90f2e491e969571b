"""No two modules of the lab import each other, directly or by way of others.

What counts is an import that runs when the module is imported. One within a function runs later,
and one under TYPE_CHECKING never: those name a type, or are there because the other way counts.
"""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2]
PACKAGES = ("lab", "tasks", "analysis")


def name_module(path: Path) -> str:
    parts = path.relative_to(HOME).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def find_imports(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the dotted names that statements import as they run, longest first."""
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from find_imports(statement.orelse)
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = (getattr(statement, name, []) for name in ("body", "orelse", "finalbody"))
            for part in inner:
                yield from find_imports(part if isinstance(part, list) else [])
            for handler in getattr(statement, "handlers", []):
                yield from find_imports(handler.body)


def build_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Return which of some modules each imports: of `from a import b`, a.b, or else a."""
    graph = {}
    for name, text in sources.items():
        found = find_imports(ast.parse(text).body)
        known = (i if i in sources else i.rpartition(".")[0] for i in found)
        graph[name] = {i for i in known if i in sources and i != name}
    return graph


def test_no_imports_go_in_a_circle():
    paths = [path for package in PACKAGES for path in (HOME / package).rglob("*.py")]
    graph = build_graph({name_module(path): path.read_text("utf-8") for path in paths})
    assert "lab.models.block" in graph["lab.models"]
    assert len(graph) > 200
    TopologicalSorter(graph).prepare()


def test_a_circle_is_found_where_imports_run():
    circle = {
        "a": "from b import f",
        "b": "try:\n    import c\nfinally:\n    pass",
        "c": "import a",
    }
    with pytest.raises(CycleError):
        TopologicalSorter(build_graph(circle)).prepare()
    for later in ("def f():\n    import a", "if TYPE_CHECKING:\n    import a"):
        TopologicalSorter(build_graph(circle | {"c": later})).prepare()
