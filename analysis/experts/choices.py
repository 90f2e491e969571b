"""Which experts each token chooses, with what weights, and by what margin over the next one.

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
"""Maximum number of tokens of a forward pass: the scores of many experts must fit into memory."""
ROUNDING = 4
"""Two scores tie if they differ by at most this many units in the last place of the largest."""


@dataclass(frozen=True)
class ExpertChoices:
    """What the tokens of a batch choose in one layer.

    Attributes:
        layer: index of the block.
        kind: the layer's class.
        n_experts: how many there are.
        indices: int32, of the chosen experts; distinct for each head and token. A routed mixture
            counts as one head.
        weights: factors of the experts' outputs, any sign.
        margins: between the k-th and the (k + 1)-th best score, in standard deviations of all
            experts' scores for this token and head (of log p for a router), ≥ 0; NaN where k is
            all experts.
        tied: whether the two are equal up to rounding, so that the order of storage decides.
    """

    layer: int
    kind: str
    n_experts: int
    indices: Int[np.ndarray, "n h k"]
    weights: Float[np.ndarray, "n h k"]
    margins: Float[np.ndarray, "n h"]
    tied: Bool[np.ndarray, "n h"]


@torch.no_grad()
def record_choices(model: LanguageModel, batch: Batch) -> list[ExpertChoices]:
    """Record what the tokens of a batch choose in every layer with experts; hooks in place act.

    Raises:
        NotApplicableError: for a model without experts.
    """
    layers = find_expert_layers(model)
    parts: dict[tuple[int, str], list[np.ndarray]] = defaultdict(list)

    def look(tensor: Tensor, point: HookPoint) -> None:
        name, layer = point.name.split(".")[-1], int(point.name.split(".")[1])
        if name.endswith("_scores"):
            margins, tied = measure_margins(layers[layer], tensor.float())
            parts[layer, "margins"].append(margins.cpu().numpy())
            parts[layer, "tied"].append(tied.cpu().numpy())
        elif name == "hook_expert_indices":
            parts[layer, "indices"].append(_flatten_tokens(tensor).int().cpu().numpy())
        else:
            parts[layer, "weights"].append(_flatten_tokens(tensor).float().cpu().numpy())

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
        ExpertChoices(
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


def find_expert_layers(model: LanguageModel) -> dict[int, RetrievedExperts | RoutedMoE]:
    """Find the state transforms that choose among experts, by index of the block.

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


def measure_margins(
    module: RetrievedExperts | RoutedMoE, scores: Float[Tensor, "*b s"]
) -> tuple[Float[Tensor, "n h"], Bool[Tensor, "n h"]]:
    """Return `ExpertChoices.margins` and `ExpertChoices.tied` for the scores of a layer.

    Args:
        module: the layer.
        scores: [b t h rows+columns] for retrieval; the probabilities, [b t e], for a router.
    """
    if isinstance(module, RoutedMoE):
        # log p is the logit up to a constant, which changes neither margins nor their spread.
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


def _flatten_tokens(chosen: Tensor) -> Tensor:
    """Reshape [b t h k], or [b t k] of a router, to [n h k]."""
    heads = chosen if chosen.ndim == 4 else chosen[:, :, None]
    return heads.flatten(0, 1)
