"""Rows of a task as a Parquet file, with the recipe that makes them again."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
from polars.io.plugins import register_io_source

from lab import __version__
from lab.files import RunError, open_file, replace_file, shorten_message
from lab.trust import ask_for_trust, list_named
from tasks import restore
from tasks.base import MAX_ROWS, Batch, Task, count_rows

SUFFIX = ".parquet"
KEY = "wonderful-lab"
"""Key of the file's metadata under which the recipe is stored, a JSON object."""
TOKENS_A_PART = 2**18


@dataclass(frozen=True)
class Recipe:
    """All it takes to make the rows of an exported file again.

    Attributes:
        task: the task that generates the rows.
        split: the split of the rows.
        seed: the seed of the rows.
        rows: number of rows, from row 0 on.

    Raises:
        ValueError: for a number of rows out of bounds, or a split that the task does not have.
    """

    task: Task
    split: str
    seed: int
    rows: int

    def __post_init__(self):
        if not 1 <= self.rows <= MAX_ROWS:
            raise ValueError(f"rows={self.rows}: must be in 1 … {MAX_ROWS}")
        if self.split not in self.task.splits:
            known = ", ".join(self.task.splits)
            raise ValueError(f"split={self.split!r}: {self.task.name} has {known}")

    @property
    def rows_a_part(self) -> int:
        """Number of rows that are made and written together."""
        return count_rows(TOKENS_A_PART, self.task.seq_len, most=self.rows)

    def generate(self) -> Iterator[tuple[int, Batch]]:
        """Generate the rows part by part: yield the number of a part's first row, and its rows."""
        for start in range(0, self.rows, self.rows_a_part):
            size = min(self.rows_a_part, self.rows - start)
            batch = self.task.batch(split=self.split, start=start, size=size, seed=self.seed)
            yield start, batch

    def python(self) -> str:
        """Return a line of Python that makes the rows again, in `batches`."""
        rows, a_part = self.rows, self.rows_a_part
        return (
            f"from tasks import restore; task = restore({self.task.describe()!r}); "
            f"batches = (task.batch(split={self.split!r}, start=start, "
            f"size=min({a_part}, {rows} - start), seed={self.seed}) "
            f"for start in range(0, {rows}, {a_part}))"
        )


def export(recipe: Recipe, path: Path) -> None:
    """Write a recipe's rows to a file, which is whole or absent.

    Columns: row (int64); inputs, targets, roles (lists of int64, as long as a row, or of lists of
    float32 where rows are vectors and answers numbers, NaN where unscored); and each of the task's
    links (lists, nested where a link has more axes). Memory use does not depend on the
    number of rows.

    Raises:
        ValueError: for a path that does not end in .parquet, exists, or is in no folder.
        OSError: when the file cannot be written.
    """
    if path.suffix != SUFFIX:
        raise ValueError(f"export={path}: must end in {SUFFIX}")
    if path.exists():
        raise ValueError(f"export={path}: already exists; choose another")
    if not path.parent.is_dir():
        raise ValueError(f"export={path}: the folder {path.parent} does not exist")
    # In another thread, so that Ctrl-C is raised here, and only once; it also ends the writing.
    with replace_file(path) as temporary, ThreadPoolExecutor(1) as pool:
        pool.submit(_write, recipe, temporary).result()


def read_recipe(path: Path, *, trust: bool = False) -> Recipe:
    """Read the recipe of an exported file.

    Args:
        path: the file.
        trust: whether the recipe may name a text to read, as another's could name a private file.

    Raises:
        ValueError: for a file that is not an export, or whose recipe is damaged, names an unknown
            task or, without trust, a text.
        OSError: when the file cannot be read.
    """
    try:
        with open_file(path) as file:
            text = pl.read_parquet_metadata(file).get(KEY)
    except RunError as error:
        raise ValueError(str(error)) from error
    except (pl.exceptions.PolarsError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a Parquet file: {shorten_message(error)}") from error
    if text is None:
        raise ValueError(f"{path}: was not written by `lab TASK --export`")
    try:
        stored = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: its recipe is not JSON: {shorten_message(error)}") from error
    kinds = {"task": dict, "split": str, "seed": int, "rows": int}
    for name, kind in kinds.items():
        if not isinstance(stored, dict) or type(stored.get(name)) is not kind:
            raise ValueError(f"{path}: its recipe has no {name} of type {kind.__name__}")
    named = list_named(stored)
    if named and not trust:
        raise ValueError(ask_for_trust(path, named, "trust=True"))
    try:
        task = restore(stored["task"])
    # A damaged description may hold anything, which a task need not notice as a ValueError.
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: its task is not known: {shorten_message(error)}") from error
    try:
        return Recipe(task, stored["split"], stored["seed"], stored["rows"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _write(recipe: Recipe, path: Path) -> None:
    """Write a Parquet file, one row group for each part."""
    first = recipe.task.batch(split=recipe.split, size=1, seed=recipe.seed)

    def source(
        with_columns: list[str] | None,
        predicate: pl.Expr | None,
        n_rows: int | None,
        batch_size: int | None,
    ) -> Iterator[pl.DataFrame]:
        # A sink always asks for everything.
        for start, batch in recipe.generate():
            yield _build_frame(start, batch)

    stored = {
        "task": recipe.task.describe(),
        "split": recipe.split,
        "seed": recipe.seed,
        "rows": recipe.rows,
        "role_names": recipe.task.role_names,
        "version": __version__,
        "python": recipe.python(),
    }
    try:
        register_io_source(source, schema=_build_frame(0, first).schema).sink_parquet(
            path,
            # By default Polars would hold a hundred thousand rows at once.
            row_group_size=recipe.rows_a_part,
            metadata={KEY: json.dumps(stored, ensure_ascii=False)},
        )
    except pl.exceptions.ComputeError as error:
        # Before what the disk said, the message has a line about Polars itself.
        raise OSError(shorten_message(error).rpartition("IO error: ")[2]) from error


def _build_frame(start: int, batch: Batch) -> pl.DataFrame:
    """Return rows, numbered from `start`, as a table."""
    tensors = {"inputs": batch.inputs, "targets": batch.targets, "roles": batch.roles}
    columns: dict[str, Any] = {"row": pl.arange(start, start + len(batch.inputs), eager=True)}
    for name, tensor in {**tensors, **batch.links}.items():
        kind: Any = pl.Float32 if tensor.is_floating_point() else pl.Int64
        for _ in tensor.shape[1:]:
            kind = pl.List(kind)
        columns[name] = pl.Series(tensor.contiguous().numpy()).cast(kind)
    return pl.DataFrame(columns)
