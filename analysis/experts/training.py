"""How did the choice of experts come about? Their load, and similarity to the end, by step."""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int

from analysis.base import Finding, NotApplicableError, Subject, Table, thin
from analysis.experts.load import (
    STANDING,
    TABLED,
    ExpertChoices,
    draw_layers,
    expect_overlap,
    find_expert_layers,
    format_count,
    measure_load,
    record_choices,
)
from analysis.figures import Axis, Curves, Line, curves
from analysis.words import percent
from tasks.base import count_rows

__all__ = ["TITLE", "Course", "measure"]

TITLE = "Experts over training"
STEPS = 24
"""Maximum number of steps whose weights are measured."""
TOKENS = 2048
"""Tokens on which each is measured, in whole rows."""
COALITION = 0.1
"""Share of the choices from which on standing experts are called a coalition."""
SETTLED = 0.5
"""A layer has settled once this share of its last choices is in place."""
QUANTITIES = {
    "effective experts": "effective",
    "experts used": "used",
    "load on standing experts": "standing",
    "most loaded, overlap with the last step": "membership",
    "choices settled": "saturation",
}
"""Titles of the panels, and the fields that they show."""


@dataclass(frozen=True)
class Course(Finding):
    """How the experts of every layer were used at steps of the training.

    Attributes:
        effective: e^H of the choices, 1 … n_experts.
        used: share of the experts that are chosen, in [0, 1].
        standing: share of the choices on experts that at least 90 % of the tokens choose.
        membership: |A_t ∩ A_last| / |A_t ∪ A_last|, where A are the most loaded experts, as many as
            a token chooses; 1 at the last step.
        saturation: |topk_t ∩ topk_last| / k, mean over tokens and heads; 1 at the last step.
        effective_uniform, …: the same under uniform random choice, by layer.
        standing_chance: its maximum in a thousand draws, by layer.
    """

    steps: Int[np.ndarray, " steps"]
    layers: Int[np.ndarray, " layers"]
    n_experts: Int[np.ndarray, " layers"]
    effective: Float[np.ndarray, "layers steps"]
    used: Float[np.ndarray, "layers steps"]
    standing: Float[np.ndarray, "layers steps"]
    membership: Float[np.ndarray, "layers steps"]
    saturation: Float[np.ndarray, "layers steps"]
    effective_uniform: Float[np.ndarray, " layers"]
    used_uniform: Float[np.ndarray, " layers"]
    standing_uniform: Float[np.ndarray, " layers"]
    standing_chance: Float[np.ndarray, " layers"]
    membership_uniform: Float[np.ndarray, " layers"]
    saturation_uniform: Float[np.ndarray, " layers"]

    title = "Use of the experts by training step"
    reading = (
        "At steps whose weights were kept, on a logarithmic axis. Effective experts are e^H of the "
        f"choices. Standing experts are chosen by at least {round(100 * STANDING)} % of the "
        f"tokens; they are a coalition if they hold {round(100 * COALITION)} % of the choices, and "
        "more than by chance. Most loaded are as many experts as a token chooses; overlap is "
        "|A ∩ B| / |A ∪ B|. Settled is the share of a token's experts that it also chooses at the "
        "last step; the table has the step from which on it is at least a half. Grey: uniform "
        "random choice."
    )

    @property
    def says(self) -> str:
        """How a coalition came and went after step 0; else how evenly experts came to be used."""
        there = self.standing >= np.maximum(COALITION, self.standing_chance[:, None] + 1e-9)
        # Step 0 is left out: with zero keys all layers begin alike, whatever training does.
        held = np.where(there, self.standing, 0.0)[:, 1:]
        if held.any():
            layer, peak = np.unravel_index(held.argmax(), held.shape)
            return (
                f"A coalition of standing experts holds {percent(held[layer, peak])} of layer "
                f"{self.layers[layer]}'s choices at step {self.steps[1 + peak]:,}, and "
                f"{percent(self.standing[layer, -1])} at the end (random choice: "
                f"{percent(self.standing_uniform[layer])})."
            )
        worst = int((self.effective[:, -1] / self.effective_uniform).argmin())
        first, last = (format_count(self.effective[worst, i]) for i in (0, -1))
        return (
            f"The least even layer, layer {self.layers[worst]}, has {first} effective experts at "
            f"step {self.steps[0]:,} and {last} at step {self.steps[-1]:,} (random choice: "
            f"{format_count(self.effective_uniform[worst])} of {self.n_experts[worst]:,})."
        )

    def numbers(self) -> Table:
        """Return the course of each layer in a few numbers."""
        rows = []
        for i in thin(range(len(self.layers)), TABLED):
            effective, unsettled = self.effective[i], self.saturation[i] < SETTLED
            lowest, peak = int(effective.argmin()), 1 + int(self.standing[i, 1:].argmax())
            first, most, last = (percent(self.standing[i, at]) for at in (0, peak, -1))
            settled = int(np.flatnonzero(unsettled).max(initial=-1)) + 1
            rows.append(
                (
                    str(self.layers[i]),
                    f"{format_count(effective[0])} → {format_count(effective[-1])} "
                    f"({format_count(self.effective_uniform[i])})",
                    f"{format_count(effective[lowest])} at step {self.steps[lowest]:,}",
                    f"{first} → {most} at step {self.steps[peak]:,} → {last}",
                    f"from step {self.steps[settled]:,}",
                )
            )
        columns = "layer", "effective (random)", "lowest", "load on standing experts", "settled"
        return Table(columns, tuple(rows))

    def figure(self) -> go.Figure:
        """Draw a panel for each quantity over one axis of training steps."""
        drawn, steps = [], self.steps
        for name, field in QUANTITIES.items():
            uniform = np.unique(getattr(self, f"{field}_uniform").round(9))
            lines = [Line("random choice", steps, np.full(len(steps), v), look=-1) for v in uniform]
            by_layer = zip(self.layers.tolist(), getattr(self, field), strict=True)
            lines += draw_layers([(layer, steps, values) for layer, values in by_layer])
            y = Axis("", "share") if drawn else Axis("", scale="log")
            drawn.append(Curves(lines, y, name, height=120))
        return curves(drawn, Axis("training step", "count", scale="steps"))


