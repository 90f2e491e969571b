"""Which edges between heads and MLPs matter: patched one by one, or estimated from gradients."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from analysis.base import Finding, Table
from analysis.figures import Axis, Colors, Map, heat
from analysis.interventions.points import get_language_model
from analysis.patching.sweeps import Metric, check_pair, compute_metric
from analysis.plain import figure_only
from lab.hooks import HookPoint, hooks, run_with_cache
from lab.layers.mixer import Mixer
from lab.models import LanguageModel
from lab.models.activation_cache import ActivationCache
from lab.models.head_results import split_heads
from lab.models.user_mixer import is_from_lab


@dataclass(frozen=True)
class EdgeEffects(Finding):
    """How the metric of the clean run changes when one edge carries the corrupt run's tensor.

    An edge leads from a sender, which adds to the residual stream, to a receiver, which reads it.
    Senders: "embed", the heads "L0H1" and the state transforms "M0". Receivers: the queries, keys
    and values of attention heads, "L1H0.k"; other mixers as a whole, "L1"; "M1"; and "logits".

    Attributes:
        effect: metric with the edge patched − clean metric, or an estimate; NaN where the receiver
            comes before the sender.
    """

    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    effect: Float[np.ndarray, "n m"]
    clean: float
    corrupt: float
    method: str = figure_only()

    def list_strongest(self, count: int = 10) -> list[tuple[str, str, float]]:
        """Return (sender, receiver, effect) of the edges whose effects are largest in size."""
        order = np.argsort(-np.nan_to_num(np.abs(self.effect), nan=-1.0), axis=None)
        order = order[: min(count, int(np.isfinite(self.effect).sum()))]
        places = zip(*np.unravel_index(order, self.effect.shape), strict=True)
        return [(self.senders[i], self.receivers[j], float(self.effect[i, j])) for i, j in places]

    title = "Effects of edges"
    reading = (
        "A row for each sender, a column for each receiver: the change of the clean run's metric "
        "when this edge alone carries the corrupt run's tensor."
    )

    @property
    def says(self) -> str:
        """The strongest edge."""
        edges, [(sender, receiver, effect)] = np.isfinite(self.effect).sum(), self.list_strongest(1)
        differ = f"the two runs differ by {self.corrupt - self.clean:.3g}"
        if not effect:
            return f"No edge of {edges}, {self.method}, changes the metric, where {differ}."
        return (
            f"Of {edges} edges, {self.method}, {sender} → {receiver} changes the metric most: by "
            f"{effect:.3g}, where {differ}."
        )

    def numbers(self) -> Table:
        """Return the strongest edges."""
        rows = [(a, b, f"{effect:.3g}") for a, b, effect in self.list_strongest(8)]
        return Table(("sender", "receiver", "effect"), tuple(rows))

    def figure(self) -> go.Figure:
        """Draw senders against receivers, the first sender on top."""
        bound = float(np.nanmax(np.abs(self.effect))) or 1.0
        notes = [
            [f"{sender} → {receiver}" for receiver in self.receivers] for sender in self.senders
        ]
        shown = Map(self.effect, self.senders, self.receivers, notes=notes)
        colors = Colors("effect on the metric", ends=(-bound, bound))
        fig = heat([shown], colors, Axis(), Axis("sender"), row=22)
        return fig.update_layout(title_text=self.title)


def attribute_edges(
    model: nn.Module,
    clean: Int[Tensor, "b t"],
    corrupt: Int[Tensor, "b t"],
    metric: Metric,
    *,
    steps: int | None = None,
) -> EdgeEffects:
    """Estimate the effect of every edge from gradients: edge attribution patching.

        effect(u → v) ≈ Σ (corrupt output of u − clean output of u) · ∂ metric / ∂ (input of v)

    It costs as much as a few forward and backward passes, and equals `patch_edges` where the metric
    is linear in the changes. In trained models it often is not, and the gradient of the clean run
    alone can rank edges wrongly; give `steps` there (docs/interpretability.md has numbers).

    Args:
        model: a language model.
        clean: tokens.
        corrupt: tokens whose tensors the edges carry.
        metric: one number of the logits [b t v], differentiable.
        steps: average the gradient over this many embeddings between clean and corrupt, at the
            middles of equal parts (integrated gradients); None: the gradient of the clean run.

    Raises:
        ValueError: for tokens of different shapes, steps below 1, or a metric that is not one
            differentiable number.

    Source: Syed et al. 2023 (arXiv 2310.10348); steps: Hanna et al. 2024 (arXiv 2403.17806).
    """
    if steps is not None and steps < 1:
        raise ValueError(f"{steps=}: must be ≥ 1")
    shares = [0.0] if steps is None else [(i + 0.5) / steps for i in range(steps)]
    runs = _Runs.of(model, clean, corrupt, metric)
    effect, changes = (
        runs.new_effects(),
        torch.stack([change for _, change in runs.senders.values()]),
    )
    with torch.enable_grad():
        for share in shares:
            x = torch.lerp(runs.clean["embed"], runs.corrupt["embed"], share)
            for j, gradient in enumerate(_compute_gradients(runs, clean, x, metric)):
                sums = (changes * gradient).flatten(1).sum(1)
                effect[:, j] += sums.double().cpu().numpy() / len(shares)
    method = "estimated from the gradient at the clean run"
    if steps is not None:
        method = f"estimated from gradients at {steps} inputs between the runs"
    return runs.collect(effect, method)


@torch.no_grad()
def patch_edges(
    model: nn.Module, clean: Int[Tensor, "b t"], corrupt: Int[Tensor, "b t"], metric: Metric
) -> EdgeEffects:
    """Measure the effect of every edge, with a forward pass for each: for small models.

    The receiver reads the clean residual stream with one sender's output exchanged for that of the
    corrupt run; all else reads the clean stream, and what follows is computed anew.

    Args:
        model: a language model.
        clean: tokens.
        corrupt: tokens whose tensors the edges carry.
        metric: one number of the logits [b t v].

    Raises:
        ValueError: for tokens of different shapes, or a metric that is not one number.
    """
    runs = _Runs.of(model, clean, corrupt, metric)
    effect, changes = runs.new_effects(), [change for _, change in runs.senders.values()]
    for i, j in np.argwhere(np.isfinite(effect)):
        effect[i, j] = _patch_edge(runs, clean, runs.receivers[j], changes[i], metric)
    return runs.collect(effect - runs.metrics[0], "measured edge by edge")


@dataclass(frozen=True)
class _Receiver:
    """What reads the residual stream.

    Attributes:
        order: how many halves of blocks come before it.
        residual: the point of the residual stream that it reads.
        point: the point of what it makes of it; None for the logits.
        head: index along the axis h of the point; None: all of it.
    """

    name: str
    order: int
    residual: str
    point: str | None
    head: int | None = None


@dataclass(frozen=True)
class _Runs:
    """A clean and a corrupt run, and what sends to and reads from the residual stream.

    Attributes:
        senders: by name, how many halves of blocks come before each, and its corrupt minus its
            clean output [b t d].
    """

    model: LanguageModel
    clean: ActivationCache
    corrupt: ActivationCache
    metrics: tuple[float, float]
    senders: dict[str, tuple[int, Float[Tensor, "b t d"]]]
    receivers: list[_Receiver]

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        model: nn.Module,
        clean: Int[Tensor, "b t"],
        corrupt: Int[Tensor, "b t"],
        metric: Metric,
    ) -> "_Runs":
        check_pair(clean, corrupt)
        inner = get_language_model(model)
        (before, ours), (after, theirs) = map(inner.run_with_cache, (clean, corrupt))
        metrics = compute_metric(metric, before), compute_metric(metric, after)
        senders = {"embed": (0, theirs["embed"] - ours["embed"])}
        receivers = []
        for layer, block in enumerate(inner.list_blocks()):
            way = f"blocks.{layer}"
            if block.mixer is not None:
                order, residual = 2 * layer + 1, f"{way}.hook_resid_pre"
                heads = split_heads(theirs, layer)
                for name, clean_output in split_heads(ours, layer).items():
                    senders[name] = order, heads[name] - clean_output
                for name, point, head in _list_inputs(block.mixer, way, ours):
                    receivers.append(_Receiver(f"L{layer}{name}", order, residual, point, head))
            if block.mlp is not None:
                order, residual = 2 * layer + 2, f"{way}.hook_resid_mid"
                senders[f"M{layer}"] = order, theirs["mlp_out", layer] - ours["mlp_out", layer]
                receivers.append(_Receiver(f"M{layer}", order, residual, f"{way}.hook_mlp_out"))
        last = len(inner.blocks)
        residual = f"blocks.{last - 1}.hook_resid_post"
        receivers.append(_Receiver("logits", 2 * last + 1, residual, None))
        return cls(inner, ours, theirs, metrics, senders, receivers)

    def new_effects(self) -> Float[np.ndarray, "n m"]:
        """Return zero for every edge; NaN where the receiver comes before the sender."""
        sent = np.array([order for order, _ in self.senders.values()])[:, None]
        return np.where(sent < [receiver.order for receiver in self.receivers], 0.0, np.nan)

    def collect(self, effect: Float[np.ndarray, "n m"], method: str) -> EdgeEffects:
        names = tuple(receiver.name for receiver in self.receivers)
        return EdgeEffects(tuple(self.senders), names, effect, *self.metrics, method)


def _list_inputs(
    mixer: Mixer, way: str, cache: ActivationCache
) -> list[tuple[str, str, int | None]]:
    """Return name, point and head of what each head reads, else of the mixer as a whole."""
    # A user's class may read x in further ways, whatever it inherits.
    if not (mixer.input_hooks and is_from_lab(mixer)):
        return [("", f"{way}.hook_attn_out", None)]
    points = {f"{way}.mixer.{hook}": hook.removeprefix("hook_") for hook in mixer.input_hooks}
    return [
        (f"H{head}.{name}", point, head)
        for point, name in points.items()
        for head in range(cache[point].shape[2])
    ]


def _compute_gradients(
    runs: _Runs, tokens: Int[Tensor, "b t"], x: Float[Tensor, "b t d"], metric: Metric
) -> Iterator[Float[Tensor, "b t d"]]:
    """Yield for each receiver the gradient of the metric in what it alone reads, from embeddings x.

    The gradient in what a receiver makes of the residual stream goes back to the stream through
    that receiver; what lies between the two belongs to it.
    """
    kept: dict[str, Tensor] = {}

    def keep(tensor: Tensor, point: HookPoint) -> None:
        kept[point.name] = tensor

    points = [receiver.point for receiver in runs.receivers if receiver.point is not None]
    residuals = [receiver.residual for receiver in runs.receivers]
    begin = x.detach().requires_grad_()
    names = list(dict.fromkeys([*points, *residuals]))
    with hooks(runs.model, [("hook_embed", lambda tensor, hook: begin), (names, keep)]):
        value = metric(runs.model(tokens))
    if not (isinstance(value, Tensor) and value.requires_grad and value.numel() == 1):
        raise ValueError("metric: must return one number as a tensor that has a gradient")
    outputs = [kept[point] for point in points] + [kept[residuals[-1]]]
    *inner, last = torch.autograd.grad(value, outputs, retain_graph=True, materialize_grads=True)
    for receiver, gradient in zip(runs.receivers, inner, strict=False):
        assert receiver.point is not None
        if receiver.head is not None:
            alone = torch.zeros_like(gradient)
            alone[:, :, receiver.head] = gradient[:, :, receiver.head]
            gradient = alone
        made, read = kept[receiver.point], kept[receiver.residual]
        [back] = torch.autograd.grad(
            made, read, gradient, retain_graph=True, materialize_grads=True
        )
        yield back
    yield last


def _patch_edge(
    runs: _Runs,
    tokens: Int[Tensor, "b t"],
    receiver: _Receiver,
    change: Float[Tensor, "b t d"],
    metric: Metric,
) -> float:
    """Return the metric when a receiver reads the clean residual stream plus a change."""
    model, x = runs.model, runs.clean[receiver.residual] + change
    if receiver.point is None:
        return float(metric(model.head(model.norm_final(x))))
    _, number, *inside = receiver.point.split(".")
    block = model.list_blocks()[int(number)]
    if inside == ["hook_mlp_out"]:
        assert block.mlp is not None
        assert block.norm_mlp is not None
        made = block.mlp(block.norm_mlp(x))
    else:
        assert block.mixer is not None
        assert block.norm_mixer is not None
        made, seen = run_with_cache(block.mixer, block.norm_mixer(x))
        made = made if receiver.head is None else seen[inside[-1]]

    def replace(tensor: Tensor, point: HookPoint) -> Tensor:
        if receiver.head is None:
            return made
        tensor = tensor.clone()
        tensor[:, :, receiver.head] = made[:, :, receiver.head]
        return tensor

    with hooks(model, [(receiver.point, replace)]):
        return float(metric(model(tokens)))
