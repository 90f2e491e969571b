"""How did the choice of experts come about? Their load, and similarity to the end, by step."""

from dataclasses import dataclass, replace

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int
from plotly.subplots import make_subplots

from analysis.base import Finding, NotApplicableError, Subject, Words, describe, draw
from analysis.experts.choices import ExpertChoices, find_expert_layers, record_choices
from analysis.experts.load import Load, measure_load
from analysis.experts.load_by_rank import assign_faces, format_count
from analysis.experts.spread import STANDING, expect_overlap
from analysis.plots.steps import add_step_axis, scale_steps
from analysis.plots.style import MUTED, new_figure
from analysis.statistics.estimates import thin
from analysis.words import percent
from lab.training.run import Run
from tasks.base import count_rows

__all__ = ["TITLE", "Course", "describe", "draw", "measure"]

TITLE = "Experts over training"
STEPS = 24
"""Maximum number of steps whose weights are measured."""
TOKENS = 2048
"""Tokens on which each is measured, in whole rows."""
DIP = 0.8
"""A step is named if it has less than this share of an earlier and the last step's experts."""
COALITION = 0.1
"""Share of the choices from which on standing experts are called a coalition."""
SETTLED = 0.5
"""A layer has settled once this share of its last choices is in place."""


@dataclass(frozen=True)
class Course(Finding):
    """How the experts of every layer were used at steps of the training.

    Attributes:
        steps: training steps, from 0 to the last that was kept.
        tokens: on which each step was measured.
        layers: index of each layer's block.
        n_experts: of each layer.
        effective: e^H of the choices, 1 … n_experts.
        used: share of the experts that are chosen, in [0, 1].
        standing: share of the choices on experts that at least 90 % of the tokens choose.
        membership: |A_t ∩ A_last| / |A_t ∪ A_last|, where A are the most loaded experts, as many as
            a token chooses; 1 at the last step.
        saturation: |topk_t ∩ topk_last| / k, mean over tokens and heads; 1 at the last step.
        effective_uniform: e^H under uniform random choice, by layer.
        used_uniform: share of the experts it uses, by layer.
        standing_uniform: load on standing experts under random choice, by layer.
        standing_chance: its maximum in a thousand draws, by layer.
        membership_uniform: of two random sets, by layer.
        saturation_uniform: k/N, by layer.
    """

    steps: Int[np.ndarray, " steps"]
    tokens: int
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

    def describe(self) -> Words:
        """Say how the least even layer came to use its experts, and when it settled."""
        first, last = self.steps[0], self.steps[-1]
        # Step 0 is left out: with zero keys all layers begin alike, whatever training does.
        after = self.effective[:, 1:]
        worst = int((after / self.effective_uniform[:, None]).min(axis=1).argmin())
        effective = self.effective[worst]
        lowest = 1 + int(after[worst].argmin())
        says = f"Layer {self.layers[worst]} has {format_count(effective[0])} effective experts at "
        says += f"step {first:,}"
        if effective[lowest] < DIP * min(effective[:lowest].max(), effective[-1]):
            says += f", {format_count(effective[lowest])} at step {self.steps[lowest]:,}"
        says += (
            f" and {format_count(effective[-1])} at step {last:,} (random choice: "
            f"{format_count(self.effective_uniform[worst])} of {self.n_experts[worst]:,})"
        )
        says += f"{self._describe_coalition(worst)}; {self._describe_settling(worst)}."
        same = self.standing[:, 0] >= np.maximum(STANDING, self.standing_chance + 1e-9)
        if same.any():
            which = "every layer" if same.all() else f"{same.sum()} of {len(same)} layers"
            says = (
                f"At step {first:,} nearly every token chooses the same experts in {which}. {says}"
            )
        reading = (
            f"Each on {self.tokens:,} tokens, at steps whose weights were kept, on "
            "a logarithmic axis. Effective experts are e^H of the choices. "
            f"Standing experts are chosen by at least {round(100 * STANDING)} % of the tokens; "
            f"they are a coalition if they hold {round(100 * COALITION)} % of the choices, and "
            "more than by chance. Most loaded are as many experts as a token chooses; overlap is "
            "|A ∩ B| / |A ∪ B|. Settled is the share of a token's experts that it also chooses at "
            "the last step. Dashed: uniform random choice."
        )
        alt = "Lines by training step: " + "; ".join(
            f"layer {layer} effective experts {format_count(self.effective[i, 0])} to "
            f"{format_count(self.effective[i, -1])}, used {percent(self.used[i, 0])} to "
            f"{percent(self.used[i, -1])}"
            for i, layer in enumerate(self.layers)
        )
        return Words("Use of the experts by training step", says, reading, alt + ".")

    def _describe_settling(self, layer: int) -> str:
        """Say from which step on half of a layer's last choices are in place."""
        alike, random = self.saturation[layer], percent(self.saturation_uniform[layer])
        since = int(np.flatnonzero(alike < SETTLED).max(initial=-1)) + 1
        if since < len(alike) - 1:
            return (
                f"from step {self.steps[since]:,} on at least half of its last choices are in "
                f"place (random choice: {random})"
            )
        return (
            f"at step {self.steps[-2]:,} only {percent(alike[-2])} of its last choices are in "
            f"place (random choice: {random})"
        )

    def _describe_coalition(self, layer: int) -> str:
        """Say when a coalition of standing experts formed, and when it was gone; else nothing."""
        standing, steps = self.standing[layer], self.steps
        peak = 1 + int(standing[1:].argmax())
        there = standing >= max(COALITION, self.standing_chance[layer] + 1e-9)
        if not there[peak]:
            return ""
        gone = np.flatnonzero(~there)
        formed = int(gone[gone < peak].max(initial=-1)) + 1
        left = int(gone[gone > peak].min(initial=len(steps)))
        since = f"forms by step {steps[formed]:,}" if formed else f"is there from step {steps[0]:,}"
        until = (
            f"is gone by step {steps[left]:,}"
            if left < len(steps)
            else f"holds {percent(standing[-1])} at the end"
        )
        says, uniform = "; a coalition of standing experts", percent(self.standing_uniform[layer])
        if peak == len(steps) - 1:
            return f"{says} {since} and {until} (random choice: {uniform})"
        return (
            f"{says} {since}, holds most, {percent(standing[peak])} of the choices (random choice: "
            f"{uniform}), at step {steps[peak]:,}, and {until}; the most loaded experts of step "
            f"{steps[peak]:,} and of the last overlap by {percent(self.membership[layer, peak])} "
            f"(chance: {percent(self.membership_uniform[layer])})"
        )

    def draw(self) -> go.Figure:
        """Draw a panel for each quantity over one axis of training steps."""
        panels = (
            ("effective experts", self.effective, self.effective_uniform),
            ("experts used", self.used, self.used_uniform),
            ("load on standing experts", self.standing, self.standing_uniform),
            ("most loaded, overlap with the last step", self.membership, self.membership_uniform),
            ("choices settled", self.saturation, self.saturation_uniform),
        )
        fig = make_subplots(
            rows=len(panels),
            cols=1,
            shared_xaxes=True,
            vertical_spacing=0.05,
            subplot_titles=[f"<b>{name}</b>" for name, _, _ in panels],
            figure=new_figure(height=840),
        )
        fig.update_annotations(x=0, xanchor="left", font_size=12)
        looks = assign_faces(self.layers.tolist())
        x = scale_steps(self.steps)
        for row, (_, values, uniform) in enumerate(panels, start=1):
            shown = ",.1f" if row == 1 else ".1%"
            levels = np.unique(uniform.round(9)).tolist()
            for level in levels:
                fig.add_scatter(
                    x=[x[0], x[-1]],
                    y=[level, level],
                    mode="lines",
                    line={"color": MUTED, "width": 1.5, "dash": "dash"},
                    name="random choice",
                    legendgroup="random choice",
                    showlegend=row == 1 and level == levels[0],
                    hovertemplate=f"random choice: %{{y:{shown}}}<extra></extra>",
                    row=row,
                    col=1,
                )
            for layer, series in zip(self.layers.tolist(), values, strict=True):
                face = looks[layer]
                fig.add_scatter(
                    x=x,
                    y=series,
                    mode="lines+markers" if face.symbol else "lines",
                    line={"color": face.color, "width": 2 if face.symbol else 1},
                    marker={"symbol": face.symbol, "size": 6},
                    opacity=1 if face.symbol else 0.6,
                    name=f"layer {layer}",
                    legendgroup=f"layer {layer}",
                    showlegend=row == 1 and face.symbol is not None,
                    cliponaxis=False,
                    text=[f"layer {layer}, step {step:,}" for step in self.steps],
                    hovertemplate=f"%{{text}}: %{{y:{shown}}}<extra></extra>",
                    row=row,
                    col=1,
                )
            if row == 1:
                fig.update_yaxes(type="log", tickformat=",", dtick=1, row=1, col=1)
                top = np.log10(max(values.max(), uniform.max()))
                fig.update_yaxes(range=[-0.05, top + 0.1], row=1, col=1)
            else:
                fig.update_yaxes(range=[-0.05, 1.08], tickformat=".0%", row=row, col=1)
                fig.update_yaxes(tickvals=[0, 0.5, 1], row=row, col=1)
        add_step_axis(fig, self.steps)
        fig.update_xaxes(title_text=None)
        fig.update_xaxes(title_text="training step", row=len(panels), col=1)
        return fig.update_layout(margin_t=116, legend_y=1.037)


