"""The card of a profile: one page and one JSON that can be sent to a colleague."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from analysis.base import Finding, Table
from analysis.pages.page import PagePart, build_page, show_finding
from analysis.plain import to_plain
from analysis.profile.findings import (
    Abilities,
    AbilityMap,
    Costs,
    RecallCurves,
    RecallPerByte,
    correlate,
)
from analysis.profile.scores import AbilityScore
from lab.studies.profile import ABILITIES, CHOOSER, RATES, SCALES, STEP_TOKENS, WIDTH


@dataclass(frozen=True)
class ProfileCard:
    """What is known of a mixer.

    Attributes:
        mixer: its name.
        scale: of the profile.
        scores: of it, and of all that it is compared with.
        against: the others that are named.
        rate: the learning rate that was chosen, as a multiple of the lab's own.
        window: the rates that recall nearly as much, likewise.
        unsolved: why a run of an ability is not solved, by the ability's title.
        mechanism: findings on how it recalls.
        costs: of it and of attention; None before they are measured.
        laws: verdict and evidence by law.
        machine: on which costs were measured.
    """

    mixer: str
    scale: str
    scores: tuple[AbilityScore, ...]
    against: tuple[str, ...]
    rate: str
    window: tuple[str, ...]
    unsolved: Mapping[str, str] = field(default_factory=dict)
    mechanism: Sequence[Finding] = ()
    costs: Costs | None = None
    laws: Sequence[Mapping[str, Any]] = ()
    machine: str = ""

    @property
    def abilities(self) -> Abilities:
        """The strip of abilities."""
        return Abilities(self.mixer, self.scores, self.against)

    @property
    def recall(self) -> AbilityScore | None:
        """Its score in recall, which has parameters and bytes of state of that model."""
        return next((s for s in self.abilities.own if s.ability == CHOOSER), None)

    def summarize(self) -> str:
        """Return in a sentence where it stands, and which laws it breaks."""
        broken = [law["law"] for law in self.laws if law["verdict"] == "fails"]
        laws = f" Laws that it breaks: {', '.join(broken)}." if broken else ""
        return f"{self.abilities.says}{laws}"

    def to_dict(self) -> dict[str, Any]:
        """Return the card as JSON takes it; numbers that are not finite are null."""
        own = to_plain(
            [
                {"title": ABILITIES[s.ability].title, "value": s.value, "text": str(s), **asdict(s)}
                for s in self.abilities.own
            ]
        )
        return {
            "mixer": self.mixer,
            "scale": self.scale,
            "settings": asdict(SCALES[self.scale]),
            "learning_rate": {"chosen": self.rate, "window": self.window},
            "parameters": self.recall and self.recall.parameters,
            "state_bytes": self.recall and self.recall.state_bytes,
            "abilities": own,
            "unsolved": dict(self.unsolved),
            "mechanism": [finding.says for finding in self.mechanism],
            "costs": [asdict(speed) for speed in self.costs.speeds] if self.costs else [],
            "laws": list(self.laws),
            "machine": self.machine,
        }

    def render(self) -> str:
        """Return the page as HTML; all text from users is escaped."""
        named = (self.mixer, *self.against)
        curves = RecallCurves(named, self.scores)
        spent = SCALES[self.scale]
        how = (
            f"Two layers of it with MLPs, width {WIDTH}, {spent.tokens:,} tokens of training on "
            f"each ability in steps of {STEP_TOKENS:,}, runs of each ability: {spent.seeds}. The "
            "learning rate is the best of three on validation rows of recall. All mixers are "
            "trained alike; parameters and bytes of state differ and are given."
        )
        of = self.recall
        parameters, state = (of.parameters, of.state_bytes) if of else (None, None)
        facts = {
            "mixer": self.mixer,
            "parameters": "–" if parameters is None else f"{parameters:,}",
            "bytes of state": "not known" if state is None else f"{state:,}",
            "learning rate": f"{RATES[self.rate]:g} × the lab's",
            "rates that recall nearly as much": [f"{RATES[rate]:g} ×" for rate in self.window],
            "scale": self.scale,
        }
        failed = [f"{title}: {why}" for title, why in self.unsolved.items()]
        laws = Table(
            ("law", "verdict", "evidence"),
            tuple((law["law"], law["verdict"], law["evidence"]) for law in self.laws),
        )
        parts = [
            PagePart("compared", "What is compared", [how], facts=facts),
            PagePart("abilities", "Abilities", figures=[self._show("abilities-1", self.abilities)]),
            PagePart(
                "recall", "Recall", figures=[self._show("recall-1", curves), *self._show_bytes()]
            ),
            PagePart("unsolved", "What the first seed fails, and why", failed),
            PagePart(
                "mechanism",
                "How it recalls",
                figures=[self._show(f"mechanism-{i}", f) for i, f in enumerate(self.mechanism, 1)],
            ),
            PagePart(
                "costs",
                "Costs",
                [f"Measured on {self.machine}."] if self.costs else [],
                figures=[self._show("costs-1", self.costs)] if self.costs else [],
            ),
            PagePart("laws", "Laws", table=laws if self.laws else None),
            PagePart("mixers", "All mixers", figures=self._show_mixers()),
            PagePart(
                "paste",
                "To paste into a paper",
                programs={"Markdown": self.to_markdown(), "LaTeX": self.to_latex()},
            ),
        ]
        return build_page("Profile", self.mixer, self.summarize(), parts)

    def _show(self, key: str, finding: Finding) -> tuple[str, Any]:
        return key, show_finding(finding, f"{self.mixer} · {self.scale}")

    def _show_bytes(self) -> list[tuple[str, Any]]:
        found = RecallPerByte(self.scores, self.mixer)
        return [self._show("recall-2", found)] if found.points else []

    def _show_mixers(self) -> list[tuple[str, Any]]:
        """Return the map of all mixers, if there are others, and which abilities go together."""
        if len({score.mixer for score in self.scores}) < 2:
            return []
        findings = [AbilityMap(self.scores), *correlate(self.scores)]
        return [self._show(f"mixers-{i}", finding) for i, finding in enumerate(findings, 1)]

    def _tabulate(self) -> list[tuple[str, ...]]:
        """Return a row for each ability, a column for each mixer that is named."""
        named = [n for n in (self.mixer, *self.against) if any(s.mixer == n for s in self.scores)]
        found = {(s.mixer, s.ability): s for s in self.scores}
        rows = [("ability", *named)]
        for score in self.abilities.own:
            cells = (found.get((name, score.ability)) for name in named)
            title = ABILITIES[score.ability].title
            rows.append((title, *("–" if s is None else _add_interval(s) for s in cells)))
        return rows

    def to_markdown(self) -> str:
        """Return the abilities of the named mixers as a table in Markdown."""
        head, *rows = ([cell.replace("|", r"\|") for cell in row] for row in self._tabulate())
        lines = [head, ["---"] * len(head), *rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def to_latex(self) -> str:
        """Return the same as a LaTeX tabular with the rules of booktabs."""
        head, *rows = ([_escape(cell) for cell in row] for row in self._tabulate())
        body = "\n".join(f"{' & '.join(row)} \\\\" for row in rows)
        columns = "l" + "r" * (len(head) - 1)
        return (
            f"\\begin{{tabular}}{{{columns}}}\n\\toprule\n{' & '.join(head)} \\\\\n\\midrule\n"
            f"{body}\n\\bottomrule\n\\end{{tabular}}"
        )


def _add_interval(score: AbilityScore) -> str:
    ends = score.describe_interval()
    return str(score) if ends == "–" else f"{score} ({ends})"


def _escape(text: str) -> str:
    """Escape what LaTeX reads as a command."""
    text = re.sub(r"[\\^~]", "", text)
    text = re.sub(r"[%&_#${}]", r"\\\g<0>", text)
    return text.replace("≥", r"$\geq$").replace("<", "$<$").replace("…", "--").replace("–", "--")
