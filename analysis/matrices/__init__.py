"""Where does each position look? Every mixer's matrix [h t s] on one test row."""

import math
from dataclasses import dataclass, replace

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int, Shaped

from analysis.base import Finding, NotApplicableError, Subject, Table, thin
from analysis.figures.picture import (
    Heatmap,
    Picture,
    choose_pool,
    count_columns,
    draw_heatmap,
    find_expected,
    list_tokens,
    make_picture,
    pool_matrix,
)
from analysis.links import SHOWS, AnswerLinks, find_links, find_offsets
from analysis.mixing import BlockMixer, collect_mixers
from analysis.plain import figure_only
from analysis.words import name_head, name_place, percent
from lab.layers.mixer import MatrixMixer

__all__ = ["TITLE", "LayerMatrix", "measure"]

TITLE = "What each layer mixes, on the first test row"
ROWS, STEPS = 4, 5
"""Maximum number of rows, and of training steps beside the last, to choose from."""
DRAWN = 12
"""Maximum number of heads that are drawn: of some mixers each channel is one."""
VIEWED = 2**18
"""Maximum number of cells of a layer in all of these."""
CROP = 256
"""Cells across the crop, all panels together."""


@dataclass(frozen=True)
class Mass:
    """Where the mass |M_ij| / Σ_j |M_ij| of a matrix lies: per head, the mean over rows of M.

    Attributes:
        on_value: from queries to their value; empty if the task stores no pairs.
        written: from values to their key; likewise.
        on_previous: from every position to the one before it.
        uniform_value, …: the same if every row were uniform: the mean of 1/(row + 1).
    """

    on_value: Float[np.ndarray, " asked"]
    written: Float[np.ndarray, " asked"]
    on_previous: Float[np.ndarray, " heads"]
    uniform_value: float
    uniform_written: float
    uniform_previous: float


@dataclass(frozen=True)
class LayerMatrix(Finding):
    """A mixer's matrix on one row.

    Attributes:
        picture: what is drawn; None when the mixer offers no matrix.
        mass: where the mass of the whole matrix lies; None when the mixer offers no matrix.
        cropped: whether the picture is a crop of a matrix that is also shown pooled.
        links, tokens, roles: the row's; roles are indices into role_names.
        views: this row first, other rows, and this one at other training steps, by what they are.
    """

    layer: int
    mixer: str
    form: str
    picture: Picture | None
    mass: Mass | None
    cropped: bool
    links: AnswerLinks
    tokens: Shaped[np.ndarray, " t"]
    roles: Int[np.ndarray, " t"]
    role_names: tuple[str, ...]
    title: str = figure_only()
    views: dict[str, Heatmap] = figure_only()

    reading = (
        "The sentence and the table are of the first test row, test row 0; other rows, and this "
        "one at other training steps, have the same colours. Mass is an entry's share of its row's "
        "magnitudes. Colours end where nine rows of ten have their largest entry; of a signed "
        "matrix, at the 99.5 % quantile of magnitudes. Ticks on "
        "the left mark query rows, rings where a query meets what it asks for: click their name in "
        "the legend to hide or see them."
    )

    @property
    def says(self) -> str:
        """What the layer does, or where the crop lies."""
        mass, links = self.mass, self.links
        if self.picture is None or mass is None:
            return f"This layer offers no matrix: {self.mixer} has no matrix, values and project."
        if self.cropped:
            (row, column), (_, high, wide) = self.picture.first, self.picture.weights.shape
            return (
                f"Rows {row} to {row + high - 1}, columns {column} to {column + wide - 1}; each "
                "cell is one entry of the matrix."
            )
        if not mass.on_previous.size:
            return "The row is a single token."
        if not mass.on_value.size:
            return (
                f"Of a row's mass, up to {_format_most(mass.on_previous)} is on the token before."
            )
        does = "shows neither recall nor binding"
        if _exceeds_uniform(mass.written, mass.uniform_written):
            does = "binds each value to its key"
        if _exceeds_uniform(mass.on_value, mass.uniform_value):
            does = "recalls"
        return (
            f"It {does}: query rows put up to {_format_most(mass.on_value)} of their mass on "
            f"{name_place(links.read, 'the value they ask for')}, and "
            f"{name_place(links.written, 'a value')} puts up to {_format_most(mass.written)} on "
            "its key."
        )

    def numbers(self) -> Table | None:
        """Return the largest shares, next to a uniform row's, or how many of the rings are here."""
        mass, links = self.mass, self.links
        if self.picture is None or mass is None:
            return None
        if self.cropped:
            met = len(find_expected(self.picture, links)[0])
            counts = "queries that meet their value", f"{met}", f"{len(links.values)}"
            return Table(("", "here", "in all"), (counts,)) if len(links.values) else None
        found = (
            ("query → value", mass.on_value, mass.uniform_value),
            ("value → key", mass.written, mass.uniform_written),
            ("token before", mass.on_previous, mass.uniform_previous),
        )
        rows = tuple(
            (name, name_head(self.layer, int(of.argmax())), _format_most(of), percent(uniform))
            for name, of, uniform in found
            if of.size
        )
        return Table(("mass", "highest", "share", "a uniform row"), rows)

    def figure(self) -> go.Figure | None:
        """Draw a heat map per head; None where the mixer offers no matrix."""
        if self.picture is None:
            return None
        shown = Heatmap(self.picture, self.links, self.tokens, self.roles, self.role_names)
        return draw_heatmap(shown, self.layer, self.views)