def measure(subject: Subject) -> list[Course]:
    """Measure how the run's experts were used over training, on a few of the subject's rows.

    Raises:
        NotApplicableError: for a model without experts, without a run, or with weights of only
            one step.
    """
    find_expert_layers(subject.model)
    if subject.run is None:
        raise NotApplicableError("no run to read earlier weights of")
    steps = thin(subject.run.list_steps(), STEPS)
    if len(steps) < 2:
        raise NotApplicableError("the run has weights of one step only")
    rows = count_rows(TOKENS, subject.task.seq_len)
    few = replace(subject, batch=subject.batch[:rows])
    last = _record_step(few, subject.run, steps[-1])
    loads: list[list[Load]] = []
    members: list[list[float]] = []
    alike: list[list[float]] = []
    for step in steps:
        now = last if step == steps[-1] else _record_step(few, subject.run, step)
        loads.append([measure_load(chosen, subject.seed) for chosen in now])
        members.append([measure_membership(*pair) for pair in zip(now, last, strict=True)])
        alike.append([measure_saturation(*pair) for pair in zip(now, last, strict=True)])
    end = loads[-1]

    def stack(values: list[list[float]]) -> Float[np.ndarray, "layers steps"]:
        return np.array(values, dtype=np.float64).T

    return [
        Course(
            steps=np.array(steps),
            tokens=end[0].tokens,
            layers=np.array([one.layer for one in end]),
            n_experts=np.array([one.n_experts for one in end]),
            effective=stack([[one.choices.effective for one in at] for at in loads]),
            used=stack([[one.choices.used for one in at] for at in loads]),
            standing=stack([[one.standing_share for one in at] for at in loads]),
            membership=stack(members),
            saturation=stack(alike),
            effective_uniform=np.array([one.uniform.effective for one in end]),
            used_uniform=np.array([one.uniform.used for one in end]),
            standing_uniform=np.array([one.standing_uniform for one in end]),
            standing_chance=np.array([one.standing_chance for one in end]),
            membership_uniform=np.array(
                [
                    expect_overlap(one.n_experts, min(one.n_heads * one.k, one.n_experts))
                    for one in end
                ]
            ),
            saturation_uniform=np.array([one.k / one.n_experts for one in end]),
        )
    ]


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


def _record_step(subject: Subject, run: Run, step: int) -> list[ExpertChoices]:
    return record_choices(run.load_model(step).to(subject.batch.inputs.device), subject.batch)