def measure(subject: Subject) -> list[Course]:
    """Measure how the run's experts were used over training, on a few of the subject's rows.

    Raises:
        NotApplicableError: for a model without experts, without a run, or with weights of only
            one step.
    """
    find_expert_layers(subject.model)
    run = subject.run
    if run is None:
        raise NotApplicableError("no run to read earlier weights of")
    steps = thin(run.list_steps(), STEPS)
    if len(steps) < 2:
        raise NotApplicableError("the run has weights of one step only")
    batch = subject.batch[: count_rows(TOKENS, subject.task.seq_len)]

    def record(step: int) -> list[ExpertChoices]:
        return record_choices(run.load_model(step).to(batch.inputs.device), batch)

    last = record(steps[-1])
    found = []
    for step in steps:
        for now, end in zip(last if step == steps[-1] else record(step), last, strict=True):
            load = measure_load(now, subject.seed)
            alike = measure_membership(now, end), measure_saturation(now, end)
            found.append((load.choices.effective, load.choices.used, load.standing_share, *alike))
    by_quantity = np.array(found).reshape(len(steps), len(last), -1).transpose(2, 1, 0)
    uniform = []
    for load in [measure_load(end, subject.seed) for end in last]:
        overlap = expect_overlap(load.n_experts, min(load.n_heads * load.k, load.n_experts))
        standing = load.standing_uniform, load.standing_chance
        settled = load.k / load.n_experts
        uniform.append((load.uniform.effective, load.uniform.used, *standing, overlap, settled))
    layers, n_experts = np.array([(end.layer, end.n_experts) for end in last]).T
    return [Course(np.array(steps), layers, n_experts, *by_quantity, *np.array(uniform).T)]


def measure_saturation(now: ExpertChoices, last: ExpertChoices) -> float:
    """Return |topk ∩ topk_last| / k, mean over tokens and heads, in [0, 1].

    Two random sets of k among N experts share k/N on average.
    """
    same = now.indices[..., :, None] == last.indices[..., None, :]
    return float(same.any(-1).mean())


def measure_membership(now: ExpertChoices, last: ExpertChoices) -> float:
    """Return the Jaccard index of the most loaded experts now and at the last step, in [0, 1]."""
    one, other = _find_leading(now), _find_leading(last)
    return len(one & other) / len(one | other)


def _find_leading(chosen: ExpertChoices) -> set[int]:
    """Return the most loaded experts, as many as a token chooses; unused ones are left out."""
    counts = np.bincount(chosen.indices.ravel(), minlength=chosen.n_experts)
    first = np.argsort(-counts, kind="stable")[: chosen.indices[0].size]
    return set(first[counts[first] > 0].tolist())
