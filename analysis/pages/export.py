"""Save figures as files: PNG and SVG drawn by Chromium, or a page that needs no network."""

import asyncio
import importlib.util
import os
import shutil
import struct
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import kaleido
import plotly.graph_objects as go
from choreographer.browsers.chromium import Chromium
from choreographer.errors import BrowserClosedError, BrowserFailedError, ChromeNotFoundError

from analysis.pages.page import render_figure
from lab.files import check_output, write

IMAGES: dict[str, Literal["png", "svg"]] = {".png": "png", ".svg": "svg"}
SUFFIXES = (*IMAGES, ".html")
SCALE = 2.0
"""Pixels of a PNG per pixel of the layout: sharp in print."""


class BrowserError(RuntimeError):
    """There is no Chromium to draw an image, or it does not start."""


def check_figure(figure: Path, force: bool) -> None:
    """Check that a figure may be saved as this file.

    Raises:
        ValueError: for another kind of file, or one that the lab did not make, unless forced.
    """
    if figure.suffix.lower() not in SUFFIXES:
        raise ValueError(f"figure={figure}: must end in {', '.join(SUFFIXES)}")
    check_output("figure", figure, force)


def save(figure: go.Figure, path: Path | str, *, scale: float = SCALE) -> None:
    """Write a figure to a file whose suffix names the format; an error leaves no partial file.

    Args:
        figure: drawn at the width and height of its layout.
        scale: pixels of a PNG per pixel of the layout.

    Raises:
        ValueError: for another suffix, or a scale that is not above 0.
        BrowserError: for an image without a Chromium that can draw it.
        OSError: when the file cannot be written.
    """
    save_all({Path(path): figure}, scale=scale)


def save_all(figures: Mapping[Path, go.Figure], *, scale: float = SCALE) -> None:
    """Write figures as `save` does; the browser starts only once, which takes seconds.

    Raises:
        ValueError: for another suffix, or a scale that is not above 0; nothing is written then.
        BrowserError: for an image without a Chromium that can draw it.
        OSError: when a file cannot be written.
    """
    if scale <= 0:
        raise ValueError(f"scale={scale}: must be > 0")
    for path in figures:
        if path.suffix.lower() not in SUFFIXES:
            raise ValueError(
                f"figure={path}: must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
            )
    images = {path: figure for path, figure in figures.items() if path.suffix.lower() in IMAGES}
    for path, figure in figures.items():
        if path not in images:
            write(path, render_figure(figure))
    if not images:
        return
    # A notebook's thread already runs an event loop, and a thread can have only one.
    with ThreadPoolExecutor(1) as pool:
        drawn = pool.submit(_draw, images, scale).result()
    for path, image in drawn.items():
        write(path, _mark(path, image))


def _mark(path: Path, image: bytes) -> bytes:
    """Say in an image what made it, so that it may be overwritten without being asked for."""
    if IMAGES[path.suffix.lower()] == "svg":
        return image + b"<!-- wonderful-lab -->"
    text = b"tEXtSoftware\0wonderful-lab"  # a chunk: its length, kind and text, and their checksum
    chunk = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
    end = image.rindex(b"IEND") - 4
    return image[:end] + chunk + image[end:]


def find_browser() -> str | None:
    """Return the path of a Chromium: BROWSER_PATH, the system's, playwright's, or None.

    The one without windows comes first: it opens a page in little more than half the time.
    """
    named, light = os.environ.get("BROWSER_PATH"), shutil.which("chromium-headless-shell")
    return named or light or Chromium.find_browser(skip_local=False) or _find_playwright()


def _find_playwright() -> str | None:
    """Return the Chromium that `make browser` installs by playwright; None without it."""
    if importlib.util.find_spec("playwright") is None:
        return None
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if Path(path).exists() else None


def _draw(figures: Mapping[Path, go.Figure], scale: float) -> dict[Path, bytes]:
    """Draw figures as images in one browser.

    Raises:
        BrowserError: when no Chromium starts.
    """
    path = find_browser()
    try:
        return asyncio.run(_draw_images(figures, scale, path))
    except (ChromeNotFoundError, BrowserFailedError, BrowserClosedError) as error:
        why = "none was found" if path is None else f"{path} is not Chromium, or does not start"
        raise BrowserError(f"images are drawn by Chromium: {why}; run `make browser`") from error


async def _draw_images(
    figures: Mapping[Path, go.Figure], scale: float, path: str | None
) -> dict[Path, bytes]:
    images = {}
    # Without mathjax=False the page would ask the network for it.
    async with kaleido.Kaleido(mathjax=False, path=path) as drawing:
        for file, figure in figures.items():
            kind = IMAGES[file.suffix.lower()]
            size = scale if kind == "png" else 1
            images[file] = await drawing.calc_fig(figure, opts={"format": kind, "scale": size})
    return images
