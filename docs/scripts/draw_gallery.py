"""Repeat the commands that gallery.md prints, and take its pictures anew: `make gallery`.

Every command of gallery.md is run, and finished runs are kept. Then every picture of gallery.md and
of the README is made. Its path says what it shows:

    images/RUN/FIGURE.png     a figure of the newest run folder of that name, below runs/
    images/RUN/report.png     the first screen of that run's report
    images/atlas/SCALE-NAME.png  of the runs that come with the lab: NAME is abilities or bytes
    images/NAME.png           the page runs/gallery/NAME.html, or what a command wrote there itself

A picture that stands beside another (`width="49%"`) is drawn narrower, so that one can read it.
"""

import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import plotly.graph_objects as go
from pictures import shrink
from playwright.sync_api import sync_playwright

from analysis.base import Subject
from analysis.examination import examine
from analysis.figures.theme import WIDTH, add_title
from analysis.pages.export import find_browser, save_all
from analysis.pages.page import draw_figures
from analysis.profile.findings import AbilityMap, RecallPerByte
from analysis.profile.scores import collect_scores
from lab.api.profiling import ATLAS, read_comparable
from lab.training.run import Run

HOME = Path(__file__).parents[2]
IMAGES = HOME / "docs" / "images"
RUNS = (HOME / "runs" / "gallery", HOME / "runs")
PICTURE = re.compile(r'images/([\w/-]+\.png)"?(?: width="(\d+)%")?')
ATLAS_FOLDER = "atlas"
FINDINGS = {"abilities": AbilityMap, "bytes": RecallPerByte}
HALF = 0.5
"""Share of the page's width up to which a picture stands beside another."""
NARROW = 420
"""Width of a figure that stands beside another, px of its layout."""
TITLE = 52
"""Characters of a line of its title."""
SCREEN = {"width": 1200, "height": 900}


def main() -> None:
    """Run the commands, make the pictures, and remove those that no page shows."""
    pages = [(HOME / "README.md").read_text(), (HOME / "docs" / "gallery.md").read_text()]
    for line in re.findall(r"^\.venv/bin/lab .*$", pages[1].replace("\\\n", ""), re.MULTILINE):
        done = subprocess.run(shlex.split(line, comments=True), cwd=HOME, check=False)
        if done.returncode > 1:  # 1: a law fails, which the gallery is to show
            sys.exit(f"{line}: exit code {done.returncode}")
    wanted = {
        Path(name): float(width or 100) / 100
        for page in pages
        for name, width in PICTURE.findall(page)
    }
    for path in wanted:
        (IMAGES / path).parent.mkdir(parents=True, exist_ok=True)
    figures = {
        path: share
        for path, share in wanted.items()
        if path.parent != Path() and not is_screen(path)
    }
    save_all({IMAGES / path: figure for path, figure in draw(figures).items()})
    photograph([path for path in wanted if is_screen(path)])
    for path in IMAGES.rglob("*.png"):
        if path.relative_to(IMAGES) in wanted:
            shrink(path)
        else:
            path.unlink()


def is_screen(path: Path) -> bool:
    """Whether a picture shows a page, not a figure."""
    return path.stem == "report" or find_page(path).exists()


def find_page(path: Path) -> Path:
    """Return the page that a picture shows."""
    if path.stem == "report":
        return find_run(path.parent.name).path / "report.html"
    return RUNS[0] / f"{path.stem}.html"


def find_run(name: str) -> Run:
    """Open the run folder of that name."""
    return Run.open(next(runs / name for runs in RUNS if (runs / name).exists()))


def draw(wanted: dict[Path, float]) -> dict[Path, go.Figure]:
    """Draw figures of runs, each as wide as the share of the page that it takes."""
    found = {}
    for path, share in wanted.items():
        if path.parent.name == ATLAS_FOLDER:
            scale = path.stem.partition("-")[0]
            scores = collect_scores(read_comparable(ATLAS, scale))
            chart = FINDINGS[path.stem.partition("-")[2]](tuple(scores))
            command = f"lab profile MIXER --scale {scale}"
            figure = add_title(chart.figure(), chart.title, command)
            found[path] = figure if share > HALF else narrow(figure)
    for run in {path.parent.name for path in wanted} - {ATLAS_FOLDER}:
        mine = {path: share for path, share in wanted.items() if path.parent.name == run}
        only = {path.stem.rpartition("-")[0] for path in mine}
        figures = draw_figures(examine(Subject.of(find_run(run)), sorted(only)))
        for path, share in mine.items():
            found[path] = figures[path.stem] if share > HALF else narrow(figures[path.stem])
    return found


def narrow(figure: go.Figure) -> go.Figure:
    """Make a figure narrower without making its text smaller; squares stay squares.

    The stamp goes, and a second line of the title has room of its own above the legend.
    """
    square = next(figure.select_yaxes(lambda axis: axis.scaleanchor), None)
    shorter = 0.0
    if square is not None:
        across = figure.layout[square.scaleanchor.replace("x", "xaxis")].domain or (0, 1)
        down = square.domain or (0, 1)
        shorter = (WIDTH - NARROW) * (across[1] - across[0]) / (down[1] - down[0])
    lines = textwrap.wrap(figure.layout.title.text, TITLE)
    more = 20 * (len(lines) - 1)
    return figure.update_layout(
        width=NARROW,
        height=figure.layout.height - shorter + more,
        margin_t=figure.layout.margin.t + more,
        title={"text": "<br>".join(lines), "subtitle": {"text": ""}},
        title_pad={"t": 10 * len(lines) - 4, "l": 2},
    )


def photograph(paths: list[Path]) -> None:
    """Take the first screen of each page."""
    chromium = find_browser()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=SCREEN)
        for path in paths:
            page.goto(find_page(path).as_uri())
            page.wait_for_timeout(1000)
            page.screenshot(path=IMAGES / path)


if __name__ == "__main__":
    sys.exit(main())
