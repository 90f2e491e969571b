"""Depo: the links of a cycle in random order, then nodes; which node is k links further?"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from tasks import counter, nodes
from tasks.base import IGNORE, Batch, Links, Predictor, Preset, Task
from tasks.bounds import MAX_SEQ_LEN, check_range, option
from tasks.lazy import Tensor, torch
from tasks.shortcuts import copy_latest_match, predict_by_position

SOURCE, TARGET, HOPS, QUERY, MARKER, ANSWER, FILLER = range(7)
MAX_HOPS = 32
ANSWERS = MAX_HOPS + 1
"""The token between a question and its answer. Smaller ones are 0, the filler, and k = 1 … 32."""


@dataclass(frozen=True, kw_only=True)
class Depo(Task):
    """Name the node that is k links away, for another k in each question.

    A row is the n links of a cycle of all its nodes, source and target, in random order; then up to
    M questions about different nodes: the token k, the node, a marker, the node that k links lead
    to. k is uniform in 1 … K. A name has min_name_len … max_name_len letters, each length equally
    likely, of n_letters; the last letter of a name is another token than the same letter before it,
    so a name shows where it ends. No two nodes of a row have the same name. Token 0 fills the row.

    With three nodes, names of one or two of two letters and k ≤ 2, row 0 of seed 0 is

    >>> options = {"n_nodes": 3, "n_queries": 2, "n_letters": 2, "hops": 2}
    >>> batch = Depo(seq_len=24, **options).batch(size=1)
    >>> batch.inputs[:, :10].tolist()
    [[34, 37, 34, 36, 34, 36, 36, 36, 34, 37]]
    >>> batch.inputs[:, 10:].tolist()
    [[1, 34, 37, 33, 34, 36, 1, 34, 36, 33, 36, 0, 0, 0]]
    >>> batch.targets[:, 10:].tolist()
    [[-100, -100, -100, 34, 36, -100, -100, -100, -100, 36, -100, -100, -100, -100]]

    Letters are 34 and 35, and 36 and 37 where a name ends. The links are 34 37 → 34 36, 34 36 → 36
    and 36 → 34 37. Both questions have k = 1.

    Scored: the marker, whose answer is the first letter, and each letter of the answer but its
    last. Chance: a guess among all letters, 1/(2·n_letters), or 1/n_letters in names of one letter.

    Links, int64 [b q], scored positions from left to right, −1 from their end: query_pos,
    answer_pos (the letter in the last of the k links, as its target), distance (query_pos −
    answer_pos) and hops (k).

    Raises:
        ValueError: for an option out of bounds.

    Source: Allen-Zhu 2025 (Physics of Language Models, part 4.1), Depo, as its published generator
    draws it: Depo1 has up to 225, 300 or 375 nodes, K = 8 and names of 1 or 2 of 50 letters; Depo2
    75, 100 or 125, K = 16 and names of 5 to 7 of 3 letters. The number of nodes n is 3 … N with
    probability ∝ 1/(n + √N) in training, and N in its test; here without min_nodes it is N.

    Departs: the loss leaves out the marker, which is certain; rows have no first token.
    """

    name: ClassVar[str] = "depo"
    role_names: ClassVar[tuple[str, ...]] = (
        "source",
        "target",
        "hops",
        "query",
        "marker",
        "answer",
        "filler",
    )
    separates: ClassVar[str] = "reasoning depth: many links in one pass, names of several tokens"
    grows: ClassVar[tuple[str, ...]] = ("seq_len", "n_nodes", "n_queries")
    presets: ClassVar[dict[str, Preset]] = {
        "small": Preset(
            {
                "seq_len": 31,
                "n_nodes": 5,
                "n_queries": 5,
                "hops": 2,
                "max_name_len": 1,
                "n_letters": 10,
            },
            "LOG.md, small presets",
            stack="SN AN*2",
            layers={"S.position": "conv"},
            seconds=171,
        ),
        "published": Preset(
            {"seq_len": 2048, "n_nodes": 375, "min_nodes": 3},
            "Allen-Zhu 2025, Depo1 at its largest",
        ),
    }
    evaluations: ClassVar[dict[str, tuple[int, ...]]] = {"exact_hops": (1, 2, 4, 8)}

    seq_len: int = option(256, "tokens per row")
    vocab_size: int = field(init=False, default=0)
    n_nodes: int = option(40, "most nodes of a row's cycle")
    min_nodes: int | None = option(None, "fewest nodes of a row's cycle", "n_nodes")
    n_queries: int = option(10, "questions per row")
    hops: int = option(8, "most links to follow")
    exact_hops: int | None = option(None, "links to follow in every question", "1 to hops")
    n_letters: int = option(50, "number of letters in names")
    min_name_len: int = option(1, "letters of the shortest name")
    max_name_len: int = option(2, "letters of the longest name")

    def validate(self) -> None:
        """Validate the options."""
        check_range("hops", self.hops, 1, MAX_HOPS)
        if self.exact_hops is not None:
            check_range("exact_hops", self.exact_hops, 1, self.hops, "hops")
        check_range("n_letters", self.n_letters, 2, nodes.MAX_NAMES)
        longest = 1
        while nodes.count_names(self.n_letters, 1, longest + 1) <= nodes.MAX_NAMES:
            longest += 1
        why = f"≤ {nodes.MAX_NAMES} names of up to so many letters"
        check_range("max_name_len", self.max_name_len, 1, longest, why)
        check_range("min_name_len", self.min_name_len, 1, self.max_name_len, "max_name_len")
        most = nodes.count_names(self.n_letters, self.min_name_len, self.max_name_len)
        check_range("n_nodes", self.n_nodes, 3, most, "names of these lengths")
        nodes.check_least(self.min_nodes, self.n_nodes)
        check_range("n_queries", self.n_queries, 1, self.n_nodes, "n_nodes")
        least = 2 * self.max_name_len * self.n_nodes + self.n_queries * (2 * self.max_name_len + 2)
        why = "room for the longest names of all links and questions"
        check_range("seq_len", self.seq_len, least, MAX_SEQ_LEN, why)
        object.__setattr__(self, "vocab_size", ANSWERS + 1 + 2 * self.n_letters)

    def generate(self, split: str, numbers: Tensor, seed: int) -> Batch:
        """Build the rows with these numbers (int64 [b]) on the device of `numbers`.

        A row is first written with gaps where names are shorter than the longest, or nodes or
        questions fewer than in other rows.
        """
        n, m, t, longest = self.n_nodes, self.n_queries, self.seq_len, self.max_name_len
        pool = nodes.count_names(self.n_letters, self.min_name_len, longest)
        sizes = [1, pool, n, n, n, m]
        word = self.draw_words(split, numbers, seed, sum(sizes)).split(sizes, 1)
        count = nodes.draw_count(word[0], self.min_nodes, n)
        used = torch.arange(n, device=numbers.device) < count
        stored, asked, mixed = (nodes.draw_order_of_used(some, used) for some in word[2:5])
        # Names are drawn short ones first; a node's link leads to the next in a mixed order.
        names = nodes.draw_names(word[1], n, self.n_letters, self.min_name_len, self.max_name_len)
        names = _pick(names + ANSWERS * (names > 0), mixed) * used[:, :, None]
        asked = asked[:, :m]
        hops = 1 + counter.draw_below(word[5], self.hops)
        if self.exact_hops is not None:
            hops = torch.full_like(hops, self.exact_hops)
        reached = (asked + hops) % count
        real = torch.arange(m, device=numbers.device) < count

        links = torch.cat([_pick(names, stored), _pick(names, (stored + 1) % count)], 2)
        links *= used.gather(1, stored)[:, :, None]
        marker = torch.full_like(hops, ANSWERS)[:, :, None]
        asking = [hops[:, :, None], _pick(names, asked), marker, _pick(names, reached)]
        asking = torch.cat(asking, 2) * real[:, :, None]
        token = torch.cat([links.flatten(1), asking.flatten(1)], 1)
        position = nodes.close_gaps(token, t)
        role = [SOURCE] * longest + [TARGET] * longest
        role = role * n + ([HOPS] + [QUERY] * longest + [MARKER] + [ANSWER] * longest) * m
        role = torch.tensor(role, device=numbers.device).expand_as(token)

        inputs = torch.zeros(len(numbers), t + 1, dtype=torch.int64, device=numbers.device)
        targets, roles = torch.full_like(inputs, IGNORE), torch.full_like(inputs, FILLER)
        inputs.scatter_(1, position, token)
        roles.scatter_(1, position, role)
        # The position before each letter of an answer is asked for that letter.
        answer_at = position[:, links[0].numel() :].unflatten(1, (m, -1))[:, :, longest + 2 :]
        query = torch.where(answer_at < t, answer_at - 1, t)
        targets.scatter_(1, query.flatten(1), asking[:, :, longest + 2 :].flatten(1))
        targets[:, t] = IGNORE

        def make_links() -> dict[str, Tensor]:
            place = position[:, : links[0].numel()].unflatten(1, (n, 2, longest))[:, :, 1]
            last = stored.argsort(1).gather(1, (reached - 1) % count)
            answer = _pick(place, last)
            every = {
                "query_pos": query,
                "answer_pos": answer,
                "distance": query - answer,
                "hops": hops[:, :, None].expand_as(query),
            }
            unscored = (query == t).flatten(1)
            order = unscored.long().argsort(dim=1, stable=True)
            return {
                name: link.flatten(1).masked_fill(unscored, -1).gather(1, order)
                for name, link in every.items()
            }

        return Batch(inputs[:, :t], targets[:, :t], roles[:, :t], Links(make_links))

    def oracle(self, batch: Batch) -> Tensor:
        """Return the letters of the node that k links lead to."""
        return self._follow(batch, lambda hops: hops)

    def _follow(self, batch: Batch, count: Callable[[int], int]) -> Tensor:
        """Follow `count(k)` links in each question, letter by letter."""
        answers = torch.full_like(batch.inputs, IGNORE)
        for row, answer in zip(batch.inputs.tolist(), answers, strict=True):
            link: dict[tuple[int, ...], tuple[int, ...]] = {}
            hops, name, known = 0, (), ()
            source: tuple[int, ...] = ()
            for position, token in enumerate(row):
                if token == ANSWERS:
                    known, name = source, ()
                    for _ in range(count(hops)):
                        known = link[known]
                elif token <= MAX_HOPS:
                    hops, source, name, known = token, (), (), ()
                else:
                    name += (token,)
                if len(name) < len(known):
                    answer[position] = known[len(name)]
                if name and token > ANSWERS + self.n_letters and not known:  # a name ends
                    if source:
                        link[source], source = name, ()
                    else:
                        source = name
                    name = ()
        return answers

    @property
    def chance(self) -> float:
        """The accuracy of a guess among the letters."""
        return 1 / self.n_letters if self.max_name_len == 1 else 1 / (2 * self.n_letters)

    def shortcuts(self) -> dict[str, Predictor]:
        """Return predictors that look right without following k links.

        "one hop" is right where k = 1: 1/K, and some more as later letters are right by chance: .14
        at the defaults, .50 at "small". "a hop too few" and "a hop too many" are right in letters
        that two nodes share: below .01 at the defaults, but .27 in names of three letters.
        "most recent match" copies what last followed the same token: .30 at the defaults, since
        there a letter begins few names, and chance in names of one letter. "position only" is at
        chance; a bigram table, too, as names are drawn anew.
        """
        return {
            "one hop": lambda batch: self._follow(batch, lambda _: 1),
            "a hop too few": lambda batch: self._follow(batch, lambda hops: hops - 1),
            "a hop too many": lambda batch: self._follow(batch, lambda hops: hops + 1),
            "most recent match": copy_latest_match,
            "position only": predict_by_position(self),
        }

    def format_token(self, token: int) -> str:
        """Return how a token is shown: k as h1 … h32, = for the marker, a letter's number.

        The last letter of a name has a full stop.
        """
        if token < ANSWERS:
            return f"h{token}" if token else "_"
        letter = token - ANSWERS
        if letter <= self.n_letters:
            return str(letter) if letter else "="
        return f"{letter - self.n_letters}."


def _pick(names: Tensor, node: Tensor) -> Tensor:
    """Return the names [b m l] of nodes [b m]; names are [b n l]."""
    return names.gather(1, node[:, :, None].expand(-1, -1, names.shape[2]))
