"""Restore one clean entry at a time in a corrupt run: heat maps by layer and position or head."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from analysis.base import Finding, Table
from analysis.figures import Axis, Colors, Map, heat
from analysis.figures.heat import FEW
from analysis.interventions.points import find_axes, get_language_model, list_axes
from analysis.plain import figure_only
from analysis.words import name_head
from lab.hooks import HookPoint, hook_points, hooks
from lab.models import LanguageModel
from lab.models.point_names import find_name

Metric = Callable[[Float[Tensor, "b t v"]], Tensor | float]
"""One number of the logits, such as a logit difference."""

PASS_ENTRIES = 2**24
"""Scores or logits of the patched copies of a batch that go through the model in one pass."""
LEAST = 0.01
"""The share of the difference from which on a cell restores something; less may be rounding."""


@dataclass(frozen=True)
class PatchSweep(Finding):
    """The metric of a corrupt run in which one entry at a time is the clean run's.

    Attributes:
        metric: with the entry patched, layers × positions or heads; NaN where there is none.
    """

    point: str
    along: str
    layers: Int[np.ndarray, " n"]
    metric: Float[np.ndarray, "n m"]
    clean: float
    corrupt: float
    labels: tuple[str, ...] = figure_only()

    @property
    def restored(self) -> Float[np.ndarray, "n m"]:
        """(metric − corrupt) / (clean − corrupt): 0 changes nothing, 1 restores the clean run.

        NaN where clean and corrupt do not differ.
        """
        change = self.clean - self.corrupt
        return (self.metric - self.corrupt) / (change if change else np.nan)

    title = "Patching one place at a time"
    reading = (
        "The clean run's tensor replaces the corrupt run's in one layer and at one position or "
        "head. At 0 the metric stays the corrupt run's, at 1 it becomes the clean run's."
    )

    @property
    def says(self) -> str:
        """Where patching restores most."""
        shares = np.nan_to_num(self.restored, nan=-np.inf)
        row, column = np.unravel_index(shares.argmax(), shares.shape)
        if not shares.max() >= LEAST:
            return "No patch restores a hundredth of the difference between the two runs."
        return (
            f"Of all patches of {self.point}, {self._name_cell(int(row), int(column))} restores "
            f"most: {shares[row, column]:.2f} of the difference between the runs."
        )

    def numbers(self) -> Table:
        """Return the metric of both runs."""
        return Table(
            ("run", "metric"), (("clean", f"{self.clean:.3g}"), ("corrupt", f"{self.corrupt:.3g}"))
        )

    def figure(self) -> go.Figure:
        """Draw the restored shares, layer 0 at the bottom."""
        bound = max(1.0, float(np.nanmax(np.abs(self.restored), initial=0.0)))
        lines, wide = range(len(self.layers))[::-1], len(self.labels)
        shown = Map(
            self.restored[::-1],
            [f"layer {self.layers[i]}" for i in lines],
            self.labels if wide <= FEW else np.arange(wide),
            notes=[[self._name_cell(i, j) for j in range(wide)] for i in lines],
        )
        colors = Colors("share of the difference restored", ends=(-bound, bound))
        fig = heat([shown], colors, Axis(self.along), Axis())
        return fig.update_layout(title_text=f"{self.title}: {self.point}")

    def _name_cell(self, row: int, column: int) -> str:
        """Name a place that was patched, with what stands there if a label says so."""
        if self.along == "head":
            return name_head(self.layers[row], column)
        label = self.labels[column]
        shown = "" if label == str(column) else f" ({label})"
        return f"layer {self.layers[row]}, {self.along} {column}{shown}"


def sweep_positions(
    model: nn.Module,
    clean: Int[Tensor, "b t"],
    corrupt: Int[Tensor, "b t"],
    metric: Metric,
    point: str = "resid_pre",
    *,
    labels: Sequence[str] | None = None,
) -> PatchSweep:
    """Patch every position of a point in every layer, one at a time.

    Each cell is what `patch(model, name, clean_tensor, positions=[position])` gives; many are
    computed in one forward pass.

    Args:
        model: a language model.
        clean: tokens whose tensors are patched in.
        corrupt: tokens of the run that is patched.
        metric: one number of the logits [b t v].
        point: short name of a point with an axis t, such as "attn_out", "mlp_out" or "z".
        labels: of the positions, such as `task.to_str_tokens(clean[0])`; None: their numbers.

    Raises:
        ValueError: for tokens of different shapes, a point without positions, or a metric that is
            not one number.
    """
    names = _find_points(get_language_model(model), point)
    found = _sweep(model, clean, corrupt, metric, point, names, "position")
    if labels is None:
        return found
    wide = found.metric.shape[1]
    if len(labels) != wide:
        raise ValueError(f"labels has {len(labels)} entries, must have {wide}, a position each")
    return replace(found, labels=tuple(labels))


def sweep_heads(
    model: nn.Module,
    clean: Int[Tensor, "b t"],
    corrupt: Int[Tensor, "b t"],
    metric: Metric,
    point: str | None = None,
) -> PatchSweep:
    """Patch every head of a point in every layer at all positions, one head at a time.

    Args:
        model: a language model.
        clean: tokens whose tensors are patched in.
        corrupt: tokens of the run that is patched.
        metric: one number of the logits [b t v].
        point: short name of a point with an axis h, such as "pattern", "q" or "k"; None: what the
            heads of each mixer mixed (`heads_hook`).

    Raises:
        ValueError: for tokens of different shapes, a model without such a point, or a metric that
            is not one number.
    """
    inner = get_language_model(model)
    if point is not None:
        names = _find_points(inner, point)
    else:
        names = {
            layer: f"blocks.{layer}.mixer.{block.mixer.heads_hook}"
            for layer, block in enumerate(inner.list_blocks())
            if block.mixer is not None and block.mixer.heads_hook is not None
        }
        if not names:
            raise ValueError(
                f"no mixer of the model names its heads (heads_hook). {_ask_for_point(inner)}"
            )
    return _sweep(model, clean, corrupt, metric, point or "heads", names, "head")


def _ask_for_point(model: LanguageModel) -> str:
    """Ask for a point with an axis of heads; name those that the model has."""
    points = [
        name.rpartition(".hook_")[2]
        for name in hook_points(model)
        if any("h" in axes for axes in list_axes(name))
    ]
    found = ", ".join(dict.fromkeys(points))
    return f"Give a point: {found}" if found else "It has no point with an axis of heads"


def _find_points(model: LanguageModel, point: str) -> dict[int, str]:
    """Return the full names of a point by layer.

    Raises:
        ValueError: when no layer has it.
    """
    names, found, reason = hook_points(model), {}, ""
    for layer in range(len(model.blocks)):
        try:
            found[layer] = find_name(names, (point, layer), len(model.blocks))
        except KeyError as error:
            reason = error.args[0]
    if not found:
        raise ValueError(f"{point=}: {reason}")
    return found


@torch.no_grad()
def _sweep(
    model: nn.Module,
    clean: Int[Tensor, "b t"],
    corrupt: Int[Tensor, "b t"],
    metric: Metric,
    point: str,
    names: dict[int, str],
    along: str,
) -> PatchSweep:
    """Patch each index along an axis of points alone, several in one pass."""
    inner = get_language_model(model)
    check_pair(clean, corrupt)
    clean_logits, cache = inner.run_with_cache(clean, list(names.values()))
    b, t = corrupt.shape
    at_once = max(1, PASS_ENTRIES // (b * t * max(t, inner.head.out_features)))
    rows: list[list[float]] = []
    for name in names.values():
        source, axes = cache[name], find_axes(cache[name], name)
        letter = along[0].replace("p", "t")
        if letter not in axes:
            raise ValueError(f"{name} has no axis of {along}s to patch along")
        axis = axes.index(letter)
        size = source.shape[axis]
        rows.append([])
        for part in torch.eye(size, dtype=torch.bool, device=source.device).split(at_once):
            marks = part.view(len(part), *(size if i == axis else 1 for i in range(source.ndim)))

            def patch(tensor: Tensor, point: HookPoint, marks=marks, source=source) -> Tensor:
                cells = tensor.unflatten(0, (len(marks), b))
                return torch.where(marks, source, cells).flatten(0, 1)

            with hooks(model, [(name, patch)]):
                logits = inner(corrupt.repeat(len(part), 1)).unflatten(0, (len(part), b))
            rows[-1] += [compute_metric(metric, cell) for cell in logits]
    wide = max(map(len, rows))
    return PatchSweep(
        point=point,
        along=along,
        layers=np.array(list(names)),
        metric=np.array([row + [np.nan] * (wide - len(row)) for row in rows]),
        clean=compute_metric(metric, clean_logits),
        corrupt=compute_metric(metric, inner(corrupt)),
        labels=tuple(map(str, range(wide))),
    )


def compute_metric(metric: Metric, logits: Float[Tensor, "b t v"]) -> float:
    """Return a metric of the logits as a number.

    Raises:
        ValueError: when the metric returns several numbers.
    """
    value = metric(logits)
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"metric: returned {list(value.shape)}, must return one number")
    return float(value)


def check_pair(clean: Int[Tensor, "b t"], corrupt: Int[Tensor, "b t"]) -> None:
    """Check that two runs can be patched into each other.

    Raises:
        ValueError: for tokens of different shapes.
    """
    if clean.shape != corrupt.shape:
        raise ValueError(f"corrupt is {list(corrupt.shape)}, must be {list(clean.shape)} as clean")
