"""Memorising: facts that are the same in every row; what is the value of each?"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from tasks import counter
from tasks.base import IGNORE, Batch, Links, Predictor, Preset, Task
from tasks.bounds import MAX_SEQ_LEN, MAX_VOCAB_SIZE, check_range, option
from tasks.lazy import Tensor, torch
from tasks.shortcuts import look_back, look_up, tabulate_most_frequent

INSERT = 0
KEY, QUERY, PADDING = range(3)
MAX_FACTS = 2**20
MASK = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class Memorize(Task):
    """Recall the values of facts that no row shows: they must be memorised in training.

    Fact f = 0 … F − 1 has one of the values V/2 … V − 1, drawn from the batch's seed: training and
    test ask for the same F·log₂(V/2) bits, 28,672 by default. Its key is the number f in base
    V/2 − 1, in as many digits as the largest needs, the highest first; digit 0 is token 1.

    A row is slots of a key and the insert token 0, each for a fact drawn at random; the target
    at the insert token is the fact's value. Tokens left over at the end are 0.

    With T = 9, 16 facts and V = 10, row 0 of seed 0 is

    >>> batch = Memorize(seq_len=9, n_facts=16, vocab_size=10).batch(size=1)
    >>> batch.inputs.tolist()
    [[4, 1, 0, 3, 4, 0, 3, 2, 0]]
    >>> batch.targets.tolist()
    [[-100, -100, 8, -100, -100, 8, -100, -100, 9]]
    >>> batch.links["fact"].tolist()
    [[12, 11, 9]]

    In base 4 the facts are 30, 23 and 21: tokens 4 1, 3 4 and 3 2. The first two have value 8.

    Scored: the insert tokens behind a key. Chance: 2/V.

    Links, int64 [b q]: query_pos, key_pos (the first digit of the fact's key), fact; and map [b 1],
    the 64 bits of the key that values are drawn by: the value of fact f is V/2 + ⌊w·V/2 / 2³²⌋
    with w the low half of word 2²⁴·f of splitmix64 seeded with it.

    Raises:
        ValueError: for an option out of bounds.

    Source: Poli et al. 2024 (Mechanistic Design and Scaling of Hybrid Architectures), the task
    "memorization" of MAD; Allen-Zhu and Li 2024 (Physics of Language Models, part 3.3) for bits per
    parameter, at most 2 in theirs.

    Departs: keys have several tokens, so that the number of facts does not determine the size of
    the embedding.
    """

    name: ClassVar[str] = "memorize"
    role_names: ClassVar[tuple[str, ...]] = ("key", "query", "padding")
    separates: ClassVar[str] = "facts per parameter; CDMoE retrieval, expert collapse"
    grows: ClassVar[tuple[str, ...]] = ()
    why_fixed: ClassVar[str] = "its facts are asked one by one, in rows of any length"
    presets: ClassVar[dict[str, Preset]] = {
        "small": Preset(
            {"seq_len": 48, "n_facts": 256, "vocab_size": 64},
            "LOG.md, small presets",
            seconds=62,
        ),
        "published": Preset(
            {"seq_len": 32, "n_facts": 127, "vocab_size": 256},
            "Poli et al. 2024 (MAD), its baseline of memorization: keys of one token",
        ),
    }

    seq_len: int = option(256, "tokens per row")
    n_facts: int = option(2**12, "number of facts")
    vocab_size: int = option(256, "size of the vocabulary; the upper half is for values")

    def validate(self) -> None:
        """Validate the options."""
        check_range("n_facts", self.n_facts, 1, MAX_FACTS)
        check_range("vocab_size", self.vocab_size, 6, MAX_VOCAB_SIZE)
        if self.vocab_size % 2:
            raise ValueError(f"vocab_size={self.vocab_size}: must be even, half are values")
        slot = self.key_len + 1
        check_range("seq_len", self.seq_len, slot, MAX_SEQ_LEN, f"a fact takes {slot} tokens")

    @property
    def n_values(self) -> int:
        """The number of values V/2."""
        return self.vocab_size // 2

    @property
    def base(self) -> int:
        """The number of digits V/2 − 1."""
        return self.n_values - 1

    @property
    def key_len(self) -> int:
        """The number of tokens of a key."""
        length = 1
        while self.base**length < self.n_facts:
            length += 1
        return length

    def generate(self, split: str, numbers: Tensor, seed: int) -> Batch:
        """Build the rows with these numbers (int64 [b]) on the device of `numbers`."""
        slot, device = self.key_len + 1, numbers.device
        n_slots = self.seq_len // slot
        fact = counter.draw_below(self.draw_words(split, numbers, seed, n_slots), self.n_facts)
        key = counter.derive_key(f"{self.name} map", seed)

        inputs = torch.full((len(numbers), self.seq_len), INSERT, device=device)
        targets = torch.full_like(inputs, IGNORE)
        used, rest = n_slots * slot, fact
        for place in reversed(range(self.key_len)):
            inputs[:, place:used:slot] = rest % self.base + 1
            rest = rest // self.base
        targets[:, self.key_len : used : slot] = self._draw_values(key, fact)
        roles = torch.full((self.seq_len,), KEY, device=device)
        roles[self.key_len : used : slot], roles[used:] = QUERY, PADDING
        links = partial(self._make_links, fact, key)
        return Batch(inputs, targets, roles.expand_as(inputs), Links(links))

    def _make_links(self, fact: Tensor, key: int) -> dict[str, Tensor]:
        """Link each query to the fact that it asks for."""
        first = torch.arange(fact.shape[1], device=fact.device) * (self.key_len + 1)
        signed = ((key + 2**63) & MASK) - 2**63
        return {
            "query_pos": (first + self.key_len).expand_as(fact),
            "key_pos": first.expand_as(fact),
            "fact": fact,
            "map": torch.full((len(fact), 1), signed, device=fact.device),
        }

    def _draw_values(self, key: int, fact: Tensor) -> Tensor:
        """Draw the values of facts; any shape."""
        word = counter.draw_words(key, 0, fact.flatten(), 1)
        return counter.draw_below(word, self.n_values).view(fact.shape) + self.n_values

    def oracle(self, batch: Batch) -> Tensor:
        """Return the value of the key before each insert token.

        No row shows the map: the key that it is drawn with is read from `links["map"]`, and each
        value is computed from it in plain integers.
        """
        answers = torch.full_like(batch.inputs, IGNORE)
        keys = batch.links["map"][:, 0].tolist()
        for row, answer, key in zip(batch.inputs.tolist(), answers, keys, strict=True):
            for query in range(self.key_len, len(row), self.key_len + 1):
                fact = 0
                for token in row[query - self.key_len : query]:
                    fact = fact * self.base + token - 1
                half = counter.splitmix64(key & MASK, fact * 2**24) % 2**32
                answer[query] = self.n_values + half * self.n_values // 2**32
        return answers

    @property
    def chance(self) -> float:
        """The accuracy of a guess among the V/2 values."""
        return 1 / self.n_values

    def shortcuts(self) -> dict[str, Predictor]:
        """Return predictors that look right without knowing the facts.

        "most frequent value" is that of the whole map, "last digit" that of the facts whose keys
        end with the same digit: all that the token before the query tells, the most frequent of
        about F/(V/2 − 1) draws from V/2 values. With keys of one token it solves the task. Both
        read the map from its link. Facts are drawn alike at all positions and rows do not show
        values, so a bigram table and the position give the most frequent value, and there is
        nothing to copy.
        """
        return {
            "most frequent value": lambda batch: self._find_most_frequent(batch, 1),
            "last digit": lambda batch: self._find_most_frequent(batch, self.base),
        }

    def _find_most_frequent(self, batch: Batch, modulus: int) -> Tensor:
        """Find the most frequent value of facts that equal the last digit modulo 1 or the base.

        Of equally frequent values it is the lowest.
        """
        answers = torch.full_like(batch.inputs, IGNORE)
        fact = torch.arange(self.n_facts, device=batch.inputs.device)
        digit = (look_back(1)(batch) - 1) % modulus
        for key in batch.links["map"].unique().tolist():
            table = tabulate_most_frequent(fact % modulus, self._draw_values(key & MASK, fact))
            answers = look_up(table, digit).where(batch.links["map"] == key, answers)
        return answers

    def format_token(self, token: int) -> str:
        """Return how a token is shown: a digit as a number, a value as v0, v1, …, and ?."""
        if token == INSERT:
            return "?"
        value = token - self.n_values
        return f"v{value}" if value >= 0 else str(token - 1)
