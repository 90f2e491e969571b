"""What does each layer with a state keep, and for how long? Now and at step 0.

    half-life           ln 2 / mean(−a)
    effective context   the smallest window of latest tokens that holds 90 % of Σ_j |M̃_ij|
    content and decay   log|M_ij| = log|C_i·B_j| + log L_ij: which of them varies?

M̃ is signed, without D, and never passes through a softmax. The layers are SSD and the family of
`lab.layers.recurrence`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.base import Finding, Subject, Table, thin
from analysis.figures import (
    Axis,
    Curves,
    Dots,
    Line,
    Pairs,
    curves,
    draw_heads,
    make_head_lines,
    name_heads,
)
from analysis.figures.picture import Heatmap, Picture, choose_pool, draw_heatmap, pool_matrix
from analysis.plain import figure_only
from analysis.state_space.recurrence import (
    HELD,
    StateRecurrence,
    choose_rows,
    collect_recurrences,
    index_heads,
    load_initial_model,
)
from analysis.words import format_digits, format_range, name_head, percent
from tasks.base import Batch

__all__ = ["TITLE", "measure"]

TITLE = "What the states keep"
PICTURED = 4
"""Maximum number of layers whose magnitudes are drawn; of more, evenly spaced ones."""
QUANTITIES = ("dt", "e^a", "write", "read")
"""Per token: the step; the share of the state that is kept; ‖dt·B⊗x‖, what is added to the state;
‖h C‖, what is read from it."""
FAVOURS = 1.5
"""A head distinguishes roles if one role's mean is at least this many times another's."""
LEAST = float(np.finfo(np.float32).tiny)
"""What stands for 0, which has no logarithm."""
DECADES = 6
"""How far below the largest magnitude colours end."""


@torch.no_grad()
def measure(subject: Subject) -> list[Finding]:
    """Return memory, contexts, means by role, and the magnitudes of a few layers.

    Raises:
        NotApplicableError: for a model without a layer that holds a state.
    """
    batch = choose_rows(subject)
    initial = load_initial_model(subject)
    start = None if initial is None else measure_memory(collect_recurrences(initial, batch))[0]
    found = collect_recurrences(subject.model, batch)
    memory, contexts = measure_memory(found)
    return [
        replace(memory, initial=start),
        contexts,
        measure_roles(found, batch, subject.task.role_names),
        *(measure_magnitudes(layer, subject) for layer in thin(found, PICTURED)),
    ]


@dataclass(frozen=True)
class StateMemory(Finding):
    """How long each head remembers; the same of the initial weights under `initial`.

    Attributes:
        layers: the block of each head.
        heads: its index in the block.
        half_life: ln 2 / mean(−a), tokens; ∞ without decay.
        context: effective context, tokens in [1, i + 1]: mean over positions and rows.
        decay: share of var log L_ij in var log|M_ij| over j < i; NaN where M is no product of
            decay and content.
        uniform_context: of a uniform causal matrix.
        initial: of the run's initial weights; None without a run, or if these are the subject's.
    """

    layers: Int[np.ndarray, " h"]
    heads: Int[np.ndarray, " h"]
    half_life: Float[np.ndarray, " h"]
    context: Float[np.ndarray, " h"]
    decay: Float[np.ndarray, " h"]
    uniform_context: float
    initial: "StateMemory | None"

    title = "Memory of the heads with a state"
    reading = (
        "Half-life is ln 2 / mean(−a), over key channels too where each decays at its own rate; "
        "heads without decay have no dot, and what delta rules replace is no decay. The effective "
        "context of "
        f"a position is the smallest window of latest tokens that holds {100 * HELD:.0f} % of "
        "Σ_j |M̃_ij|, without D; the panel shows its mean over positions and rows. The last panel "
        "is the share of decay, var log L, in the variance of log|M| between positions; the rest "
        "belongs to content, log|C·B|, and to their covariance. Diamonds are the run's weights at "
        "step 0. Of more than 24 heads, those of a layer share a line."
    )

    @property
    def says(self) -> str:
        """How far half-lives and contexts reach."""
        lives = self.half_life[np.isfinite(self.half_life)]
        return (
            f"Half-lives in tokens: {format_range(lives)}; effective contexts: "
            f"{format_range(self.context)} (uniform matrix: "
            f"{format_digits(self.uniform_context)}); heads that never forget: "
            f"{len(self.heads) - len(lives)} of {len(self.heads)}."
        )

    def numbers(self) -> Table:
        """Return the heads at either end, now and at step 0."""
        names = name_heads(self.layers, self.heads)
        rows = (
            (
                f"{quantity}, {when}",
                *(f"{format_digits(y[i])} (head {names[i]})" for i in (y.argmin(), y.argmax())),
            )
            for when, memory in self._list_times().items()
            for quantity, y in (
                ("half-life", memory.half_life),
                ("effective context", memory.context),
            )
        )
        return Table(("tokens", "shortest", "longest"), tuple(rows))

    def figure(self) -> go.Figure:
        """Draw half-life, effective context and decay's share as dots, one line per head."""
        lives, contexts, shares = [], [], []
        for when, memory in self._list_times().items():
            lives.append(Dots(when, np.nan_to_num(memory.half_life, posinf=np.nan)))
            contexts.append(Dots(when, memory.context))
            shares.append(Dots(when, memory.decay))
        ends = (
            -0.05,
            1.05 * float(np.nanmax([np.ones_like(self.decay), *(d.values for d in shares)])),
        )
        uniform = {"uniform": self.uniform_context}
        panels = [
            Pairs(lives, Axis(scale="log"), "half-life,\ntokens"),
            Pairs(contexts, Axis(scale="log"), "context,\ntokens", uniform),
        ]
        if not all(np.isnan(d.values).all() for d in shares):
            panels.append(Pairs(shares, Axis(unit="share", ends=ends), "var log|M|\nby decay"))
        return draw_heads(self.layers, self.heads, panels)

    def _list_times(self) -> dict[str, "StateMemory"]:
        return {"now": self} | ({"step 0": self.initial} if self.initial else {})


