"""D: the dynamic mask."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lab.errata.erratum import Erratum, catch_refusal
from lab.errata.probes import build_seeded, compute_gradients, draw_normal, measure_gap
from lab.layers.attention import Attention
from lab.layers.printed.attention import MaskAfterSoftmaxAttention, PlainAttention


def build_printed_mask(
    padding: Float[Tensor, "b s"], table: Float[Tensor, "h max_s"], n_queries: int, n_keys: int
) -> Float[Tensor, "b h t s"]:
    """Return the bias of the mask listing, from the padding (ones are tokens) and the table l.

    −∞ above the diagonal and where padding · l is zero; the first query stands at the first key.
    """
    causal = torch.zeros(n_queries, n_keys, dtype=table.dtype).masked_fill(
        torch.ones(n_queries, n_keys, dtype=torch.bool).triu(1), -torch.inf
    )
    total = causal + padding[:, None, None, :] * table[None, :, None, : padding.shape[1]]
    return causal.expand_as(total).masked_fill(total == 0, -torch.inf)


def d1() -> Erratum:
    """No gradient reaches the mask."""
    x, target = draw_normal(2, 20, 8), draw_normal(2, 20, 8, seed=1)
    table = nn.Parameter(torch.ones(2, 20).double())
    bias = build_printed_mask(torch.ones(2, 20).double(), table, 20, 20)
    rounded = (
        torch.autograd.grad((table.round() * draw_normal(2, 20)).sum(), table)[0].abs().max().item()
    )

    def train(layer: Attention) -> Tensor:
        for _ in range(3):
            layer.zero_grad()
            (layer(x) - target).square().mean().backward()
            with torch.no_grad():
                for parameter in layer.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
        return layer(x)

    masked = build_seeded(lambda: Attention(8, 2, mask="literal", max_seq_len=20))
    plain = build_seeded(lambda: Attention(8, 2))
    plain.load_state_dict({n: p for n, p in masked.state_dict().items() if "mask" not in n})
    start = masked.out.weight.detach().clone()
    apart = measure_gap(train(masked), train(plain))
    moved = (masked.out.weight - start).abs().max().item()
    grad = compute_gradients(masked, x)["mask.l"]
    soft = build_seeded(lambda: Attention(8, 2, mask="soft", max_seq_len=20))
    alive = compute_gradients(soft, x)["mask.l"] or 0.0
    return Erratum(
        row="D1",
        where="eq. dynamic_mask, lst:dynamic_mask",
        printed="round(l), and masked_fill where padding · l == 0",
        meant="a mask that learns: straight-through, soft log σ(l), or from the values",
        printed_evidence=f"l's gradient is {grad} by the listing and exactly {rounded:g} through "
        f"round; after three steps, which move "
        f"its weights by {moved:.1e}, the layer is off plain causal attention by {apart:.1e}",
        meant_evidence=f"soft: l's largest gradient is {alive:.1e}",
        printed_option="--option A.mask=literal (also I)",
        meant_option="--option A.mask=soft, =straight-through or =value (also I)",
        fails=not bias.requires_grad and grad is None and rounded == 0 and apart < 1e-12 < moved,
        holds=alive > 1e-4,
        note="the listing does not even round; by the equation's product l gets a gradient of "
        "zero, not none, and then weight decay does move it",
    )


def d2() -> Erratum:
    """A mask multiplied after the softmax."""
    x = draw_normal(1, 12, 8)
    later = x.clone()
    later[:, -1] = 8 * draw_normal(8, seed=1)
    sums, leaks = [], []
    for cls in (MaskAfterSoftmaxAttention, PlainAttention):
        layer = build_seeded(lambda cls=cls: cls(8, 2))
        sums.append(layer.matrix(x).sum(-1).min().item())
        leaks.append(measure_gap(layer(later)[:, :-1], layer(x)[:, :-1]))
    return Erratum(
        row="D2",
        where="M = L ∘ A after eq. dynamic_mask, against lst:innerfuncattn",
        printed="the text multiplies softmax(QKᵀ) by the mask, the listing adds it before",
        meant="added before the softmax",
        printed_evidence=f"a row sums to {sums[0]:.2f}; the last token moves earlier outputs by "
        f"{leaks[0]:.1e}: not causal",
        meant_evidence=f"rows sum to one to {abs(1 - sums[1]):.0e}; they move by {leaks[1]:.1e}",
        printed_option="--model lab.layers.printed:MaskAfterSoftmaxAttention",
        meant_option="--option A.mask=… (also I): every mask is added before the softmax",
        fails=sums[0] < 0.5 and leaks[0] > 1e-3,
        holds=abs(1 - sums[1]) < 1e-12 and leaks[1] < 1e-12,
        note="the softmax divides by keys that the mask removes afterwards, later ones too; the "
        "text's softmax has no 1/√d, the listing's has. With the listing's own 0 and −∞ for L the "
        "product would be 0 and −∞",
    )


def d3() -> Erratum:
    """One query, left padding, a long sequence."""
    ones, table = torch.ones(1, 6).double(), torch.ones(2, 9).double()
    seen = (build_printed_mask(ones, table, 1, 6)[0, 0, 0] == 0).nonzero().flatten().tolist()
    padding = torch.tensor([[0.0, 0, 1, 1, 1, 1]]).double()
    pattern = build_printed_mask(padding, table, 6, 6).softmax(-1)
    empty = int(pattern[0, 0].isnan().any(-1).sum())
    long = catch_refusal(
        RuntimeError, lambda: build_printed_mask(torch.ones(1, 12).double(), table, 12, 12)
    )

    layer = build_seeded(lambda: Attention(8, 2, mask="literal", max_seq_len=9))
    x = draw_normal(1, 6, 8)
    _, state = layer.prefill(x[:, :5])
    last = layer.step(x[:, 5], state)[0]
    apart = measure_gap(last, layer(x)[:, 5])
    alone = measure_gap(layer.prefill(x, keep=padding.bool())[0][:, 2:], layer(x[:, 2:]))
    said = catch_refusal(ValueError, lambda: layer(draw_normal(1, 12, 8)))
    return Erratum(
        row="D3",
        where="lst:static_mask, lst:dynamic_mask",
        printed="the diagonal starts at key 0; −∞ for padding; l[:, :T]",
        meant="the last query stands at the last key; empty rows guarded; an error in words",
        printed_evidence=f"one query of 6 keys sees {seen}; 2 tokens of left padding leave {empty} "
        f"rows NaN; 12 tokens on a table of 9: {long}",
        meant_evidence=f"the sixth token by itself is off the whole by {apart:.1e}, a row padded "
        f"on the left off one that is not by {alone:.1e}; {said}",
        printed_option=None,
        meant_option="prefill, step and keep of A and I; --option A.max_seq_len=…",
        fails=seen == [0] and empty == 2 and long is not None,
        holds=apart < 1e-12 and alone < 1e-12 and said is not None,
        note="the static mask has no table, so it shares the first two faults alone",
    )
