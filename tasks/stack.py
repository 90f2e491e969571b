"""Stacks: elements are pushed onto many stacks and popped off again; which is popped?"""

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from jaxtyping import Int64

from tasks import counter
from tasks.base import IGNORE, Batch, Links, Predictor, Preset, Task
from tasks.bounds import MAX_SEQ_LEN, MAX_VOCAB_SIZE, check_range, option
from tasks.lazy import Tensor, torch
from tasks.shortcuts import copy_latest_match, look_back, predict_by_position

FILLER, PUSH, POP = range(3)
FIRST_STACK = 3
OPERATION, STACK, ELEMENT, QUERY, PADDING = range(5)


@dataclass(frozen=True, kw_only=True)
class Stack(Task):
    """Say which element is popped off one of S stacks.

    A row is T/3 operations of three tokens: push 1 or pop 2, a stack, an element; fillers, token 0,
    up to two, end a row. Stacks are tokens 3 … S + 2, elements V/2 … V − 1 (V/2 rounded down). Each
    operation is on a stack at random and is a push or a pop, equally likely; a pop from an empty
    stack is a push instead. What is pushed is random; what is popped is the element pushed last of
    those still on the stack. The last operation is on the stack of the first, and is a pop unless
    that is empty: so every row has one.

    With T = 18, two stacks and V = 16, row 0 of seed 0 is

    >>> task = Stack(seq_len=18, n_stacks=2, vocab_size=16)
    >>> batch = task.batch(size=1)
    >>> " ".join(task.to_str_tokens(batch.inputs[0]))
    '+ s1 9 + s0 12 + s0 11 + s1 14 - s1 14 - s1 9'
    >>> batch.targets[:, 13::3].tolist()
    [[14, 9]]

    Stack 1 holds 9 and 14, in this order, when it is popped twice.

    Scored: the stack of each pop; the target is the element that comes next. Chance: 2/V, a guess
    among the V/2 elements.

    Links, int64 [b T/6], one column for each pop and −1 past the last: query_pos, key_pos and
    value_pos (the stack and the element of the push), distance (query_pos − value_pos).

    Raises:
        ValueError: for an option out of bounds.

    Source: Kimi Linear (arXiv 2510.26692), § 5.1: 64 stacks, T = 256 to 2,048. How its operations
    are drawn, and how many elements there are, is not published.
    """

    name: ClassVar[str] = "stack"
    role_names: ClassVar[tuple[str, ...]] = ("operation", "stack", "element", "query", "padding")
    separates: ClassVar[str] = "tracking many states"
    grows: ClassVar[tuple[str, ...]] = ("seq_len", "n_stacks")
    presets: ClassVar[dict[str, Preset]] = {
        "small": Preset(
            {"seq_len": 48, "n_stacks": 2, "vocab_size": 32},
            "LOG.md, small presets; attention is right about .92 after 320 s",
            stack="gdn+M*2",
            seconds=181,
        ),
        "published": Preset(
            {"seq_len": 1024, "n_stacks": 64}, "Kimi Linear (arXiv 2510.26692), § 5.1"
        ),
    }

    seq_len: int = option(256, "tokens per row; an operation takes three")
    n_stacks: int = option(8, "stacks")
    vocab_size: int = option(256, "size of the vocabulary; the upper half is for elements")

    def validate(self) -> None:
        """Validate the options."""
        check_range("seq_len", self.seq_len, 6, MAX_SEQ_LEN, "a push and a pop")
        check_range("vocab_size", self.vocab_size, 2 * FIRST_STACK + 2, MAX_VOCAB_SIZE)
        most = self.vocab_size // 2 - FIRST_STACK
        check_range("n_stacks", self.n_stacks, 1, most, "vocab_size / 2 − 3")

    def _scale(self, name: str, value: Any, seq_len: int) -> Any:
        """Return the value of an option at another row length; one stack stays one."""
        scaled = super()._scale(name, value, seq_len)
        return max(scaled, 1) if name == "n_stacks" else scaled

    def generate(self, split: str, numbers: Tensor, seed: int) -> Batch:
        """Build the rows with these numbers (int64 [b]) on the device of `numbers`."""
        n, half = self.seq_len // 3, self.vocab_size // 2
        word = self.draw_words(split, numbers, seed, 2 * n)
        stack = counter.draw_below(word[:, :n], self.n_stacks)
        stack[:, -1] = stack[:, 0]
        level, pop = _walk(stack, 1 - 2 * ((word[:, :n] >> 32) & 1))
        place = torch.arange(n, device=numbers.device).expand_as(pop)
        pushed = find_previous(stack * (n + 1) + level).where(pop, place)
        element = half + counter.draw_below(word[:, n:], self.vocab_size - half)
        element = element.gather(1, pushed)

        end = 3 * n
        inputs = torch.full((len(numbers), self.seq_len), FILLER, device=numbers.device)
        inputs[:, :end:3] = torch.where(pop, POP, PUSH)
        inputs[:, 1:end:3], inputs[:, 2:end:3] = FIRST_STACK + stack, element
        targets = torch.full_like(inputs, IGNORE)
        targets[:, 1:end:3] = element.where(pop, IGNORE)
        roles = torch.full_like(inputs, PADDING)
        roles[:, :end:3], roles[:, 2:end:3] = OPERATION, ELEMENT
        roles[:, 1:end:3] = torch.where(pop, QUERY, STACK)
        return Batch(inputs, targets, roles, Links(partial(self._make_links, pop, pushed)))

    def _make_links(self, pop: Tensor, pushed: Tensor) -> dict[str, Tensor]:
        """Link each pop to its push, given which operations are pops, and their pushes."""
        order = (~pop).long().argsort(dim=1, stable=True)[:, : self.seq_len // 6]
        query, key = 3 * order + 1, 3 * pushed.gather(1, order) + 1
        links = {
            "query_pos": query,
            "key_pos": key,
            "value_pos": key + 1,
            "distance": query - key - 1,
        }
        there = pop.gather(1, order)
        return {name: link.where(there, -1) for name, link in links.items()}

    def oracle(self, batch: Batch) -> Tensor:
        """Return the top of the stack at every pop."""
        return self._simulate(batch)

    def _simulate(self, batch: Batch, *, one: bool = False, take: int = -1) -> Tensor:
        """Answer every pop with item `take` of its list of elements; `one` list holds all."""
        answers = torch.full_like(batch.inputs, IGNORE)
        for row, answer in zip(batch.inputs.tolist(), answers, strict=True):
            stacks = defaultdict[int, list[int]](list)
            for position in range(0, self.seq_len - 2, 3):
                operation, name, element = row[position : position + 3]
                elements = stacks[FILLER if one else name]
                if operation == PUSH:
                    elements.append(element)
                else:
                    answer[position + 1] = elements.pop(take)
        return answers

    @property
    def chance(self) -> float:
        """The accuracy of a guess among the elements."""
        return 1 / (self.vocab_size - self.vocab_size // 2)

    def shortcuts(self) -> dict[str, Predictor]:
        """Return predictors that look right without following each stack.

        "most recent match" copies the element that last followed the stack, pushed or popped: right
        where the stack's last operation was a push. That is .75 of the pops at the defaults, .80 at
        "small", .84 at "published", and .97 with 64 stacks at T = 256, where few stacks hold more
        than one element: short rows of many stacks ask for little more than recall. "oldest
        element" takes a stack for a queue, .36, "one stack" all for one, .14, and 1 if there is
        only one. "last element" is the element before, .11. "position only" is at chance, as is a
        bigram table: elements are random.
        """
        return {
            "most recent match": copy_latest_match,
            "oldest element": lambda batch: self._simulate(batch, take=0),
            "one stack": lambda batch: self._simulate(batch, one=True),
            "last element": look_back(2),
            "position only": predict_by_position(self),
        }

    def format_token(self, token: int) -> str:
        """Return how a token is shown: _ filler, + push, - pop, s0 … the stacks."""
        if token < FIRST_STACK:
            return "_+-"[token]
        return f"s{token - FIRST_STACK}" if token < FIRST_STACK + self.n_stacks else str(token)


def _walk(stack: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Return the level of each operation, 1 for the lowest element of a stack, and the pops.

    The height of a stack is |walk|, where `step`, ±1 at random, adds up over its operations: away
    from 0 is a push, towards 0 a pop. The last operation goes towards 0 if it can.
    """
    before = (step * (stack == stack[:, -1:]))[:, :-1].sum(1)
    step[:, -1] = step[:, -1].where(before == 0, -before.sign())
    order = stack.argsort(dim=1, stable=True)
    stack, step = stack.gather(1, order), step.gather(1, order)
    total = step.cumsum(1) - step
    place = torch.arange(stack.shape[1], device=stack.device).expand_as(stack)
    first = place.where(stack != stack.roll(1, 1), 0).cummax(1).values
    before = total - total.gather(1, first)
    level, height = torch.maximum(before.abs(), (before + step).abs()), before.abs()
    back = order.argsort(dim=1)
    return level.gather(1, back), (height == level).gather(1, back)


def find_previous(key: Int64[Tensor, "b i"]) -> Int64[Tensor, "b i"]:
    """Return the place of the previous item with the same key, for each that has one.

    For the first of a key it is any place.
    """
    order = key.argsort(dim=1, stable=True)
    return torch.empty_like(order).scatter_(1, order, order.roll(1, 1))