@dataclass(frozen=True)
class Contexts(Finding):
    """How wide each head's effective context is by position.

    Attributes:
        layers, heads: as in `StateMemory`.
        positions: i, about powers of √2 less one, and the last.
        context_at: effective context there, tokens in [1, i + 1]: mean over rows.
        uniform_at: of a uniform causal matrix.
    """

    layers: Int[np.ndarray, " h"]
    heads: Int[np.ndarray, " h"]
    positions: Int[np.ndarray, " i"]
    context_at: Float[np.ndarray, "h i"]
    uniform_at: Float[np.ndarray, " i"]

    title = "Effective context of the heads with a state by position"
    reading = (
        f"The smallest window of latest tokens that holds {100 * HELD:.0f} % of a row's "
        "magnitudes, mean over rows of the batch. A head whose line levels off has a window of its "
        "own; one that follows the line of a uniform matrix looks back over the whole row. Of many "
        "heads, those of narrowest and widest context at the end are named."
    )

    @property
    def says(self) -> str:
        """How wide the heads' contexts are at the last position."""
        return (
            f"Effective contexts at the last position, {self.positions[-1]:,}: "
            f"{format_range(self.context_at[:, -1])} tokens (uniform matrix: "
            f"{format_digits(self.uniform_at[-1])})."
        )

    def figure(self) -> go.Figure:
        """Draw effective context by position, one line per head, on logarithmic axes."""
        last = self.context_at[:, -1]
        names, places = name_heads(self.layers, self.heads), self.positions + 1
        extremes = int(last.argmin()), int(last.argmax())
        lines = make_head_lines(names, places, self.context_at, extremes)
        lines.append(Line("uniform", places, self.uniform_at))
        ends = 0.9, 1.15 * float(max(2, places[-1]))
        y = Axis("effective context, tokens", scale="log", ends=ends)
        x = Axis("tokens up to the position, i + 1", scale="log", ends=ends)
        return curves([Curves(lines, y, height=260)], x)


