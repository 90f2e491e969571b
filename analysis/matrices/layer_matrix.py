"""One layer's matrix on one row: its heat map, and where its mass lies."""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int

from analysis.base import Finding, Words
from analysis.links import AnswerLinks, Mass
from analysis.plots.heatmaps import CIRCLES, Heatmap, Picture, draw_heatmap, find_expected
from analysis.words import capitalize, name_head, name_place, percent

SHOWS = 0.25
"""A head shows a pattern if its share lies this far or farther from uniform (0) to all (1)."""


@dataclass(frozen=True)
class LayerMatrix(Finding):
    """A mixer's matrix on one row.

    Attributes:
        layer: index of the block.
        mixer: its class.
        form: which matrix this is.
        picture: what is drawn; None when the mixer offers no matrix.
        mass: where the mass of the whole matrix lies; None when the mixer offers no matrix.
        cropped: whether the picture is a crop of a matrix that is also shown pooled.
        links: the row's.
        tokens: the row's, int [t].
        roles: indices into role_names, int [t].
        role_names: the task's.
    """

    layer: int
    mixer: str
    form: str
    picture: Picture | None
    mass: Mass | None
    cropped: bool
    links: AnswerLinks
    tokens: Int[np.ndarray, " t"]
    roles: Int[np.ndarray, " t"]
    role_names: tuple[str, ...]

    def describe(self) -> Words:
        """Say what the layer does most, or where the crop lies."""
        title = f"Layer {self.layer} · {self.mixer}"
        heatmap = self._build_heatmap()
        if heatmap is None or self.mass is None:
            says = f"This layer offers no matrix: {self.mixer} has no matrix, values and project."
            return Words(title, says, "", says)
        title += f" · {self.form}"
        if self.cropped:
            title += ", crop at full resolution"
            says = _describe_crop(heatmap)
        else:
            pool = heatmap.picture.pool
            title += f", signed max over {pool} × {pool}" if pool > 1 else ""
            says = _describe_mass(self.mass, self.layer, self.links)
        heads = len(heatmap.picture.weights)
        panels = "1 head" if heads == 1 else f"{heads} heads"
        alt = f"Heat map of {title}, {panels}, lower triangle. {says}"
        return Words(title, says, _explain(heatmap), alt)

    def draw(self) -> go.Figure | None:
        """Draw a heat map per head; None where the mixer offers no matrix."""
        heatmap = self._build_heatmap()
        return None if heatmap is None else draw_heatmap(heatmap, self.layer)

    def _build_heatmap(self) -> Heatmap | None:
        if self.picture is None:
            return None
        return Heatmap(self.picture, self.links, self.tokens, self.roles, self.role_names)


def _explain(heatmap: Heatmap) -> str:
    """Say how to read the heat map."""
    picture = heatmap.picture
    ends = f"±{picture.bound:.2g}" if picture.signed else f"0 and {picture.bound:.2g}"
    reading = f"Mass is an entry's share of its row's magnitudes. Colours end at {ends}."
    reading += " Ticks on the left mark query rows."
    if len(heatmap.links.values):
        place = name_place(heatmap.links.read, "the value it asks for")
        reading += f" Rings mark where a query meets {place}."
        if find_expected(heatmap)[0].size > CIRCLES:
            reading += " There are many rings: click their name in the legend to see them."
    return reading


def _describe_crop(heatmap: Heatmap) -> str:
    """Say which rows and columns the crop shows, and how many of the expected cells."""
    height, width = heatmap.picture.weights.shape[1:]
    (row, column), found = heatmap.picture.first, find_expected(heatmap)[0].size
    says = f"Rows {row} to {row + height - 1}, columns {column} to {column + width - 1}"
    if found:
        says += f" hold {found} of the {len(heatmap.links.queries)} cells where a query meets "
        says += name_place(heatmap.links.read, "its value")
    return f"{says}; each cell is one entry of the matrix."


def _describe_mass(mass: Mass, layer: int, links: AnswerLinks) -> str:
    """Say what a layer does most, and the numbers behind it."""
    if not mass.on_value.size:
        if not mass.on_previous.size:
            return "A single token."
        best = _name_best(mass.on_previous, mass.uniform_previous, layer)
        return f"Of a row's mass {best} lies on the token before."
    recall = f"Query rows put {_name_best(mass.on_value, mass.uniform_value, layer)} of their mass"
    recall += f" on {name_place(links.read, 'the value they ask for')}"
    written = _name_best(mass.written, mass.uniform_written, layer)
    write = f"Value rows put {written} on their key"
    if links.written:
        write = f"{capitalize(name_place(links.written, 'a value'))} puts {written} on its key"
    if _exceeds_uniform(mass.on_value, mass.uniform_value):
        return f"It recalls. {recall}. {write}."
    if _exceeds_uniform(mass.written, mass.uniform_written):
        return f"It binds each value to its key. {write}. {recall}."
    return f"It shows neither recall nor binding. {recall}. {write}."


def _exceeds_uniform(share: Float[np.ndarray, " h"], uniform: float) -> bool:
    """Whether some head is far enough from uniform."""
    return bool(share.max() >= uniform + SHOWS * (1 - uniform))


def _name_best(share: Float[np.ndarray, " h"], uniform: float, layer: int) -> str:
    """Return the largest share, its head, and what a uniform row would have."""
    head = "" if len(share) == 1 else f"{name_head(layer, int(share.argmax()))}; "
    return f"{percent(float(share.max()))} ({head}uniform: {percent(uniform)})"
