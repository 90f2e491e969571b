"""Brevo: the edges of a graph without cycles, then a node; list its ancestors in order."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from tasks import counter, nodes
from tasks.base import IGNORE, Batch, Links, Predictor, Preset, Task
from tasks.bounds import MAX_SEQ_LEN, MAX_VOCAB_SIZE, check_range, option
from tasks.lazy import Tensor, torch
from tasks.shortcuts import copy_latest_match

PARENT, CHILD, ASKING, QUERY, ANSWER, FILLER = range(6)
ASK, EQUALS = 1, 2
FIRST_NODE = 3
"""Smaller tokens are 0, the filler, 1 and 2, before and after the node that is asked for."""
MAX_NODES, MAX_DEGREE = 256, 8
CHANCE_ROWS = 64
"""Test rows that the chance level is averaged over."""


@dataclass(frozen=True, kw_only=True)
class Brevo(Task):
    """List the ancestors of a node, each after its parents, and then the node itself.

    A row is the edges of a graph, parent and child, in random order; token 1, a node, token 2; and
    all its ancestors in an order that has parents before children, which ends with the node. Of the
    nodes 1 … n, 1 … ⌊(n − 1)/4⌋ + 1 have no parents, uniform; each of the others has up to d
    parents among the nodes before it that do not yet have d children, uniform in number and choice.
    Node n is asked for. Its order is drawn from the end: any node that has no more children to be
    placed, uniform, again and again. Nodes are distinct tokens, uniform in 3 … V − 1. Token 0 fills
    the row.

    With six nodes, d = 2 and V = 9, row 1 of seed 0 is

    >>> task = Brevo(seq_len=27, n_nodes=6, max_degree=2, vocab_size=9)
    >>> batch = task.batch(start=1, size=1)
    >>> " ".join(task.to_str_tokens(batch.inputs[0]))
    '8 7 8 3 7 3 5 7 7 4 4 6 5 4 ? 6 = 5 8 7 4 6 _ _ _ _ _'
    >>> batch.targets[:, 16:22].tolist()
    [[5, 8, 7, 4, 6, -100]]
    >>> batch.links["legal"][0, 16:18].sort(descending=True).values.tolist()
    [[8, 5, -1, -1, -1, -1], [8, -1, -1, -1, -1, -1]]

    Node 6 has the parent 4, and above it are 7, 5 and 8. Nodes 5 and 8 have no parents, so either
    may come first; node 3 is no ancestor.

    Scored: token 2 and each node of the answer but the last; right is every node whose parents have
    all been given, not only the next of this row's order. Chance: a guess among the V − 3 nodes,
    averaged over test rows.

    The loss is that of the row's own order, as published. Its mean is least for the exact
    probabilities of the right continuations, so what a trained model finds likeliest is right. A
    likelihood of all right tokens together would be as small for a model that knows one of them.

    Links, int64: query_pos [b q], from left to right, −1 pads; legal [b t n], the right answers at
    each scored position, -1 pads.

    Raises:
        ValueError: for an option out of bounds.

    Source: Allen-Zhu 2025 (Physics of Language Models, part 4.1), Brevo, as its published generator
    draws it: Brevo1 has up to 70, 90 or 110 nodes, d = 4. Their number n is 3 … N with probability
    ∝ 1/(n + √N) in training, and N in its test; here without min_nodes it is N.

    Departs: no token ends the answer, which ends with the node asked for; nor does one begin the
    row. Brevo2, whose nodes have names of 2 to 4 tokens, is left out.
    """

    name: ClassVar[str] = "brevo"
    role_names: ClassVar[tuple[str, ...]] = (
        "parent",
        "child",
        "asking",
        "query",
        "answer",
        "filler",
    )
    separates: ClassVar[str] = "reasoning breadth: a plan of the answer before its first token"
    grows: ClassVar[tuple[str, ...]] = ("seq_len", "n_nodes")
    presets: ClassVar[dict[str, Preset]] = {
        "small": Preset(
            {"seq_len": 24, "n_nodes": 5, "max_degree": 2, "vocab_size": 11},
            "LOG.md, small presets; the fewest nodes of which two may lack parents",
            stack="AM*3",
            seconds=368,
        ),
        "published": Preset(
            {"seq_len": 1024, "n_nodes": 110, "min_nodes": 3, "vocab_size": 113},
            "Allen-Zhu 2025, Brevo1 at its largest",
        ),
    }

    seq_len: int = option(256, "tokens per row")
    n_nodes: int = option(24, "most nodes of a row's graph")
    min_nodes: int | None = option(None, "fewest nodes of a row's graph", "n_nodes")
    max_degree: int = option(4, "most parents of a node, and most children")
    vocab_size: int = option(64, "size of the vocabulary; nodes start at 3")

    def validate(self) -> None:
        """Validate the options."""
        check_range("n_nodes", self.n_nodes, 3, MAX_NODES)
        check_range("max_degree", self.max_degree, 1, MAX_DEGREE)
        nodes.check_least(self.min_nodes, self.n_nodes)
        least = 2 * self.most_edges + 3 + self.n_nodes
        why = "room for the most edges, and for all nodes as the answer"
        check_range("seq_len", self.seq_len, least, MAX_SEQ_LEN, why)
        least = FIRST_NODE + self.n_nodes
        check_range("vocab_size", self.vocab_size, least, MAX_VOCAB_SIZE, "n_nodes + 3")

    @property
    def most_edges(self) -> int:
        """How many edges a row may have."""
        return sum(min(node, self.max_degree) for node in range(1, self.n_nodes))

    def generate(self, split: str, numbers: Tensor, seed: int) -> Batch:
        """Build the rows with these numbers (int64 [b]) on the device of `numbers`.

        A row is first written with gaps where it has fewer edges or nodes than others may have.
        """
        n, d, t, rows = self.n_nodes, self.max_degree, self.seq_len, len(numbers)
        pool = self.vocab_size - FIRST_NODE
        sizes = [1, 1, counter.count_rounds(pool), n, n * n, n * d, n]
        word = self.draw_words(split, numbers, seed, sum(sizes)).split(sizes, 1)
        count = nodes.draw_count(word[0], self.min_nodes, n)
        first = 1 + counter.draw_below(word[1], (count - 1) // 4 + 1)
        label = FIRST_NODE + counter.draw_distinct(word[2], n, pool)
        parents = self._draw_parents(word[3], word[4].view(rows, n, n), first, count)
        order, length = _draw_order(parents, count, word[6])

        real = (parents >= 0).flatten(1)
        edge = nodes.draw_order_of_used(word[5], real)[:, : self.most_edges]
        ends = torch.stack([parents.flatten(1).clamp(min=0).gather(1, edge), edge // d], 2)
        edges = label.gather(1, ends.flatten(1)).view_as(ends) * real.gather(1, edge)[:, :, None]
        query = label.gather(1, count - 1)
        asking = torch.cat([torch.full_like(query, ASK), query, torch.full_like(query, EQUALS)], 1)
        step = torch.arange(n, device=numbers.device)
        answer = label.gather(1, order) * (step < length)
        token = torch.cat([edges.flatten(1), asking, answer], 1)
        position = nodes.close_gaps(token, t)
        role = [PARENT, CHILD] * edges.shape[1] + [ASKING, ASKING, QUERY] + [ANSWER] * n
        role = torch.tensor(role, device=numbers.device).expand_as(token)

        inputs = torch.zeros(rows, t + 1, dtype=torch.int64, device=numbers.device)
        targets, roles = torch.full_like(inputs, IGNORE), torch.full_like(inputs, FILLER)
        inputs.scatter_(1, position, token)
        roles.scatter_(1, position, role)
        query_pos = torch.where(step < length, position[:, -n:] - 1, t)
        targets.scatter_(1, query_pos, answer)
        targets[:, t] = IGNORE

        def links() -> dict[str, Tensor]:
            # A node may be given from the step after its last parent to that at which it is.
            given = torch.full_like(position[:, : n + 1], n)
            given.scatter_(1, order.where(step < length, n), step.expand_as(order))
            given = given[:, :n]
            ready = (given.gather(1, parents.clamp(min=0).flatten(1)) + 1).view_as(parents)
            ready = ready.where(parents >= 0, 0).amax(2)
            may = (ready[:, None] <= step[:, None]) & (step[:, None] <= given[:, None])
            may &= (given < n)[:, None] & (step < length)[:, :, None]
            legal = label[:, None].where(may, -1)
            every = legal.new_full((rows, t + 1, n), -1)
            every.scatter_(1, query_pos[:, :, None].expand_as(legal), legal)
            return {
                "query_pos": query_pos.where(query_pos < t, -1),
                "legal": every[:, :t],
            }

        return Batch(inputs[:, :t], targets[:, :t], roles[:, :t], Links(links), several=True)

    def _draw_parents(self, many: Tensor, which: Tensor, first: Tensor, count: Tensor) -> Tensor:
        """Draw the parents [b n d] of each node, -1 where there are fewer, from words."""
        n, d = self.n_nodes, self.max_degree
        place, children = torch.arange(d, device=many.device), torch.zeros_like(many)
        parents = torch.full((len(many), n, d), -1, device=many.device)
        for child in range(1, n):
            free, some = children[:, :child] < d, min(child, d)
            most = free.sum(1, keepdim=True).clamp(max=d)
            chosen = 1 + counter.draw_below(many[:, child : child + 1], most)
            chosen *= (first <= child) & (child < count)
            order = (which[:, child, :child] >> 1).masked_fill(~free, 2**63 - 1)
            found = order.topk(some, 1, largest=False).indices
            taken = place[:some] < chosen
            parents[:, child, :some] = found.where(taken, -1)
            children.scatter_add_(1, found, taken.long())
        return parents

    def oracle(self, batch: Batch) -> Tensor:
        """Return the lowest of the right answers, given the answer so far."""
        return self._answer(batch, _find_ancestors)

    def _answer(self, batch: Batch, find: Callable[[dict[int, set[int]], int], set[int]]) -> Tensor:
        """Give the nodes that `find` makes of the parents and the query, lowest first.

        Each follows its parents. Where none of them is left, the answer is the query.
        """
        answers = torch.full_like(batch.inputs, IGNORE)
        for row, answer in zip(batch.inputs.tolist(), answers, strict=True):
            begin = row.index(ASK)
            query, parents = row[begin + 1], {}
            for parent, child in zip(row[:begin:2], row[1:begin:2], strict=True):
                parents.setdefault(child, set()).add(parent)
                parents.setdefault(parent, set())
            wanted, given = find(parents, query), set()
            for position in range(begin + 2, len(row)):
                if position > begin + 2:
                    given.add(row[position])
                if query in given or row[position] == 0:
                    break
                ready = [node for node in wanted - given if parents[node] <= given]
                answer[position] = min(ready, default=query)
        return answers

    @property
    def chance(self) -> float:
        """The accuracy of a guess among the nodes, over 64 test rows."""
        batch = self.batch(split="test", size=CHANCE_ROWS)
        right = (batch.links["legal"] >= 0).sum() / (batch.targets != IGNORE).sum()
        return right.item() / (self.vocab_size - FIRST_NODE)

    def shortcuts(self) -> dict[str, Predictor]:
        """Return predictors that look right without finding the ancestors.

        "whole graph" gives the lowest node whose parents were all given, whatever was asked: .69 at
        the defaults. "parents only" looks for parents of the query and no further: .42. "most
        recent match" copies what last followed the same token, sometimes a child of it: .20.
        """
        return {
            "whole graph": lambda batch: self._answer(batch, lambda parents, _: {*parents}),
            "parents only": lambda batch: self._answer(batch, lambda parents, node: parents[node]),
            "most recent match": copy_latest_match,
        }

    def format_token(self, token: int) -> str:
        """Return how a token is shown: _ for filler, ? and = around the query."""
        return "_?="[token] if token < FIRST_NODE else str(token)


def _find_ancestors(parents: dict[int, set[int]], query: int) -> set[int]:
    """Return a node and all its ancestors."""
    found, left = {query}, [query]
    while left:
        new = parents[left.pop()] - found
        found |= new
        left += new
    return found


def _draw_order(parents: Tensor, count: Tensor, word: Tensor) -> tuple[Tensor, Tensor]:
    """Draw an order [b n] of the last node's ancestors, and how many they are [b 1].

    It is drawn from its end: a node may be taken when all its children are.

    Args:
        parents: [b n d], -1 where there are fewer.
        count: [b 1], nodes.
        word: [b n], one for each step.
    """
    b, n, _ = parents.shape
    above = torch.zeros(b, n, n + 1, dtype=torch.int64, device=parents.device)
    above = above.scatter(2, parents % (n + 1), 1)[:, :, :n]  # [child, parent]
    wanted = torch.zeros_like(above[:, 0]).scatter(1, count - 1, 1)
    for child in reversed(range(n)):
        wanted = wanted | above[:, child] & wanted[:, child, None]
    children = (above * wanted[:, :, None]).sum(1)
    length, left, taken = wanted.sum(1, keepdim=True), wanted, []
    for step in range(n):
        free = left * (children == 0)
        rank = counter.draw_below(word[:, step : step + 1], free.sum(1, keepdim=True))
        found = (free.cumsum(1) * free == rank + 1).long().argmax(1, keepdim=True)
        taken.append(found)
        left = left.scatter(1, found, 0)
        children -= above.gather(1, found[:, :, None].expand(-1, -1, n))[:, 0]
    step = torch.arange(n, device=parents.device)
    return torch.cat(taken, 1).gather(1, (length - 1 - step).clamp(min=0)), length
