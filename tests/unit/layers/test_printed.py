"""The printed readings as layers: each trains, and breaks the law that its erratum says."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from lab.laws import LAWS, CertifySettings, Probes, Reach
from lab.layers.attention import Attention
from lab.layers.cdmoe import CDMoE
from lab.layers.printed import (
    PRINTED,
    DynamicBaseAttention,
    FloorSquareCDMoE,
    HeadRotatedAttention,
    MaskAfterSoftmaxAttention,
    RoundedRotationAttention,
    SkewedRotationAttention,
    TargetSummedSSD,
)
from lab.layers.printed.attention import PlainAttention
from lab.models.stack import make_layer
from tests.normal import draw_normal

M = TypeVar("M", bound=nn.Module)


SMALL = {"n_experts": 12, "k": 2, "d_retrieval": 4}
TRIED = (
    *("deterministic", "causal", "batch-invariant"),
    *("matrix applies", "table reach", "precision"),
)


@dataclass(frozen=True)
class Case:
    """A printed layer, what breaks, where it shows, and what learns nothing."""

    row: str
    options: Mapping[str, Any] = field(default_factory=dict)
    breaks: str | None = None
    words: str = ""
    dead: Mapping[str, Reach] = field(default_factory=dict)
    lengths: tuple[int, ...] = (1, 2, 5, 16)
    d_model: int = 16
    tried: tuple[str, ...] = TRIED

    def make(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return PRINTED[self.row](self.d_model, **self.options)

    def probes(self) -> Probes:
        return Probes(CertifySettings(self.d_model, self.lengths, max_len=256, seconds=10.0))


CASES = [
    Case("R1", {"n_heads": 2}),
    Case("R5", {"n_heads": 8}, lengths=(8,), tried=("batch-invariant", "matrix applies")),
    Case(
        "R6",
        {"n_heads": 2, "max_position": 8},
        "causal",
        "length 9: cutting the input after position 1",
    ),
    Case("R7", {}, "precision", "length 1024: bfloat16"),
    Case("R7", {"round_angles": False}),
    Case("S2", {"d_state": 4, "chunk_len": 4}, "causal", "length 6: changing position 5"),
    Case("S2", {"d_state": 4, "chunk_len": 16}),
    Case("D2", {"n_heads": 2}, "causal", "length 2: changing position 1", {"l": "zero"}),
    Case("I3", {"n_heads": 2}),
    Case("C4", SMALL, "table reach", "3 of 12 rows of down: 9, 10, 11"),
]


def test_every_printed_layer_is_tried():
    assert {case.row for case in CASES} == set(PRINTED)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.row} {case.breaks}")
def test_the_one_law_breaks_and_no_other(case: Case):
    module, probes = case.make().double(), case.probes()
    for law in case.tried:
        v = LAWS[law].judge(module, probes)
        if law == case.breaks:
            assert v.verdict == "fails", v
            assert case.words in (v.counterexample or ""), v
        else:
            shows_no_matrix = law == "matrix applies" and case.row in ("S2", "C4")
            assert v.verdict == ("not applicable" if shows_no_matrix else "holds"), v


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.row} {case.breaks}")
def test_a_step_of_gradient_lowers_the_loss(case: Case):
    layer = case.make().double()
    x, target = (draw_normal(3, case.lengths[-1], case.d_model, seed=seed) for seed in (1, 2))
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = (layer(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0] - 1e-5


@pytest.mark.parametrize("cls", PRINTED.values(), ids=lambda cls: cls.__name__)
def test_the_command_line_can_make_it(cls: type[nn.Module]):
    layer = make_layer(cls, "U", {"d_model": 32, "n_heads": 4}, {})
    x = draw_normal(2, 4, 32).float()
    assert layer(x).shape == x.shape


def with_weights_of(layer: nn.Module, cls: type[M], **options: Any) -> M:
    twin = cls(8, 2, **options).double()
    twin.load_state_dict(layer.state_dict())
    return twin


def test_the_plain_form_is_attention():
    plain = PlainAttention(8, 2, rope_base=100.0).double()
    x = draw_normal(2, 9, 8)
    same = with_weights_of(plain, Attention, rope_base=100.0)
    torch.testing.assert_close(plain(x), same(x), rtol=0, atol=1e-13)


def shifted(layer: PlainAttention, x: Tensor) -> float:
    """How far a shift of all positions moves the pattern."""
    return (layer.matrix(x, start=50) - layer.matrix(x)).abs().max().item()


@pytest.mark.parametrize("cls", [SkewedRotationAttention, DynamicBaseAttention])
def test_scores_depend_on_where_not_only_on_how_far(cls: type[PlainAttention]):
    torch.manual_seed(0)
    layer = cls(8, 2, rope_base=10.0).double()
    x = draw_normal(1, 9, 8)
    twin = with_weights_of(layer, PlainAttention, rope_base=10.0)
    assert shifted(layer, x) > 1e-3
    assert shifted(twin, x) < 1e-13


def test_rounded_rotation_is_attention_but_in_bf16():
    torch.manual_seed(0)
    rounded, x = RoundedRotationAttention(8, 2).double(), draw_normal(1, 2048, 8)
    exact = with_weights_of(rounded, PlainAttention)
    table = with_weights_of(rounded, RoundedRotationAttention, round_angles=False)
    torch.testing.assert_close(rounded(x[:, :64]), exact(x[:, :64]), rtol=0, atol=1e-12)
    q = draw_normal(1, 2048, 1, 8).bfloat16()
    positions = torch.arange(2048)
    right = exact.turn(q.double(), positions)
    off = [
        (layer.turn(q, positions).double() - right).abs().max().item() / right.abs().max().item()
        for layer in (exact, table, rounded)
    ]
    # Half a unit in the last place; the table's too and two products; angles radians away.
    assert off[0] < 2**-8 < off[1] + 2**-9
    assert off[1] < 4 * 2**-8
    assert off[2] > 0.5


def test_target_summed_ssd_follows_the_definition_within_a_chunk():
    torch.manual_seed(0)
    layer, x = TargetSummedSSD(8, 2, d_state=4, chunk_len=4).double(), draw_normal(2, 12, 8)
    whole = TargetSummedSSD(8, 2, d_state=4, chunk_len=12).double()
    whole.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x[:, :4]), whole(x[:, :4]))
    assert (layer(x) - whole(x))[:, :4].abs().max() < 1e-13
    assert (layer(x) - whole(x))[:, 4:].abs().max() > 1e-3


def test_on_a_square_it_is_cdmoe():
    printed, ours = (
        cls(8, n_experts=16, k=3, n_retrieval_heads=2, d_retrieval=6).double()
        for cls in (FloorSquareCDMoE, CDMoE)
    )
    ours.load_state_dict(printed.state_dict())
    x = draw_normal(2, 9, 8)
    assert torch.equal(printed(x), ours(x))


def test_errors_at_the_forward_pass():
    with pytest.raises(ValueError, match="n_heads=2 must equal the sequence length 5"):
        HeadRotatedAttention(8, 2)(torch.ones(1, 5, 8))
    with pytest.raises(ValueError, match="sequence length 5 exceeds max_seq_len=4"):
        MaskAfterSoftmaxAttention(8, 2, max_seq_len=4)(torch.ones(1, 5, 8))
