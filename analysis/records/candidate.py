"""A candidate: options of `lab mqar` that are said to need less than the holder of a track."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lab.config import ModelConfig, TrainConfig
from lab.files import read_toml
from tasks.near_names import suggest

PARTS = ("says", "options")
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
JUDGED = ("seed", "init", "early_stop", "solved_at", "test_rows", "options")
"""Options of model and training that the track sets, or that would make the task another."""
FREE = tuple(
    f.name for kind in (ModelConfig, TrainConfig) for f in fields(kind) if f.name not in JUDGED
)
"""Options that a candidate chooses, beside those of layers, such as S.d_state."""


@dataclass(frozen=True)
class Candidate:
    """Options that are said to solve a track's rows in less.

    Attributes:
        name: of its file, and of its entry.
        says: what it does, in a sentence.
        options: of `lab mqar`, by name; those of layers as S.d_state.
    """

    name: str
    says: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> str | None:
        """The module and class of its own mixer; None if it has none."""
        return self.options.get("model")

    @property
    def is_foreign(self) -> bool:
        """Whether it names code that is not the lab's."""
        return self.model is not None and not self.model.startswith("lab.")

    @classmethod
    def read(cls, file: Path) -> "Candidate":
        """Read a file with `says` and [options].

        Raises:
            ValueError: for a file that cannot be read, or has unknown, missing or wrong parts.
        """
        if file.suffix != ".toml":
            raise ValueError(f"{file}: must be a .toml file with {' and '.join(PARTS)}")
        content = read_toml(file)
        for part in content:
            if part not in PARTS:
                raise ValueError(f"{file}: unknown part {part!r}. {suggest(part, PARTS)}")
        if not NAME.fullmatch(file.stem):
            raise ValueError(
                f"{file}: the file's name is the entry's; must be at most 40 of a-z, 0-9 and -"
            )
        says, options = content.get("says"), content.get("options", {})
        if not isinstance(says, str) or not says.strip():
            raise ValueError(f"{file}: says must be a sentence, is {says!r}")
        if not isinstance(options, dict):
            raise ValueError(f"{file}: options must be a table, [options]")
        for option, value in options.items():
            if "." not in option and option not in FREE:
                raise ValueError(_refuse(file, option))
            if not isinstance(value, str | int | float):
                raise ValueError(f"{file}: {option}={value!r}: must be a number, text or truth")
        if not isinstance(options.get("model", ""), str):
            raise ValueError(f"{file}: model={options['model']!r}: must be MODULE:CLASS")
        return cls(file.stem, says.strip(), options)


def _refuse(file: Path, option: str) -> str:
    advice = suggest(option, FREE)
    return f"{file}: options.{option}: is set by the track or is not an option. {advice}"
