"""The parts of every page: findings with their figures, tables, formulas, themes, plotly.js."""

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from latex2mathml.converter import convert
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from analysis.base import Finding, Passage, Passages, Subject, Table, TokenText
from analysis.examination import Examination
from analysis.figures.theme import DARK, HEAD, LIGHT, add_title
from analysis.plain import deflate
from analysis.words import percent

FORMULAS = {
    "⟨|M|, P⟩ / Σ|M|": r"\frac{\langle |M|, P \rangle}{\sum |M|}",
    "Σ|M|(i − j) / Σ|M|": r"\frac{\sum_{ij} |M_{ij}| (i - j)}{\sum_{ij} |M_{ij}|}",
    "Σ_j |M_ij|": r"\textstyle\sum_j |M_{ij}|",
    "Σ_j |M̃_ij|": r"\textstyle\sum_j |\tilde{M}_{ij}|",
    "‖M_ij v_j W_O‖": r"\| M_{ij} v_j W_O \|",
    "‖dt·B⊗x‖": r"\| dt \cdot B \otimes x \|",
    "‖h C‖": r"\| h C \|",
    "exp H(σ / Σσ)": r"\exp H(\sigma / \textstyle\sum \sigma)",
    "σ_max · max(m, T − m) · ε": r"\sigma_{\max} \cdot \max(m, T - m) \cdot \varepsilon",
    "Π (½ I + ½ Ā)": r"\textstyle\prod (\frac{1}{2} I + \frac{1}{2} \bar{A})",
    "M̃ = L∘CBᵀ·dt + D": r"\tilde{M} = L \circ C B^\top \cdot dt + D",
    "M = L ∘ CBᵀ": r"M = L \circ C B^\top",
    "log₁₀|M̃|": r"\log_{10} |\tilde{M}|",
    "log|M_ij|": r"\log |M_{ij}|",
    "log|C_i·B_j|": r"\log |C_i \cdot B_j|",
    "log L_ij": r"\log L_{ij}",
    "log₂(step + 1)": r"\log_2(\mathrm{step} + 1)",
    "y = M · values": r"y = M \cdot \mathrm{values}",
    "I(row; column)": r"I(\mathrm{row}; \mathrm{column})",
    "exp Σa": r"\exp \textstyle\sum a",
    "e^H": "e^H",
    "e^a": "e^a",
    "R_ij": "R_{ij}",
    "M_ij": "M_{ij}",
    "|M|": "|M|",
}
"""LaTeX of the formulas that sentences and titles of analyses contain, by their plain text."""
KNOWN = re.compile("|".join(re.escape(plain) for plain in sorted(FORMULAS, key=len, reverse=True)))


@dataclass(frozen=True)
class Shown:
    """A finding as a page shows it and report.json keeps it.

    Attributes:
        spec: the figure as plotly's JSON without a template; None without a figure.
        texts: what is read in place of a figure.
        tokens: a row that is looked at token by token in place of a figure.
    """

    title: str
    says: str
    reading: str
    alt: str
    table: Table | None = None
    spec: dict[str, Any] | None = None
    texts: tuple[Passage, ...] = ()
    tokens: dict[str, Any] | None = None

    @property
    def height(self) -> int:
        """Height of the figure without its title, px."""
        assert self.spec
        return self.spec["layout"]["height"] - HEAD

    @property
    def ratio(self) -> str:
        """Width by height of the figure without its title."""
        assert self.spec
        return f"{self.spec['layout']['width']} / {self.height}"

    @property
    def views(self) -> list[str]:
        """The names of what the figure can show, if there is a choice."""
        meta = (self.spec or {"layout": {}})["layout"].get("meta") or {}
        return [view["name"] for view in meta.get("views", ())]

    @property
    def square(self) -> bool:
        """Whether cells are square, so that the height must shrink with the width."""
        assert self.spec
        axes = (part for part in self.spec["layout"].values() if isinstance(part, dict))
        return any("scaleanchor" in axis for axis in axes)


