"""Mixers whose every channel is a head, against transformers' layers or their definition."""

import pytest
import torch

from lab.layers.family.mamba import Mamba
from tests.normal import draw_normal
from tests.parity.compare import (
    SHAPES,
    assert_agree,
    config,
    draw_parameters,
    draw_shape,
    modules,
)

ROUNDINGS = 160
"""Theirs computes in fp32, token by token; 1e-5 of the largest."""


@pytest.mark.parametrize("seed", SHAPES)
def test_mamba_is_that_of_transformers(seed: int):
    b, h, t, p = draw_shape(seed)
    d, rank = h * p, 1 + seed % 3
    options = {"state_size": 1 + seed % 8, "time_step_rank": rank, "expand": 1 + seed % 2}
    settings = config("mamba", d, conv_kernel=1 + seed % 4, **options)
    theirs = draw_parameters(modules("mamba").MambaMixer(settings, 0), torch.float32).eval()
    values, gate = theirs.in_proj.weight.chunk(2)
    dt_down, keys = theirs.x_proj.weight.split([rank, 2 * settings.state_size])
    weights = {"v_proj.weight": values, "g_proj.weight": gate, "key_proj.weight": keys}
    weights |= {"dt_down.weight": dt_down, "conv.weight": theirs.conv1d.weight[:, 0]}
    same = {"conv.bias": "conv1d.bias", "dt_up.weight": "dt_proj.weight"}
    same |= {"dt_up.bias": "dt_proj.bias", "out_proj.weight": "out_proj.weight"}
    same |= {"A_log": "A_log", "D": "D"}
    weights |= {ours: theirs.get_parameter(name) for ours, name in same.items()}
    ours = Mamba(
        d,
        d_state=settings.state_size,
        d_inner=values.shape[0],
        dt_rank=rank,
        conv_width=settings.conv_kernel,
    )
    x = draw_normal(b, t, d, dtype=torch.float32, seed=seed)
    assert_agree(ours, weights, theirs, theirs, x, ROUNDINGS)
