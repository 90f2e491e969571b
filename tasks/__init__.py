"""Synthetic tasks. `TASKS` maps a task's name to its class and imports it when asked."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.base import Task

_HOMES = {
    "mqar": "tasks.mqar:MQAR",
}


class _Tasks(Mapping[str, "type[Task]"]):
    """Task classes by name. Names are known without importing torch."""

    def __getitem__(self, name: str) -> "type[Task]":
        if name not in _HOMES:
            raise KeyError(f"unknown task {name!r}; known: {', '.join(_HOMES)}")
        module, _, attribute = _HOMES[name].partition(":")
        return getattr(import_module(module), attribute)

    def __contains__(self, name: object) -> bool:
        return name in _HOMES

    def __iter__(self) -> Iterator[str]:
        return iter(_HOMES)

    def __len__(self) -> int:
        return len(_HOMES)

    def module(self, name: str) -> str:
        """Return the dotted name of the module that holds a task."""
        return _HOMES[name].partition(":")[0]


TASKS = _Tasks()