def _exceeds_uniform(share: Float[np.ndarray, " h"], uniform: float) -> bool:
    """Whether some head is far enough from uniform."""
    return bool(share.max() >= uniform + SHOWS * (1 - uniform))


def _format_most(share: Float[np.ndarray, " h"]) -> str:
    return percent(float(share.max()))


@torch.no_grad()
def measure(subject: Subject) -> list[LayerMatrix]:
    """Return each mixer's matrix on the subject's first row, and a crop of each large one.

    Raises:
        NotApplicableError: for a model without mixers.
    """
    batch = subject.batch[:1]
    offsets, findings = find_offsets(subject), []
    views = draw_views(subject)
    for mixer in collect_mixers(subject.model, batch):
        read, written = offsets.get(mixer.layer)
        links = replace(find_links(batch), read=read, written=written)
        offered = isinstance(mixer.module, MatrixMixer)
        picture = view_whole(mixer) if offered else None
        pool = picture.pool if picture else 1
        title = f"Layer {mixer.layer} · {mixer.kind}" + f" · {mixer.form}" * offered
        mass = measure_mass(mixer, links) if offered else None
        heads = 0 if mass is None else len(mass.on_previous)
        title += f", the first {DRAWN} of {heads} heads" * (heads > DRAWN)
        whole = LayerMatrix(
            layer=mixer.layer,
            mixer=mixer.kind,
            form=mixer.form,
            picture=picture,
            mass=mass,
            cropped=False,
            links=links,
            tokens=list_tokens(subject),
            roles=batch.roles[0].cpu().numpy(),
            role_names=subject.task.role_names,
            title=title + f", signed max over {pool} × {pool}" * (pool > 1),
            views=views.get(mixer.layer, {}),
        )
        findings.append(whole)
        if picture and pool > 1:
            crop = view_crop(mixer, picture, links)
            title += ", crop at full resolution"
            crop = replace(whole, picture=crop, cropped=True, title=title, views={})
            findings.append(crop)
    if not findings:
        raise NotApplicableError("no block has a sequence mixer")
    return findings


