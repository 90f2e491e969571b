"""Rows could say otherwise: make the printed reading right, or the meant one wrong, and they do."""

from math import isqrt
from typing import Any

import pytest

from lab.errata import ERRATA, cdmoe, mask, rotation, ssd, tables
from lab.errata import inner_function as inner
from lab.errata.mask import build_printed_mask
from lab.layers import attention, retrieval
from lab.layers.attention import Attention
from lab.layers.cdmoe import CDMoE
from lab.layers.inner_function import InnerFunctionAttention
from lab.layers.mask import MASKS, LiteralMask, SoftMask
from lab.layers.printed.attention import (
    MaskAfterSoftmaxAttention,
    PlainAttention,
    SoftSumAttention,
)
from lab.layers.printed.rotation import rotate_skewed
from lab.layers.printed.ssd import ssd_by_chunk_matrix
from lab.layers.ssd import SSD
from lab.ops.rope import Layout, apply_rotary, rotary_table, rotate
from lab.ops.ssd import ssd as state_space_dual
from lab.ops.ssd_forms import ssd_recurrent


def with_options(cls: type, **forced: Any):
    """The layer with some options as given here, whatever it is called with."""
    return lambda *args, **options: cls(*args, **{**options, **forced})


def one_layout(x, positions, base=10000.0, layout: Layout = "half"):
    return rotate(x, positions, base, "interleaved")


def turn_back(x, positions, base=10000.0, layout: Layout = "half"):
    """The sine's sign flipped."""
    return rotate(x, -positions, base, layout)


def with_positions_in_bf16(x, positions, base=10000.0, layout: Layout = "half"):
    return rotate(x, positions.bfloat16().long(), base, layout)


def with_a_table_in_its_own_dtype(x, positions, base=10000.0, layout: Layout = "half"):
    return apply_rotary(x, *rotary_table(positions, x.shape[-1], base, dtype=x.dtype), layout)


def turn_by_its_number_of_heads(x, positions, base=10000.0, layout: Layout = "half"):
    return rotate(x, positions + x.shape[2], base, layout)


def sum_over(summed: str):
    return lambda *args: ssd_by_chunk_matrix(*args[:-1], summed)  # type: ignore[arg-type]


def ssd_summed_over_the_target(x, dt, A, B, C, chunk_len):
    y = ssd_by_chunk_matrix(x, dt, A, B[:, :, 0], C[:, :, 0], chunk_len, "target")
    return y, ssd_recurrent(x, dt, A, B, C)[1]


def ssd_of_tiled_groups(x, dt, A, B, C, chunk_len):
    each = x.shape[2] // B.shape[2]
    B, C = (z.repeat(1, 1, each, 1) for z in (B, C))
    return state_space_dual(x, dt, A, B, C, chunk_len=chunk_len)


def mask_from_the_last_key(padding, table, n_queries, n_keys):
    return build_printed_mask(padding, table, n_keys, n_keys)[..., n_keys - n_queries :, :]


class PaddingReadAttention(Attention):
    def prefill(self, x, state=None, keep=None):
        return super().prefill(x, state)


def values_counted_by_heads(d_model, n_heads, *, n_values):
    return InnerFunctionAttention(d_model, n_heads, n_values=n_heads)


def soft_sum(d_model, *, n_values, **_):
    return SoftSumAttention(d_model, n_values=n_values)


def values_as_wide_as_x(d_model, *, d_value=None, **options):
    return InnerFunctionAttention(d_model, **options)


def best_rows(rows, columns, k):
    """Keys without the half that columns have."""
    return rows.sort(dim=-1, descending=True)


def form_two(self, x):
    shared = self.cross_domain(x)
    return self.retrieve(shared) + shared


def form_two_of_the_equation(self, x):
    return self.retrieve(self.cross_domain(x))


SOUND = {name: (scores, sum(scores) / 7) for name, (scores, _) in tables.AVERAGES.items()}
IFA = "InnerFunctionAttention"
TURNS = [
    ("R1", rotation, "rotate_skewed", one_layout, "fails"),
    ("R1", rotation, "rotate", lambda x, j, **_: rotate_skewed(x, j), "holds"),
    ("R2", rotation, "rotate", turn_back, "holds"),
    ("R3", rotation, "rotate", one_layout, "fails"),
    ("R4", rotation, "rotate", with_positions_in_bf16, "holds"),
    ("R5", rotation, "HeadRotatedAttention", PlainAttention, "fails"),
    ("R5", rotation, "rotate", turn_by_its_number_of_heads, "holds"),
    ("R6", rotation, "dynamic_base", lambda base, *_, **__: base, "fails"),
    ("R7", rotation, "rotate", with_a_table_in_its_own_dtype, "holds"),
    ("S1", ssd, "ssd", ssd_summed_over_the_target, "holds"),
    ("S2", ssd, "ssd_by_chunk_matrix", sum_over("source"), "fails"),
    ("S2", ssd, "ssd_by_chunk_matrix", sum_over("target"), "holds"),
    ("S3", ssd, "ssd", ssd_of_tiled_groups, "fails"),
    ("S3", ssd, "ssd", ssd_of_tiled_groups, "holds"),
    ("S4", ssd, "SSD", with_options(SSD, dt_init="mamba2"), "fails"),
    ("S4", ssd, "SSD", with_options(SSD, dt_init="paper"), "holds"),
    ("D1", attention, "MASKS", {**MASKS, "literal": SoftMask}, "fails"),
    ("D1", attention, "MASKS", {**MASKS, "soft": LiteralMask}, "holds"),
    ("D2", mask, "MaskAfterSoftmaxAttention", PlainAttention, "fails"),
    ("D2", mask, "PlainAttention", MaskAfterSoftmaxAttention, "holds"),
    ("D3", mask, "build_printed_mask", mask_from_the_last_key, "fails"),
    ("D3", mask, "Attention", PaddingReadAttention, "holds"),
    ("I1", inner, IFA, with_options(InnerFunctionAttention, retrieval="softmax"), "fails"),
    ("I1", inner, IFA, with_options(InnerFunctionAttention, retrieval="literal"), "holds"),
    ("I2", inner, IFA, values_counted_by_heads, "fails"),
    ("I2", inner, IFA, values_counted_by_heads, "holds"),
    ("I3", inner, "SoftSumAttention", InnerFunctionAttention, "fails"),
    ("I3", inner, IFA, soft_sum, "holds"),
    ("I4", inner, IFA, values_as_wide_as_x, "holds"),
    ("C1", cdmoe, "product_topk", best_rows, "holds"),
    ("C2", retrieval, "factor", lambda n: (n, 1), "holds"),
    ("C3", cdmoe, "CDMoE", with_options(CDMoE, key_init="normal"), "fails"),
    ("C3", cdmoe, "CDMoE", with_options(CDMoE, key_init="zeros", score="inside"), "holds"),
    ("C4", cdmoe, "factor", lambda n: (isqrt(n), isqrt(n)), "holds"),
    ("C5", CDMoE, "forward", form_two, "holds"),
    ("C5", CDMoE, "forward", form_two_of_the_equation, "holds"),
    ("T1", tables, "AVERAGES", SOUND, "fails"),
]


def test_every_row_can_turn():
    assert {row for row, *_ in TURNS} == set(ERRATA)


@pytest.mark.parametrize(("row", "module", "name", "other", "verdict"), TURNS)
def test_a_verdict_turns_with_the_code(monkeypatch, row, module, name, other, verdict):
    monkeypatch.setattr(module, name, other)
    found = ERRATA[row]()
    assert getattr(found, verdict) is False
    assert not found.confirmed
