"""Joint recall: keys have another value in each context; each is asked in each context."""

from dataclasses import dataclass
from math import isqrt
from typing import Any, ClassVar

from tasks import counter
from tasks.base import IGNORE, Batch, Links, Predictor, Preset, Task
from tasks.bounds import MAX_SEQ_LEN, MAX_VOCAB_SIZE, check_range, option
from tasks.lazy import Tensor, torch
from tasks.shortcuts import copy_first_match, copy_latest_match, look_back

CONTEXT, KEY, VALUE, SEPARATOR, QUERY, ANSWER, FILLER = range(7)
FIRST_TOKEN = 2
"""Smaller tokens are 0, the filler, and 1, the separator."""


@dataclass(frozen=True, kw_only=True)
class JointRecall(Task):
    """Recall the value that a key has in a context.

    A row is C blocks, each a context and then K pairs of a key and its value there; a separator;
    and the same blocks in another order, with their keys in another order. Every context has the
    same K keys. Tokens 2 … V − 1 are three groups of ⌊(V − 2)/3⌋: contexts, keys, values. Contexts
    and keys of a row are distinct; values are independent and uniform. Token 0 fills the row.

    With two contexts, two keys and V = 14, row 0 of seed 0 is

    >>> batch = JointRecall(seq_len=21, n_contexts=2, n_keys=2, vocab_size=14).batch(size=1)
    >>> batch.inputs[:, :11].tolist()
    [[4, 7, 13, 8, 13, 5, 8, 12, 7, 11, 1]]
    >>> batch.inputs[:, 11:].tolist()
    [[5, 8, 12, 7, 11, 4, 7, 13, 8, 13]]
    >>> batch.targets[:, 11:].tolist()
    [[-100, 12, -100, 11, -100, -100, 13, -100, 13, -100]]

    In context 4 keys 7 and 8 have the value 13, in context 5 key 7 has 11 and key 8 has 12.

    Scored: the keys after the separator. Chance: a guess among the values, 1/⌊(V − 2)/3⌋.

    Links, int64 [b q] in the order of the queries: query_pos, key_pos (the same key in the same
    context), value_pos, context_pos (that context), distance (query_pos − value_pos).

    Raises:
        ValueError: for an option out of bounds.

    Source: Zhan et al. 2025 (Overcoming Long-Context Limitations of State-Space Models via
    Context-Dependent Sparse Attention), multi-query joint recall, as its published generator draws
    it: 5 to 16 contexts and 5 to 16 keys, each pair of numbers as often, and 16 values.

    Departs: where contexts or keys are fewer than there are tokens, they are a random choice of
    them, not the first; rows have no first token.
    """

    name: ClassVar[str] = "joint_recall"
    role_names: ClassVar[tuple[str, ...]] = (
        "context",
        "key",
        "value",
        "separator",
        "query",
        "answer",
        "filler",
    )
    separates: ClassVar[str] = "recall by context and key: attention that chooses or a state"
    grows: ClassVar[tuple[str, ...]] = ("seq_len", "n_contexts", "n_keys")
    presets: ClassVar[dict[str, Preset]] = {
        "small": Preset(
            {"seq_len": 44, "n_contexts": 3, "n_keys": 3, "vocab_size": 26},
            "LOG.md, small presets",
            seconds=74,
        ),
        "published": Preset(
            {
                "seq_len": 1152,
                "n_contexts": tuple(range(5, 17)),
                "n_keys": tuple(range(5, 17)),
                "vocab_size": 50,
            },
            "Zhan et al. 2025, the dataset of its synthetic experiments",
        ),
    }

    seq_len: int = option(256, "tokens per row")
    n_contexts: int = option(8, "contexts per row")
    n_keys: int = option(6, "keys per row, each with a value in every context")
    vocab_size: int = option(
        50, "size of the vocabulary; from token 2 on a third each are contexts, keys and values"
    )

    def validate(self) -> None:
        """Validate the options."""
        check_range("seq_len", self.seq_len, 21, MAX_SEQ_LEN, "two contexts with two keys")
        most = ((self.seq_len - 1) // 4 - 1) // 2
        check_range("n_keys", self.n_keys, 2, most, "room for two contexts")
        most = (self.seq_len - 1) // (2 * self.block)
        why = "(seq_len − 1) / (4·n_keys + 2)"
        check_range("n_contexts", self.n_contexts, 2, most, why)
        least = FIRST_TOKEN + 3 * max(self.n_contexts, self.n_keys)
        why = "a third of them contexts, a third keys"
        check_range("vocab_size", self.vocab_size, least, MAX_VOCAB_SIZE, why)

    def _scale(self, name: str, value: Any, seq_len: int) -> Any:
        """Return the value of an option at another row length; there are C·K pairs."""
        if name == "seq_len":
            return seq_len
        return max(2, isqrt(value**2 * seq_len // self.seq_len))

    @property
    def block(self) -> int:
        """Tokens of a context and its pairs."""
        return 2 * self.n_keys + 1

    @property
    def group(self) -> int:
        """Number of context tokens, of key tokens, and of value tokens."""
        return (self.vocab_size - FIRST_TOKEN) // 3

    def generate(self, split: str, numbers: Tensor, seed: int) -> Batch:
        """Build the rows with these numbers (int64 [b]) on the device of `numbers`."""
        c, k, group, device = self.n_contexts, self.n_keys, self.group, numbers.device
        rounds = counter.count_rounds(group)
        sizes = [rounds, rounds, c * k, c, c, c * k, c * k]
        word = self.draw_words(split, numbers, seed, sum(sizes)).split(sizes, 1)
        contexts = FIRST_TOKEN + counter.draw_distinct(word[0], c, group)
        keys = FIRST_TOKEN + group + counter.draw_distinct(word[1], k, group)
        values = FIRST_TOKEN + 2 * group + counter.draw_below(word[2], group)

        # Pair p is context p // k with key p % k; of each half, the pairs in their order [b c k].
        order = []
        for context, key in ((word[3], word[5]), (word[4], word[6])):
            inner = key.unflatten(1, (c, k)).argsort(dim=2, stable=True)
            order.append(counter.draw_order(context)[:, :, None] * k + inner)
        pair = torch.cat(order, 1)
        tokens = (contexts[:, :, None].expand(-1, -1, k), keys[:, None].expand(-1, c, -1))
        context, key = (token.flatten(1).gather(1, pair.flatten(1)) for token in tokens)
        value = values.gather(1, pair.flatten(1))
        blocks = torch.stack([key, value], 2).unflatten(1, (2 * c, k)).flatten(2)
        blocks = torch.cat([context.unflatten(1, (2 * c, k))[:, :, :1], blocks], 2).flatten(1)

        half, t = c * self.block, self.seq_len
        separator = torch.ones_like(blocks[:, :1])
        inputs = torch.cat([blocks[:, :half], separator, blocks[:, half:]], 1)
        inputs = torch.nn.functional.pad(inputs, (0, t - 2 * half - 1))
        query = torch.arange(half + 1, 2 * half + 1, device=device).view(c, -1)[:, 1::2].flatten()
        targets = torch.full_like(inputs, IGNORE)
        targets[:, query] = inputs[:, query + 1]
        role = ([CONTEXT] + [KEY, VALUE] * k) * c + [SEPARATOR]
        role += ([CONTEXT] + [QUERY, ANSWER] * k) * c + [FILLER] * (t - 2 * half - 1)
        roles = torch.tensor(role, device=device).expand_as(inputs)

        def links() -> dict[str, Tensor]:
            stored, asked = (some.flatten(1) for some in order)
            place = stored.argsort(1).gather(1, asked)
            key_pos = place // k * self.block + 1 + 2 * (place % k)
            query_pos = query.expand_as(key_pos)
            return {
                "query_pos": query_pos,
                "key_pos": key_pos,
                "value_pos": key_pos + 1,
                "context_pos": place // k * self.block,
                "distance": query_pos - key_pos - 1,
            }

        return Batch(inputs, targets, roles, Links(links))

    def oracle(self, batch: Batch) -> Tensor:
        """Return the value that was stored for each key in its context."""
        answers = torch.full_like(batch.inputs, IGNORE)
        for row, answer in zip(batch.inputs.tolist(), answers, strict=True):
            stored: dict[tuple[int, int], int] = {}
            context = 0
            for position, token in enumerate(row):
                kind = (token - FIRST_TOKEN) // self.group
                if kind == 0:
                    context = token
                elif kind == 1 and (context, token) in stored:
                    answer[position] = stored[context, token]
                elif kind == 1:
                    stored[context, token] = row[position + 1]
        return answers

    @property
    def chance(self) -> float:
        """The accuracy of a guess among the values."""
        return 1 / self.group

    def shortcuts(self) -> dict[str, Predictor]:
        """Return predictors that look right without binding key and context.

        "first key" gives the first value of the context, 1/K and what is right by chance: .22 at
        the defaults, .42 at "small". "first match" copies what first followed the key, in whatever
        context, 1/C and chance: .18 and .42. "most recent match" copies what last followed it,
        which is right only by chance after the first context: .08 and .22. "position only" is the
        i-th stored value at the i-th query: 1/(C·K) and chance. A bigram table is near chance.
        """
        half = self.n_contexts * self.block
        return {
            "most recent match": copy_latest_match,
            "first match": copy_first_match,
            "first key": self._copy_from_context,
            "position only": look_back(half),
        }

    def _copy_from_context(self, batch: Batch) -> Tensor:
        """Return the first value that was stored in the context that is asked for."""
        answers = torch.full_like(batch.inputs, IGNORE)
        half = self.n_contexts * self.block
        for row, answer in zip(batch.inputs.tolist(), answers, strict=True):
            stored = {row[p]: row[p + 2] for p in range(0, half, self.block)}
            for p in range(half + 1, 2 * half + 1, self.block):
                answer[p : p + self.block] = stored[row[p]]
        return answers
