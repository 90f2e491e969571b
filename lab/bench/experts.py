"""Single-neuron experts, forward and backward: the lab's PEER and CDMoE against PEER-pytorch's.

That both compute the same numbers is held by `tests/parity/test_peer.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from lab.bench.ratio import Contest, Ratio
from lab.layers.cdmoe import CDMoE
from lab.layers.mlp import MLP
from lab.layers.peer import PEER
from lab.layers.retrieval import RetrievedExperts
from lab.peers import load

TOKENS, D_MODEL = 4096, 256
N_EXPERTS, HEADS, K, D_RETRIEVAL = 16_384, 8, 16, 256
SPEED_TARGET, MEMORY_TARGET = 2.0, 4.0


class PeerCDMoE(nn.Module):
    """CDMoE as one would write it with PEER-pytorch: its layer behind a shared MLP."""

    def __init__(self, shared: MLP, experts: nn.Module):
        super().__init__()
        self.shared, self.experts = shared, experts

    def forward(self, x: Tensor) -> Tensor:
        """Return the experts' sum plus φ(x)."""
        shared = self.shared(x)
        return self.experts(shared) + shared


def measure() -> Iterator[Ratio]:
    """Time both, with the same weights and inputs, and compare their peak memory."""
    sizes = f"{TOKENS} tokens, d {D_MODEL}, {N_EXPERTS} experts, {HEADS} heads of {K}"
    for kind in ("PEER", "CDMoE"):
        ours, theirs = partial(_prepare, kind, 1), partial(_prepare, kind, 0)
        name = f"{kind} forward and backward, {sizes}"
        yield from Contest(name, ours, theirs, SPEED_TARGET, MEMORY_TARGET).measure(5)


def _prepare(kind: str, side: int) -> Callable[[], None]:
    """Return their (0) or our (1) call, after a first call has loaded the libraries."""
    torch.manual_seed(0)
    peer = load("PEER_pytorch.PEER").PEER(
        dim=D_MODEL,
        heads=HEADS,
        num_experts=N_EXPERTS,
        num_experts_per_head=K,
        non_competing_scores=False,
    )
    layer = PEER if kind == "PEER" else partial(CDMoE, activation="gelu")
    ours = layer(
        D_MODEL, n_experts=N_EXPERTS, n_retrieval_heads=HEADS, k=K, d_retrieval=D_RETRIEVAL
    )
    theirs = PeerCDMoE(ours.cross_domain, peer) if isinstance(ours, CDMoE) else peer
    take_weights(ours, peer)
    chosen, x = (theirs, ours)[side], torch.randn(1, TOKENS, D_MODEL)

    def run(given: Tensor) -> None:
        chosen(given.detach().requires_grad_()).sum().backward()
        chosen.zero_grad(set_to_none=True)

    run(x[:, :8])
    return lambda: run(x)


def pair_parameters(
    ours: Mapping[str, Tensor], peer: Mapping[str, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Contest our tensor of each parameter, a weight or a gradient, with PEER-pytorch's."""
    row_keys, column_keys = peer["keys"].unbind(2)
    return [
        (ours["query.weight"], peer["to_queries.0.weight"]),
        (ours["row_keys"], row_keys),
        (ours["column_keys"], column_keys),
        (ours["down"], peer["weight_down_embed.weight"]),
        (ours["up"], peer["weight_up_embed.weight"]),
    ]


@torch.no_grad()
def take_weights(ours: RetrievedExperts, peer: nn.Module) -> None:
    """Copy PEER-pytorch's weights into a layer of the lab's."""
    for mine, given in pair_parameters(
        dict(ours.named_parameters()), dict(peer.named_parameters())
    ):
        mine.copy_(given)
