"""What makes no sense as an intervention is refused in words, and leaves nothing behind."""

import pytest
import torch

from analysis.interventions import (
    ablate,
    block_edges,
    edit_matrix,
    knock_out_experts,
    override_mask,
    patch,
    swap_values,
    transplant_experts,
)
from lab.hooks import HookPoint
from lab.layers.cdmoe import CDMoE
from lab.layers.mlp import MLP
from lab.layers.routed import RoutedMoE
from tests.intervened import TOKENS, Opaque, UserMixer, attention, experts, stack
from tests.ssd_variants import moved as ssd_moved


def edges(*places, **more):
    return lambda: block_edges(stack(attention()), 0, *places, **more)


def ablation(name: str, *how, **place):
    model = stack(attention(), mlps=(experts("routed"),))
    return lambda: ablate(model, name, *how, **place)


def transplant(giver, taker, *chosen, **into):
    source, target = (stack(mlps=(mlp,)) for mlp in (giver, taker))
    return lambda: transplant_experts(source, target, 0, *chosen, **into)


def within(kind: str, chosen: list[int], into: list[int]):
    model = stack(mlps=(experts(kind),))
    return lambda: transplant_experts(model, model, 0, chosen, into)


REFUSALS = [
    (lambda: swap_values(stack(attention()), 1, [0], [0]), "layer=1 must be in 0 … 0: the model's"),
    (lambda: block_edges(stack(attention()), -1, [1], [0]), "layer=-1 must be"),
    (lambda: swap_values(stack(None), 0, [0], [1]), "layer=0 has no mixer"),
    (
        lambda: block_edges(stack(Opaque()), 0, [1], [0]),
        "layer=0: Opaque has no matrix, values and project to edit",
    ),
    (lambda: block_edges(attention(), 0, [1], [0]), "model is Attention, must be LanguageModel"),
    (edges([1], [-1]), "sources holds -1, must be at least 0"),
    (edges(torch.ones(1), [0]), r"targets is torch.float32 \[1\], must be integers \[n\]"),
    (edges(torch.ones(9).bool(), [0]), r"targets is torch.bool \[9\], must be integers"),
    (edges([1, 2], [0]), "2 targets, 1 sources: must be equally many"),
    (edges([1], [0], rows=[0, 1]), "1 targets, 2 rows: must be equally many"),
    (edges([1, 3], [0, 5]), "source 5 is after its target 3"),
    (
        lambda: patch(stack(attention()), "blocks.0.mixer.hook_y", TOKENS),
        "no hook point 'blocks.0.mixer.hook_y'; near names",
    ),
    (
        lambda: patch(stack(attention()), "blocks.0.hook_resid_mid", TOKENS, heads=[0]),
        r"heads: blocks.0.hook_resid_mid has \[b t d\], no axis h",
    ),
    (
        ablation("blocks.1.mlp.hook_balance_loss", rows=[0]),
        r"rows: blocks.1.mlp.hook_balance_loss has \[\], no axis b",
    ),
    (
        ablation("hook_embed", rows=[0], positions=[1, 2]),
        "1 rows, 2 positions: must be equally many",
    ),
    (ablation("hook_embed", "noise"), "how='noise': must be one of zero, mean, resample"),
    (
        lambda: override_mask(stack(ssd_moved()), 0, torch.zeros(9)),
        "layer=0: SSD has no place for a dynamic mask",
    ),
    (
        lambda: override_mask(stack(attention()), 0, torch.full((9,), -torch.inf)),
        "bias must be finite; lab.ops.attention.MASKED",
    ),
    (
        lambda: knock_out_experts(stack(mlps=(MLP(12),)), 0, [0]),
        "layer=0: MLP has no experts; CDMoE, PEER, RoutedMoE and SharedExpertMoE have",
    ),
    (
        lambda: knock_out_experts(stack(attention()), 0, [0]),
        "layer=0: no state transform has no experts",
    ),
    (within("routed", [0, 1], into=[0, 4]), "into holds 4, must be below 4"),
    (within("peer", [0, 1], into=[2, 2]), "into names slot 2 twice"),
    (
        transplant(CDMoE(12, n_experts=12), CDMoE(12, n_experts=6, k=6), [7]),
        "experts holds 7, must be below 6",
    ),
    (
        transplant(experts("peer"), experts("cdmoe"), [0]),
        "layer=0: the source's PEER has experts of .*, the target's CDMoE of",
    ),
    (
        transplant(RoutedMoE(12, d_ff=3), RoutedMoE(12, d_ff=4), [0]),
        "layer=0: the source's RoutedMoE has experts of .*3.*, the target's RoutedMoE of .*4",
    ),
]
RUNNING = [
    (block_edges, (0, [9], [3]), {}, "targets holds 9, must be below 9, the sequence length"),
    (
        block_edges,
        (0, [5], [3]),
        {"rows": [3]},
        "rows holds 3, must be below 3, the rows of the batch",
    ),
    (
        block_edges,
        (0, [5], [3]),
        {"heads": [2]},
        "heads holds 2, must be below 2, the heads of the matrix",
    ),
    (
        edit_matrix,
        (0, lambda matrix, rows: matrix[..., :-1]),
        {},
        r"edit returned \[3, 2, 9, 8\], must be \[3, 2, 9, 9\]",
    ),
    (edit_matrix, (0, lambda matrix, rows: None), {}, "edit returned NoneType, must be"),
    (
        swap_values,
        (0, [0, 1], [1, 2]),
        {},
        "first and second have 2 rows, must be the batch's 3",
    ),
    (
        swap_values,
        (0, [0, 1, 2], [1, 9, 2]),
        {},
        "second holds 9, must be below 9, the sequence length",
    ),
    (
        patch,
        ("hook_embed", torch.zeros(3, 8, 12)),
        {},
        r"source is \[3, 8, 12\], must be \[3, 9, 12\] as at hook_embed",
    ),
    (
        ablate,
        ("hook_embed",),
        {"positions": [9]},
        "positions holds 9, must be below 9, the positions at hook_embed",
    ),
    (
        override_mask,
        (0, torch.zeros(1, 8)),
        {},
        r"bias is \[1, 8\], must be \[9\], \[2, 9\] or \[3, 2, 9\]",
    ),
    (
        ablate,
        ("blocks.1.mlp.hook_expert_weights",),
        {"heads": [0]},
        r"heads: blocks.1.mlp.hook_expert_weights has \[b t k\], no axis h",
    ),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("enter", "said"), REFUSALS, ids=[said for _, said in REFUSALS])
