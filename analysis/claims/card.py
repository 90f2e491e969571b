"""The card of a verdict: numbers, runs, and the digests of data, code and configuration."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import analysis
import lab
import tasks
from analysis.claims.claim import Claim
from analysis.claims.verdict import ClaimVerdict
from analysis.pages.page import PagePart, Shown, build_page
from analysis.words import join_names, percents, round_percent
from lab import __version__
from lab.files import explain_write_errors, write, write_json
from tasks.base import Task

CARD, PAGE = "claim.json", "claim.html"
ROWS = 4
"""Rows of each split that the digest of the data covers; a row is a function of its number."""


@dataclass(frozen=True)
class Card:
    """All that someone who disagrees needs to run a verdict again.

    Attributes:
        power: how often such a sweep says "holds" if the assumed effect is true; None for a claim
            about costs.
        seeds: of each setting, or rounds in which costs were taken.
        looks: after how many seeds a verdict was or would have been sought; () for costs.
        machines: on which the runs were trained, or costs taken.
    """

    claim: Claim
    scale: str
    verdict: ClaimVerdict
    power: float | None
    seeds: int
    digests: dict[str, str]
    machines: tuple[str, ...]
    looks: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the card, ready for JSON; ends that are not finite are null."""
        found = self.verdict.estimate
        numbers = {
            name: value if math.isfinite(value) else None
            for name, value in (("value", found.value), ("low", found.low), ("high", found.high))
        }
        statistic = self.claim.statistic
        return {
            "name": self.claim.name,
            "claim": self.claim.says,
            "source": self.claim.source,
            "stands_for": self.claim.stands_for,
            "refuted_by": self.claim.refuted_by,
            "scale": self.scale,
            "verdict": self.verdict.outcome,
            "because": self.verdict.because,
            "failure": "operational" if self.verdict.operational else None,
            "statistic": statistic.kind,
            "cost": statistic.cost or None,
            "measure": None if statistic.cost else statistic.measure,
            statistic.side: statistic.threshold,
            **numbers,
            "where": found.where,
            "confidence": found.confidence,
            "seeds": self.seeds,
            "looks": self.looks,
            "places": found.places,
            "runs": self.verdict.runs,
            "unended": self.verdict.unended,
            "power": self.power,
            "assumed": vars(self.claim.power) if self.claim.power else None,
            "digests": self.digests,
            "versions": {name: version(name) for name in ("torch", "numpy")}
            | {"wonderful-lab": __version__},
            "machines": self.machines,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def summarize(self) -> str:
        """Say the verdict in one line: outcome, value, interval, n."""
        found, statistic = self.verdict.estimate, self.claim.statistic
        kind = " (operational failure)" if self.verdict.operational else ""
        line = f"{self.verdict.outcome}{kind}: {self.verdict.because}"
        if math.isnan(found.value):
            return f"{line}."
        what = statistic.cost or ("bits" if statistic.measure == "bits" else "")
        kind = f"{statistic.kind} of {what}" if what else statistic.kind
        shown = f"{kind} {_sign(found.value, statistic.kind)}"
        if math.isfinite(found.low):
            shown += f", {100 * found.confidence:.3g} %: {_sign(found.low, statistic.kind)} … "
            shown += _sign(found.high, statistic.kind)
        if statistic.cost:
            rounds = f"n = {found.seeds} round{'s' * (found.seeds > 1)}"
            return f"{line}. {shown}, {rounds}, {self.verdict.runs} settings."
        seeds = f"n = {found.seeds} seed{'s' * (found.seeds > 1)} of each setting"
        return f"{line}. {shown}, {seeds}, {self.verdict.runs} runs."

    def write(
        self,
        folder: Path,
        figures: Sequence[tuple[str, Shown]],
        errors: Mapping[str, Sequence[str]],
    ) -> Path:
        """Write claim.json and claim.html into a folder, and return the page's path.

        Raises:
            RunError: when they cannot be written.
        """
        content = self.to_dict()
        page = build_page(
            "Claim", self.claim.says, self.summarize(), self._list_parts(content, figures, errors)
        )
        with explain_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / CARD, content)
            write(folder / PAGE, page)
        return folder / PAGE

    def _list_parts(
        self,
        content: Mapping[str, Any],
        figures: Sequence[tuple[str, Shown]],
        errors: Mapping[str, Sequence[str]],
    ) -> list[PagePart]:
        """Return what decides, the figures, the runs that failed, and what it takes to repeat."""
        claim, found = self.claim, self.verdict.estimate
        counted = ("seeds", "runs")
        certainty = (
            f"Rounds in which costs were taken on the machine named below: {self.seeds}. The "
            "interval tells what its noise leaves open; other machines may differ."
        )
        if claim.statistic.cost:
            counted = ("rounds", "settings")
        elif claim.power and self.power is not None:
            looks = join_names(list(map(str, self.looks or (self.seeds,))), "or")
            certainty = (
                f"With {looks} seeds of each setting, a true effect of {claim.power.effect} "
                f"with a spread of {claim.power.spread} between seeds gives the verdict “holds” in "
                f"{round_percent(self.power)} of sweeps."
            )
            if len(self.looks) > 1:
                certainty += (
                    " More seeds are run while the claim is undecided. The interval is one of "
                    f"{100 * found.confidence:.3g} %, so that looking several times is "
                    "wrong no more often than looking once at 95 %."
                )
            if (tuning := claim.count_tuning_seeds(self.scale)) is not None:
                certainty += (
                    f" Seeds that tried all learning rates: {tuning}. The others ran at the best."
                )
        ends = None
        if math.isfinite(found.high - found.low):
            ends = percents(found.low, found.high)
            if claim.statistic.measure == "bits":
                ends = [f"{end:+.4f} bits" for end in (found.low, found.high)]
            if claim.statistic.cost:
                ends = [f"{end:.4g} ×" for end in (found.low, found.high)]
        facts = {name: content[name] for name in ("verdict", "scale", "value")}
        facts |= {"interval": ends, counted[0]: self.seeds, counted[1]: self.verdict.runs}
        facts |= {"machines": "; ".join(self.machines), "date": content["date"], **self.digests}
        source = " ".join(filter(None, (claim.source, claim.stands_for)))
        failed = [f"{error}: {'; '.join(runs)}" for error, runs in errors.items()]
        what = "costs" if claim.statistic.cost else "runs"
        refuted = f"It would be refuted by this: {claim.refuted_by}"
        return [
            PagePart("decides", "What decides", [source, refuted, certainty]),
            PagePart("runs", f"The {what}", figures=figures),
            PagePart("failed", "Runs that failed or diverged", failed),
            PagePart("card", "To run it again", facts=facts),
        ]


def _sign(value: float, kind: str) -> str:
    return f"{value:+.4f}" if kind == "difference" else f"{value:.4f}"


def digest_data(rows_of: Sequence[tuple[Task, int]]) -> str:
    """Return a digest of the first rows of every task and seed, of each split."""
    found = hashlib.sha256()
    for task, seed in rows_of:
        for split in task.splits:
            batch = task.batch(split=split, size=ROWS, seed=seed)
            for tensor in (batch.inputs, batch.targets):
                found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def digest_code() -> str:
    """Return a digest of the source of the lab, the tasks and the analyses."""
    found = hashlib.sha256()
    for package in (lab, tasks, analysis):
        home = Path(package.__file__ or "").parent
        for file in sorted(home.rglob("*.py")):
            found.update(str(file.relative_to(home.parent)).encode())
            found.update(file.read_bytes())
    return found.hexdigest()


def digest_configuration(claim: Claim, scale: str) -> str:
    """Return a digest of the claim's file and the scale."""
    return hashlib.sha256(json.dumps([claim.digest, scale]).encode()).hexdigest()