def show_finding(finding: Finding, stamp: str, of: str = "") -> Shown:
    """Prepare a finding for a page.

    Args:
        stamp: where it comes from; saved figures show it.
        of: what comes before its title, such as the name of a run.
    """
    title = f"{of} · {finding.title}" if of else finding.title
    figure = finding.figure()
    return Shown(
        title,
        finding.says,
        finding.reading,
        finding.alt,
        finding.numbers(),
        _make_spec(add_title(figure, title, stamp)) if isinstance(figure, go.Figure) else None,
        figure.texts if isinstance(figure, Passages) else (),
        figure.row if isinstance(figure, TokenText) else None,
    )


def _make_spec(fig: go.Figure) -> dict[str, Any]:
    """Return plotly's own JSON, in which arrays are base64, without the template."""
    spec = json.loads(fig.to_json() or "")
    del spec["layout"]["template"]
    return {**spec, "head": HEAD}


def draw_findings(results: Mapping[str, Sequence[Finding]], stamp: str) -> dict[str, go.Figure]:
    """Draw every figure with title and stamp, named by the key of its finding and a number."""
    found = {}
    for name, findings in results.items():
        for i, finding in enumerate(findings, 1):
            figure = finding.figure()
            if isinstance(figure, go.Figure):
                found[f"{name}-{i}"] = add_title(figure, finding.title, stamp)
    return found


def draw_figures(examination: Examination) -> dict[str, go.Figure]:
    """Draw every figure of an examination, with title and stamp, named by analysis and number."""
    return draw_findings(examination.results, make_stamp(examination.subject))


def make_stamp(subject: Subject) -> str:
    """Return where a figure comes from: task, stack, run, step and seed."""
    parts = [subject.name]
    if subject.run is not None:
        parts.append(subject.run.path.resolve().name)
    if subject.step is not None:
        parts.append(f"step {subject.step:,}" if subject.step else "initial weights")
    return " · ".join([*parts, f"seed {subject.seed}"])


@dataclass(frozen=True)
class PagePart:
    """A part of a page below a heading.

    Attributes:
        figures: each after its identifier.
        side: whether the figures stand side by side.
        programs: code, folded, by what it shows.
    """

    key: str
    title: str
    texts: Sequence[str] = ()
    table: Table | None = None
    figures: Sequence[tuple[str, Shown]] = ()
    side: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
    programs: Mapping[str, str] = field(default_factory=dict)


def build_page(
    kind: str, title: str, verdict: str, parts: Sequence[PagePart], mark: str = ""
) -> str:
    """Return a page of parts as HTML; all text from users is escaped.

    Args:
        kind: what it is, such as "Sweep".
        parts: in order; those without content are left out.
        mark: a comment that tells it from another page.
    """
    kept = [p for p in parts if p.texts or p.table or p.figures or p.facts or p.programs]
    return fill_template(
        "parts.html.j2",
        kind=kind,
        title=title,
        verdict=verdict,
        parts=kept,
        outline=[(part.key, part.title) for part in kept],
        mark=mark,
    )