def measure_memory(found: Sequence[StateRecurrence]) -> tuple[StateMemory, Contexts]:
    """Measure how long heads remember, and their effective context by position."""
    n_rows, seq_len = found[0].mixer.x.shape[:2]
    layers, heads = index_heads(found)

    def average(measure: Callable[[StateRecurrence, int], Tensor]) -> Float[np.ndarray, "h n"]:
        """Return the mean over rows of the batch that have a number."""
        by_row = [torch.cat([measure(layer, row) for layer in found]) for row in range(n_rows)]
        return torch.stack(by_row).double().nanmean(0).cpu().numpy()

    context = average(lambda layer, row: layer.measure_contexts(row))
    powers = np.round(2 ** (np.arange(2 * seq_len.bit_length()) / 2)).astype(int) - 1
    positions = np.unique([*powers[powers < seq_len], seq_len - 1])
    uniform = np.ceil(HELD * np.arange(1, seq_len + 1) - 1e-6)
    memory = StateMemory(
        layers=layers,
        heads=heads,
        half_life=torch.cat([layer.half_lives for layer in found]).cpu().numpy(),
        context=context.mean(-1),
        decay=average(lambda layer, row: layer.measure_decay_share(row)),
        uniform_context=float(uniform.mean()),
        initial=None,
    )
    return memory, Contexts(layers, heads, positions, context[:, positions], uniform[positions])


@dataclass(frozen=True)
class RoleMeans(Finding):
    """What each head does at each kind of token: means over the tokens of a role.

    Attributes:
        layers, heads: as in `StateMemory`.
        role_names: the roles that occur on these rows.
        means: by quantity, role and head; NaN for the step of heads without one.
    """

    layers: Int[np.ndarray, " h"]
    heads: Int[np.ndarray, " h"]
    role_names: tuple[str, ...]
    quantities: tuple[str, ...]
    means: Float[np.ndarray, "q r h"]

    title = "What the heads with a state do at each kind of token"
    reading = (
        "Means over the tokens of each role, on logarithmic axes: dt, the step of SSD; 1 − e^a, "
        "the share of the state that decays at that token; ‖dt·B⊗x‖ or ‖k v‖, what is written to "
        "the state; ‖h C‖ or ‖S q‖, what is read from it, before D, norm and gate. Of more than 24 "
        "heads, those of a layer share a line. The table has the head whose writing depends most "
        "on the role."
    )

    @property
    def ratio(self) -> Float[np.ndarray, " h"]:
        """How many times as much each head writes at one role's tokens as at another's."""
        write = self.means[self.quantities.index("write")]
        lowest = np.maximum(write.min(0), np.sqrt(np.finfo(float).tiny))
        # A head that writes nothing at any token favours no role.
        return np.maximum(write.max(0), lowest) / lowest

    @property
    def says(self) -> str:
        """How many heads write more at one role's tokens than at another's."""
        return (
            f"Heads that write at least {FAVOURS:g} times as much at the tokens of one role as at "
            f"those of another: {(self.ratio >= FAVOURS).sum()} of {len(self.layers)}."
        )

    def numbers(self) -> Table:
        """Return the means of the head whose writing depends most on the role."""
        head = int(self.ratio.argmax())
        name = name_head(self.layers[head], self.heads[head])
        rows = (
            (role, *("–" if np.isnan(mean) else f"{mean:.3g}" for mean in means))
            for role, means in zip(self.role_names, self.means[:, :, head].T, strict=True)
        )
        return Table((name, "step dt", "kept e^a", "written", "read"), tuple(rows))

    def figure(self) -> go.Figure:
        """Draw the four quantities by role as dots, one line per head."""
        # e^a is next to 1 in heads that remember; only 1 − e^a shows how they differ.
        dt, kept, write, read = self.means
        shown = {
            "step\ndt": dt,
            "forgotten\n1 − e^a": 1 - kept,
            "written\n‖dt·B⊗x‖": write,
            "read\n‖h C‖": read,
        }
        if np.isnan(dt).all():
            shown = {"forgotten\n1 − e^a": 1 - kept, "written\n‖k v‖": write, "read\n‖S q‖": read}
        panels = []
        for title, means in shown.items():
            positive = np.where(means > 0, means, np.nan)
            dots = [Dots(*role) for role in zip(self.role_names, positive, strict=True)]
            panels.append(Pairs(dots, Axis(scale="log"), title))
        return draw_heads(self.layers, self.heads, panels)


