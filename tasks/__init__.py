"""Synthetic tasks. `TASKS` maps a task's name to its class, and imports it when asked."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any

from tasks.bounds import check_choice
from tasks.near_names import suggest

_HOMES = {
    "mqar": "tasks.mqar:MQAR",
    "overwrite": "tasks.overwrite:Overwrite",
    "compositional": "tasks.compositional:Compositional",
    "hops": "tasks.hops:Hops",
    "fuzzy": "tasks.fuzzy:Fuzzy",
    "selective_copy": "tasks.selective_copy:SelectiveCopy",
    "copy": "tasks.copying:Copy",
    "induction": "tasks.induction:Induction",
    "flip_flop": "tasks.flip_flop:FlipFlop",
    "word_problem": "tasks.word_problem:WordProblem",
    "memorize": "tasks.memorize:Memorize",
    "regression": "tasks.regression:Regression",
    "language": "tasks.language:Language",
    "bytes": "tasks.next_byte:Bytes",
    "stack": "tasks.stack:Stack",
    "palindrome": "tasks.palindrome:Palindrome",
    "sort": "tasks.sorting:Sort",
    "brackets": "tasks.brackets:Brackets",
    "grammar": "tasks.grammar:Grammar",
    "capo": "tasks.capo:Capo",
    "addition": "tasks.addition:Addition",
    "depo": "tasks.depo:Depo",
    "brevo": "tasks.brevo:Brevo",
    "mano": "tasks.mano:Mano",
    "joint_recall": "tasks.joint_recall:JointRecall",
}


class _Tasks(Mapping[str, Any]):
    """Task classes (`tasks.base.Task`) by name. Names are known without importing torch."""

    def __getitem__(self, name: str) -> Any:
        if name not in _HOMES:
            raise KeyError(f"unknown task {name!r}. {suggest(str(name), _HOMES)}")
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
"""The class of each task by name, imported when it is asked for: `TASKS["mqar"](seq_len=64)`."""


def restore(description: Mapping[str, Any]) -> Any:
    """Return the task that `Task.describe` described, also from JSON.

    Raises:
        ValueError: for an unknown name or option, or an option out of its bounds.
    """
    from tasks.schedule import Schedule

    name = str(description.get("name"))
    check_choice("task", name, TASKS)
    known = [f.name for f in fields(TASKS[name]) if f.init]

    options = {
        option: Schedule(**value) if isinstance(value, Mapping) else value
        for option, value in description.items()
        if option != "name"
    }
    for option in options:
        if option not in known:
            raise ValueError(f"unknown option {option!r} of {name}. {suggest(option, known)}")
    return TASKS[name](**options)


described = restore
"""The name in Parquet files that were exported before, which hold a line of Python."""
