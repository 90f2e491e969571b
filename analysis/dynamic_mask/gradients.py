"""The parameters that the masks of a model learn, and the gradients that reach them."""

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from analysis.dynamic_mask.masks import TableMask, find_masked_layers, name_mask_points
from lab.hooks import HookPoint
from lab.models import LanguageModel
from lab.models.evaluation import score
from lab.ops.cross_entropy import linear_cross_entropy
from tasks.base import Batch, count_rows

GRADIENT_TOKENS = 2**11
"""Number of tokens of the rows whose loss is differentiated."""


def list_parameters(model: LanguageModel, layer: int) -> list[nn.Parameter]:
    """Return what the mask of a layer learns: l of a table, A and dt of a value mask."""
    mask = find_masked_layers(model)[layer].mask
    assert mask is not None
    return [p for _, p in sorted(mask.named_parameters())]


def measure_gradients(
    model: LanguageModel, batch: Batch
) -> tuple[list[Float[np.ndarray, "h t"]], list[float]]:
    """Return the values of each masked layer, as in `MaskHistory`, and ‖∂loss/∂θ‖ of its mask.

    The loss is the mean cross-entropy at scored positions of the batch's first rows. The gradient
    is exactly 0 for a mask that it does not reach, NaN for one without parameters.
    """
    layers, seq_len = find_masked_layers(model), batch.inputs.shape[1]
    batch = batch[: count_rows(GRADIENT_TOKENS, seq_len)]
    biases: dict[str, Tensor] = {}

    def keep(bias: Tensor, point: HookPoint) -> None:
        biases[point.name] = bias.detach()[:, :, 0].mean(0)

    names = name_mask_points(layers)
    learned = {i: list_parameters(model, i) for i in layers}
    flat = [p for of_layer in learned.values() for p in of_layer]
    with model.hooks([(names, keep)]), torch.enable_grad():
        hidden, head, targets = score(model, batch, "fp32")
        loss, _ = linear_cross_entropy(hidden, head, targets)
        grads = [None] * len(flat)
        if flat and loss.requires_grad:
            grads = list(torch.autograd.grad(loss, flat, allow_unused=True))
    sizes, values = [], []
    for name, (i, module) in zip(names, layers.items(), strict=True):
        own, grads = grads[: len(learned[i])], grads[len(learned[i]) :]
        squares = sum(float(g.double().square().sum()) for g in own if g is not None)
        sizes.append(squares**0.5 if learned[i] else math.nan)
        table = module.mask.l.detach() if isinstance(module.mask, TableMask) else biases[name]
        values.append(table[:, :seq_len].float().cpu().numpy())
    return values, sizes
