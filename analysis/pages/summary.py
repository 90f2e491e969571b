"""The first screen of a report: how the model does it, why to trust that, and the key findings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from analysis.base import Words
from analysis.pages.page import Shown
from analysis.run.baselines import Standing

Section = tuple[str, str, list[Shown]]
"""Name, title and figures of an analysis."""

TRUST = "leaks"
HOW = "mechanism"
KEY = (
    "errors",
    "generalisation",
    "recall",
    "state_space",
    "dynamic_mask",
    "value_usage",
    "expert_knockout",
    "expert_roles",
    "dynamics",
    "samples",
)
"""Analyses whose first findings count most, in the order of the list."""
MOST = 5
"""Maximum number of key findings."""
OPEN = ("tokens", "curves", "mechanism")
"""Sections that are unfolded from the start."""
FEW = 3
"""Maximum number of sections of a page on which all are unfolded."""
ALWAYS = ("baselines", "leaks", "rows", "tokens", "curves", "positions", "generalisation")
"""Analyses that say something of a model that has learned nothing, too."""


@dataclass(frozen=True)
class Answer:
    """A question of the first screen, answered.

    Attributes:
        question: what a reader asks first.
        says: the answer.
        section: where the evidence is; empty where the page has none.
    """

    question: str
    says: str
    section: str = ""


def answer_first(
    standing: Standing, words: Mapping[str, Words], not_applicable: Mapping[str, str]
) -> list[Answer]:
    """Answer how the model does it, and why to trust it, or what it has not learned.

    Args:
        standing: how the run ended.
        words: of the first finding of each analysis, by its name.
        not_applicable: why the others do not apply, by name.
    """
    how = _explain_how(standing, words, not_applicable)
    if not standing.learned:
        return [how, Answer("What is there to learn?", standing.rules, "baselines")]
    trust = standing.rules
    if TRUST in words:
        trust += f" {words[TRUST].lead}"
    return [how, Answer("Why trust it?", trust, TRUST if TRUST in words else "baselines")]


def _explain_how(
    standing: Standing, words: Mapping[str, Words], not_applicable: Mapping[str, str]
) -> Answer:
    question = "How does it do it?"
    if not standing.learned:
        why = standing.failure or "Its accuracy is near that of a blind guess."
        return Answer(question, f"There is nothing to explain yet. {why}", "baselines")
    if HOW in words:
        return Answer(question, words[HOW].lead, HOW)
    if HOW in not_applicable:
        return Answer(question, f"No label applies: {not_applicable[HOW]}.")
    return Answer(question, "Not analyzed: `lab analyze` finds out.")


def pick_key_findings(words: Mapping[str, Words]) -> list[tuple[str, str]]:
    """Return the analyses that matter most, each with its finding in one sentence."""
    return [(name, words[name].lead) for name in KEY if name in words][:MOST]


def choose_open(names: Sequence[str]) -> set[str]:
    """Return which sections are unfolded from the start."""
    return set(names if len(names) <= FEW else OPEN)


def split_sections(
    sections: Sequence[Section], learned: bool
) -> tuple[list[Section], list[Section]]:
    """Return the sections that are shown, and those put aside as there is nothing to explain."""
    if learned:
        return list(sections), []
    return (
        [section for section in sections if section[0] in ALWAYS],
        [section for section in sections if section[0] not in ALWAYS],
    )
