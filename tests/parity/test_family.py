"""Every mixer of the family against its reference: values and gradients over random shapes.

References are flash-linear-attention's plain forms, transformers' layers and mamba-ssm's weights;
where there is none, the mixer's equation, token by token.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from lab.models.mixers import MIXERS
from tests.normal import draw_normal
from tests.parity import family_attention as attention
from tests.parity import family_channels as channels
from tests.parity import family_decays as decays
from tests.parity import family_deltas as deltas
from tests.parity.compare import Comparison, Shape, assert_agree, draw_shape, keep_precision

SEEDS = range(50)
DOUBLE = 1e-11
"""Bound in fp64."""


class Reference(NamedTuple):
    """What a mixer is compared with.

    Attributes:
        compare: makes the comparison, for a shape.
        least: how wide a head is at least: a norm of one channel has no gradient.
        multiple: what the width of a head is a multiple of.
        scale: of the input.
        single: bound in fp32; higher where a norm of a short vector, or the exponential of a gate,
            makes more of a rounding. The bound in fp64 is the same for all.
    """

    compare: Callable[[Shape], Comparison]
    least: int = 1
    multiple: int = 1
    scale: float = 1.0
    single: float = 1e-5


REFERENCES = {
    "linear": Reference(decays.compare_linear, least=2),
    "based": Reference(decays.compare_based),
    "retnet": Reference(decays.compare_retention, least=3, multiple=2),
    "gla": Reference(decays.compare_gla, least=3),
    "hgrn2": Reference(decays.compare_hgrn2, least=3),
    "mlstm": Reference(decays.compare_mlstm, least=4, scale=3.0, single=2e-4),
    "rwkv6": Reference(decays.compare_rwkv6, least=4, single=3e-5),
    "mamba3": Reference(decays.compare_mamba3, least=2),
    "loglinear": Reference(decays.compare_loglinear, least=3, single=3e-5),
    "deltanet": Reference(deltas.compare_deltanet, least=3),
    "gdn": Reference(deltas.compare_gdn, least=3, single=3e-5),
    "kda": Reference(deltas.compare_kda, least=3),
    "deltaproduct": Reference(deltas.compare_deltaproduct, least=3, single=3e-5),
    "comba": Reference(deltas.compare_comba, least=3),
    "rwkv7": Reference(deltas.compare_rwkv7, least=4),
    "ttt": Reference(deltas.compare_ttt, least=4),
    "ttt as defined": Reference(deltas.define_ttt, least=4),
    "mamba": Reference(channels.compare_mamba),
    "mingru": Reference(channels.compare_mingru),
    "rglru": Reference(channels.compare_rglru),
    "hyena": Reference(channels.compare_hyena),
    "alibi": Reference(attention.compare_alibi, multiple=4),
    "fox": Reference(attention.compare_forgetting),
    "window": Reference(attention.compare_window),
    "stickbreaking": Reference(attention.compare_stickbreaking),
    "diff": Reference(attention.compare_differential, multiple=4),
}


def test_every_mixer_of_the_family_has_a_reference():
    assert {name.split()[0] for name in REFERENCES} == set(MIXERS) - {"attention", "ssd", "ifa"}


@pytest.mark.filterwarnings("ignore:According to Bo")
@pytest.mark.filterwarnings("ignore:The correction_factor")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=("fp32", "fp64"))
@pytest.mark.parametrize("name", REFERENCES)
def test_same_values_and_gradients(name: str, dtype: torch.dtype):
    reference, single = REFERENCES[name], dtype == torch.float32
    bound = reference.single if single else DOUBLE
    roundings = bound / (torch.finfo(dtype).eps / 2)
    for seed in SEEDS:
        shape = draw_shape(seed, dtype, reference.least, reference.multiple)
        ours, weights, theirs, run = reference.compare(shape)
        x = reference.scale * draw_normal(shape.b, shape.t, shape.d, dtype=dtype, seed=seed)
        try:
            run = run if single else keep_precision()(run)
            assert_agree(ours.to(dtype), weights, theirs, run, x, roundings, together=single)
        except AssertionError as error:
            raise AssertionError(f"{shape}: {error}") from error
