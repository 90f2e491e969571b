"""What does each SSD layer keep, and for how long? Now and at step 0.

    half-life           ln 2 / mean(−a)
    effective context   the smallest window of latest tokens that holds 90 % of Σ_j |M̃_ij|
    content and decay   log|M_ij| = log|C_i·B_j| + log L_ij: whose variance is it?

M̃ is signed, without D, never softmaxed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.base import Subject, Words
from analysis.figures import pictures
from analysis.figures.dots import LINES, Panel, dots
from analysis.figures.style import percent
from analysis.links import row_links
from analysis.measures.recurrence import HELD, Recurrence, joined, names, recurrences
from analysis.record import drawn
from tasks.base import Batch

TITLE = "What the states keep"
FAVOURS = 1.5
"""How many times one role's mean another's must be for a head to be said to tell them apart."""
DECADES = 6
"""How far below the largest magnitude colours end."""
PICTURED = 4
"""Most layers whose magnitudes are drawn; of more, evenly spaced ones."""
QUANTITIES = ("dt", "e^a", "write", "read")
"""Per token: the step; what is kept of the state; ‖dt·B⊗x‖, what is added to it; ‖h C‖, what is
read from it."""


@dataclass(frozen=True)
class Memory:
    """How long each head remembers; the same of the initial weights under `initial`.

    Attributes:
        layers: index of the block, a head an entry.
        heads: the head's index in its layer.
        half_life: ln 2 / mean(−a), tokens; ∞ without decay.
        context: effective context, tokens in [1, i + 1]: mean over positions and rows.
        positions: about powers of √2 less one, and the last, i.
        context_at: effective context at those, mean over rows.
        content, decay, covariance: shares of var log|M_ij| over j < i: var log|C_i·B_j|,
            var log L_ij and twice their covariance; they add up to 1.
        uniform_context: of a uniform causal matrix.
        rows: of the batch.
        initial: of the run's initial weights; None without a run, or of those themselves.
    """

    layers: Int[np.ndarray, " h"]
    heads: Int[np.ndarray, " h"]
    half_life: Float[np.ndarray, " h"]
    context: Float[np.ndarray, " h"]
    content: Float[np.ndarray, " h"]
    decay: Float[np.ndarray, " h"]
    covariance: Float[np.ndarray, " h"]
    positions: Int[np.ndarray, " i"]
    context_at: Float[np.ndarray, "h i"]
    uniform_context: float
    rows: int
    initial: "Memory | None"


@dataclass(frozen=True)
class Roles:
    """What each head does at each kind of token: means over tokens of the role; `QUANTITIES`.

    Attributes:
        layers, heads, rows: as in `Memory`.
        role_names: the roles that there are on these rows.
        quantities: names.
        means: NaN nowhere.
    """

    layers: Int[np.ndarray, " h"]
    heads: Int[np.ndarray, " h"]
    role_names: tuple[str, ...]
    quantities: tuple[str, ...]
    means: Float[np.ndarray, "q r h"]
    rows: int


@dataclass(frozen=True)
class Magnitudes:
    """log₁₀|M̃| of a layer on the first row.

    Attributes:
        layer: index of the block.
        largest: log₁₀ of the largest magnitude.
        floor: log₁₀ of what smaller ones are shown as.
        median: log₁₀ of the median magnitude of the cells drawn.
        below: share of those below the floor, in [0, 1].
        shown: the picture.
    """

    layer: int
    largest: float
    floor: float
    median: float
    below: float
    shown: pictures.Mixing = drawn()


Result = Memory | Roles | Magnitudes


@torch.no_grad()
def measure(subject: Subject) -> list[Result]:
    """Return memory, roles, and the magnitudes of a few layers.

    Raises:
        NotApplicableError: for a model without SSD.
    """
    found, before, batch = recurrences(subject)
    layers = np.arange(len(found))
    if len(found) > PICTURED:
        layers = np.unique(np.linspace(0, len(found) - 1, PICTURED).round().astype(int))
    memory = _memory(found)
    return [
        replace(memory, initial=_memory(before)) if before else memory,
        _roles(found, batch, subject.task.role_names),
        *(_magnitudes(found[i], subject) for i in layers.tolist()),
    ]


def _memory(found: Sequence[Recurrence]) -> Memory:
    n_rows, seq_len = found[0].dt.shape[:2]
    layers, heads = names(found)

    def over_rows(measured: Callable[[Recurrence, int], Tensor]) -> np.ndarray:
        """Return the mean over rows of the batch that have a number."""
        return joined(
            found,
            lambda layer: (
                torch.stack([measured(layer, row) for row in range(n_rows)]).double().nanmean(0)
            ),
        )

    context = over_rows(Recurrence.contexts)
    shares = over_rows(Recurrence.content_and_decay)
    powers = np.round(2 ** (np.arange(2 * seq_len.bit_length()) / 2)).astype(int) - 1
    positions = np.unique([*powers[powers < seq_len], seq_len - 1])
    return Memory(
        layers=layers,
        heads=heads,
        half_life=joined(found, lambda layer: layer.half_lives),
        context=context.mean(-1),
        content=shares[:, 0],
        decay=shares[:, 1],
        covariance=shares[:, 2],
        positions=positions,
        context_at=context[:, positions],
        uniform_context=float(np.ceil(HELD * np.arange(1, seq_len + 1) - 1e-6).mean()),
        rows=n_rows,
        initial=None,
    )


def _roles(found: Sequence[Recurrence], batch: Batch, role_names: tuple[str, ...]) -> Roles:
    layers, heads = names(found)
    there = [role for role in range(len(role_names)) if (batch.roles == role).any()]
    of = [batch.roles == role for role in there]

    def by_role(values: Callable[[Recurrence], Tensor]) -> np.ndarray:
        """Return a quantity [b t h] by role, [r h]."""
        return joined(
            found, lambda layer: torch.stack([values(layer)[role].mean(0) for role in of], dim=1)
        ).T

    means = (
        by_role(lambda layer: layer.dt),
        by_role(lambda layer: layer.log_decay.exp()),
        by_role(lambda layer: layer.writes),
        by_role(lambda layer: layer.reads.norm(dim=-1)),
    )
    present = tuple(role_names[role] for role in there)
    return Roles(layers, heads, present, QUANTITIES, np.stack(means), len(batch.inputs))


def _magnitudes(layer: Recurrence, subject: Subject) -> Magnitudes:
    seq_len = layer.dt.shape[1]
    pool = pictures.pooling(layer.n_heads, seq_len)
    place, parts = np.arange(seq_len), []
    for rows, block in layer.blocks(0, pool):
        causal = place <= place[rows, None]
        parts.append(
            pictures.pooled(np.where(causal, block.cpu().numpy(), np.float32(np.nan)), pool)
        )
    weights = np.concatenate(parts, axis=1)
    size = np.abs(weights)
    entries = size[~np.isnan(size)]
    least = np.finfo(np.float32).tiny
    smallest, median, largest = (
        float(np.log10(max(float(number), least)))
        for number in (entries.min(), np.median(entries), entries.max())
    )
    floor = min(max(largest - DECADES, smallest), largest - 1)
    logs = np.log10(np.maximum(size, np.float32(10**floor)))
    picture = pictures.Picture(logs, pool, (0, 0), largest, signed=False)
    return Magnitudes(
        layer=layer.mixer.layer,
        largest=largest,
        floor=floor,
        median=median,
        below=float((entries < 10**floor).mean()),
        shown=pictures.Mixing(
            layer=layer.mixer.layer,
            mixer="SSD",
            form="log₁₀|M̃|, without D",
            picture=picture,
            mass=None,
            cropped=False,
            links=row_links(subject.batch),
            tokens=subject.batch.inputs[0].cpu().numpy(),
            roles=subject.batch.roles[0].cpu().numpy(),
            role_names=subject.task.role_names,
        ),
    )


def describe(result: Result) -> Words:
    """Put memory, roles or magnitudes in words."""
    if isinstance(result, Memory):
        return _memory_in_words(result)
    return _roles_in_words(result) if isinstance(result, Roles) else _magnitudes_in_words(result)


def _memory_in_words(memory: Memory) -> Words:
    labels = _labels(memory)
    short, long = int(memory.half_life.argmin()), int(memory.half_life.argmax())
    if np.isinf(memory.half_life).all():
        says = "No head forgets: there is no decay"
    elif len(labels) == 1:
        says = f"The half-life is {_tokens(memory, 0)}"
    else:
        says = f"Half-lives go from {_tokens(memory, short)} to {_tokens(memory, long)}"
    far = int(memory.context.argmax())
    says += f"; {'its' if len(labels) == 1 else 'the widest'} effective context is "
    says += f"{memory.context[far]:.3g} tokens"
    says += "" if len(labels) == 1 else f" (head {labels[far]})"
    says += f" beside {memory.uniform_context:.3g} of a uniform matrix."
    reading = (
        "Half-life is ln 2 / mean(−a). The effective context of a position is the smallest window "
        f"of latest tokens that holds {HELD:.0%} of Σ_j |M̃_ij|, without D; its mean over positions "
        f"and {memory.rows} rows is shown. The last panel is decay's share, var log L, of the "
        "variance of log|M| between positions; what content, log|C·B|, has, and their covariance, "
        "make up the rest."
    ).replace("90%", "90 %")
    if memory.initial is not None:
        reading += " Diamonds are the run's weights at step 0."
    if len(labels) > LINES:
        reading += " Heads of a layer share a line."
    alt = f"Dot plot of half-life, effective context and decay's share, {len(labels)} heads. {says}"
    return Words("Memory of the SSD heads", says, reading, alt)


def _labels(result: Memory | Roles) -> list[str]:
    return [f"{layer}.{head}" for layer, head in zip(result.layers, result.heads, strict=True)]


def _tokens(memory: Memory, head: int) -> str:
    """Return a half-life as text, with whose it is and what it was at step 0."""
    text = f"{memory.half_life[head]:.3g} tokens (head {_labels(memory)[head]}"
    if memory.initial is None:
        return f"{text})"
    return f"{text}; {memory.initial.half_life[head]:.3g} at step 0)"


def _roles_in_words(roles: Roles) -> Words:
    write = roles.means[roles.quantities.index("write")]
    ratio = write.max(0) / np.maximum(write.min(0), np.finfo(float).tiny)
    head = int(ratio.argmax())
    most, least = int(write[:, head].argmax()), int(write[:, head].argmin())
    name = f"Head {_labels(roles)[head]}"
    if len(roles.role_names) < 2:
        says = f"All tokens are of one role, {', '.join(roles.role_names)}."
    elif ratio[head] < FAVOURS:
        says = f"No head tells roles apart by what it writes: {name.lower()} comes nearest, with "
        says += f"{ratio[head]:.3g} times as much at {roles.role_names[most]} tokens as at "
        says += f"{roles.role_names[least]} ones."
    else:
        says = f"{name} writes {ratio[head]:.3g} times as much at {roles.role_names[most]} tokens "
        says += f"as at {roles.role_names[least]} ones"
        others = int((ratio >= FAVOURS).sum()) - 1
        says += f"; so do {others} more heads, by {FAVOURS:g} times or more." if others > 1 else "."
    reading = (
        "Means over the tokens of each role, on logarithmic axes: dt, the step; 1 − e^a, what is "
        "forgotten of the state at that token; ‖dt·B⊗x‖, what is written to it; ‖h C‖, what is "
        f"read from it, before D and gate. {roles.rows} rows of the batch."
    )
    if len(roles.layers) > LINES:
        reading += " Heads of a layer share a line."
    alt = f"Dot plots of step, decay, write and read by role. {says}"
    return Words("What the SSD heads do at each kind of token", says, reading, alt)


def _magnitudes_in_words(found: Magnitudes) -> Words:
    picture = found.shown.picture
    assert picture is not None
    title = f"Layer {found.layer} · SSD · log₁₀|M̃|, without D, first test row"
    if picture.pool > 1:
        title += f", max over {picture.pool} × {picture.pool}"
    cells = "entries" if picture.pool == 1 else "cells"
    apart = found.largest - found.median
    says = f"Half of the {cells} lie {apart:.2g} decades or more below the largest, "
    says += f"{10**found.largest:.2g}"
    says += f"; {percent(found.below)} are below the floor of the colours." if found.below else "."
    reading = (
        f"Colour is log₁₀|M̃|, from the floor, {found.floor:.1f}, which is the smallest magnitude "
        f"shown or {DECADES} decades below the largest, to {found.largest:.1f}; what is smaller "
        "has the floor's colour. A head that forgets fades away from the diagonal. Ticks on the "
        "left mark query rows."
    )
    return Words(title, says, reading, f"Heat map of {title}, lower triangle. {says}")


def draw(result: Result) -> go.Figure | None:
    """Draw dots for memory and roles, a heat map a head for magnitudes."""
    if isinstance(result, Memory):
        return _draw_memory(result)
    return _draw_roles(result) if isinstance(result, Roles) else _draw_magnitudes(result)


def _draw_memory(memory: Memory) -> go.Figure:
    sources = [memory] if memory.initial is None else [memory, memory.initial]
    panels = []
    half_lives = tuple(
        np.where(np.isinf(source.half_life), np.nan, source.half_life) for source in sources
    )
    if not np.isnan(half_lives).all():
        panels.append(Panel("half-life,\ntokens", half_lives, _decades(*half_lives), log=True))
    contexts = tuple(source.context for source in sources)
    ends = _decades(*contexts, np.array([memory.uniform_context]))
    chance = memory.uniform_context
    panels.append(Panel("context,\ntokens", contexts, ends, chance=chance, log=True))
    shares = tuple(100 * source.decay for source in sources)
    ends = (-5.0, 1.05 * max(100.0, float(np.nanmax(shares))))
    panels.append(Panel("var log|M|\nby decay, %", shares, ends))
    series = ("now", "step 0")[: len(sources)]
    return dots(memory.layers, memory.heads, panels, series, "uniform")


def _draw_roles(roles: Roles) -> go.Figure:
    titles = ("step\ndt", "forgotten\n1 − e^a", "written\n‖dt·B⊗x‖", "read\n‖h C‖")
    dt, kept, write, read = roles.means
    panels = [
        # Kept is next to 1 in heads that remember, which only 1 − e^a can tell apart.
        Panel(title, tuple(np.where(means > 0, means, np.nan)), _decades(means), log=True)
        for title, means in zip(titles, (dt, 1 - kept, write, read), strict=True)
        if (means > 0).any()
    ]
    return dots(roles.layers, roles.heads, panels, roles.role_names, "")


def _decades(*values: np.ndarray) -> tuple[float, float]:
    """Return ends of a logarithmic axis that has some air on both sides."""
    everything = np.concatenate([np.ravel(v) for v in values])
    seen = everything[np.isfinite(everything) & (everything > 0)]
    low, high = (float(seen.min()), float(seen.max())) if seen.size else (1.0, 1.0)
    air = max(1.15, (high / low) ** 0.08)
    return low / air, high * air


def _draw_magnitudes(found: Magnitudes) -> go.Figure | None:
    figure = pictures.draw(found.shown)
    if figure is None:
        return None
    ticks = np.arange(np.ceil(found.floor), np.floor(found.largest) + 1)
    figure.update_traces(
        hovertemplate="row %{y}, column %{x}: log₁₀|M̃| = %{z:.2f}<extra></extra>",
        selector={"type": "heatmap"},
    )
    return figure.update_layout(
        coloraxis={
            # By itself plotly would take the diverging scale: logarithms have both signs.
            "autocolorscale": False,
            "colorscale": "cividis",
            "cmin": found.floor,
            "cmax": found.largest,
            "colorbar": {
                "tickvals": ticks.tolist(),
                "ticktext": [f"10<sup>{tick:.0f}</sup>" for tick in ticks],
            },
        }
    )
