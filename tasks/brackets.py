"""Brackets: a string of nested brackets of several kinds, some of which are left out."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, get_args

from tasks import counter
from tasks.base import IGNORE, Batch, Links, Predictor, Preset, Task
from tasks.bounds import MAX_SEQ_LEN, check_choice, check_range, option
from tasks.lazy import Tensor, torch
from tasks.shortcuts import predict_by_position
from tasks.stack import find_previous

GAP = 0
OPEN, CLOSE, QUERY, PADDING = range(4)
MAX_KINDS = 2**16
Asked = Literal["kind", "depth"]
SIGNS = "()", "[]", "{}", "<>"


@dataclass(frozen=True, kw_only=True)
class Brackets(Task):
    """Fill gaps in nested brackets: which bracket closes here, or how many stay open?

    A row is a string of T brackets of K kinds in which each closes the one opened last, and no
    more than M = `max_depth` are open at a time. At each position a bracket opens or closes with
    equal probability, where both are possible: none is open at the beginning and the end. Kinds are
    uniform. Kind i opens as token 2i + 1 and closes as 2i + 2, i = 0 … K − 1. A closing bracket is
    a gap, token 0, with probability `p_gap`; the last always is.

    The target at a gap is the bracket that closes there, or, with `ask` depth, token 2K + 1 + d,
    where d is how many brackets are open after it, 0 … M − 1. The former asks for a stack; a
    counter is enough for the latter.

    With T = 12, two kinds and three at a time, row 0 of seed 0 is

    >>> task = Brackets(seq_len=12, n_kinds=2, max_depth=3)
    >>> batch = task.batch(size=1)
    >>> " ".join(task.to_str_tokens(batch.inputs[0]))
    '( ) [ ? [ [ [ ? ? ? ( ?'
    >>> task.to_str_tokens(batch.targets[batch.inputs == 0])
    [']', ']', ']', ']', ')']

    Scored: the gaps. Chance: 1/K, or 1/M for depths.

    Links, int64 [b T/2], one column for each gap and −1 past the last: query_pos, open_pos (the
    bracket that is closed) and distance (query_pos − open_pos).

    Raises:
        ValueError: for an option out of bounds.

    Source: Hewitt et al. 2020 (RNNs can generate bounded hierarchical languages with optimal
    memory), Dyck-(k, m): K = 2 to 128, M = 3 or 5, up to 180 brackets, tested up to 360. CogScale
    (arXiv 2605.19758), bracket matching, for how strings of one length are drawn, at K = 1.

    Departs: Hewitt et al. predict every next token and end strings at random. CogScale asks
    whether a string, in half of the rows one with mutations, is well nested.
    """

    name: ClassVar[str] = "brackets"
    role_names: ClassVar[tuple[str, ...]] = ("open", "close", "gap", "padding")
    separates: ClassVar[str] = "a counter against a stack"
    presets: ClassVar[dict[str, Preset]] = {
        "small": Preset(
            {"seq_len": 16, "n_kinds": 4, "max_depth": 4},
            "LOG.md, small presets",
            seconds=97,
        ),
        "published": Preset(
            {"seq_len": 180, "n_kinds": 128, "max_depth": 5}, "Hewitt et al. 2020, m = 5"
        ),
    }

    seq_len: int = option(128, "brackets per row; even")
    n_kinds: int = option(8, "kinds of brackets")
    max_depth: int = option(8, "brackets that are open at a time, at most")
    p_gap: float = option(0.5, "probability that a closing bracket is a gap")
    ask: Asked = option("kind", "the bracket that closes (kind) or how many stay open (depth)")
    vocab_size: int = field(init=False, default=17)

    def validate(self) -> None:
        """Validate the options, and set vocab_size to gap, brackets and, if asked, depths."""
        check_choice("ask", self.ask, get_args(Asked))
        check_range("seq_len", self.seq_len, 4, MAX_SEQ_LEN)
        if self.seq_len % 2:
            raise ValueError(f"seq_len={self.seq_len}: must be even, brackets come in pairs")
        least = 2 if self.ask == "kind" else 1
        check_range("n_kinds", self.n_kinds, least, MAX_KINDS, f"ask={self.ask}")
        check_range("max_depth", self.max_depth, 2, self.seq_len // 2, "seq_len / 2")
        check_range("p_gap", self.p_gap, 0, 1)
        tokens = 1 + 2 * self.n_kinds + (self.max_depth if self.ask == "depth" else 0)
        object.__setattr__(self, "vocab_size", tokens)

    def generate(self, split: str, numbers: Tensor, seed: int) -> Batch:
        """Build the rows with these numbers (int64 [b]) on the device of `numbers`.

        The depth is a random walk folded into 0 … M, until there are as many brackets open as left.
        """
        t, m = self.seq_len, self.max_depth
        word = self.draw_words(split, numbers, seed, 2 * t)
        position = torch.arange(t, device=numbers.device)
        walk = (1 - 2 * ((word[:, :t] >> 32) & 1)).cumsum(1)
        depth, left = ((walk + m) % (2 * m) - m).abs(), t - 1 - position
        depth = left.where((depth >= left).cumsum(1) > 0, depth)
        before = torch.nn.functional.pad(depth, (1, -1))
        opens = depth > before
        opened = position.where(opens, find_previous(torch.maximum(before, depth)))
        kind = counter.draw_below(word[:, :t], self.n_kinds).gather(1, opened)
        gap = counter.draw_truth(word[:, t:], self.p_gap) & ~opens
        gap[:, -1] = True

        close = 2 * kind + 2
        inputs = torch.where(opens, close - 1, close).masked_fill_(gap, GAP)
        answer = close if self.ask == "kind" else 2 * self.n_kinds + 1 + depth
        roles = torch.where(opens, OPEN, CLOSE).masked_fill_(gap, QUERY)
        links = Links(partial(self._make_links, gap, opened))
        return Batch(inputs, answer.where(gap, IGNORE), roles, links)

    def _make_links(self, gap: Tensor, opened: Tensor) -> dict[str, Tensor]:
        """Link each gap to the bracket that it closes."""
        query = (~gap).long().argsort(dim=1, stable=True)[:, : self.seq_len // 2]
        opened, there = opened.gather(1, query), gap.gather(1, query)
        links = {"query_pos": query, "open_pos": opened, "distance": query - opened}
        return {name: link.where(there, -1) for name, link in links.items()}

    def oracle(self, batch: Batch) -> Tensor:
        """Return the bracket that closes at each gap, or how many stay open."""
        return self._fill(batch, lambda opened, _last: opened[-1])

    def _fill(
        self, batch: Batch, choose: Callable[[list[tuple[int, int]], tuple[int, int]], Any]
    ) -> Tensor:
        """Answer as if a gap closed what `choose` picks from the open brackets or the last opened.

        A bracket is its token and how many were open before it.
        """
        answers = torch.full_like(batch.inputs, IGNORE)
        for row, answer in zip(batch.inputs.tolist(), answers, strict=True):
            opened, last = [], (IGNORE, 0)
            for position, token in enumerate(row):
                if token % 2:
                    last = token, len(opened)
                    opened.append(last)
                    continue
                if token == GAP:
                    answer[position] = self._name(*choose(opened, last))
                opened.pop()
        return answers

    def _skip_gaps(self, batch: Batch) -> Tensor:
        """Answer as if earlier gaps had closed nothing; a bracket closes the last of its kind."""
        answers = torch.full_like(batch.inputs, IGNORE)
        for row, answer in zip(batch.inputs.tolist(), answers, strict=True):
            opened: list[int] = []
            for position, token in enumerate(row):
                if token % 2:
                    opened.append(token)
                elif token == GAP:
                    answer[position] = self._name(opened[-1], len(opened) - 1)
                else:
                    while opened.pop() != token - 1:
                        pass
        return answers

    def _name(self, token: int, depth: int) -> int:
        """Return the answer where this bracket closes, before which so many were open."""
        return token + 1 if self.ask == "kind" else 2 * self.n_kinds + 1 + depth

    @property
    def chance(self) -> float:
        """The accuracy of a guess among the kinds or depths."""
        return 1 / (self.n_kinds if self.ask == "kind" else self.max_depth)

    def shortcuts(self) -> dict[str, Predictor]:
        """Return predictors that look right without a stack or a counter.

        "last opened" closes the bracket that was opened last, whatever closed since: .60 at the
        defaults, .55 of the depths. "outermost bracket" closes the first of those open: .28 and
        .18. "gaps skipped" takes earlier gaps for nothing: .73 and .05. "position only" is at
        chance, but right about .35 of the depths. Every gap is the same token, which tells nothing.
        """
        return {
            "last opened": lambda batch: self._fill(batch, lambda _opened, last: last),
            "outermost bracket": lambda batch: self._fill(batch, lambda opened, _last: opened[0]),
            "gaps skipped": self._skip_gaps,
            "position only": predict_by_position(self),
        }

    def format_token(self, token: int) -> str:
        """Return how a token is shown: ? a gap, ( and ) and the like brackets, d0 … depths."""
        kind, closes = divmod(token - 1, 2)
        if token == GAP:
            return "?"
        if kind >= self.n_kinds:
            return f"d{token - 1 - 2 * self.n_kinds}"
        return SIGNS[kind][closes] if kind < len(SIGNS) else f"{'()'[closes]}{kind}"
