"""One self-contained page a run: what was trained, how well, how it got there, what it learned."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from analysis import ANALYSES, baselines
from analysis.base import Analysis, Subject, Words
from analysis.provenance import provenance
from analysis.style import DARK, HEAD, LIGHT, percent, stamped
from lab import experiment
from lab.files import write, writing
from lab.runs import Run


@dataclass(frozen=True)
class Shown:
    """A result on the page.

    Attributes:
        words: what stands beside it.
        spec: the figure as plotly's JSON without a template; None when there is no figure.
        ratio: width by height of what the page shows of it.
    """

    words: Words
    spec: Markup | None
    ratio: str


def write_report(run: Run) -> Path:
    """Write report.html into the run folder and return its path.

    Raises:
        RunError: when a checkpoint cannot be read, or the folder cannot be written.
    """
    path = run.path / "report.html"
    page = render(subject_of(run))
    with writing(run.path):
        write(path, page)
    return path


def subject_of(run: Run) -> Subject:
    """Return what is analysed of a run: its newest weights, and the first row of the test split.

    Raises:
        RunError: when a checkpoint cannot be read.
    """
    state = run.load("cpu")
    scores = (run.result() or {}).get("baselines")
    return Subject(
        run=run,
        model=state.model.eval(),
        step=state.step,
        checkpointed=bool(run.checkpoints()),
        batch=run.task.batch(split="test", size=1, seed=run.train.seed),
        baselines=scores or experiment.baselines(run.task, run.train.seed),
    )


def render(subject: Subject) -> str:
    """Return the page as HTML; all text from users is escaped."""
    run = subject.run
    standing = baselines.measure(subject)[0]
    sections = [(module.TITLE, shown) for module in ANALYSES if (shown := show(module, subject))]
    templates = Environment(
        loader=PackageLoader("analysis"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters.update(percent=percent, shown=_shown, unbroken=_unbroken)
    return templates.get_template("report.html.j2").render(
        subject=subject,
        run=run,
        result=run.result() or {},
        standing=standing,
        headline=baselines.headline(standing),
        record=_script(record(subject, standing)),
        sections=sections,
        themes=_script({"light": LIGHT.to_plotly_json(), "dark": DARK.to_plotly_json()}),
        config=json.dumps(run.config(), indent=2, ensure_ascii=False),
        provenance=provenance(run),
        plotly=Markup(get_plotlyjs()),
    )


def show(analysis: Analysis, subject: Subject) -> list[Shown]:
    """Return the results of an analysis, ready for the page."""
    shown = []
    for result in analysis.measure(subject):
        words, drawn = analysis.describe(result), analysis.draw(result)
        if drawn is None:
            shown.append(Shown(words, None, ""))
            continue
        # plotly's own JSON: arrays become base64.
        spec = json.loads(stamped(drawn, words.title, _stamp(subject)).to_json() or "")
        layout = spec["layout"]
        del layout["template"]
        ratio = f"{layout['width']} / {layout['height'] - HEAD}"
        shown.append(Shown(words, _script({**spec, "head": HEAD}), ratio))
    return shown


def record(subject: Subject, standing: baselines.Standing) -> dict[str, Any]:
    """Return what the page recomputes its headline numbers from: the metrics, not the result."""
    rows = subject.run.metrics()
    last = rows[-1] if rows else {}
    return {
        "steps": last.get("step"),
        "batch_size": subject.run.train.batch_size,
        "seconds": sum(row["seconds"] for row in rows),
        "scored": standing.scored,
        # The last step is evaluated unless the run was interrupted between two evaluations.
        "accuracy": last.get("test_accuracy", standing.accuracy),
        "loss": last.get("test_loss", (subject.run.result() or {}).get("loss")),
    }


def _shown(value: object) -> str:
    """Return a configuration's value as a reader expects it."""
    if value is None or value == {}:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name}={_shown(part)}" for name, part in value.items())
    if isinstance(value, tuple | list):
        return ", ".join(map(_shown, value))
    return str(value)


def _unbroken(text: str) -> str:
    """Keep a number and its per cent sign on one line."""
    return text.replace(" %", "\N{NO-BREAK SPACE}%")


def _stamp(subject: Subject) -> str:
    weights = f"step {subject.step:,}" if subject.checkpointed else "initial weights"
    return f"{subject.name} · {weights} · seed {subject.run.train.seed}"


def _script(content: dict[str, Any]) -> Markup:
    """Return JSON that is safe inside a script element."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028"))
