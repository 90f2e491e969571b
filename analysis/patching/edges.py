"""Which edges between heads and MLPs matter: patched one by one, or estimated from gradients."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from analysis.base import Finding, Words
from analysis.interventions.places import get_language_model
from analysis.patching.sweeps import Metric, check_pair
from analysis.plots import style
from analysis.record import figure_only
from lab.hooks import HookPoint, hooks, run_with_cache
from lab.layers.mixer import SplitInputMixer
from lab.models import Block, LanguageModel
from lab.models.activation_cache import ActivationCache
from lab.models.head_results import split_heads
from lab.models.user_mixer import is_own


@dataclass(frozen=True)
class EdgeEffects(Finding):
    """How the metric of the clean run changes when one edge carries the corrupt run's tensor.

    An edge leads from a sender, which adds to the residual stream, to a receiver, which reads it.
    Senders: "embed", the heads "L0H1" and the state transforms "M0". Receivers: the queries, keys
    and values of attention heads, "L1H0.k"; other mixers as a whole, "L1"; "M1"; and "logits".

    Attributes:
        senders: their names, in the order of the forward pass.
        receivers: theirs.
        effect: metric with the edge patched − clean metric, or an estimate; NaN where the receiver
            comes before the sender.
        clean: the metric of the clean run.
        corrupt: the metric of the corrupt run.
        method: how the effects were found.
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

    def describe(self) -> Words:
        """Name the strongest edge."""
        edges = int(np.isfinite(self.effect).sum())
        sender, receiver, effect = self.list_strongest(1)[0]
        says = (
            f"Of {edges} edges, {sender} → {receiver} changes the metric most: by {effect:.3g}, "
            f"where the two runs differ by {self.corrupt - self.clean:.3g}."
        )
        reading = (
            "A row for each sender, a column for each receiver: the change of the clean run's "
            f"metric when this edge alone carries the corrupt run's tensor, {self.method}."
        )
        return Words("Effects of edges", says, reading, f"A heat map of edges. {says}")

    def draw(self) -> go.Figure:
        """Draw senders against receivers, the first sender on top."""
        bound = float(np.nanmax(np.abs(self.effect))) or 1.0
        fig = style.new_figure(height=190 + 22 * len(self.senders))
        fig.add_heatmap(
            z=self.effect,
            x=list(self.receivers),
            y=list(self.senders),
            coloraxis="coloraxis",
            hoverongaps=False,
            hovertemplate="%{y} → %{x}: %{z:.3g}<extra></extra>",
        )
        fig.update_xaxes(title_text="receiver", type="category", showgrid=False)
        fig.update_yaxes(title_text="sender", type="category", showgrid=False, autorange="reversed")
        return fig.update_layout(
            title_text=self.describe().title,
            margin={"b": 130},
            coloraxis={"cmin": -bound, "cmax": bound, "colorbar": {"title": {"text": "effect"}}},
        )


