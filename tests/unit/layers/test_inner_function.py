"""Inner function attention: its values by every reading, and the printed one's errors."""

import pytest
import torch
from torch import Tensor

from lab.hooks import hooks, run_with_cache
from lab.layers.attention import Attention
from lab.layers.inner_function import InnerFunctionAttention, Retrieval, ValueMap
from tests.normal import draw_normal


def flat_values(layer: InnerFunctionAttention, x: Tensor) -> Tensor:
    """All heads' values side by side [b t d_value]."""
    return layer.values(x).transpose(1, 2).flatten(2)


def weight(retrieval: str, scores: Tensor, chosen: int) -> Tensor:
    if retrieval == "softmax":
        return scores.exp()[chosen] / scores.exp().sum()
    return 1 / (1 + (-scores[chosen]).exp()) if retrieval == "sigmoid" else torch.tensor(1.0)


@pytest.mark.parametrize("value_map", ["diagonal", "linear"])
@pytest.mark.parametrize("retrieval", ["literal", "softmax", "sigmoid", "straight-through"])
@pytest.mark.parametrize(("n_heads", "k"), [(1, 2), (3, 1), (3, 2), (2, 5)])
def test_values_token_by_token(n_heads: int, k: int, retrieval: Retrieval, value_map: ValueMap):
    layer = InnerFunctionAttention(
        12, n_heads, n_values=5, k=k, retrieval=retrieval, value_map=value_map
    ).double()
    x = draw_normal(2, 4, 12)
    found = layer.values(x)
    p = 12 // n_heads
    for b, t, h in [(b, t, h) for b in range(2) for t in range(4) for h in range(n_heads)]:
        token, channels = x[b, t], slice(h * p, (h + 1) * p)
        scores = layer.value_keys @ (layer.value_query.weight @ token)
        order = sorted(range(5), key=lambda i: -scores[i].item())
        mapped = layer.v(token)[channels]
        right = torch.zeros(p, dtype=torch.float64)
        for i in order[:k]:
            right += weight(retrieval, scores, i) * mapped * layer.value_rows[i, channels]
        torch.testing.assert_close(found[b, h, t], right)


def test_softmax_of_all_rows_is_the_equations_sum():
    """Erratum I3: V = Σ_i softmax_i(x W_vQ θ_vKᵀ) (x ∘ θ_i), over every row."""
    layer, x = InnerFunctionAttention(8, 2, n_values=4, k=4).double(), draw_normal(2, 5, 8)
    weights = (layer.value_query(x) @ layer.value_keys.T).softmax(-1)
    torch.testing.assert_close(flat_values(layer, x), x * (weights @ layer.value_rows))


def test_grouped_heads_share_values():
    layer = InnerFunctionAttention(8, 4, value_map="linear", d_value=12, n_kv_heads=2).double()
    assert layer.value_rows.shape == (2, 6)
    assert layer.v.get_parameter("weight").shape == (6, 8)
    v = layer.values(draw_normal(2, 5, 8))
    assert v.shape == (2, 4, 5, 3)
    assert torch.equal(v[:, 0], v[:, 1])
    assert not torch.allclose(v[:, 1], v[:, 2])


def test_straight_through_has_the_gradient_of_softmax():
    """Forward one for each chosen row; backward, as if their softmax were the weights."""
    hard = InnerFunctionAttention(6, n_values=3, retrieval="straight-through").double()
    soft = InnerFunctionAttention(6, n_values=3, retrieval="softmax").double()
    soft.load_state_dict(hard.state_dict())
    x, against = draw_normal(2, 4, 6), draw_normal(2, 4, 6, seed=1)
    parameters = [(layer.value_query.weight, layer.value_keys) for layer in (hard, soft)]
    found = torch.autograd.grad(flat_values(hard, x), parameters[0], against)
    right = torch.autograd.grad(flat_values(soft, x), parameters[1], against)
    for mine, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_printed_retrieval_never_trains():
    """Erratum I1: top-k indices carry no gradient, so queries and keys stay as they started."""
    layer = InnerFunctionAttention(8, retrieval="literal", key_init="zeros")
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    for seed in range(3):
        optimizer.zero_grad()
        layer(draw_normal(2, 9, 8, seed=seed).float()).square().sum().backward()
        optimizer.step()
    still = {name for name, p in layer.named_parameters() if torch.equal(p, before[name])}
    assert still == {"value_query.weight", "value_keys"}
    assert layer.value_query.weight.grad is None
    assert layer.value_keys.grad is None


def test_only_the_values_differ_from_attention():
    layer, plain = (
        InnerFunctionAttention(8, 2, mask="soft").double(),
        Attention(8, 2, mask="soft").double(),
    )
    shared = {n: p for n, p in layer.state_dict().items() if not n.startswith("value_")}
    assert plain.load_state_dict(shared, strict=False).missing_keys == ["v.weight"]
    x = draw_normal(2, 9, 8)
    torch.testing.assert_close(layer.matrix(x), plain.matrix(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "shapes"),
    [
        ({}, {"value_rows": (2, 8), "value_keys": (2, 4), "value_query.weight": (4, 8)}),
        ({"n_values": 6, "d_retrieval": 3}, {"value_rows": (6, 8), "value_keys": (6, 3)}),
        ({"value_map": "linear"}, {"v.weight": (8, 8), "out.weight": (8, 8)}),
        (
            {"value_map": "linear", "d_value": 4},
            {"v.weight": (4, 8), "value_rows": (2, 4), "out.weight": (8, 4)},
        ),
    ],
)
def test_shapes_of_every_reading(options: dict, shapes: dict[str, tuple[int, ...]]):
    """Errata I2 (n_v rows, whatever the heads) and I4 (both readings of d_innerV)."""
    state = InnerFunctionAttention(8, 2, **options).state_dict()
    assert {name: tuple(state[name].shape) for name in shapes} == shapes


def test_hooks_see_and_replace_scores_and_indices():
    layer, x = InnerFunctionAttention(8, 2, n_values=3, k=2).double(), draw_normal(2, 5, 8)
    y, cache = run_with_cache(layer, x, ["hook_value_scores", "hook_value_indices"])
    assert cache["hook_value_scores"].shape == (2, 5, 3)
    assert cache["hook_value_indices"].shape == (2, 5, 2)
    assert torch.equal(y, layer(x))
    for name in cache:
        with hooks(layer, [(name, lambda tensor, _: tensor.flip(-1) // 1 * 0)]):
            assert not torch.allclose(layer(x), y)
