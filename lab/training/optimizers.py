"""Which optimizer trains which parameters."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from lab.config import TrainConfig
from lab.models import LanguageModel
from lab.training.muon import BatchedMuon, update_matrices
from lab.training.without_dynamo import AdamW
from tasks.one_thread import use_one_thread


def build_optimizers(model: LanguageModel, config: TrainConfig) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers of a configuration, by name.

    Muon updates the weights of the linear layers that `muon_on` names; its step is scaled to
    AdamW's, so that one learning rate serves both. AdamW updates everything else. In the first
    stage the embedding and the head learn at `table_learning_rate`. Weight decay applies to tensors
    of two dimensions or more.
    """
    linear = {id(weight) for weight in _list_linear_weights(model, config.muon_on)}
    ends = {id(model.embed.weight), id(model.head.weight)}
    muon, tables, matrices, vectors = [], [], [], []
    for p in model.parameters():
        if not p.requires_grad:
            continue
        if config.optimizer == "muon" and id(p) in linear:
            muon.append(p)
        elif config.table_learning_rate is not None and id(p) in ends:
            tables.append(p)
        elif p.ndim >= 2:
            matrices.append(p)
        else:
            vectors.append(p)
    rate, decay = config.learning_rate, config.weight_decay
    faster = (config.table_learning_rate or rate) / rate
    groups = [
        {"params": tables, "weight_decay": decay, "rate": faster},
        {"params": matrices, "weight_decay": decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizers: dict[str, torch.optim.Optimizer] = {}
    if groups:
        optimizers["adamw"] = AdamW(
            groups, lr=rate, betas=(0.9, 0.999), weight_decay=decay, fused=True
        )
    if muon:
        optimizers["muon"] = BatchedMuon(muon, lr=rate, weight_decay=decay)
    return optimizers


def step_together(of_models: Sequence[Mapping[str, torch.optim.Optimizer]]) -> None:
    """Take a step of the optimizers of each model; Muon's iteration runs once for all of them."""
    optimizers = [each for of_model in of_models for each in of_model.values()]
    for each in optimizers:
        if not isinstance(each, BatchedMuon):
            sizes = [p.numel() for group in each.param_groups for p in group["params"]]
            with use_one_thread(sum(sizes) // len(sizes)):
                each.step()
    update_matrices([each for each in optimizers if isinstance(each, BatchedMuon)])


def _list_linear_weights(model: LanguageModel, layers: str) -> list[nn.Parameter]:
    """Return the weights of the linear layers of the mixers, of the MLPs, or of all."""
    weights = []
    for block in model.blocks:
        chosen = {"all": block, "mixers": block.mixer, "mlps": block.mlp}[layers]
        if chosen is not None:
            weights += [m.weight for m in chosen.modules() if isinstance(m, nn.Linear)]
    return weights
