"""Interpolated n-grams: how many bits the next token takes if only the last few are read.

    p_k(w | c) = (N(c w) + M(c) p_{k−1}(w | c′)) / (N(c) + M(c)),   p_0 = 1/V

c is the last k tokens, c′ those without the first, N counts in training, and M(c) is the number of
different tokens that followed c there. A context that never occurred leaves p_{k−1} as it is.

Source: Witten and Bell 1991, as interpolated in Chen and Goodman 1999, § 2.
"""

from dataclasses import dataclass

from tasks.base import Batch
from tasks.lazy import Tensor, torch
from tasks.shortcuts import count_each, encode_contexts, look_up


@dataclass(frozen=True)
class _Counts:
    """How often contexts of one length, and tokens after them, occur; codes are in order."""

    grams: tuple[Tensor, Tensor]
    contexts: tuple[Tensor, Tensor]
    kinds: Tensor


@dataclass(frozen=True)
class NGram:
    """The counts of contexts of 0 … n − 1 tokens, int64.

    Attributes:
        vocab_size: V; Vⁿ must be below 2⁶³.
    """

    vocab_size: int
    counts: tuple[_Counts, ...]

    @classmethod
    def count(cls, text: Tensor, n: int, vocab_size: int) -> "NGram":
        """Count the n-grams of a text, int64 [t] with t ≥ n, and all that are shorter."""
        inputs, counts = text[None, :-1], []
        for k in range(n):
            targets = text[None, max(k, 1) :]
            grams = count_each(encode_contexts(inputs, k, vocab_size) * vocab_size + targets)
            begins = grams[0] // vocab_size
            contexts, kinds = begins.unique_consecutive(return_counts=True)
            ends = kinds.cumsum(0)
            totals = grams[1].cumsum(0)[ends - 1].diff(prepend=torch.zeros_like(ends[:1]))
            counts.append(_Counts(grams, (contexts, totals), kinds))
        return cls(vocab_size, tuple(counts))

    def measure_bits(self, batch: Batch) -> Tensor:
        """Return the bits that each target takes, float64 [b t]; NaN where none is scored."""
        targets = batch.targets.where(batch.scored, 0)
        share = torch.full_like(targets, 1 / self.vocab_size, dtype=torch.float64)
        for k, counts in enumerate(self.counts):
            context = encode_contexts(batch.inputs, k, self.vocab_size)
            shorter = share[:, max(0, k - 1) :]
            gram = context * self.vocab_size + targets[:, max(0, k - 1) :]
            total = look_up(counts.contexts, context)
            kinds = look_up((counts.contexts[0], counts.kinds), context)
            times = look_up(counts.grams, gram).clamp(min=0)
            longer = (times + kinds * shorter) / (total + kinds)
            shorter.copy_(longer.where(total > 0, shorter))
        return (-share.log2()).masked_fill(~batch.scored, torch.nan)
