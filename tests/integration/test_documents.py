"""README.md and docs/: commands parse, Python runs, links lead somewhere, the tree is exact."""

import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

import lab
from analysis.claims.claim import Claim
from lab.api.claiming import build_sweep, check_parameters
from lab.api.sweep_settings import read_file
from lab.cli.app import app
from lab.files import is_marked

HOME = Path(__file__).parents[2]
README = HOME / "README.md"
DOCUMENTS = [README, *sorted((HOME / "docs").rglob("*.md"))]
GUIDES = [README, *sorted((HOME / "docs").glob("*.md"))]
IMAGES = HOME / "docs" / "images"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]*))?\)")
IMAGE = re.compile(r'src="([^"]+)"')
MOST_LINES, MOST_TREE_LINES = 290, 20
MOST_COLUMNS = 80
"""What the site shows of a line of a block in a window of 1,280 pixels."""
MOST_IMAGE_BYTES = 1_500_000


def blocks(document: Path, language: str) -> list[str]:
    found = BLOCK.findall(document.read_text(encoding="utf-8"))
    return [text for name, text in found if name == language]


def command_lines(start: str) -> list[tuple[str, str]]:
    """Commands of plain blocks that begin so, each in one line without its remark, by document."""
    return [
        (document.name, line.partition("  #")[0])
        for document in DOCUMENTS
        for block in blocks(document, "")
        for line in re.sub(r" *\\\n *", " ", block).splitlines()
        if line.startswith(start)
    ]


LAB = sorted(set(command_lines(".venv/bin/lab ")))
MAKE = sorted(set(command_lines("make ")))
PIP = sorted(set(command_lines(".venv/bin/pip install ")))


def test_there_are_commands():
    assert len(LAB) > 40
    assert MAKE


@pytest.mark.parametrize(("document", "line"), LAB, ids=[line for _, line in LAB])
def test_a_printed_command_parses(document, line):
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    words = [word for word in shlex.split(line)[1:] if word != "--help"]
    with group.make_context("lab", list(words)) as context:
        name, command, rest = group.resolve_command(context, words)
        assert command is not None
        command.make_context(name, rest, parent=context).close()


def test_a_printed_command_may_write_its_committed_figure_again():
    """`make gallery` repeats them; a picture that does not name the lab would be refused."""
    figures = [
        HOME / found for _, line in LAB for found in re.findall(r"--figure (docs/\S+)", line)
    ]
    assert figures
    assert [figure for figure in figures if not is_marked(figure)] == []


def write_printed_file(name: str, start: str, folder: Path) -> Path:
    """Write the one plain block of a document that begins so to a file."""
    [block] = [text for text in blocks(HOME / "docs" / name, "") if text.startswith(start)]
    file = folder / "printed.toml"
    file.write_text(block)
    return file


def test_the_printed_claim_can_be_decided(tmp_path):
    claim = Claim.read(write_printed_file("claims.md", "claim = ", tmp_path))
    sweep = build_sweep(claim, "smoke")
    assert {cell.factors["mixer"] for cell in sweep.cells} == {"attention", "SSD"}
    check_parameters(claim.equal, claim.statistic, sweep)


def test_the_printed_sweep_can_be_run(tmp_path):
    sweep = read_file(write_printed_file("sweeps.md", "task = ", tmp_path)).build()
    assert sweep.factors == ("d_model", "learning_rate", "mixer", "seed")


def test_the_printed_recipes_can_be_run(tmp_path):
    sweep = read_file(write_printed_file("records.md", "task = ", tmp_path)).build()
    assert len(sweep.cells) == 20


@pytest.mark.parametrize("document", GUIDES, ids=lambda document: document.name)
def test_the_site_shows_whole_lines_of_blocks(document):
    lines = [
        line for _, block in BLOCK.findall(document.read_text()) for line in block.splitlines()
    ]
    assert [line for line in lines if len(line) > MOST_COLUMNS] == []


@pytest.mark.parametrize(("document", "line"), MAKE, ids=[line for _, line in MAKE])
def test_a_printed_target_exists(document, line):
    assert re.search(rf"^{line.split()[1]}:", (HOME / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize(("document", "line"), PIP, ids=[line for _, line in PIP])
def test_a_printed_installation_names_extras_and_constraints_that_exist(document, line):
    known = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    extras = [name for found in re.findall(r"\.\[(.*?)\]", line) for name in found.split(",")]
    assert set(extras) <= set(known)
    assert all((HOME / file).exists() for file in re.findall(r"--constraint (\S+)", line))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_printed_python_runs(document, tmp_path, monkeypatch):
    """In order and in one namespace; a block that begins with a file's name is that file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    namespace = {}
    if 'lab.open("runs/mqar")' in document.read_text():  # which `make mqar` trains
        sizes = {"seq_len": 16, "vocab_size": 32, "stack": "AM*2", "d_model": 32, "steps": 4}
        lab.train("mqar", **sizes, out="runs/mqar")
    try:
        for block in blocks(document, "python"):
            file = re.match(r"# (\w+\.py)\n", block)
            if file:
                (tmp_path / file[1]).write_text(block)
            else:
                exec(compile(block, document.name, "exec"), namespace)
        for name, value in namespace.items():
            if name.startswith("test_"):
                value()
    finally:
        for name in set(sys.modules) - known:
            if getattr(sys.modules[name], "__file__", None) == str(tmp_path / f"{name}.py"):
                del sys.modules[name]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_lead_somewhere(document):
    text = BLOCK.sub("", document.read_text(encoding="utf-8"))
    for target, anchor in [*LINK.findall(text), *((image, "") for image in IMAGE.findall(text))]:
        if target.startswith("https:"):
            continue
        page = document.parent / target if target else document
        assert page.exists(), target
        assert not anchor or anchor in list_anchors(page), f"{target}#{anchor}"


def list_anchors(page: Path) -> list[str]:
    """What GitHub and mkdocs make of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]


def test_every_image_is_shown_and_all_are_small():
    shown = {
        (document.parent / target).resolve()
        for document in DOCUMENTS
        for pattern in (LINK, IMAGE)
        for target in [match[1] for match in pattern.finditer(document.read_text("utf-8"))]
        if target.endswith(".png")
    }
    images = {path.resolve() for path in IMAGES.rglob("*.*")}
    assert images == shown
    assert sum(path.stat().st_size for path in images) <= MOST_IMAGE_BYTES


def test_the_readme_is_short_and_its_tree_is_exact():
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MOST_LINES
    tree = blocks(README, "")[-1].splitlines()
    assert len(tree) <= MOST_TREE_LINES
    top, in_lab = set(), set()
    for line in tree:
        paths = re.split(r"\s{2,}", line.strip())[0].split()
        (in_lab if line.startswith(" ") else top).update(path.rstrip("/") for path in paths)
    assert top == {"lab", "tasks", "analysis", "notebooks", "tests", "docs"}
    assert all((HOME / name).is_dir() for name in top)
    packages = {path.parent.name for path in HOME.glob("lab/*/__init__.py")}
    modules = {path.name for path in HOME.glob("lab/*.py") if not path.name.startswith("__")}
    assert in_lab == packages | modules
