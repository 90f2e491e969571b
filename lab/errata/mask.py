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
        printed="The equation rounds l; the listing calls masked_fill where padding · l == 0.",
        meant="A mask that learns: straight-through, soft (log σ(l)), or computed from the values.",
        printed_evidence=f"the gradient of l is {grad} in the listing, and exactly {rounded:g} "
        f"through round. Three training steps move the layer's weights by {moved:.1e}, and its "
        f"output is then off that of plain causal attention by {apart:.1e}",
        meant_evidence=f"the largest entry of the soft mask's gradient is {alive:.1e}",
        printed_option="--option A.mask=literal (also I)",
        meant_option="--option A.mask=soft, =straight-through or =value (also I)",
        fails=not bias.requires_grad and grad is None and rounded == 0 and apart < 1e-12 < moved,
        holds=alive > 1e-4,
        note="The listing does not even round. In the equation's product, l gets a gradient of "
        "zero instead of none, so weight decay does move it.",
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
        printed="The text multiplies softmax(QKᵀ) by the mask; the listing adds the mask before "
        "the softmax.",
        meant="The mask is added before the softmax.",
        printed_evidence=f"a row sums to {sums[0]:.2f}. The last token moves earlier outputs by "
        f"{leaks[0]:.1e}, so the layer is not causal",
        meant_evidence=f"rows sum to one, to {abs(1 - sums[1]):.0e}. The last token moves earlier "
        f"outputs by {leaks[1]:.1e}",
        printed_option="--model lab.layers.printed:MaskAfterSoftmaxAttention",
        meant_option="--option A.mask=… (also I): every mask is added before the softmax",
        fails=sums[0] < 0.5 and leaks[0] > 1e-3,
        holds=abs(1 - sums[1]) < 1e-12 and leaks[1] < 1e-12,
        note="The softmax is normalised over all keys, also those that the mask removes "
        "afterwards, and later ones. The listing's softmax has 1/√d, the text's has not. The "
        "listing's mask holds 0 and −∞; multiplied, it would give 0 and −∞.",
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
        printed="The first query is at key 0, padding is −∞, and the table is cut by l[:, :T].",
        meant="The last query is at the last key, rows without a key are guarded, and a sequence "
        "longer than the table is a clear error.",
        printed_evidence=f"one query of 6 keys sees only {seen}. Two tokens of left padding make "
        f"{empty} rows NaN. 12 tokens with a table of 9 raise {long}",
        meant_evidence=f"the sixth token decoded by itself is off the whole by {apart:.1e}, and a "
        f"row padded on the left off one without padding by {alone:.1e}. Too long a sequence "
        f"raises {said}",
        printed_option=None,
        meant_option="prefill, step and keep of A and I; --option A.max_seq_len=…",
        fails=seen == [0] and empty == 2 and long is not None,
        holds=apart < 1e-12 and alone < 1e-12 and said is not None,
        note="The static mask has no table, so it has only the first two faults.",
    )
