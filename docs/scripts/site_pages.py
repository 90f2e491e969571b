"""A hook of mkdocs: the files at the top and the notebooks are pages of the site too."""

import json
import re
import textwrap
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tasks import TASKS

HOME = Path(__file__).parents[2]
WIDTH = 100
OUTSIDE = re.compile(r'(\]\(|src=")(?:docs/|\.\./(?=LOG|notebooks)|\.\./(?=\.\./LOG))')
"""What leads from a page out of docs/, or into it."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside docs/."""
    for name in ("README.md", "LOG.md", "CHANGELOG.md", "CITATION.cff"):
        text = (HOME / name).read_text(encoding="utf-8")
        target = "index.md" if name == "README.md" else name
        files.append(File.generated(config, target, content=text))
    for path in sorted((HOME / "notebooks").glob("*.ipynb")):
        text = "\n\n".join(map(write_cell, json.loads(path.read_text(encoding="utf-8"))["cells"]))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
    return files


def on_page_markdown(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links relative to docs/, where every page of the site is; list every task's class."""
    if page.file.src_uri == "reference/tasks.md":
        classes = (f"{TASKS.module(name)}.{TASKS[name].__name__}" for name in TASKS)
        text += "".join(f"\n::: {name}\n" for name in classes)
    return OUTSIDE.sub(r"\1", text).replace(".ipynb)", ".md)").replace("../README.md", "index.md")


def write_cell(cell: dict[str, Any]) -> str:
    """Write a cell of a notebook, and what it shows, as Markdown."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    return "\n\n".join([fence(source, "python"), *map(write_output, cell["outputs"])])


def write_output(output: dict[str, Any]) -> str:
    """Write an output as Markdown: a picture, a table, or text."""
    data = output.get("data", {})
    if "image/png" in data:
        return f"![Figure](data:image/png;base64,{data['image/png'].strip()})"
    if "text/html" in data:
        return "".join(data["text/html"])
    lines = "".join(output.get("text") or data["text/plain"]).rstrip().splitlines()
    return fence("\n".join(map(wrap, lines)), "text")


def wrap(line: str) -> str:
    """Break a sentence that is wider than a page; the lines of a table are not."""
    return textwrap.fill(line, WIDTH) if len(line) > WIDTH else line


def fence(text: str, language: str) -> str:
    """Put text into a code block."""
    return f"````{language}\n{text}\n````"
