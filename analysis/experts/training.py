"""How did the choice of experts come about? Its load and its likeness to the end, by step."""

from dataclasses import dataclass, replace

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int
from plotly.subplots import make_subplots

from analysis.base import NotApplicableError, Subject, Words
from analysis.experts.choices import Chosen, chosen_experts, expert_layers
from analysis.experts.evenness import STANDING, Load, load, overlap_uniform
from analysis.experts.load import faces, number
from analysis.plots.style import MUTED, new_figure
from analysis.statistics.estimates import thin
from analysis.words import percent
from lab.training.runs import Run
from tasks.base import count_rows

TITLE = "Experts over training"
STEPS = 24
"""Most steps whose weights are looked at."""
TOKENS = 2048
"""Tokens that each of them is looked at on, in whole rows."""
DIP = 0.8
"""How low the effective experts of a step are, beside an earlier one and the last, to be named."""
COALITION = 0.1
"""Share of the choices from which on standing experts are named a coalition."""
SETTLED = 0.5
"""Share of the last choices from which on a layer is said to have found its experts."""


@dataclass(frozen=True)
class Course:
    """How the experts of every layer were used along the way.

    Attributes:
        steps: training steps, from 0 to the last that was kept.
        tokens: that each step was looked at on.
        layers: index of each layer's block.
        n_experts: of each layer.
        effective: e^H of the choices, 1 … n_experts.
        used: share of the experts that are chosen, in [0, 1].
        standing: share of the choices on experts that at least 90 % of the tokens choose.
        membership: |A_t ∩ A_last| / |A_t ∪ A_last| of the most loaded experts, as many as a token
            chooses; 1 at the last step.
        saturation: |topk_t ∩ topk_last| / k, mean over tokens and heads; 1 at the last step.
        effective_uniform: e^H of uniform random choice, a layer.
        used_uniform: experts it uses, a layer.
        standing_uniform: load on standing experts under random choice, a layer.
        standing_chance: the most that it came to in a thousand draws, a layer.
        membership_uniform: of two random sets, a layer.
        saturation_uniform: k/N, a layer.
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


def measure(subject: Subject) -> list[Course]:
    """Return how the run's experts came to be used as they are, on a few of the subject's rows.

    Raises:
        NotApplicableError: for a model without experts, without a run, or with weights of one
            step alone.
    """
    expert_layers(subject.model)
    if subject.run is None:
        raise NotApplicableError("no run to read earlier weights of")
    steps = thinned(subject.run.list_steps())
    if len(steps) < 2:
        raise NotApplicableError("the run has weights of one step only")
    rows = count_rows(TOKENS, subject.task.seq_len)
    few = replace(subject, batch=subject.batch[:rows])
    last = _choices(few, subject.run, steps[-1])
    loads: list[list[Load]] = []
    members: list[list[float]] = []
    alike: list[list[float]] = []
    for step in steps:
        now = last if step == steps[-1] else _choices(few, subject.run, step)
        loads.append([load(chosen, subject.seed) for chosen in now])
        members.append([membership(*pair) for pair in zip(now, last, strict=True)])
        alike.append([saturation(*pair) for pair in zip(now, last, strict=True)])
    end = loads[-1]

    def course(values: list[list[float]]) -> Float[np.ndarray, "layers steps"]:
        return np.array(values, dtype=np.float64).T

    return [
        Course(
            steps=np.array(steps),
            tokens=end[0].tokens,
            layers=np.array([one.layer for one in end]),
            n_experts=np.array([one.n_experts for one in end]),
            effective=course([[one.choices.effective for one in at] for at in loads]),
            used=course([[one.choices.used for one in at] for at in loads]),
            standing=course([[one.standing_share for one in at] for at in loads]),
            membership=course(members),
            saturation=course(alike),
            effective_uniform=np.array([one.uniform.effective for one in end]),
            used_uniform=np.array([one.uniform.used for one in end]),
            standing_uniform=np.array([one.standing_uniform for one in end]),
            standing_chance=np.array([one.standing_chance for one in end]),
            membership_uniform=np.array(
                [
                    overlap_uniform(one.n_experts, min(one.n_heads * one.k, one.n_experts))
                    for one in end
                ]
            ),
            saturation_uniform=np.array([one.k / one.n_experts for one in end]),
        )
    ]


def thinned(steps: list[int]) -> list[int]:
    """Return at most `STEPS` of the steps, the first and the last among them."""
    return thin(steps, STEPS)


def saturation(now: Chosen, last: Chosen) -> float:
    """Return |topk ∩ topk_last| / k, the mean over tokens and heads, in [0, 1].

    Two random sets of k among N experts share k/N on average.
    """
    same = now.indices[..., :, None] == last.indices[..., None, :]
    return float(same.any(-1).mean())


def membership(now: Chosen, last: Chosen) -> float:
    """Return the Jaccard index of the experts that lead now and at last, in [0, 1]."""
    one, other = _leading(now), _leading(last)
    return len(one & other) / len(one | other)


def _leading(chosen: Chosen) -> set[int]:
    """Return the most loaded experts, as many as a token chooses, or all that are used."""
    counts = np.bincount(chosen.indices.ravel(), minlength=chosen.n_experts)
    first = np.argsort(-counts, kind="stable")[: chosen.indices[0].size]
    return set(first[counts[first] > 0].tolist())


def _choices(subject: Subject, run: Run, step: int) -> list[Chosen]:
    return chosen_experts(run.load_model(step).to(subject.batch.inputs.device), subject.batch)


def describe(course: Course) -> Words:
    """Put a course in words."""
    first, last = course.steps[0], course.steps[-1]
    # How training began says nothing of what it did: of zero keys all layers begin alike.
    after = course.effective[:, 1:]
    worst = int((after / course.effective_uniform[:, None]).min(axis=1).argmin())
    effective = course.effective[worst]
    lowest = 1 + int(after[worst].argmin())
    says = f"Layer {course.layers[worst]} has {number(effective[0])} effective experts at step "
    says += f"{first:,}"
    if effective[lowest] < DIP * min(effective[:lowest].max(), effective[-1]):
        says += f", {number(effective[lowest])} at step {course.steps[lowest]:,}"
    says += (
        f" and {number(effective[-1])} at step {last:,} (random choice: "
        f"{number(course.effective_uniform[worst])} of {course.n_experts[worst]:,})"
    )
    says += _coalition(course, worst)
    random = f"(random choice: {percent(course.saturation_uniform[worst])})"
    alike = course.saturation[worst]
    # From here on it stays settled.
    since = int(np.flatnonzero(alike < SETTLED).max(initial=-1)) + 1
    if since < len(alike) - 1:
        says += (
            f"; from step {course.steps[since]:,} on at least half of its last choices are in "
            f"place {random}."
        )
    else:
        says += (
            f"; at step {course.steps[-2]:,} only {percent(alike[-2])} of its last choices are in "
            f"place {random}."
        )
    same = course.standing[:, 0] >= np.maximum(STANDING, course.standing_chance + 1e-9)
    if same.any():
        which = "every layer" if same.all() else f"{same.sum()} of {len(same)} layers"
        says = f"At step {first:,} nearly every token takes the same experts in {which}. {says}"
    reading = (
        f"Each on {course.tokens:,} tokens, at steps that were kept; the axis is logarithmic, with "
        "step 0 at its left end. Effective experts are e^H of the choices. Standing experts are "
        f"chosen by at least {round(100 * STANDING)} % of the tokens; a coalition is where they "
        f"hold {round(100 * COALITION)} % of the choices, unlike by chance. Most loaded are as "
        "many experts as a token chooses; overlap is |A ∩ B| / |A ∪ B|. Settled is the share of a "
        "token's experts that it also has at the last step. Dashed: uniform random choice."
    )
    alt = "Lines by training step: " + "; ".join(
        f"layer {layer} effective experts {number(course.effective[i, 0])} to "
        f"{number(course.effective[i, -1])}, used {percent(course.used[i, 0])} to "
        f"{percent(course.used[i, -1])}"
        for i, layer in enumerate(course.layers)
    )
    return Words("Use of the experts by training step", says, reading, alt + ".")


def _coalition(course: Course, layer: int) -> str:
    """Say when standing experts came to hold much of a layer's choices, and when no more."""
    standing, steps = course.standing[layer], course.steps
    peak = 1 + int(standing[1:].argmax())
    there = standing >= max(COALITION, course.standing_chance[layer] + 1e-9)
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
    return (
        f"; a coalition of standing experts {since}, holds most, {percent(standing[peak])} of the "
        f"choices (random choice: {percent(course.standing_uniform[layer])}), at step "
        f"{steps[peak]:,}, and {until}; the most loaded experts of step {steps[peak]:,} and of the "
        f"last overlap by {percent(course.membership[layer, peak])} (chance: "
        f"{percent(course.membership_uniform[layer])})"
        if peak < len(steps) - 1
        else f"; a coalition of standing experts {since} and {until} (random choice: "
        f"{percent(course.standing_uniform[layer])})"
    )


