"""Single-neuron experts, forward and backward: the lab's PEER and CDMoE against PEER-pytorch's."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from lab.bench.peak import peak_mib
from lab.bench.ratio import Ratio, seconds_each
from lab.layers.cdmoe import CDMoE
from lab.layers.mlp import MLP
from lab.layers.peer import PEER
from lab.layers.retrieval import RetrievedExperts
from lab.ops.product_keys import product_topk
from lab.peers import load

TOKENS, D_MODEL = 4096, 256
N_EXPERTS, HEADS, K, D_RETRIEVAL = 16_384, 8, 16, 256
SPEED_TARGET, MEMORY_TARGET, TOLERANCE = 2.0, 4.0, 1e-5
SPARE = 256
"""Tokens drawn beyond those used, to leave out the ones that rounding could turn."""


class PeerCDMoE(nn.Module):
    """CDMoE as one would write it with PEER-pytorch: its layer behind a shared MLP."""

    def __init__(self, shared: MLP, experts: nn.Module):
        super().__init__()
        self.shared, self.experts = shared, experts

    def forward(self, x: Tensor) -> Tensor:
        """Return the experts' sum plus φ(x)."""
        shared = self.shared(x)
        return self.experts(shared) + shared


def experts() -> list[Ratio]:
    """Time both, compare their peak memory, and hold their numbers to each other.

    Inputs whose choice of experts rounding could turn are left out.

    Raises:
        RuntimeError: where a value or gradient differs by more than 1e-5 of the largest.
    """
    ratios = []
    sizes = f"{TOKENS} tokens, d {D_MODEL}, {N_EXPERTS} experts, {HEADS} heads of {K}"
    for kind in ("PEER", "CDMoE"):
        theirs, ours = _both(kind)
        x = _clear_choices(ours, torch.randn(1, TOKENS + SPARE, D_MODEL))
        error = _largest_difference(theirs, ours, x)
        if not error <= TOLERANCE:
            raise RuntimeError(f"{kind}: numbers differ by {error:.1e} of the largest")
        our_s, their_s = seconds_each(
            partial(_forward_backward, ours, x), partial(_forward_backward, theirs, x), repeats=5
        )
        name = f"{kind} forward and backward, {sizes}"
        note = f"values and gradients within {error:.0e} of the largest"
        ratios.append(
            Ratio(name, 1e3 * our_s, 1e3 * their_s, "ms", their_s / our_s, SPEED_TARGET, note)
        )
        our_peak, their_peak = (peak_mib(partial(_prepare, kind, side)) for side in (1, 0))
        ratios.append(
            Ratio(
                f"{kind}: peak memory",
                our_peak,
                their_peak,
                "MiB",
                their_peak / our_peak,
                MEMORY_TARGET,
            )
        )
    return ratios


def _both(kind: str) -> tuple[nn.Module, PEER | CDMoE]:
    """Return their layer, and ours with its weights."""
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
    return theirs, ours


def paired(ours: Mapping[str, Tensor], peer: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return our and PEER-pytorch's tensor of each parameter, from weights or gradients by name."""
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
    for mine, given in paired(dict(ours.named_parameters()), dict(peer.named_parameters())):
        mine.copy_(given)


@torch.no_grad()
def _clear_choices(layer: PEER | CDMoE, x: Tensor) -> Tensor:
    """Return the first TOKENS of x whose k-th best expert leads the next by more than rounding."""
    z = x if isinstance(layer, PEER) else layer.cross_domain(x)
    scores = product_topk(*layer.subkey_scores(z), layer.k + 1)[0]
    lead = scores[..., -2] - scores[..., -1]
    clear = (lead > 1e-6 * scores[..., 0].abs()).all(-1)
    kept = x[clear][:TOKENS]
    assert len(kept) == TOKENS
    return kept[None]


def _largest_difference(theirs: nn.Module, ours: nn.Module, x: Tensor) -> float:
    """Return how far values and gradients differ, over the largest of each tensor."""
    results = []
    for layer in (ours, theirs):
        entered = x.clone().requires_grad_()
        y = layer(entered)
        y.backward(_direction(x))
        assert entered.grad is not None
        experts = layer.experts if isinstance(layer, PeerCDMoE) else layer
        grads = {name: p.grad for name, p in experts.named_parameters() if p.grad is not None}
        layer.zero_grad(set_to_none=True)
        results.append((y.detach(), entered.grad, grads))
    (our_y, our_x, our_grads), (y, of_x, grads) = results
    pairs = [(our_y, y), (our_x, of_x), *paired(our_grads, grads)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def _direction(x: Tensor) -> Tensor:
    return torch.linspace(-1, 1, x.shape[-1]).expand_as(x).contiguous()


def _forward_backward(layer: nn.Module, x: Tensor) -> None:
    layer(x.detach().requires_grad_()).backward(_direction(x))
    layer.zero_grad(set_to_none=True)


def _prepare(kind: str, side: int) -> Callable[[], None]:
    """Return their (0) or our (1) call; the libraries it loads are behind it."""
    layer, x = _both(kind)[side], torch.randn(1, TOKENS, D_MODEL)
    _forward_backward(layer, x[:, :8])
    return partial(_forward_backward, layer, x)