@dataclass(frozen=True)
class Receiver:
    """What reads the residual stream.

    Attributes:
        name: as in `EdgeEffects`.
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
    is linear in the changes. Saturated softmaxes make it wrong; averaging the gradient over inputs
    between the two runs (`steps`) makes it better.

    Args:
        model: a language model.
        clean: tokens.
        corrupt: tokens whose tensors the edges carry.
        metric: one number of the logits [b t v], differentiable.
        steps: average the gradient over this many embeddings between clean and corrupt, at the
            middles of equal parts (integrated gradients); None: the gradient of the clean run.

    Raises:
        ValueError: for tokens of different shapes, or steps below 1.

    Source: Syed et al. 2023 (arXiv 2310.10348); steps: Hanna et al. 2024 (arXiv 2403.17806).
    """
    if steps is not None and steps < 1:
        raise ValueError(f"{steps=} must be at least 1")
    inner, runs = _run_both(model, clean, corrupt)
    receivers = list_receivers(inner, runs[0])
    senders = _list_changes(*runs)
    shares = [0.0] if steps is None else [(i + 0.5) / steps for i in range(steps)]
    effect = np.full((len(senders), len(receivers)), np.nan)
    with torch.enable_grad():
        for share in shares:
            x = torch.lerp(runs[0]["embed"], runs[1]["embed"], share)
            for j, gradient in enumerate(_compute_gradients(inner, clean, x, metric, receivers)):
                for i, (order, change) in enumerate(senders.values()):
                    if order < receivers[j].order:
                        part = float((change * gradient).sum()) / len(shares)
                        effect[i, j] = np.nan_to_num(effect[i, j]) + part
    method = "estimated from the gradient at the clean run"
    if steps is not None:
        method = f"estimated from gradients at {steps} inputs between the runs"
    return _collect(inner, runs, clean, corrupt, metric, senders, receivers, effect, method)


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
        ValueError: for tokens of different shapes.
    """
    inner, runs = _run_both(model, clean, corrupt)
    receivers = list_receivers(inner, runs[0])
    senders = _list_changes(*runs)
    effect = np.full((len(senders), len(receivers)), np.nan)
    before = float(metric(inner(clean)))
    for i, (order, change) in enumerate(senders.values()):
        for j, receiver in enumerate(receivers):
            if order < receiver.order:
                effect[i, j] = _patch_edge(inner, clean, runs[0], receiver, change, metric) - before
    return _collect(
        inner, runs, clean, corrupt, metric, senders, receivers, effect, "measured edge by edge"
    )


def list_receivers(model: LanguageModel, cache: ActivationCache) -> list[Receiver]:
    """Return what reads the residual stream, in the order of the forward pass."""
    found = []
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        way = f"blocks.{layer}"
        if block.mixer is not None:
            whole = Receiver(f"L{layer}", 2 * layer + 1, f"{way}.hook_resid_pre", "")
            found += _split_receiver(whole, block.mixer, cache, way)
        if block.mlp is not None:
            residual, point = f"{way}.hook_resid_mid", f"{way}.hook_mlp_out"
            found.append(Receiver(f"M{layer}", 2 * layer + 2, residual, point))
    last = len(model.blocks)
    residual = f"blocks.{last - 1}.hook_resid_post"
    return [*found, Receiver("logits", 2 * last + 1, residual, None)]


def _split_receiver(
    whole: Receiver, mixer: nn.Module, cache: ActivationCache, way: str
) -> Iterator[Receiver]:
    """Yield the inputs of each head where the mixer names them, else the mixer as a whole."""
    # A user's class may read x in further ways, whatever it inherits.
    if not (isinstance(mixer, SplitInputMixer) and is_own(mixer)):
        yield Receiver(whole.name, whole.order, whole.residual, f"{way}.hook_attn_out")
        return
    for hook in mixer.input_hooks:
        point = f"{way}.mixer.{hook}"
        for head in range(cache[point].shape[2]):
            name = f"{whole.name}H{head}.{hook.removeprefix('hook_')}"
            yield Receiver(name, whole.order, whole.residual, point, head)


@torch.no_grad()
def _run_both(
    model: nn.Module, clean: Int[Tensor, "b t"], corrupt: Int[Tensor, "b t"]
) -> tuple[LanguageModel, tuple[ActivationCache, ActivationCache]]:
    check_pair(clean, corrupt)
    inner = get_language_model(model)
    return inner, (inner.run_with_cache(clean)[1], inner.run_with_cache(corrupt)[1])


def _list_changes(
    clean: ActivationCache, corrupt: ActivationCache
) -> dict[str, tuple[int, Float[Tensor, "b t d"]]]:
    """Return each sender's place in the forward pass, and its corrupt minus its clean output."""
    found = {"embed": (0, corrupt["embed"] - clean["embed"])}
    for layer, block in enumerate(clean.model.blocks):
        if block.mixer is not None:
            ours, theirs = split_heads(clean, layer), split_heads(corrupt, layer)
            found |= {name: (2 * layer + 1, theirs[name] - ours[name]) for name in ours}
        if block.mlp is not None:
            change = corrupt["mlp_out", layer] - clean["mlp_out", layer]
            found[f"M{layer}"] = 2 * layer + 2, change
    return found


def _compute_gradients(
    model: LanguageModel,
    tokens: Int[Tensor, "b t"],
    x: Float[Tensor, "b t d"],
    metric: Metric,
    receivers: list[Receiver],
) -> Iterator[Float[Tensor, "b t d"]]:
    """Yield for each receiver the gradient of the metric in what it alone reads, from embeddings x.

    The gradient in what a receiver makes of the residual stream goes back to the stream through
    that receiver; what lies between the two belongs to it.
    """
    kept: dict[str, Tensor] = {}

    def keep(tensor: Tensor, point: HookPoint) -> None:
        kept[point.name] = tensor

    points = [receiver.point for receiver in receivers if receiver.point is not None]
    residuals = [receiver.residual for receiver in receivers]
    begin = x.detach().requires_grad_()
    names = list(dict.fromkeys([*points, *residuals]))
    with hooks(model, [("hook_embed", lambda tensor, hook: begin), (names, keep)]):
        value = metric(model(tokens))
    assert isinstance(value, Tensor)
    outputs = [kept[point] for point in points] + [kept[residuals[-1]]]
    *inner, last = torch.autograd.grad(value, outputs, retain_graph=True, materialize_grads=True)
    for receiver, gradient in zip(receivers, inner, strict=False):
        assert receiver.point is not None
        if receiver.head is not None:
            alone = torch.zeros_like(gradient)
            alone[:, :, receiver.head] = gradient[:, :, receiver.head]
            gradient = alone
        made, read = kept[receiver.point], kept[receiver.residual]
        yield torch.autograd.grad(made, read, gradient, retain_graph=True, materialize_grads=True)[
            0
        ]
    yield last


def _patch_edge(
    model: LanguageModel,
    tokens: Int[Tensor, "b t"],
    cache: ActivationCache,
    receiver: Receiver,
    change: Float[Tensor, "b t d"],
    metric: Metric,
) -> float:
    """Return the metric when a receiver reads the clean residual stream plus a change."""
    x = cache[receiver.residual] + change
    if receiver.point is None:
        return float(metric(model.head(model.norm_final(x))))
    _, number, *inside = receiver.point.split(".")
    block = model.blocks[int(number)]
    assert isinstance(block, Block)
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


def _collect(
    model: LanguageModel,
    runs: tuple[ActivationCache, ActivationCache],
    clean: Int[Tensor, "b t"],
    corrupt: Int[Tensor, "b t"],
    metric: Metric,
    senders: dict[str, tuple[int, Tensor]],
    receivers: list[Receiver],
    effect: Float[np.ndarray, "n m"],
    method: str,
) -> EdgeEffects:
    with torch.no_grad():
        values = [float(metric(model(tokens))) for tokens in (clean, corrupt)]
    names = tuple(receiver.name for receiver in receivers)
    return EdgeEffects(tuple(senders), names, effect, *values, method)
