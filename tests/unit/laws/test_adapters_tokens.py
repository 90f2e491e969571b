"""Models that take tokens: vectors become uniform tokens, with the embedding's gradient."""

import copy
from typing import NamedTuple

import torch
from torch import nn

from lab.laws import QUICK, Certification
from lab.laws.adaptation import adapt
from lab.laws.probes import draw
from lab.laws.tokens import BITS, Tokens, to_token_ids
from tests.unit.laws.foreign_modules import Model, relative_difference


def test_precisions_and_copies():
    found = adapt(Model())
    x = draw((2, 6, found.d_model), 0).bfloat16()
    outputs = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        module = copy.deepcopy(found.module).to(dtype)
        outputs[dtype] = module(x.to(dtype))
        assert outputs[dtype].dtype == dtype
    exact = outputs[torch.float64]
    assert relative_difference(outputs[torch.float32].double(), exact) < 1e-5
    assert relative_difference(outputs[torch.bfloat16].double(), exact) < 0.1


def test_tokens_are_uniform_and_the_vectors_own():
    x = draw((64, 256, 8 + BITS), 0)
    ids = to_token_ids(x, 32)
    expected = ids.numel() / 32
    chi_squared = ((ids.flatten().bincount(minlength=32) - expected) ** 2 / expected).sum()
    assert chi_squared < 31 + 5 * 62**0.5  # mean + 5 σ of χ² with 31 degrees of freedom
    neighbours = (32 * ids[:, :-1] + ids[:, 1:]).flatten().bincount(minlength=1024)
    expected = neighbours.sum() / 1024
    assert ((neighbours - expected) ** 2 / expected).sum() < 1023 + 5 * 2046**0.5
    assert torch.equal(to_token_ids(x[3:4, 7:9], 32), ids[3:4, 7:9])
    assert torch.equal(to_token_ids(x[3, 7], 32), ids[3, 7])
    # A rounding names no other token.
    assert torch.equal(to_token_ids((x * (1 + 2**-9)).bfloat16(), 32), ids)
    skipping = to_token_ids(x, 5, skip=2)
    assert set(skipping.unique().tolist()) == {0, 1, 3, 4}


def test_gradients_are_those_of_the_embedding():
    model = Model().double()
    reader = adapt(model).module
    x = draw((2, 6, 8 + BITS), 0).requires_grad_()
    against = draw((2, 6, 32), 1)
    (found,) = torch.autograd.grad(reader(x), x, against)
    scale = model.embed.weight.detach().square().mean().sqrt()
    embedded = model.embed(to_token_ids(x.detach(), 32)) + scale * x[..., :-BITS]
    embedded = embedded.detach().requires_grad_()
    places = model.places(torch.arange(6))
    y = model.head(model.gru(embedded + places)[0])
    (asked,) = torch.autograd.grad(y, embedded, against)
    assert relative_difference(found[..., :-BITS], scale * asked) < 1e-7
    assert found[..., -BITS:].abs().max() == 0
    # A small change of x is a change of the embedding, and of no token.
    step = 1e-9 * draw(x.shape, 2)
    with torch.no_grad():
        moved = reader(x + step) - reader(x)
        assert torch.allclose((moved * against).sum(), (found * step).sum(), rtol=1e-4, atol=0)


def test_without_a_table_the_gradient_is_zero():
    reader = Tokens(Model(), vocab_size=32, table=None)
    x = draw((2, 6, 8 + BITS), 0).float().requires_grad_()
    (grad,) = torch.autograd.grad(reader(x).sum(), x)
    assert grad.abs().max() == 0


def test_compiled_it_computes_the_same():
    target = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 8), nn.Tanh())
    module = adapt(target).module.double()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for seed in range(2):
        x = draw((2, 6, 8 + BITS), seed).requires_grad_()
        y, compiled_y = module(x), compiled(x)
        assert relative_difference(compiled_y, y) < 1e-14
        grads = [torch.autograd.grad(z.sum(), x)[0] for z in (y, compiled_y)]
        assert relative_difference(grads[1], grads[0]) < 1e-13


class Read(NamedTuple):
    position: torch.Tensor
    ids: torch.Tensor


class Rereading(Model):
    """Its state is the tokens read so far, all of which it embeds again."""

    def start(self, batch, position=0):
        return Read(torch.full((batch,), position), torch.zeros(batch, 0, dtype=torch.long))

    def prefill(self, ids, state=None, keep=None):
        before = self.start(len(ids)) if state is None else state
        every = torch.cat([before.ids, ids], 1)
        y = self(every)[:, before.ids.shape[1] :]
        return y, Read(before.position + ids.shape[1], every)

    def step(self, ids, state):
        y, state = self.prefill(ids[:, None], state)
        return y[:, 0], state


def test_a_decoder_that_embeds_old_tokens_again_is_not_called_wrong():
    torch.manual_seed(0)
    found = Certification(Rereading(), QUICK).judge("prefill = step")
    assert found.verdict == "not decided"
    assert "it embeds tokens again that it has already read" in found.evidence