def measure_roles(
    found: Sequence[StateRecurrence], batch: Batch, role_names: tuple[str, ...]
) -> RoleMeans:
    """Average step, decay, write and read over the tokens of each role."""
    present = [role for role in range(len(role_names)) if (batch.roles == role).any()]
    means = []
    for layer in found:
        kept = layer.kept
        step = torch.full_like(kept, torch.nan) if layer.step is None else layer.step
        every = torch.stack([step, kept, layer.writes, layer.reads.norm(dim=-1)])
        means.append(torch.stack([every[:, batch.roles == role].mean(1) for role in present], 1))
    joined = torch.cat(means, -1).double().cpu().numpy()
    names = tuple(role_names[role] for role in present)
    return RoleMeans(*index_heads(found), names, QUANTITIES, joined)


@dataclass(frozen=True)
class Magnitudes(Finding):
    """log₁₀|M̃| of a layer on the first row.

    Attributes:
        floor: log₁₀ of the magnitude in whose colour all smaller ones are drawn.
        median: log₁₀ of the median magnitude of the cells drawn.
        below: share of the cells below the floor, in [0, 1].
    """

    title: str
    layer: int
    largest: float
    floor: float
    median: float
    below: float
    shown: Heatmap = figure_only()

    reading = (
        f"Colour is log₁₀|M̃|. The scale begins at the smallest magnitude, at most {DECADES} "
        "decades below the largest; still smaller ones have its first colour. A head that forgets "
        "fades away from the diagonal. Ticks on the left mark query rows."
    )

    @property
    def says(self) -> str:
        """How far below the largest magnitude most entries lie."""
        if self.largest <= np.log10(LEAST):
            return "All cells are 0."
        return (
            f"Half of the cells lie {self.largest - self.median:.2g} decades or more below the "
            f"largest, {10**self.largest:.2g}; {percent(self.below)} are below the floor of the "
            "colours."
        )

    def figure(self) -> go.Figure:
        """Draw one heat map of logarithms per head."""
        fig = draw_heatmap(self.shown, self.layer)
        ticks = np.arange(np.ceil(self.floor), np.floor(self.largest) + 1)
        fig.update_traces(
            hovertemplate="row %{y}, column %{x}: log₁₀|M̃| = %{z:.2f}<extra></extra>",
            selector={"type": "heatmap"},
        )
        bar = {"tickvals": ticks, "ticktext": [f"10<sup>{tick:.0f}</sup>" for tick in ticks]}
        # By itself plotly would take the diverging scale: logarithms have both signs.
        look = {"autocolorscale": False, "colorscale": "cividis", "colorbar": bar}
        return fig.update_layout(
            meta={**fig.to_dict()["layout"]["meta"], "value": "log₁₀|M̃|"},
            coloraxis={**look, "cmin": self.floor, "cmax": self.largest},
        )


def measure_magnitudes(layer: StateRecurrence, subject: Subject) -> Magnitudes:
    """Measure log₁₀|M̃| of a layer on the subject's first row."""
    seq_len = layer.mixer.x.shape[1]
    pool = choose_pool(layer.n_heads, seq_len)
    place, parts = np.arange(seq_len), []
    for rows, block in layer.blocks(0, pool):
        causal = np.where(place <= place[rows, None], block.cpu().numpy(), np.float32(np.nan))
        parts.append(pool_matrix(causal, pool))
    size = np.abs(np.concatenate(parts, axis=1))
    entries = size[~np.isnan(size)]
    smallest, median, largest = (
        float(np.log10(max(float(number), LEAST)))
        for number in (entries.min(), np.median(entries), entries.max())
    )
    floor = min(max(largest - DECADES, smallest), largest - 1)
    logs = np.log10(np.maximum(size, np.float32(10**floor)))
    pooled = f", max over {pool} × {pool}" if pool > 1 else ""
    name = f"Layer {layer.mixer.layer} · {layer.mixer.kind}"
    return Magnitudes(
        title=f"{name} · log₁₀|M̃|, without D, first test row{pooled}",
        layer=layer.mixer.layer,
        largest=largest,
        floor=floor,
        median=median,
        below=float((entries < 10**floor).mean()),
        shown=Heatmap.of(subject, Picture(logs, pool, (0, 0), largest, signed=False)),
    )
