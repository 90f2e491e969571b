"""Interventions on a layer of experts: silence some, or replace them by another model's."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from analysis.interventions.points import Indices, check_below, check_lengths, get_block, to_indices
from lab.hooks import HookPoint, unwrap
from lab.layers.retrieval import RetrievedExperts
from lab.layers.routed import RoutedMoE

Experts = RetrievedExperts | RoutedMoE
"""CDMoE and PEER; routed experts, with or without shared ones."""

Numbers = Indices | int | np.integer
"""One expert or several."""


def get_experts(model: nn.Module, layer: int) -> Experts:
    """Return a block's layer of experts.

    Raises:
        ValueError: for a layer that the model does not have, or one without experts.
    """
    mlp = get_block(model, layer).mlp
    mlp = None if mlp is None else unwrap(mlp)
    if not isinstance(mlp, Experts):
        name = "no state transform" if mlp is None else type(mlp).__name__
        raise ValueError(
            f"{layer=}: {name} has no experts; CDMoE, PEER, RoutedMoE and SharedExpertMoE have them"
        )
    return mlp


@contextmanager
def knock_out_experts(model: nn.Module, layer: int, experts: Numbers) -> Iterator[nn.Module]:
    """Silence some experts: w_e = 0 wherever they are chosen.

    The choice stays as before: no other expert takes their place, and the others' weights are not
    normalised again. φ, which all tokens share, does not count as an expert.

    Args:
        model: a language model.
        layer: index of the block.
        experts: rows of its tables, or MLPs behind its router; one or several.

    Raises:
        ValueError: for a layer without experts, or an expert that it does not have.
    """
    mlp = get_experts(model, layer)
    out = to_indices("experts", torch.atleast_1d(torch.as_tensor(experts)))
    check_below("experts", out, len(mlp.down), "number of experts")
    chosen: list[Tensor] = []

    def note(tensor: Tensor, point: HookPoint) -> None:
        chosen.append(tensor)

    def silence(weights: Tensor, point: HookPoint) -> Tensor:
        return weights.masked_fill(torch.isin(chosen.pop(), out.to(weights.device)), 0.0)

    with ExitStack() as stack:
        stack.callback(mlp.hook_expert_indices.add_hook(note, last=True))
        stack.callback(mlp.hook_expert_weights.add_hook(silence))
        yield model


@contextmanager
def transplant_experts(
    source: nn.Module,
    target: nn.Module,
    layer: int,
    experts: Numbers,
    into: Numbers | None = None,
) -> Iterator[nn.Module]:
    """Copy experts of one model into another: what they compute, not what chooses them.

    Copied are the rows of `down` and `up` of CDMoE and PEER, and of routed experts those of `gate`
    too. Keys and router stay, so a copied expert is chosen where the replaced one was: its product
    keys also belong to its neighbours. Afterwards the target's rows are restored bit for bit, and
    what training changed in them meanwhile is lost.

    Args:
        source: the model whose experts are copied; may be the target itself.
        target: the model that receives them, and that is yielded.
        layer: index of the block, in both.
        experts: of the source, one or several.
        into: slots of the target, as many as experts, each once; None: the same numbers.

    Raises:
        ValueError: for a layer without experts, an expert or slot that does not exist, a slot named
            twice, or layers of different kinds or widths.
    """
    giver, taker = get_experts(source, layer), get_experts(target, layer)
    given = to_indices("experts", torch.atleast_1d(torch.as_tensor(experts)))
    slots = given if into is None else to_indices("into", torch.atleast_1d(torch.as_tensor(into)))
    check_lengths(experts=given, into=slots)
    check_below("experts", given, len(giver.down), "number of experts")
    name = "experts" if into is None else "into"
    check_below(name, slots, len(taker.down), "number of experts")
    found, times = slots.unique(return_counts=True)
    if (times > 1).any():
        raise ValueError(f"into names slot {found[times > 1][0]} twice: it holds one expert")
    if type(giver) is not type(taker) or _get_widths(giver) != _get_widths(taker):
        raise ValueError(
            f"{layer=}: the source's {type(giver).__name__} has experts of {_get_widths(giver)}, "
            f"the target's {type(taker).__name__} of {_get_widths(taker)}"
        )
    theirs = _get_tables(giver)
    coming = {name: theirs[name].detach()[given] for name in theirs}
    before = {name: table.detach()[slots] for name, table in _get_tables(taker).items()}
    with ExitStack() as stack:
        stack.callback(_write, taker, slots, before)
        _write(taker, slots, coming)
        yield target


def _get_tables(mlp: Experts) -> dict[str, nn.Parameter]:
    """Return the parameters that have one row per expert."""
    tables = {"down": mlp.down, "up": mlp.up}
    if isinstance(mlp, RoutedMoE) and mlp.gate is not None:
        tables["gate"] = mlp.gate
    return tables


def _get_widths(mlp: Experts) -> dict[str, list[int]]:
    """Return the shape of one expert's row in each table."""
    return {name: list(table.shape[1:]) for name, table in _get_tables(mlp).items()}


@torch.no_grad()
def _write(mlp: Experts, slots: Int[Tensor, " n"], rows: dict[str, Tensor]) -> None:
    for name, table in _get_tables(mlp).items():
        table[slots] = rows[name].to(table)