def draw_views(subject: Subject) -> dict[int, dict[str, Heatmap]]:
    """Return heat maps by layer: of the first row, of others, and of it at other steps.

    There are fewer where they are large; a single row of a batch has none.
    """
    first, found = subject.batch[:1], {}
    mixers = [m for m in collect_mixers(subject.model, first) if isinstance(m.module, MatrixMixer)]
    if not mixers or len(subject.batch.inputs) < 2:
        return {}
    cells = max(view_whole(mixer).weights.size for mixer in mixers)
    most = min(ROWS + STEPS, VIEWED // cells)
    rows = range(min(most, ROWS, len(subject.batch.inputs)))
    of = [(f"test row {i}", subject.model, subject.batch[i : i + 1]) for i in rows]
    if subject.run is not None and subject.step is not None and most > len(of):
        steps = [step for step in subject.run.list_steps() if step != subject.step]
        for step in thin(steps, most - len(of)) if steps else ():
            model = subject.run.load_model(step).to(first.inputs.device)
            of.append((f"test row 0, step {step:,}", model, first))
    for name, model, batch in of if len(of) > 1 else ():
        for mixer in collect_mixers(model, batch):
            if isinstance(mixer.module, MatrixMixer):
                drawn = Heatmap.of(replace(subject, batch=batch), view_whole(mixer))
                found.setdefault(mixer.layer, {})[name] = drawn
    return found


def measure_mass(mixer: BlockMixer, links: AnswerLinks) -> Mass:
    """Measure where the mass of a mixer's matrix lies on the first row; zeros count as 0."""
    later, gathering = np.arange(1, mixer.x.shape[1]), links.values + links.written
    edges = links.expected, (gathering, links.keys), (later, later - 1)
    targets, sources = (np.concatenate(ends) for ends in zip(*edges, strict=True))
    ends = np.cumsum([len(of) for of, _ in edges])[:-1]
    shares = np.split(mixer.measure_shares(0, targets, sources), ends, axis=1)
    on_value, written, on_previous = (
        share.mean(-1) if share.size else np.zeros(0) for share in shares
    )
    uniform_value, uniform_written, uniform_previous = (
        float((1 / (rows + 1)).mean()) if rows.size else math.nan
        for rows in (links.queries, gathering, later)
    )
    uniform = uniform_value, uniform_written, uniform_previous
    return Mass(on_value, written, on_previous, *uniform)


def view_whole(mixer: BlockMixer) -> Picture:
    """Return the pooled picture of a mixer's matrix on its first row, of at most `DRAWN` heads.

    The matrix is computed by blocks of rows: a long one is never whole in memory.
    """
    pool = choose_pool(len(mixer.matrix(0, slice(0, 1))), mixer.x.shape[1])
    parts = [
        pool_matrix(_blank_future(block[:DRAWN].cpu().numpy(), rows.start), pool)
        for rows, block in mixer.blocks(0, pool)
    ]
    return make_picture(np.concatenate(parts, axis=1), pool)


def view_crop(mixer: BlockMixer, whole: Picture, links: AnswerLinks) -> Picture:
    """Return the window of a mixer's matrix in which most queries meet their value.

    Without pairs, it is the last window.
    """
    seq_len = mixer.x.shape[1]
    side = min(seq_len, CROP // count_columns(len(whole.weights)))
    last = seq_len - side
    corners = np.array([last, *range(0, last, max(1, side // 4))[::-1]])
    rows, columns = (
        (at >= corners[:, None]) & (at < corners[:, None] + side) for at in links.expected
    )
    met = rows.astype(int) @ columns.T.astype(int)
    row, column = (int(corners[i]) for i in np.unravel_index(met.argmax(), met.shape))
    block = _blank_future(mixer.matrix(0, slice(row, row + side))[:DRAWN].cpu().numpy(), row)
    weights = block[:, :, column : column + side]
    return replace(whole, weights=weights, pool=1, first=(row, column))


def _blank_future(rows: Float[np.ndarray, "h t s"], first: int) -> Float[np.ndarray, "h t s"]:
    """Return a copy of rows first, first + 1, … with NaN at later positions than the row's own."""
    return np.where(np.tri(*rows.shape[1:], k=first, dtype=bool), rows, np.float32(np.nan))