def render_figure(fig: go.Figure) -> str:
    """Return a page on which a figure fills the window; its title and stamp become text."""
    title = fig.layout.title
    said, stamp = (html.unescape(part.text or "") for part in (title, title.subtitle))
    spec = _make_spec(go.Figure(fig))
    return fill_template("figure.html.j2", title=said, stamp=stamp, spec=spec)


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

    def pack_figure(spec: dict[str, Any]) -> Markup:
        types.update(trace["type"] for trace in spec["data"])
        # Halves of characters, of names that are not UTF-8, as JSON escapes them.
        return Markup(deflate(_write_json(spec).encode(errors="backslashreplace")))

    templates.filters.update(
        percent=percent,
        shown=format_value,
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
    return Markup(_write_json(content).replace("<", "\\u003c").replace("\u2028", "\\u2028"))


def _write_json(content: dict[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))


def typeset(text: str) -> Markup:
    """Return a text as HTML: escaped, formulas as MathML, numbers together with their %."""
    parts = KNOWN.split(text)
    found = [*map(_convert, KNOWN.findall(text)), Markup("")]
    words = (escape(_keep_together(part)) for part in parts)
    return Markup("").join(part for pair in zip(words, found, strict=True) for part in pair)


@cache
def _convert(plain: str) -> Markup:
    return Markup(convert(FORMULAS[plain]))


def _keep_together(text: str) -> str:
    """Keep a number and its per cent sign, and the ends of an interval, on one line."""
    space = "\N{NO-BREAK SPACE}"
    return text.replace(" %", f"{space}%").replace(" … ", f"{space}…{space}")


def format_value(value: object) -> str:
    """Format a configuration's value for reading: yes and no, lists, – for nothing."""
    if value is None or value == {}:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name}={format_value(part)}" for name, part in value.items())
    if isinstance(value, tuple | list):
        return ", ".join(map(format_value, value))
    return str(value)


TESTED = "plotly.js v4.1.1"
"""The version whose cut bundles are tested. Others stay whole."""
CORE = "scatter"
"""The trace type that every bundle has."""
MODULE = re.compile(r"(?<=[;}])var ([\w$]+)=W\((?:\([\w$,]*\)|[\w$]+)=>\{")
INIT = re.compile(r"([\w$]+)=Ea\(\(\)=>\{")
"""ES modules, which follow a module; they too run when they are called."""
CALL = re.compile(r"(?<![\w$.])([\w$]+)\(\)")
REGISTER = re.compile(r"(?<=\.register\(\[)(?:[\w$]+\(\),?)+")
TYPE = re.compile(r'moduleType:"trace",name:"(\w+)"')


def pack_plotly(types: Iterable[str]) -> str:
    """Return plotly.js, deflated, cut to the modules that these trace types need.

    Whole it is 2.0 MB, four times as large: a page of figures would be three times as large.
    """
    return _pack(frozenset(types) - {CORE})


@cache
def _pack(types: frozenset[str]) -> str:
    return deflate(_cut(types).encode())


def _cut(types: frozenset[str]) -> str:
    """Return plotly.js with the modules that these trace types need, or whole if in doubt.

    The bundle is a list of modules, `var NAME=W(exports=>{…});`, that run when another calls
    `NAME()`. The last one registers all trace types. With fewer types, most modules are never
    called, those of maps and WebGL first.
    """
    whole = get_plotlyjs()
    registered = REGISTER.search(whole)
    if TESTED not in whole or registered is None:
        return whole
    starts = list(MODULE.finditer(whole, 0, registered.start()))
    ends = [start.start() for start in starts[1:]]
    head, last = whole[: starts[0].start()], whole[starts[-1].start() :]
    modules = {
        start[1]: whole[start.start() : end] for start, end in zip(starts, ends, strict=False)
    }
    entries = {_find_type(name, modules): f"{name}()" for name in CALL.findall(registered[0])}
    if not types <= entries.keys():
        return whole
    last = last.replace(registered[0], ",".join(entries[name] for name in sorted(types)))
    kept = _reach(last, modules)
    return "".join([head, *(text for name, text in modules.items() if name in kept), last])


def _find_type(name: str, modules: dict[str, str]) -> str | None:
    """Return the trace type of a module, or of the one it is built on; None for other modules."""
    while name in modules:
        if found := TYPE.search(modules[name]):
            return found[1]
        call = CALL.search(modules[name])
        name = call[1] if call else ""
    return None


def _reach(text: str, modules: dict[str, str]) -> set[str]:
    """Return the modules that a text calls, and those that they call in turn."""
    owners = {init: name for name, part in modules.items() for init in INIT.findall(part)}
    owners |= {name: name for name in modules}
    found: set[str] = set()
    waiting = [text]
    while waiting:
        called = {owners[name] for name in CALL.findall(waiting.pop()) if name in owners} - found
        waiting += [modules[name] for name in called]
        found |= called
    return found
