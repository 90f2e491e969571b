"""Hook points: names, caches, replacements, and that hooks never stay behind."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lab.hooks import HookPoint, hook_points, hooks, run_with_cache, unwrap
from lab.models import build


@pytest.fixture
def model():
    return build("AM SE", vocab_size=32, d_model=16, options={"S.d_state": 8, "E.n_experts": 16})


@pytest.fixture
def tokens():
    return torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(0))


def attached(model):
    return sum(point.active for point in hook_points(model).values())


def test_the_promised_names_are_there(model):
    names = set(hook_points(model))
    for i in (0, 1):
        assert {f"blocks.{i}.hook_resid_{x}" for x in ("pre", "mid", "post")} <= names
        assert {f"blocks.{i}.hook_{x}_out" for x in ("attn", "mlp")} <= names
        assert {f"blocks.{i}.norm_{x}.hook_scale" for x in ("mixer", "mlp")} <= names
    assert {"norm_final.hook_scale", "norm_final.hook_normalized"} <= names
    assert {"blocks.0.mlp.hook_pre", "blocks.0.mlp.hook_post"} <= names
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


def test_each_half_gives_what_it_adds(model, tokens):
    _, cache = model.run_with_cache(tokens)
    for i in (0, 1):
        pre, mid, post = (cache[f"resid_{x}", i] for x in ("pre", "mid", "post"))
        torch.testing.assert_close(pre + cache["attn_out", i], mid)
        torch.testing.assert_close(mid + cache["mlp_out", i], post)


@torch.no_grad()
def test_what_replaces_an_output_replaces_it_in_decoding_too(model, tokens):
    def shift(tensor, hook):
        assert tensor.ndim == 3
        return tensor + 1

    outs = [("blocks.0.hook_attn_out", shift), ("blocks.1.hook_attn_out", shift)]
    with model.hooks(outs):
        whole = model(tokens)
        _, state = model.prefill(tokens[:, :5])
        stepped, _ = model.step(tokens[:, 5], state)
    torch.testing.assert_close(stepped, whole[:, 5])


def test_a_name_may_be_transformer_lenss(model, tokens):
    theirs = ["blocks.0.attn.hook_pattern", "blocks.1.ln2.hook_scale", "ln_final.hook_normalized"]
    _, cache = run_with_cache(model, tokens, theirs)
    assert list(cache) == [
        "blocks.0.mixer.hook_pattern",
        "blocks.1.norm_mlp.hook_scale",
        "norm_final.hook_normalized",
    ]


def test_filters(model, tokens):
    one = "blocks.0.mixer.hook_q"
    assert set(run_with_cache(model, tokens, one)[1]) == {one}
    assert set(run_with_cache(model, tokens, [one, "hook_embed"])[1]) == {one, "hook_embed"}
    resid = run_with_cache(model, tokens, lambda name: "resid" in name)[1]
    assert len(resid) == 6
    theirs = run_with_cache(model, tokens, lambda name: "attn.hook_q" in name or "ln2" in name)[1]
    found = {"blocks.0.mixer.hook_q"} | {
        f"blocks.{i}.norm_mlp.hook_{what}" for i in (0, 1) for what in ("scale", "normalized")
    }
    assert set(theirs) == found
    with pytest.raises(ValueError, match="names_filter matches none of the model's"):
        run_with_cache(model, tokens, lambda name: False)
    words = r"no hook point 'blocks.0.mixer.hook_patern'; near names"
    with pytest.raises(ValueError, match=words):
        run_with_cache(model, tokens, "blocks.0.mixer.hook_patern")


def test_stopping_before_a_layer_gives_its_residual(model, tokens):
    residual, cache = model.run_with_cache(tokens, stop_at_layer=1)
    _, whole = model.run_with_cache(tokens)
    torch.testing.assert_close(residual, whole["blocks.1.hook_resid_pre"])
    assert not any(name.startswith("blocks.1.mixer") for name in cache)
    assert torch.equal(model.run_with_cache(tokens, stop_at_layer=-1)[0], residual)
    for layer in (2, -3):
        with pytest.raises(ValueError, match=f"stop_at_layer={layer}: the model has no such block"):
            model.run_with_cache(tokens, stop_at_layer=layer)
    assert attached(model) == 0


@pytest.mark.parametrize(
    "names",
    ["hook_embed", ["hook_embed"], lambda name: name == "hook_embed"],
    ids=["name", "names", "predicate"],
)
def test_a_run_with_hooks(model, tokens, names):
    seen = []

    def shift(tensor, hook):
        seen.append(hook.name)
        return tensor + 1

    logits = model.run_with_hooks(tokens, fwd_hooks=[(names, shift)])
    torch.testing.assert_close(
        logits, model.head(model.forward_embeddings(model.embed(tokens) + 1))
    )
    assert seen == ["hook_embed"]
    assert attached(model) == 0
    with pytest.raises(ValueError, match="no hook point 'hook_z'"):
        model.run_with_hooks(tokens, fwd_hooks=[("hook_z", shift)])


def test_a_hook_meets_what_those_before_it_left(model, tokens):
    """A last one meets also what those that come after it leave."""
    point, seen = model.hook_embed, []
    first = point.add_hook(lambda tensor, hook: torch.ones_like(tensor))
    last = point.add_hook(lambda tensor, hook: seen.append(tensor.unique().tolist()), last=True)
    twice = lambda tensor, hook: 2 * tensor  # noqa: E731
    with model.hooks([("hook_embed", twice)]), model.hooks([("hook_embed", twice)]):
        model(tokens)
    model(tokens)
    first()
    assert point.active
    last()
    last()
    assert seen == [[4.0], [1.0]]
    assert attached(model) == 0


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.hook_out, self.hook_seen = HookPoint(), HookPoint()

    def forward(self, x):
        x = self.hook_out(2 * x)
        return self.hook_seen(x + 0) if self.hook_seen.active else x


def compile_all(module: nn.Module, backend: str, fullgraph: bool = False) -> Any:
    return torch.compile(module, backend=backend, fullgraph=fullgraph)


FORMS = {
    "shell": compile_all,
    "in place": lambda m, backend: m.compile(backend=backend) or m,
    "part": lambda m, backend: nn.Sequential(compile_all(m[0], backend), m[1]),
    "function": lambda m, backend: torch.compile(lambda x: m(x), backend=backend),
}


@pytest.mark.usefixtures("unchecked")  # the compiler cannot trace the tests' type checker
@pytest.mark.parametrize(
    ("form", "backend", "before"),
    [
        *((form, "eager", True) for form in FORMS),
        ("shell", "eager", False),
        ("shell", "aot_eager", True),
    ],
)
@torch.no_grad()
def test_hooks_act_in_compiled_code_and_leave_it(form, backend, before):
    """Those that come after it was compiled, and those that have gone: torch's own do neither."""
    torch.compiler.reset()
    x = torch.tensor([1.0, 2.0])
    model = nn.Sequential(Part(), Part())
    compiled = FORMS[form](model, backend)
    outer = model if form == "function" else compiled
    if before:
        torch.testing.assert_close(compiled(x), 4 * x)
    for name in ("0.hook_out", "0.hook_seen"):
        with hooks(outer, [(name, lambda tensor, hook: tensor + 1)]) as inner:
            assert inner is unwrap(outer)
            torch.testing.assert_close(compiled(x), 4 * x + 2)
            torch.testing.assert_close(inner(x), 4 * x + 2)
        torch.testing.assert_close(compiled(x), 4 * x)
    _, cache = run_with_cache(outer, x)
    assert set(cache) == set(hook_points(model))


