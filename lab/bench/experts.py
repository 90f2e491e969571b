"""Single-neuron experts, forward and backward: the lab's PEER and CDMoE against PEER-pytorch's."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from lab.bench.peak import measure_peak_mib
from lab.bench.ratio import Ratio, time_in_turns
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
"""Spare tokens that replace those whose choice of experts rounding could change."""


class PeerCDMoE(nn.Module):
    """CDMoE as one would write it with PEER-pytorch: its layer behind a shared MLP."""

    def __init__(self, shared: MLP, experts: nn.Module):
        super().__init__()
        self.shared, self.experts = shared, experts

    def forward(self, x: Tensor) -> Tensor:
        """Return the experts' sum plus φ(x)."""
        shared = self.shared(x)
        return self.experts(shared) + shared


def measure() -> list[Ratio]:
    """Time both, compare their peak memory, and check that their numbers agree.

    Inputs whose choice of experts rounding could change are left out.

    Raises:
        RuntimeError: where a value or gradient differs by more than 1e-5 of the largest.
    """
    ratios = []
    sizes = f"{TOKENS} tokens, d {D_MODEL}, {N_EXPERTS} experts, {HEADS} heads of {K}"
    for kind in ("PEER", "CDMoE"):
        theirs, ours = _build_both(kind)
        x = _keep_clear_choices(ours, torch.randn(1, TOKENS + SPARE, D_MODEL))
        error = _measure_difference(theirs, ours, x)
        if not error <= TOLERANCE:
            raise RuntimeError(f"{kind}: numbers differ by {error:.1e} of the largest")
        our_s, their_s = time_in_turns(
            partial(_run_both_passes, ours, x), partial(_run_both_passes, theirs, x), repeats=5
        )
        name = f"{kind} forward and backward, {sizes}"
        note = f"values and gradients within {error:.0e} of the largest"
        ratios.append(Ratio.of_costs(name, 1e3 * our_s, 1e3 * their_s, "ms", SPEED_TARGET, note))
        our_peak, their_peak = (measure_peak_mib(partial(_prepare, kind, side)) for side in (1, 0))
        name = f"{kind}: peak memory"
        ratios.append(Ratio.of_costs(name, our_peak, their_peak, "MiB", MEMORY_TARGET))
    return ratios


def _build_both(kind: str) -> tuple[nn.Module, PEER | CDMoE]:
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


def pair_parameters(
    ours: Mapping[str, Tensor], peer: Mapping[str, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Pair our tensor of each parameter, a weight or a gradient, with PEER-pytorch's."""
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


@torch.no_grad()
def _keep_clear_choices(layer: PEER | CDMoE, x: Tensor) -> Tensor:
    """Return the first TOKENS of x whose choice of experts rounding cannot change."""
    z = x if isinstance(layer, PEER) else layer.cross_domain(x)
    scores = product_topk(*layer.subkey_scores(z), layer.k + 1)[0]
    lead = scores[..., -2] - scores[..., -1]
    clear = (lead > 1e-6 * scores[..., 0].abs()).all(-1)
    kept = x[clear][:TOKENS]
    assert len(kept) == TOKENS
    return kept[None]


def _measure_difference(theirs: nn.Module, ours: nn.Module, x: Tensor) -> float:
    """Return the largest difference of values and gradients, relative to each tensor's largest."""
    results = []
    for layer in (ours, theirs):
        entered = x.clone().requires_grad_()
        y = layer(entered)
        y.backward(_make_direction(x))
        assert entered.grad is not None
        experts = layer.experts if isinstance(layer, PeerCDMoE) else layer
        grads = {name: p.grad for name, p in experts.named_parameters() if p.grad is not None}
        layer.zero_grad(set_to_none=True)
        results.append((y.detach(), entered.grad, grads))
    (our_y, our_x, our_grads), (y, of_x, grads) = results
    pairs = [(our_y, y), (our_x, of_x), *pair_parameters(our_grads, grads)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def _make_direction(x: Tensor) -> Tensor:
    return torch.linspace(-1, 1, x.shape[-1]).expand_as(x).contiguous()


def _run_both_passes(layer: nn.Module, x: Tensor) -> None:
    layer(x.detach().requires_grad_()).backward(_make_direction(x))
    layer.zero_grad(set_to_none=True)


def _prepare(kind: str, side: int) -> Callable[[], None]:
    """Return their (0) or our (1) call, after a first call has loaded the libraries."""
    layer, x = _build_both(kind)[side], torch.randn(1, TOKENS, D_MODEL)
    _run_both_passes(layer, x[:, :8])
    return partial(_run_both_passes, layer, x)
