"""Run the notebooks whose cells have changed and keep what they show: `make gallery`.

A figure is kept as a PNG, which GitHub shows, and not as plotly's JSON, which it does not.
"""

import base64
import hashlib
import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import plotly.graph_objects as go
from pictures import shrink

from analysis.pages.export import save_all

HOME = Path(__file__).parents[2] / "notebooks"
FIGURE, PICTURE = "application/vnd.plotly.v1+json", "image/png"
SCALE = 1.5
"""Pixels of a picture per pixel of a figure."""

nbformat = import_module("nbformat")


def main() -> None:
    """Run the notebooks that are not up to date."""
    for path in sorted(HOME.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        if notebook.metadata.get("ran") == digest(notebook):
            continue
        print(path.name, flush=True)
        run(notebook)
        keep_pictures(notebook)
        nbformat.write(notebook, path)


def digest(notebook: Any) -> str:
    """Return eight hexadecimal digits of a notebook's code."""
    code = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()[:8]


def run(notebook: Any) -> None:
    """Run a notebook from top to bottom, in its own folder."""
    client = import_module("nbclient").NotebookClient(
        notebook,
        timeout=None,
        record_timing=False,
        kernel_name="python3",
        resources={"metadata": {"path": str(HOME)}},
    )
    client.execute()
    notebook.metadata["ran"] = digest(notebook)


def keep_pictures(notebook: Any) -> None:
    """Replace the figures among a notebook's outputs by pictures."""
    outputs = [
        output
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if FIGURE in output.get("data", {})
    ]
    with TemporaryDirectory() as folder:
        figures = {
            Path(folder, f"{i}.png"): go.Figure(
                {name: output.data[FIGURE][name] for name in ("data", "layout")}
            )
            for i, output in enumerate(outputs)
        }
        save_all(figures, scale=SCALE)
        for output, (path, figure) in zip(outputs, figures.items(), strict=True):
            shrink(path)
            output.data = {PICTURE: base64.b64encode(path.read_bytes()).decode()}
            output.metadata = {PICTURE: {"width": figure.layout.width}}


if __name__ == "__main__":
    sys.exit(main())
