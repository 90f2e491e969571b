"""The sequence mixers that every law runs on: a new one is a line here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lab.laws import Reach
from lab.layers.attention import Attention
from lab.layers.inner_function import InnerFunctionAttention
from lab.layers.mask import stored
from lab.layers.ssd import SSD


@dataclass(frozen=True)
class Case:
    """A mixer from [b t d_model] to the same shape, and which of its parameters learn nothing."""

    name: str
    build: Callable[[], nn.Module]
    dead: Mapping[str, Reach] = field(default_factory=dict)
    d_model: int = 8

    def make(self) -> nn.Module:
        """Return the mixer with the same weights each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.build()


class Told(nn.Module):
    """An attention with the oracle mask, told to keep every third key and the fifth."""

    def __init__(self, mixer: Attention):
        super().__init__()
        self.mixer = mixer

    def keep(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        return ((positions % 3 == 1) | (positions == 4)).expand(x.shape[:2])

    def forward(self, x: Tensor) -> Tensor:
        with stored(self.mixer, self.keep(x)):
            return self.mixer(x)

    def matrix(self, x: Tensor) -> Tensor:
        with stored(self.mixer, self.keep(x)):
            return self.mixer.matrix(x)

    def values(self, x: Tensor) -> Tensor:
        return self.mixer.values(x)

    def project(self, x: Tensor, z: Tensor) -> Tensor:
        return self.mixer.project(x, z)


def moved(module: nn.Module) -> nn.Module:
    """Return the module with noise on its parameters, so that masks mask and gates gate."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) / 2)
    return module


NO_CHOICE: dict[str, Reach] = {"value_query.weight": "none", "value_keys": "none"}
ZERO_KEYS: dict[str, Reach] = {"value_query.weight": "zero"}
NO_MASK: dict[str, Reach] = {"mask.l": "none"}
ZERO_A: dict[str, Reach] = {"mask.dt.weight": "zero"}

A, IFA = Attention, InnerFunctionAttention

CASES = [
    Case("attention", lambda: A(8)),
    Case("attention 2 heads", lambda: A(8, 2)),
    Case("attention interleaved", lambda: A(8, 2, rope_layout="interleaved", rope_base=100.0)),
    Case("attention no position", lambda: A(9, 3, position="none"), d_model=9),
    Case("attention wide values", lambda: A(8, 2, d_value=20)),
    Case("attention literal mask", lambda: A(8, 2, mask="literal"), NO_MASK),
    Case("attention literal mask moved", lambda: moved(A(8, 2, mask="literal")), NO_MASK),
    Case("attention straight-through mask", lambda: A(8, 2, mask="straight-through")),
    Case("attention straight-through moved", lambda: moved(A(8, 2, mask="straight-through"))),
    Case("attention soft mask", lambda: A(8, mask="soft", max_seq_len=64)),
    Case("attention soft mask moved", lambda: moved(A(8, 2, mask="soft", position="none"))),
    Case("attention soft mask window", lambda: moved(A(8, 2, mask="soft", window=3))),
    Case("attention value mask", lambda: A(8, 2, mask="value"), ZERO_A),
    Case("attention value mask moved", lambda: moved(A(8, 2, mask="value"))),
    Case("attention value mask window", lambda: A(8, 2, mask="value", window=2), ZERO_A),
    Case("attention value window moved", lambda: moved(A(8, 2, mask="value", window=2))),
    Case("attention oracle mask", lambda: Told(A(8, 2, mask="oracle"))),
    Case("ifa softmax", lambda: IFA(8)),
    Case("ifa softmax 2 of 5", lambda: IFA(8, 2, n_values=5, k=2)),
    Case("ifa softmax all of 3", lambda: IFA(8, n_values=3, k=3, d_retrieval=2)),
    Case("ifa softmax zero keys", lambda: IFA(8, key_init="zeros"), ZERO_KEYS),
    Case("ifa literal", lambda: IFA(8, 2, retrieval="literal"), NO_CHOICE),
    Case("ifa as printed", lambda: IFA(8, retrieval="literal", key_init="zeros"), NO_CHOICE),
    Case("ifa sigmoid", lambda: IFA(8, 2, n_values=4, k=2, retrieval="sigmoid")),
    Case("ifa sigmoid zero keys", lambda: IFA(8, retrieval="sigmoid", key_init="zeros"), ZERO_KEYS),
    Case("ifa straight-through", lambda: IFA(8, n_values=4, retrieval="straight-through")),
    Case(
        "ifa straight-through zero keys",
        lambda: IFA(8, retrieval="straight-through", key_init="zeros"),
        ZERO_KEYS,
    ),
    Case("ifa linear", lambda: IFA(8, 2, value_map="linear")),
    Case("ifa linear narrow", lambda: IFA(8, 2, value_map="linear", d_value=4)),
    Case("ifa linear literal", lambda: IFA(8, value_map="linear", retrieval="literal"), NO_CHOICE),
    Case("ifa no position", lambda: IFA(8, 2, position="none")),
    Case("ifa value mask", lambda: moved(IFA(8, 2, mask="value", window=3))),
    Case("ifa soft mask", lambda: moved(IFA(8, 2, mask="soft", retrieval="sigmoid"))),
    Case(
        "the paper's attention",
        lambda: IFA(8, mask="literal", retrieval="literal", key_init="zeros"),
        NO_CHOICE | NO_MASK,
    ),
    Case("ssd", lambda: SSD(8, d_state=4, chunk_len=4)),
    Case("ssd one chunk", lambda: SSD(8, 2, d_state=6)),
    Case("ssd chunks of one", lambda: SSD(8, 2, d_state=4, chunk_len=1)),
    Case("ssd groups", lambda: SSD(8, 4, d_state=4, n_groups=2, chunk_len=4)),
    Case(
        "ssd tiled groups",
        lambda: SSD(8, 4, d_state=4, n_groups=2, groups="tiled", chunk_len=3),
    ),
    Case("ssd interleaved", lambda: SSD(8, d_state=4, rope_layout="interleaved", chunk_len=4)),
    Case("ssd no position", lambda: SSD(8, 2, d_state=3, position="none", chunk_len=4)),
    Case("ssd as printed", lambda: SSD(8, 2, d_state=4, dt_init="paper", chunk_len=4)),
    Case("ssd no skip", lambda: SSD(8, 2, d_state=4, skip=False, chunk_len=4)),
    Case("ssd moved", lambda: moved(SSD(8, 2, d_state=4, chunk_len=4))),
]
