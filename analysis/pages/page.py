"""The parts of every page: figures with their words, light and dark themes, templates."""

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from analysis import ANALYSES
from analysis.base import Analysis, Subject, Words
from analysis.examination import Examination
from analysis.pages.bundle import pack_plotly
from analysis.pages.formulas import typeset
from analysis.plain import deflate
from analysis.plots.style import DARK, HEAD, LIGHT, add_title
from analysis.words import percent


@dataclass(frozen=True)
class Shown:
    """A finding on a page.

    Attributes:
        words: the text beside the figure.
        spec: the figure as plotly's JSON without a template; None when there is no figure.
        ratio: width by height of the figure without its title.
        least: least height on a narrow page, px, so that panels stay readable; None for square
            cells, which must shrink with the width.
    """

    words: Words
    spec: Markup | None
    ratio: str
    least: int | None = None


def show_findings(analysis: Analysis, results: Sequence[Any], stamp: str) -> list[Shown]:
    """Describe and draw the findings of an analysis for a page.

    Args:
        analysis: describes and draws them.
        results: what it measured.
        stamp: where they come from; saved figures show it.
    """
    return [
        show_figure(analysis.describe(result), analysis.draw(result), stamp) for result in results
    ]


def show_figure(words: Words, fig: go.Figure | None, stamp: str) -> Shown:
    """Prepare a figure and its words for a page."""
    if fig is None:
        return Shown(words, None, "")
    # plotly's own JSON: arrays become base64.
    spec = json.loads(add_title(fig, words.title, stamp).to_json() or "")
    layout = spec["layout"]
    del layout["template"]
    height = layout["height"] - HEAD
    square = any("scaleanchor" in part for part in layout.values() if isinstance(part, dict))
    ratio = f"{layout['width']} / {height}"
    return Shown(words, embed_json({**spec, "head": HEAD}), ratio, None if square else height)


def render_figure(fig: go.Figure) -> str:
    """Return a page on which a figure fills the window; its title and stamp become text."""
    title = fig.layout.title
    said, stamp = (html.unescape(part.text or "") for part in (title, title.subtitle))
    shown = show_figure(Words(said, "", stamp, said), go.Figure(fig), stamp)
    return fill_template("figure.html.j2", words=shown.words, spec=shown.spec)


def make_stamp(subject: Subject) -> str:
    """Return where a figure comes from: task, stack, run, step and seed."""
    parts = [subject.name]
    if subject.run is not None:
        parts.append(subject.run.path.resolve().name)
    if subject.step is not None:
        parts.append(f"step {subject.step:,}" if subject.step else "initial weights")
    return " · ".join([*parts, f"seed {subject.seed}"])


def draw_figures(examination: Examination) -> dict[str, go.Figure]:
    """Draw every figure of an examination, with title and stamp, named by analysis and number."""
    found = {}
    for name, results in examination.results.items():
        for i, result in enumerate(results, 1):
            words, fig = ANALYSES[name].describe(result), ANALYSES[name].draw(result)
            if fig is not None:
                found[f"{name}-{i}"] = add_title(fig, words.title, make_stamp(examination.subject))
    return found


def fill_template(template: str, **parts: Any) -> str:
    """Fill in a template of this package and return the page; all text is escaped."""
    templates = Environment(
        loader=PackageLoader("analysis.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    types: set[str] = set()

    def pack_figure(spec: str) -> Markup:
        types.update(trace["type"] for trace in json.loads(spec)["data"])
        # Halves of characters, of names that are not UTF-8, as JSON escapes them.
        return Markup(deflate(spec.encode(errors="backslashreplace")))

    templates.filters.update(
        percent=percent,
        shown=_format_value,
        unbroken=_keep_together,
        typeset=typeset,
        embedded=embed_json,
        packed=pack_figure,
    )
    return templates.get_template(template).render(
        **parts,
        themes=embed_json({"light": LIGHT.to_plotly_json(), "dark": DARK.to_plotly_json()}),
        pack_plotly=lambda: Markup(pack_plotly(types)),
    )


def embed_json(content: dict[str, Any]) -> Markup:
    """Write JSON so that it is safe inside a script element."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028"))


def _format_value(value: object) -> str:
    """Format a configuration's value for reading: yes and no, lists, – for nothing."""
    if value is None or value == {}:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name}={_format_value(part)}" for name, part in value.items())
    if isinstance(value, tuple | list):
        return ", ".join(map(_format_value, value))
    return str(value)


def _keep_together(text: str) -> str:
    """Keep a number and its per cent sign on one line."""
    return text.replace(" %", "\N{NO-BREAK SPACE}%")
