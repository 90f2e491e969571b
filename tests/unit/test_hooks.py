"""Hook points: names, caches, replacements, and that hooks never stay behind."""

import pytest
import torch

from lab.hooks import hook_points, hooks, run_with_cache
from lab.models import build


@pytest.fixture
def model():
    return build("AM SE", vocab_size=32, d_model=16, options={"S.d_state": 8, "E.n_experts": 16})


@pytest.fixture
def tokens():
    return torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(0))


def attached(model):
    return sum(len(point._forward_hooks) for point in hook_points(model).values())


def test_the_promised_names_are_there(model):
    names = set(hook_points(model))
    for i in (0, 1):
        assert {f"blocks.{i}.hook_resid_{x}" for x in ("pre", "mid", "post")} <= names
    attention = ["q", "k", "v", "rot_q", "rot_k", "attn_scores", "pattern", "z", "dynamic_mask"]
    assert {f"blocks.0.mixer.hook_{x}" for x in attention} <= names
    ssd = [
        "dt",
        "log_decay",
        "B_pre",
        "B_rot",
        "C_pre",
        "C_rot",
        "ssm_write",
        "ssm_state",
        "ssm_out",
    ]
    assert {f"blocks.1.mixer.hook_{x}" for x in ssd} <= names
    experts = ["expert_scores", "expert_indices", "expert_weights", "subkey_scores"]
    assert {f"blocks.1.mlp.hook_{x}" for x in experts} <= names


def test_the_cache_holds_what_passed(model, tokens):
    logits, cache = model.run_with_cache(tokens)
    torch.testing.assert_close(logits, model(tokens))
    assert set(cache) == set(hook_points(model))
    pattern = cache["blocks.0.mixer.hook_pattern"]
    torch.testing.assert_close(pattern.sum(-1), torch.ones(2, 1, 9))
    assert attached(model) == 0


def test_filters(model, tokens):
    one = "blocks.0.mixer.hook_q"
    assert set(run_with_cache(model, tokens, one)[1]) == {one}
    assert set(run_with_cache(model, tokens, [one, "hook_embed"])[1]) == {one, "hook_embed"}
    resid = run_with_cache(model, tokens, lambda name: "resid" in name)[1]
    assert len(resid) == 6


def test_stopping_before_a_layer_gives_its_residual(model, tokens):
    residual, cache = model.run_with_cache(tokens, stop_at_layer=1)
    _, whole = model.run_with_cache(tokens)
    torch.testing.assert_close(residual, whole["blocks.1.hook_resid_pre"])
    assert not any(name.startswith("blocks.1.mixer") for name in cache)
    with pytest.raises(ValueError, match="stop_at_layer=2: the model has no such block"):
        model.run_with_cache(tokens, stop_at_layer=2)
    assert attached(model) == 0


def test_what_a_hook_returns_replaces_the_tensor(model, tokens):
    plain = model(tokens)
    with model.hooks([("blocks.0.hook_resid_post", lambda tensor, hook: torch.zeros_like(tensor))]):
        blank = model(tokens)
    assert torch.equal(blank[0, 0], blank[1, 0])
    assert torch.equal(model(tokens), plain)


def test_hooks_come_off_on_an_exception(model, tokens):
    def fail(tensor, hook):
        raise RuntimeError(hook.name)

    with (
        pytest.raises(RuntimeError, match=r"blocks\.0\.mixer\.hook_q"),
        model.hooks([("blocks.0.mixer.hook_q", fail)]),
    ):
        model(tokens)
    assert attached(model) == 0


def test_an_unmatched_name_lists_near_ones(model):
    with (
        pytest.raises(ValueError, match=r"no hook point 'blocks.0.mixer.hook_patern'; near names"),
        hooks(model, [("blocks.0.mixer.hook_patern", lambda tensor, hook: None)]),
    ):
        raise AssertionError("the block must not run")
    assert attached(model) == 0


def test_a_predicate_that_matches_nothing_is_an_error(model, tokens):
    with pytest.raises(ValueError, match="names_filter matches none of the model's"):
        run_with_cache(model, tokens, lambda name: False)
