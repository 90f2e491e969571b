"""What does each SSD layer keep, and for how long? Now and at step 0.

    half-life           ln 2 / mean(−a)
    effective context   the smallest window of latest tokens that holds 90 % of Σ_j |M̃_ij|
    content and decay   log|M_ij| = log|C_i·B_j| + log L_ij: whose variance is it?

M̃ is signed, without D, never softmaxed.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import plotly.graph_objects as go
import torch
from torch import Tensor

from analysis.base import Subject, Words
from analysis.plots import heatmaps as pictures
from analysis.plots.heads import LINES, NAMED
from analysis.state_space.figures import draw_contexts, draw_magnitudes, draw_memory, draw_roles
from analysis.state_space.recurrence import HELD, Recurrence, joined, names, recurrences
from analysis.state_space.results import QUANTITIES, Contexts, Magnitudes, Memory, Roles
from analysis.statistics.estimates import thin
from analysis.words import percent
from tasks.base import Batch

TITLE = "What the states keep"
FAVOURS = 1.5
"""How many times one role's mean another's must be for a head to be said to tell them apart."""
DECADES = 6
"""How far below the largest magnitude colours end."""
PICTURED = 4
"""Most layers whose magnitudes are drawn; of more, evenly spaced ones."""

Result = Memory | Contexts | Roles | Magnitudes


@torch.no_grad()
def measure(subject: Subject) -> list[Result]:
    """Return memory, contexts, roles, and the magnitudes of a few layers.

    Raises:
        NotApplicableError: for a model without SSD.
    """
    found, before, batch = recurrences(subject)
    layers = thin(range(len(found)), PICTURED)
    memory, contexts = _memory(found)
    return [
        replace(memory, initial=_memory(before)[0]) if before else memory,
        contexts,
        _roles(found, batch, subject.task.role_names),
        *(_magnitudes(found[i], subject) for i in layers),
    ]


def _memory(found: Sequence[Recurrence]) -> tuple[Memory, Contexts]:
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
    uniform = np.ceil(HELD * np.arange(1, seq_len + 1) - 1e-6)
    memory = Memory(
        layers=layers,
        heads=heads,
        half_life=joined(found, lambda layer: layer.half_lives),
        context=context.mean(-1),
        content=shares[:, 0],
        decay=shares[:, 1],
        covariance=shares[:, 2],
        uniform_context=float(uniform.mean()),
        rows=n_rows,
        initial=None,
    )
    at = Contexts(layers, heads, positions, context[:, positions], uniform[positions], n_rows)
    return memory, at


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
    pool = pictures.choose_pool(layer.n_heads, seq_len)
    place, parts = np.arange(seq_len), []
    for rows, block in layer.blocks(0, pool):
        causal = place <= place[rows, None]
        parts.append(
            pictures.pool_matrix(np.where(causal, block.cpu().numpy(), np.float32(np.nan)), pool)
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
        shown=pictures.Heatmap.of(subject, picture),
    )


def describe(result: Result) -> Words:
    """Put memory, contexts, roles or magnitudes in words."""
    if isinstance(result, Memory):
        return _memory_in_words(result)
    if isinstance(result, Contexts):
        return _contexts_in_words(result)
    return _roles_in_words(result) if isinstance(result, Roles) else _magnitudes_in_words(result)


def _memory_in_words(memory: Memory) -> Words:
    labels = _labels(memory)
    says = _half_lives(memory)
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
    if 0 < np.isinf(memory.half_life).sum() < len(labels):
        reading += " Heads without decay have no dot for a half-life."
    if len(labels) > LINES:
        reading += " Heads of a layer share a line."
    alt = f"Dot plot of half-life, effective context and decay's share, {len(labels)} heads. {says}"
    return Words("Memory of the SSD heads", says, reading, alt)


def _half_lives(memory: Memory) -> str:
    """Say between which half-lives the heads lie, and how many have none."""
    labels, finite = _labels(memory), np.flatnonzero(np.isfinite(memory.half_life))
    if not len(finite):
        return "No head forgets: there is no decay"
    few, many = (int(finite[at(memory.half_life[finite])]) for at in (np.argmin, np.argmax))
    endless = len(labels) - len(finite)
    if len(labels) == 1:
        return f"The half-life is {_tokens(memory, few)}"
    if len(finite) == 1:
        says = f"The half-life of head {labels[few]} is {_tokens(memory, few)}"
    else:
        says = f"Half-lives go from {_tokens(memory, few, labels[few])} to "
        says += _tokens(memory, many, labels[many])
    if not endless:
        return says
    rest = "the other head keeps" if len(labels) == 2 else f"{endless} heads keep"
    return f"{says}; {'1 head keeps' if endless == 1 < len(finite) else rest} without end"


def _contexts_in_words(contexts: Contexts) -> Words:
    labels, last = _labels(contexts), contexts.context_at[:, -1]
    short, long = int(last.argmin()), int(last.argmax())
    says = f"At the last position, {contexts.positions[-1]:,}, 90 % of a row's magnitudes lie in "
    if len(labels) == 1:
        says += f"the latest {last[0]:.3g} tokens"
    else:
        says += f"the latest {last[short]:.3g} (head {labels[short]}) to {last[long]:.3g} tokens "
        says += f"(head {labels[long]})"
    says += f", beside {contexts.uniform_at[-1]:.3g} of a uniform matrix."
    reading = (
        f"Effective context by position, mean over {contexts.rows} rows of the batch: a line that "
        "levels off has a window of its own, one that runs along the dotted line, a uniform "
        "matrix's, looks back as far as there is anything."
    )
    if len(labels) > NAMED:
        reading += " The heads of narrowest and widest context at the end are named."
    alt = f"Lines of effective context by position, {len(labels)} heads. {says}"
    return Words("Effective context of the SSD heads by position", says, reading, alt)


def _labels(result: Memory | Contexts | Roles) -> list[str]:
    return [f"{layer}.{head}" for layer, head in zip(result.layers, result.heads, strict=True)]


def _tokens(memory: Memory, head: int, label: str = "") -> str:
    """Return a half-life as text, with whose it is and what it was at step 0."""
    notes = [f"head {label}"] if label else []
    if memory.initial is not None:
        before = memory.initial.half_life[head]
        notes.append(f"{'without end' if np.isinf(before) else f'{before:.3g}'} at step 0")
    text = f"{memory.half_life[head]:.3g} tokens"
    return f"{text} ({'; '.join(notes)})" if notes else text


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
        if others:
            does, heads = ("does", "head") if others == 1 else ("do", "heads")
            says += f"; so {does} {others} other {heads}, by {FAVOURS:g} times or more"
        says += "."
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
    """Draw dots for memory and roles, lines for contexts, a heat map a head for magnitudes."""
    if isinstance(result, Memory):
        return draw_memory(result)
    if isinstance(result, Contexts):
        return draw_contexts(result)
    return draw_roles(result) if isinstance(result, Roles) else draw_magnitudes(result)