def test_what_makes_no_sense_is_refused_at_once(enter, said):
    with pytest.raises(ValueError, match=said), enter():
        raise AssertionError("the block must not run")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("intervene", "args", "more", "said"), RUNNING)
def test_what_does_not_fit_the_batch_is_refused_and_undone(intervene, args, more, said):
    model = stack(attention(), mlps=(experts("routed"),))
    plain = model(TOKENS)
    with pytest.raises(ValueError, match=said), intervene(model, *args, **more):
        model(TOKENS)
    assert torch.equal(model(TOKENS), plain)


@pytest.mark.parametrize("how", ["mean", "resample"])
def test_one_row_has_no_mean_and_no_other(how):
    model = stack(attention())
    with (
        ablate(model, "hook_embed", how),
        pytest.raises(ValueError, match=f"how='{how}' at hook_embed: needs at least 2 rows"),
    ):
        model(TOKENS[:1])


def test_a_point_that_nobody_knows_is_patched_as_a_whole():
    model, mine = stack(attention()), HookPoint()
    model.blocks[0].add_module("hook_mine", mine)
    with (
        pytest.raises(ValueError, match=r"rows: blocks.0.hook_mine has axes without names"),
        ablate(model, "blocks.0.hook_mine", rows=[0]),
    ):
        raise AssertionError("the block must not run")
    with ablate(model, "blocks.0.hook_mine"):
        assert mine(torch.ones(2)).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("mixer", "said"),
    [
        (
            UserMixer(wrong=0.1),
            r"UserMixer: raised ValueError: project\(x, .* is off forward",
        ),
        (UserMixer(d_model=11), "UserMixer: raised RuntimeError"),
    ],
)
def test_a_matrix_that_is_not_what_a_mixer_applies_is_refused(mixer, said):
    model = stack(mixer)
    with (
        edit_matrix(model, 0, lambda matrix, rows: matrix),
        pytest.raises(ValueError, match=said),
    ):
        model(TOKENS)
