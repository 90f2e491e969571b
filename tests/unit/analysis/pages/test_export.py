"""Figures as files: what was asked for, whole or not at all, without a look at the network."""

import base64
import os
from pathlib import Path
from xml.etree import ElementTree

import plotly.graph_objects as go
import pytest

from analysis.figures.theme import add_title, new_figure
from analysis.pages import export
from analysis.pages.export import BrowserError, find_browser, save, save_all
from tests.pixels import COLORS

TITLE = "Mass <by> layer & head"
"""Hostile to XML; as text it must come out as it is."""


def fig() -> go.Figure:
    bars = new_figure(height=240).add_bar(x=["a", "b", "c"], y=[1, 3, 2])
    return add_title(bars, TITLE, "mqar · AM*2")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("figures")
    save_all({folder / f"figure.{kind}": fig() for kind in ("png", "svg", "html")})
    return folder


@pytest.fixture(scope="module")
def page(browser):
    page = browser.new_page()
    yield page
    page.close()


def test_a_png_has_the_size_of_the_layout_and_is_not_blank(saved, page):
    png = base64.b64encode((saved / "figure.png").read_bytes()).decode()
    width, height, colors = page.evaluate(COLORS, png)
    assert (width, height) == (2 * 600, 2 * 240)
    assert len(colors) > 20
    assert 0xFFB27200 in colors, "the bars' blue, as ABGR"


def test_an_svg_is_xml_with_the_title_as_text(saved):
    root = ElementTree.parse(saved / "figure.svg").getroot()
    assert root.tag.endswith("svg")
    assert (root.get("width"), root.get("height")) == ("600", "240")
    assert TITLE in "".join(root.itertext())


def test_an_html_opens_without_the_network(saved, page):
    asked, errors = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    page.goto((saved / "figure.html").as_uri())
    page.wait_for_selector(".bars path")
    assert page.text_content("h1") == TITLE
    assert not errors
    assert asked
    assert not [url for url in asked if url.startswith(("http", "ws"))]


@pytest.mark.parametrize("name", ["figure.pdf", "figure", ".png"])
def test_another_suffix_lists_the_three(tmp_path, name):
    with pytest.raises(ValueError, match=r"must end in .png, .svg or .html"):
        save_all({tmp_path / "good.html": fig(), tmp_path / name: fig()})
    assert not list(tmp_path.iterdir())


def test_a_scale_below_zero_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"scale=0.0: must be > 0"):
        save(fig(), tmp_path / "figure.png", scale=0.0)


@pytest.mark.parametrize("path", ["/no/such/browser", "/bin/false"])
def test_without_a_browser_the_answer_is_make_browser(tmp_path, monkeypatch, path):
    monkeypatch.setenv("BROWSER_PATH", path)
    with pytest.raises(BrowserError, match="run `make browser`"):
        save(fig(), tmp_path / "figure.png")
    assert not list(tmp_path.iterdir())


def test_a_browser_is_found_in_order(monkeypatch):
    found = {"chromium-headless-shell": "/bin/light"}
    monkeypatch.setattr(export.shutil, "which", found.get)
    monkeypatch.setattr(export.Chromium, "find_browser", lambda skip_local: "/bin/system")
    monkeypatch.setattr(export, "_find_playwright", lambda: "/its/own")
    monkeypatch.setenv("BROWSER_PATH", "/bin/named")
    assert find_browser() == "/bin/named"
    monkeypatch.delenv("BROWSER_PATH")
    assert find_browser() == "/bin/light"
    found.clear()
    assert find_browser() == "/bin/system"
    monkeypatch.setattr(export.Chromium, "find_browser", lambda skip_local: None)
    assert find_browser() == "/its/own"


def test_a_file_that_cannot_be_replaced_is_left(tmp_path, monkeypatch):
    path = tmp_path / "figure.html"
    path.write_text("mine")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(fig(), path)
    assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]
