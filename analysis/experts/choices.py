"""Which experts every token takes, with what weights, and how narrowly: read off a model.

n tokens, row after row    h retrieval heads    k experts a head    e experts
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from analysis.base import NotApplicableError
from lab.hooks import HookPoint
from lab.layers.retrieval import RetrievedExperts
from lab.layers.routed import RoutedMoE
from lab.models import LanguageModel
from lab.models.evaluation import score
from lab.ops.product_keys import product_topk
from tasks.base import Batch, count_rows

TOKENS_AT_ONCE = 4096
"""Tokens of a forward pass, so that scores of many experts do not fill the memory."""
ROUNDING = 4
"""Units in the last place of the largest score within which two scores count as one."""


@dataclass(frozen=True)
class Chosen:
    """What the tokens of a batch chose in one layer.

    Attributes:
        layer: index of the block.
        kind: the layer's class.
        n_experts: how many there are to choose from.
        indices: int32, of the experts; those of a head and token are distinct. A routed mixture
            has one head.
        weights: what each expert's output is multiplied by, any sign.
        margins: between the k-th and the (k + 1)-th best score, in standard deviations of all
            experts' scores for this token and head (of log p for a router), ≥ 0; NaN where k is
            all experts.
        tied: whether the two are equal but for rounding, so that order of storage decides.
    """

    layer: int
    kind: str
    n_experts: int
    indices: Int[np.ndarray, "n h k"]
    weights: Float[np.ndarray, "n h k"]
    margins: Float[np.ndarray, "n h"]
    tied: Bool[np.ndarray, "n h"]


@torch.no_grad()
def chosen_experts(model: LanguageModel, batch: Batch) -> list[Chosen]:
    """Return what the tokens of a batch choose in every layer that has experts; hooks act.

    Raises:
        NotApplicableError: for a model without experts.
    """
    layers = expert_layers(model)
    parts: dict[tuple[int, str], list[np.ndarray]] = defaultdict(list)

    def look(tensor: Tensor, point: HookPoint) -> None:
        name, layer = point.name.split(".")[-1], int(point.name.split(".")[1])
        if name.endswith("_scores"):
            margins, tied = narrowness(layers[layer], tensor.float())
            parts[layer, "margins"].append(margins.cpu().numpy())
            parts[layer, "tied"].append(tied.cpu().numpy())
        elif name == "hook_expert_indices":
            parts[layer, "indices"].append(_by_token(tensor).int().cpu().numpy())
        else:
            parts[layer, "weights"].append(_by_token(tensor).float().cpu().numpy())

    wanted = [
        f"blocks.{layer}.mlp.hook_{name}"
        for layer, module in layers.items()
        for name in (
            "router_scores" if isinstance(module, RoutedMoE) else "subkey_scores",
            "expert_indices",
            "expert_weights",
        )
    ]
    rows, seq_len = batch.inputs.shape
    size = count_rows(TOKENS_AT_ONCE, seq_len)
    with model.hooks([(wanted, look)]):
        for start in range(0, rows, size):
            score(model, batch[start : start + size], "fp32")
    return [
        Chosen(
            layer,
            type(module).__name__,
            module.n_experts if isinstance(module, RoutedMoE) else len(module.down),
            *(
                np.concatenate(parts.pop((layer, name)))
                for name in ("indices", "weights", "margins", "tied")
            ),
        )
        for layer, module in layers.items()
    ]


def expert_layers(model: LanguageModel) -> dict[int, RetrievedExperts | RoutedMoE]:
    """Return the state transforms that choose among experts, by block.

    Raises:
        NotApplicableError: when there are none.
    """
    transforms = {layer: block.mlp for layer, block in enumerate(model.blocks)}
    found = {
        layer: module
        for layer, module in transforms.items()
        if isinstance(module, RetrievedExperts | RoutedMoE)
    }
    if not found:
        raise NotApplicableError("no block chooses among experts")
    return found


def narrowness(
    module: RetrievedExperts | RoutedMoE, scores: Float[Tensor, "*b s"]
) -> tuple[Float[Tensor, "n h"], Bool[Tensor, "n h"]]:
    """Return `Chosen.margins` and `Chosen.tied` of what a layer scores.

    Args:
        module: the layer.
        scores: [b t h rows+columns] of retrieval; p, [b t e], of a router.
    """
    if isinstance(module, RoutedMoE):
        # log p is the logit but for a constant, which neither margin nor spread sees.
        logits = scores.clamp(min=torch.finfo(scores.dtype).tiny).log()[..., None, :]
        best = logits.topk(min(module.k + 1, module.n_experts), dim=-1).values
        variance, largest = logits.var(-1, correction=0), logits.abs().amax(-1)
    else:
        rows, columns = scores.split(module.shape, dim=-1)
        reached = rows.shape[-1] * columns.shape[-1]
        best = product_topk(rows, columns, min(module.k + 1, reached))[0]
        variance = rows.var(-1, correction=0) + columns.var(-1, correction=0)
        largest = rows.abs().amax(-1) + columns.abs().amax(-1)
    if best.shape[-1] == module.k:
        nothing = torch.full_like(variance, torch.nan).flatten(0, 1)
        return nothing, torch.zeros_like(nothing, dtype=torch.bool)
    gap = best[..., -2] - best[..., -1]
    tied = gap <= ROUNDING * torch.finfo(scores.dtype).eps * largest
    margins = torch.where(tied, 0.0, gap / variance.sqrt().clamp(min=1e-30))
    return margins.flatten(0, 1), tied.flatten(0, 1)


def _by_token(chosen: Tensor) -> Tensor:
    """Return [n h k] from [b t h k], or from a router's [b t k]."""
    heads = chosen if chosen.ndim == 4 else chosen[:, :, None]
    return heads.flatten(0, 1)
