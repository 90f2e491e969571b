"""Hops: pairs a → b, b → c, …; where do k links from an entity lead?"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from tasks import counter
from tasks.base import IGNORE, Batch, Links, Predictor, Preset, Task
from tasks.bounds import MAX_SEQ_LEN, MAX_VOCAB_SIZE, check_range, option
from tasks.lazy import Tensor, torch
from tasks.shortcuts import copy_latest_match, look_at, look_back, pick_stored_value

SOURCE, TARGET, COUNT, QUERY, FILLER = range(5)
MAX_HOPS = 5
FIRST_ENTITY = 1 + MAX_HOPS
"""Smaller tokens are 0, the filler, and h = 1 … 5, which asks for h hops."""


@dataclass(frozen=True, kw_only=True)
class Hops(Task):
    """Follow k links from an entity.

    A row is K pairs a f(a) in random order, the token k that gives the number of hops, then a slot
    for each of the K entities, once, in random order: entity, filler; then fillers to the end. f is
    a random cycle of all K ≥ k + 2, so that k hops lead neither back to the entity nor to its
    predecessor. Entities are distinct, uniform in 6 … V − 1; fillers are token 0.

    With four entities, two hops and V = 12, row 0 of seed 0 is

    >>> task = Hops(seq_len=17, n_pairs=4, hops=2, vocab_size=12)
    >>> batch = task.batch(size=1)
    >>> batch.inputs.tolist()
    [[9, 7, 7, 6, 6, 8, 8, 9, 2, 7, 0, 8, 0, 9, 0, 6, 0]]
    >>> batch.targets[:, 9:].tolist()
    [[8, -100, 7, -100, 6, -100, 9, -100]]

    The cycle is 9 → 7 → 6 → 8 → 9; the token 2 asks for two hops, and from 7 they lead over 6 to 8.

    Scored: the entity of each slot; the answer is fᵏ of it. Chance: 1/(V − 6).

    Links: query_pos, answer_pos (the position of the last hop's target), distance (query_pos −
    answer_pos), int64 [b q] in the order of the queries; chain_key_pos and chain_value_pos, int64
    [b q k]: the pair that each hop takes.

    Raises:
        ValueError: for an option out of bounds.

    Source: Sanford et al. 2024 (Transformers, Parallel Computation, and Logarithmic Depth), § 4:
    k-hop induction heads, in depth ⌊log₂ k⌋ + 2 (theorem 4.2); one model for all k, drawn anew a
    row and told, as here a mixture over `hops`. A pointer to a value: Zhang et al. 2021 (Pointer
    Value Retrieval).

    Departs: links are stored pairs of a map; theirs lead from a letter of a string of 100 over an
    alphabet of 4 to what followed its latest earlier occurrence. So every answer is k hops away,
    and none is undefined or shared by most letters.
    """

    name: ClassVar[str] = "hops"
    role_names: ClassVar[tuple[str, ...]] = ("source", "target", "hops", "query", "filler")
    separates: ClassVar[str] = "depth and composition of heads"
    grows: ClassVar[tuple[str, ...]] = ("seq_len", "n_pairs")
    presets: ClassVar[dict[str, Preset]] = {
        "small": Preset(
            {"seq_len": 29, "n_pairs": 7, "vocab_size": 24},
            "LOG.md, small presets",
            stack="SM AM*2",
            layers={"S.position": "conv"},
            seconds=150,
        ),
        "published": Preset(
            {"seq_len": 100, "n_pairs": 24, "hops": 5, "vocab_size": 30},
            "Sanford et al. 2024, § 4.2: strings of 100, here with an alphabet for the pairs",
        ),
    }
    evaluations: ClassVar[dict[str, tuple[int, ...]]] = {"hops": (1, 2, 3, 4, 5)}

    seq_len: int = option(256, "tokens per row")
    n_pairs: int = option(32, "entities per row, each with one link")
    hops: int = option(2, "links to follow, 1 to 5")
    vocab_size: int = option(
        8192, "size of the vocabulary; tokens 1 to 5 say how many hops, entities start at 6"
    )

    def validate(self) -> None:
        """Validate the options."""
        check_range("hops", self.hops, 1, MAX_HOPS)
        shortest = 4 * (self.hops + 2) + 1
        check_range(
            "seq_len", self.seq_len, shortest, MAX_SEQ_LEN, "room for hops + 2 pairs and slots"
        )
        most = (self.seq_len - 1) // 4
        check_range("n_pairs", self.n_pairs, self.hops + 2, most, "hops + 2; (seq_len − 1) / 4")
        least = FIRST_ENTITY + self.n_pairs
        check_range("vocab_size", self.vocab_size, least, MAX_VOCAB_SIZE, "n_pairs + 6")

    def generate(self, split: str, numbers: Tensor, seed: int) -> Batch:
        """Build the rows with these numbers (int64 [b]) on the device of `numbers`."""
        n_pairs, pool, device = self.n_pairs, self.vocab_size - FIRST_ENTITY, numbers.device
        sizes = [counter.count_rounds(pool), n_pairs, n_pairs]
        word = self.draw_words(split, numbers, seed, sum(sizes)).split(sizes, 1)
        # The i-th entity's link leads to the next: a cycle.
        entity = FIRST_ENTITY + counter.draw_distinct(word[0], n_pairs, pool)
        stored, asked = counter.draw_order(word[1]), counter.draw_order(word[2])

        context, end = 2 * n_pairs, 4 * n_pairs + 1
        inputs = torch.zeros(len(numbers), self.seq_len, dtype=torch.int64, device=device)
        inputs[:, :context:2] = entity.gather(1, stored)
        inputs[:, 1:context:2] = entity.gather(1, (stored + 1) % n_pairs)
        inputs[:, context] = self.hops
        inputs[:, context + 1 : end : 2] = entity.gather(1, asked)
        targets = torch.full_like(inputs, IGNORE)
        targets[:, context + 1 : end : 2] = entity.gather(1, (asked + self.hops) % n_pairs)
        roles = torch.full((self.seq_len,), FILLER, device=device)
        roles[:context:2], roles[1:context:2], roles[context] = SOURCE, TARGET, COUNT
        roles[context + 1 : end : 2] = QUERY

        def links() -> dict[str, Tensor]:
            query = torch.arange(context + 1, end, 2, device=device).repeat(len(numbers), 1)
            hop = torch.arange(self.hops, device=device)
            taken = (asked[:, :, None] + hop) % n_pairs
            key = 2 * stored.argsort(1).gather(1, taken.flatten(1)).view_as(taken)
            return {
                "query_pos": query,
                "chain_key_pos": key,
                "chain_value_pos": key + 1,
                "answer_pos": key[:, :, -1] + 1,
                "distance": query - key[:, :, -1] - 1,
            }

        return Batch(inputs, targets, roles.expand(len(numbers), -1), Links(links))

    def oracle(self, batch: Batch) -> Tensor:
        """Return the entity that the row's number of links leads to from each slot's entity."""
        return self._follow(batch, 0)

    def _follow(self, batch: Batch, more: int) -> Tensor:
        """Follow `more` links more than the row asks for from each slot's entity."""
        answers = torch.full_like(batch.inputs, IGNORE)
        context = 2 * self.n_pairs
        for row, answer in zip(batch.inputs.tolist(), answers, strict=True):
            link = dict(zip(row[:context:2], row[1:context:2], strict=True))
            for position in range(context + 1, 2 * context + 1, 2):
                entity = row[position]
                for _ in range(row[context] + more):
                    entity = link[entity]
                answer[position] = entity
        return answers

    def _choose_each(
        self, batch: Batch, choose: Callable[[dict[int, int], int, int], int]
    ) -> Tensor:
        """Answer with what `choose` makes of the links, an entity and its predecessor."""
        answers = torch.full_like(batch.inputs, IGNORE)
        context = 2 * self.n_pairs
        for row, answer in zip(batch.inputs.tolist(), answers, strict=True):
            link = dict(zip(row[:context:2], row[1:context:2], strict=True))
            source = {target: entity for entity, target in link.items()}
            for position in range(context + 1, 2 * context + 1, 2):
                answer[position] = choose(link, row[position], source[row[position]])
        return answers

    @property
    def chance(self) -> float:
        """The accuracy of a guess among the entities."""
        return 1 / (self.vocab_size - FIRST_ENTITY)

    def shortcuts(self) -> dict[str, Predictor]:
        """Return predictors that look right without following k links.

        "one hop", "a hop too few", "a hop too many" and "one hop back", the predecessor, are never
        right, but for "one hop" at k = 1. "no neighbour" is the first stored entity that is neither
        the one asked for nor linked to it: 1/(K − 3), and never right at k = 1. So four entities
        are too few for two hops.
        "most recent match" copies what last followed the entity, as source or as target: 1/(2K),
        and 1/2 more at k = 1. "context value" is a stored target at random, "last value" the last
        stored, "position only" the i-th stored in slot i: 1/K. A bigram table is at chance, as
        entities are drawn anew.
        """
        return {
            "one hop": lambda batch: self._follow(batch, 1 - self.hops),
            "a hop too few": lambda batch: self._follow(batch, -1),
            "a hop too many": lambda batch: self._follow(batch, 1),
            "one hop back": lambda batch: self._choose_each(
                batch, lambda _link, _entity, back: back
            ),
            "no neighbour": lambda batch: self._choose_each(batch, _choose_non_neighbour),
            "most recent match": copy_latest_match,
            "context value": pick_stored_value(self.n_pairs, 2),
            "last value": look_at(2 * self.n_pairs - 1),
            "position only": look_back(2 * self.n_pairs),
        }

    def format_token(self, token: int) -> str:
        """Return how a token is shown: a hop count as h1 … h5."""
        return f"h{token}" if 0 < token < FIRST_ENTITY else str(token)


def _choose_non_neighbour(link: dict[int, int], entity: int, back: int) -> int:
    """Choose the first stored entity that is not linked to this one (-100 if all are)."""
    near = (entity, link[entity], back)
    return next((other for other in link if other not in near), IGNORE)
