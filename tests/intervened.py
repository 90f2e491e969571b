"""Small models in fp64 to intervene in: every mixer, every layer of experts, and tokens."""

import pytest
import torch
from torch import Tensor, nn

from lab.layers.attention import Attention
from lab.layers.cdmoe import CDMoE
from lab.layers.inner_function import InnerFunctionAttention
from lab.layers.peer import PEER
from lab.layers.routed import RoutedMoE, SharedExpertMoE
from lab.models import Block, LanguageModel
from tests.case import move
from tests.ssd_variants import moved as ssd_moved

TOKENS = torch.randint(8, (3, 9), generator=torch.Generator().manual_seed(0))


class UserMixer(nn.Module):
    """A mixer that is not the lab's: each token takes half of the one before it, and itself."""

    def __init__(self, d_model: int = 12, wrong: float = 0.0):
        super().__init__()
        self.line = nn.Linear(d_model, d_model, bias=False)
        self.wrong = wrong

    def forward(self, x):
        y = self.line(x)
        return y + 0.5 * torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], 1) + x

    def matrix(self, x):
        t = x.shape[1]
        one = torch.eye(t, dtype=x.dtype) + (0.5 + self.wrong) * torch.eye(t, dtype=x.dtype).roll(
            1, 0
        ).tril(-1)
        return one.expand(len(x), 1, t, t)

    def values(self, x):
        return self.line(x)[:, None]

    def project(self, x, z):
        return z[:, 0] + x


class Opaque(nn.Module):
    """A mixer that offers no matrix."""

    def forward(self, x):
        return x


def stack(*mixers: nn.Module | None, mlps: tuple[nn.Module, ...] = ()) -> LanguageModel:
    """Return a model in fp64 of these layers, one block each."""
    pairs = [(mixer, None) for mixer in mixers] + [(None, mlp) for mlp in mlps]
    blocks = [Block(12, mixer, mlp) for mixer, mlp in pairs]
    return LanguageModel(blocks, vocab_size=8, d_model=12).double().eval()


def attention(cls: type[Attention] = Attention, **options) -> Attention:
    torch.manual_seed(1)
    return move(cls(12, 2, **options)).double()


ATTENTIONS = {
    "plain": lambda: attention(),
    "grouped": lambda: attention(n_kv_heads=1, position="none"),
    "soft": lambda: attention(mask="soft", max_seq_len=16),
    "value": lambda: attention(mask="value", d_value=8),
    "window": lambda: attention(mask="value", window=3),
    "ifa": lambda: attention(InnerFunctionAttention, n_values=4, k=2, mask="value"),
}
MIXERS = {
    **ATTENTIONS,
    "ssd": lambda: ssd_moved(),
    "ssd conv norm": lambda: ssd_moved(position="conv", gate="norm"),
    "user": lambda: UserMixer().double(),
}
EXPERTS = {
    "cdmoe": lambda **options: CDMoE(12, n_experts=12, k=3, n_retrieval_heads=2, **options),
    "peer": lambda **options: PEER(12, n_experts=12, k=3, n_retrieval_heads=2, **options),
    "routed": lambda **options: RoutedMoE(12, d_ff=5, gated=True, normalise=True, **options),
    "shared": lambda **options: SharedExpertMoE(12, d_ff=5, k=2, **options),
}


def experts(kind: str, seed: int = 2, **options) -> nn.Module:
    torch.manual_seed(seed)
    return move(EXPERTS[kind](**options)).double()


def mixed(model: LanguageModel, layer: int = 0) -> Tensor:
    """Return what a layer's mixer gives for the tokens."""
    names = [f"blocks.{layer}.hook_resid_{x}" for x in ("pre", "mid")]
    _, cache = model.run_with_cache(TOKENS, names)
    return cache[names[1]] - cache[names[0]]


def given(model: LanguageModel) -> Tensor:
    """Return what the first mixer is given."""
    block = model.blocks[0]
    assert isinstance(block, Block)
    assert block.norm_mixer is not None
    return block.norm_mixer(model.embed(TOKENS))


every_attention = pytest.mark.parametrize("mixer", ATTENTIONS.values(), ids=ATTENTIONS)
every_mixer = pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
every_experts = pytest.mark.parametrize("kind", EXPERTS)