def draw(course: Course) -> go.Figure:
    """Draw panels over the training steps: effective, used, standing, most loaded, settled."""
    panels = (
        ("effective experts", course.effective, course.effective_uniform),
        ("experts used", course.used, course.used_uniform),
        ("load on standing experts", course.standing, course.standing_uniform),
        ("most loaded, overlap with the last step", course.membership, course.membership_uniform),
        ("choices settled", course.saturation, course.saturation_uniform),
    )
    chart = make_subplots(
        rows=len(panels),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.05,
        figure=new_figure(height=840),
    )
    looks = faces(course.layers.tolist())
    zero = 0.5 * course.steps[course.steps > 0].min()
    x = np.maximum(course.steps, zero)
    for row, (name, values, uniform) in enumerate(panels, start=1):
        shown = ",.1f" if row == 1 else ".1%"
        levels = np.unique(uniform.round(9)).tolist()
        for level in levels:
            chart.add_scatter(
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
        for layer, series in zip(course.layers.tolist(), values, strict=True):
            face = looks[layer]
            chart.add_scatter(
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
                text=[f"layer {layer}, step {step:,}" for step in course.steps],
                hovertemplate=f"%{{text}}: %{{y:{shown}}}<extra></extra>",
                row=row,
                col=1,
            )
        chart.add_annotation(
            text=f"<b>{name}</b>",
            xref=f"x{row if row > 1 else ''} domain",
            yref=f"y{row if row > 1 else ''} domain",
            x=0,
            y=1,
            xanchor="left",
            yanchor="bottom",
        )
        if row == 1:
            chart.update_yaxes(type="log", tickformat=",", dtick=1, row=1, col=1)
            top = np.log10(max(values.max(), uniform.max()))
            chart.update_yaxes(range=[-0.05, top + 0.1], row=1, col=1)
        else:
            chart.update_yaxes(range=[-0.05, 1.08], tickformat=".0%", row=row, col=1)
            chart.update_yaxes(tickvals=[0, 0.5, 1], row=row, col=1)
    powers = 10.0 ** np.arange(np.ceil(np.log10(zero * 2)), np.log10(x[-1]) + 1e-9)
    chart.update_xaxes(
        type="log",
        range=[np.log10(zero), np.log10(x[-1])],
        tickvals=[zero, *powers],
        ticktext=["0", *(f"{power:,.0f}" for power in powers)],
        showgrid=False,
    )
    chart.update_xaxes(title_text="training step", row=len(panels), col=1)
    return chart.update_layout(margin_t=116, legend_y=1.037)
