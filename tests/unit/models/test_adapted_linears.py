"""An adapter around any linear map of any layer is read, learns, and merges into the weight."""

import pytest
import torch
from torch import Tensor, nn

from lab.models import build
from lab.models.evaluation import score
from tasks.mqar import MQAR
from tests.case import Case
from tests.cases import CASES


class LowRank(nn.Module):
    """A linear map plus one of rank 2, as LoRA's layers are: the map is called, not read."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(0.3 * torch.randn(2, base.in_features))
        self.up = nn.Parameter(0.3 * torch.randn(base.out_features, 2))

    # What a layer may ask of a linear map without computing with it, as of LoRA's layers.
    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def in_features(self) -> int:
        return self.base.in_features

    @property
    def out_features(self) -> int:
        return self.base.out_features

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.mT @ self.up.mT

    @torch.no_grad()
    def merge(self) -> nn.Linear:
        self.base.weight += self.up @ self.down
        return self.base


def list_linears(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]


def adapt(module: nn.Module) -> dict[str, LowRank]:
    """Put an adapter around every linear map, in place."""
    torch.manual_seed(1)
    adapters = {name: LowRank(module.get_submodule(name)) for name in list_linears(module)}  # type: ignore[arg-type]
    for name, adapter in adapters.items():
        module.set_submodule(name, adapter)
    return adapters


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_linear_of_a_layer_takes_an_adapter(case: Case):
    # The grouped kernel has no fp64.
    dtype = torch.float32 if case.name == "routed grouped" else torch.float64
    module = case.make().eval()
    x = torch.randn(2, 16, case.d_model, generator=torch.Generator().manual_seed(2)).to(dtype)
    adapters = adapt(module)
    module.to(dtype)
    y = module(x)
    y.square().sum().backward()
    silent = {name for name, adapter in adapters.items() if adapter.up.grad is None}
    # Maps that only choose have no gradient themselves; the head is not part of these cases.
    assert silent == {
        name
        for name, adapter in adapters.items()
        if name.endswith("head") or adapter.base.weight.grad is None
    }
    for name, adapter in adapters.items():
        module.set_submodule(name, adapter.merge())
    eps = torch.finfo(dtype).eps ** 0.75
    torch.testing.assert_close(module(x), y, rtol=eps, atol=eps)


def test_what_is_scored_and_attributed_reads_an_adapted_head():
    torch.manual_seed(0)
    model = build("AM SM", vocab_size=64, d_model=8).double()
    batch = MQAR(seq_len=16, vocab_size=64).batch(size=2)
    adapters = {name: adapter.double() for name, adapter in adapt(model).items()}
    hidden, weight, _ = score(model, batch, "fp32")
    logits = model(batch.inputs)
    found = hidden @ weight.mT
    assert any(torch.allclose(found[0], row, atol=1e-9) for row in logits.flatten(0, 1))
    cache = model.run_with_cache(batch.inputs)[1]
    tokens = torch.arange(len(batch.inputs[0])).expand(2, -1) % 64
    stack = cache.decompose_resid()
    direct = cache.logit_attrs(stack, tokens).sum(0)
    torch.testing.assert_close(direct, logits.gather(2, tokens[..., None])[..., 0])
    found.square().sum().backward()
    assert adapters["head"].up.grad is not None
