"""Every notebook asks, runs from top to bottom, and answers; it shows what its cells gave."""

import hashlib
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

HOME = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(HOME.glob("*.ipynb"))
SECONDS = 120
"""What a cell may take; a whole notebook is to stay below it on an idle machine."""
STEPS, TEST_ROWS = 10, 64
"""Of a training, in place of a notebook's own: enough to have something to analyse."""
LONGEST = 64
"""Of the rows of a certificate, likewise."""
MOST_BYTES = 400_000
"""What a notebook's file may take, its pictures included."""


def read(path: Path) -> Any:
    return import_module("nbformat").read(path, as_version=4)


@pytest.fixture(scope="session")
def workplace(tmp_path_factory) -> Path:
    """One folder for all, so that a notebook finds the runs of another."""
    return tmp_path_factory.mktemp("notebooks")


def test_there_are_eight():
    assert [int(path.name.split("_")[0]) for path in NOTEBOOKS] == list(range(1, 9))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_asks_and_answers(path):
    cells = read(path).cells
    first, last = cells[0], cells[-1]
    assert first.cell_type == last.cell_type == "markdown"
    assert first.source.startswith("# ")
    assert "?" in first.source
    assert last.source.startswith("## Answer")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_shows_what_its_cells_gave(path):
    """`make gallery` runs the notebooks whose code has changed."""
    notebook = read(path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    sources = "\0".join(cell.source for cell in code)
    assert notebook.metadata["ran"] == hashlib.sha256(sources.encode()).hexdigest()[:8]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert all(output.output_type != "error" for output in outputs)
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert "image/png" in kinds
    assert not kinds & {"application/vnd.plotly.v1+json", "application/javascript"}
    assert path.stat().st_size <= MOST_BYTES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_two_files_hold_the_same(path):
    paired = import_module("jupytext").read(path.with_suffix(".py"))
    notebook = read(path)
    assert notebook.metadata["jupytext"]["formats"] == "ipynb,py:percent"
    assert [(cell.cell_type, cell.source) for cell in paired.cells] == [
        (cell.cell_type, cell.source) for cell in notebook.cells
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_on_a_few_steps(path, workplace, monkeypatch):
    """In this process, which has imported the lab: a kernel would import it again."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    monkeypatch.chdir(workplace)
    monkeypatch.setattr(sys, "displayhook", sys.displayhook)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(InteractiveShell, "_instance", None)  # what progress is shown in
    shell = InteractiveShell.instance()
    printed = []
    for cell in read(path).cells:
        if cell.cell_type == "code":
            with capture_output() as shown:
                ran = shell.run_cell(shorten(cell.source))
            ran.raise_error()
            printed.append(shown.stdout)
    assert_numbers_stand_before_the_answer(printed[-1])


@pytest.mark.thorough
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path, workplace):
    notebook = read(path)
    client = import_module("nbclient").NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(workplace)}},
    )
    client.execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]
    assert any("application/vnd.plotly.v1+json" in output.get("data", {}) for output in outputs)
    assert_numbers_stand_before_the_answer(
        "".join(
            output.get("text", "") + "".join(output.get("data", {}).get("text/plain", ""))
            for output in cells[-1].outputs
        )
    )


def shorten(source: str) -> str:
    """Return a cell whose trainings and certificates take few steps and short rows."""
    source = re.sub(r"(?<=rounding_len=)\d+", str(LONGEST), source)
    rows = re.sub(r"(?<=test_rows=)\d+", str(TEST_ROWS), source)
    also = "" if "test_rows=" in source else f", test_rows={TEST_ROWS}"
    return re.sub(r"(?<=\bsteps=)\d+", f"{STEPS}{also}", rows)


def assert_numbers_stand_before_the_answer(printed: str) -> None:
    assert re.search(r"\d", printed), "the cell before the answer shows its numbers"
