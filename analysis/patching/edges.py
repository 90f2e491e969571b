"""Which edges between heads and MLPs matter: patched one by one, or estimated from gradients."""

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from analysis.interventions.points import get_language_model
from analysis.patching.edge_effects import EdgeEffects
from analysis.patching.receivers import Receiver, list_receivers
from analysis.patching.sweeps import Metric, check_pair, compute_metric
from lab.hooks import HookPoint, hooks, run_with_cache
from lab.models import LanguageModel
from lab.models.activation_cache import ActivationCache
from lab.models.head_results import split_heads


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
    return _collect(inner, clean, corrupt, metric, senders, receivers, effect, method)


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
    inner, runs = _run_both(model, clean, corrupt)
    receivers = list_receivers(inner, runs[0])
    senders = _list_changes(*runs)
    effect = np.full((len(senders), len(receivers)), np.nan)
    before = compute_metric(metric, inner(clean))
    for i, (order, change) in enumerate(senders.values()):
        for j, receiver in enumerate(receivers):
            if order < receiver.order:
                effect[i, j] = _patch_edge(inner, clean, runs[0], receiver, change, metric) - before
    return _collect(
        inner, clean, corrupt, metric, senders, receivers, effect, "measured edge by edge"
    )


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
    if not (isinstance(value, Tensor) and value.requires_grad and value.numel() == 1):
        raise ValueError("metric: must return one number as a tensor that has a gradient")
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


def _collect(
    model: LanguageModel,
    clean: Int[Tensor, "b t"],
    corrupt: Int[Tensor, "b t"],
    metric: Metric,
    senders: dict[str, tuple[int, Tensor]],
    receivers: list[Receiver],
    effect: Float[np.ndarray, "n m"],
    method: str,
) -> EdgeEffects:
    with torch.no_grad():
        before, after = (compute_metric(metric, model(tokens)) for tokens in (clean, corrupt))
    names = tuple(receiver.name for receiver in receivers)
    return EdgeEffects(tuple(senders), names, effect, before, after, method)
