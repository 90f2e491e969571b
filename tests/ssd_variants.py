"""The SSD layer in every variant, small and in fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lab.layers.ssd import SSD
from tests.case import move


def layer(**options: Any) -> SSD:
    torch.manual_seed(0)
    defaults: dict[str, Any] = {"d_state": 6, "n_groups": 2, "chunk_len": 4}
    return SSD(12, 4, **(defaults | options)).double()


def moved(**options: Any) -> SSD:
    """Return the layer with noise on its parameters, so that it forgets, skips and gates."""
    return move(layer(**options))


POSITIONS, GATES = ("rope", "conv", "decay", "none"), ("none", "silu", "norm")
VARIANTS: list[dict[str, Any]] = [
    *(
        {"position": position, "n_groups": 2**number, "gate": gate}
        for position in POSITIONS
        for number, gate in enumerate(GATES)
    ),
    {"rope_layout": "interleaved", "rope_base": 100.0},
    {"groups": "tiled"},
    {"groups": "tiled", "position": "conv", "gate": "norm"},
    {"dt_init": "paper"},
    {"dt_init": "long", "position": "conv"},
    {"dt_init": "paper", "position": "none"},
    {"skip": False},
    {"position": "conv", "skip": False, "conv_width": 1},
    {"position": "conv", "conv_width": 2, "d_state": 5},
    {"position": "conv", "conv_width": 7},
    {"d_inner": 24, "position": "conv", "gate": "norm"},
    {"d_inner": 8},
    {"activation": "silu"},
    {"activation": "silu", "position": "decay", "groups": "tiled"},
    {"activation": "none", "position": "conv"},
]
every_variant = pytest.mark.parametrize("options", VARIANTS, ids=str)
HOOKS = ["dt", "log_decay", "B_pre", "B_rot", "C_pre", "C_rot", "ssm_write", "ssm_state", "ssm_out"]


def matrix_without_skip(module: SSD, x: Tensor) -> Tensor:
    """Return M̃ [b h t s] without D on its diagonal."""
    matrix = module.matrix(x)
    return (
        matrix
        if module.D is None
        else matrix - torch.diag_embed(module.D[:, None].expand(-1, x.shape[1]))
    )
