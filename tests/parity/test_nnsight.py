"""nnsight's traces on our models: the tensors that `run_with_cache` keeps, and the same edits."""

from importlib import import_module

import pytest
import torch

from lab.hooks import hook_points
from lab.models import build

TOKENS = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(0))
OPTIONS = {"A.mask": "soft", "S.d_state": 8, "E.n_experts": 16, "P.n_experts": 16}


@pytest.fixture(scope="module")
def nnsight():
    """The package, without the method that it hangs on every object there is."""
    # Not at the top: beartype does not import beside that method.
    nnsight = import_module("nnsight")
    import_module("nnsight._c").unmount("save")
    assert not hasattr(object, "save")
    return nnsight


@pytest.fixture
def model():
    return build("AM SE IP AX", vocab_size=32, d_model=16, options=OPTIONS).eval()


def place(traced, name: str):
    """Return nnsight's view of the module of this name."""
    for part in name.split("."):
        traced = traced[int(part)] if part.isdigit() else getattr(traced, part)
    return traced


@torch.no_grad()
def test_a_trace_reads_what_a_layer_always_computes(model, nnsight):
    """What needs a hook to be computed (`HookPoint.active`) a trace by itself does not meet."""
    names = ["blocks.0.mixer.hook_q", "blocks.1.mixer.hook_ssm_out", "blocks.3.hook_resid_post"]
    logits, cache = model.run_with_cache(TOKENS, names)
    traced = nnsight.NNsight(model)
    with traced.trace(TOKENS):
        query = nnsight.save(traced.blocks[0].mixer.hook_q.output)
        mixed = nnsight.save(traced.blocks[1].mixer.hook_ssm_out.output)
        residual = nnsight.save(traced.blocks[3].hook_resid_post.output)
        output = nnsight.save(traced.output)
    for name, tensor in zip(names, (query, mixed, residual), strict=True):
        assert torch.equal(tensor, cache[name])
    assert torch.equal(output, logits)


@torch.no_grad()
def test_a_trace_reads_every_point_that_a_hook_watches(model, nnsight):
    _, cache = model.run_with_cache(TOKENS)
    assert len(cache) > 50
    traced = nnsight.NNsight(model)
    with model.hooks([(list(cache), lambda tensor, hook: None)]):
        # In the order in which they run, as a trace asks for.
        for name in cache:
            point = place(traced, name)
            with traced.trace(TOKENS):
                tensor = nnsight.save(point.output)
            assert torch.equal(tensor, cache[name]), name


@torch.no_grad()
def test_what_a_trace_puts_in_place_is_what_a_hook_does(model, nnsight):
    name = "blocks.1.hook_resid_post"
    expected = model.run_with_hooks(TOKENS, [(name, lambda tensor, hook: tensor.flip(0))])
    traced = nnsight.NNsight(model)
    with traced.trace(TOKENS):
        traced.blocks[1].hook_resid_post.output = traced.blocks[1].hook_resid_post.output.flip(0)
        output = nnsight.save(traced.output)
    assert torch.equal(output, expected)
    assert not any(point.active for point in hook_points(model).values())