@pytest.mark.usefixtures("unchecked")
def test_a_compiled_graph_that_must_stay_whole_refuses_hooks():
    torch.compiler.reset()
    x = torch.ones(2)
    compiled = compile_all(nn.Sequential(Part()), "eager", fullgraph=True)
    compiled(x)
    from torch._dynamo.exc import Unsupported  # imported with the first compilation

    with (
        hooks(compiled, [("0.hook_out", lambda tensor, hook: None)]),
        pytest.raises(Unsupported),
    ):
        compiled(x)


def test_hooks_come_off_on_an_exception(model, tokens):
    def fail(tensor, hook):
        raise RuntimeError(hook.name)

    with (
        pytest.raises(RuntimeError, match=r"blocks\.0\.mixer\.hook_q"),
        model.hooks([("blocks.0.mixer.hook_q", fail)]),
    ):
        model(tokens)
    assert attached(model) == 0


class Bound:
    def fn(self, tensor, *, hook):
        return tensor + len(hook.name)


@pytest.mark.parametrize(
    "fn",
    [
        lambda tensor, hook: tensor + len(hook.name),
        lambda value, point: value + len(point.name),
        lambda tensor, *, hook: tensor + len(hook.name),
        partial(lambda more, tensor, hook: tensor + more * len(hook.name), 1),
        Bound().fn,
    ],
    ids=["positional", "other names", "keyword", "partial", "method"],
)
def test_a_hook_gets_its_point_as_in_transformer_lens(model, tokens, fn):
    expected = model.head(model.forward_embeddings(model.embed(tokens) + len("hook_embed")))
    with model.hooks([("hook_embed", fn)]):
        torch.testing.assert_close(model(tokens), expected)


def test_hooks_that_are_added_stay_until_reset(model, tokens):
    plain = model(tokens)
    model.add_hook(lambda name: name == "hook_embed", lambda tensor, hook: tensor + 1)
    model.add_hook("blocks.1.hook_resid_post", lambda tensor, *, hook: tensor * 0)
    assert attached(model) == 2
    assert not torch.allclose(model(tokens), plain)
    with pytest.raises(ValueError, match="no hook point 'hook_z'"):
        model.add_hook("hook_z", lambda tensor, hook: None)
    model.reset_hooks()
    assert attached(model) == 0
    assert torch.equal(model(tokens), plain)


def test_a_block_that_ends_after_a_reset_takes_no_later_hook_off(model, tokens):
    with model.hooks([("hook_embed", lambda tensor, hook: tensor + 1)]):
        model.reset_hooks()
        model.add_hook("hook_embed", lambda tensor, hook: tensor + 2)
    torch.testing.assert_close(
        model(tokens), model.head(model.forward_embeddings(model.embed(tokens) + 2))
    )


def test_the_cache_holds_no_graph(model, tokens):
    logits, cache = model.run_with_cache(tokens)
    assert logits.requires_grad
    assert not any(tensor.requires_grad for tensor in cache.values())


def test_a_point_knows_its_block():
    model = build("AM*2", vocab_size=16, d_model=8)
    points = hook_points(model)
    assert points["blocks.1.mixer.hook_pattern"].layer() == 1
    with pytest.raises(ValueError, match="hook_embed: is not a point of a block"):
        points["hook_embed"].layer()
