"""Word problem: the running product of elements of a finite group, at every prefix."""

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations, permutations
from typing import ClassVar

from jaxtyping import Int64

from tasks import counter
from tasks.base import Batch, Links, Predictor, Preset, Task
from tasks.bounds import MAX_SEQ_LEN, check_choice, check_range, option
from tasks.lazy import Tensor, torch
from tasks.shortcuts import predict_by_position

POINTS = {"S3": 3, "S4": 4, "S5": 5, "A5": 5}
"""How many points the groups of permutations permute."""
MOST_RESIDUES = 1024
"""Largest n of the residues Zn, whose products are a table of n²."""


def count_residues(group: str) -> int | None:
    """Return the n of the residues Zn; None for another group, or a name of none."""
    number = group.removeprefix("Z")
    return int(number) if group != number and number.isascii() and number.isdecimal() else None


@lru_cache
def list_elements(group: str) -> tuple[tuple[int, ...], ...]:
    """List the elements of a group in order: (residue,), or (p(0), p(1), …)."""
    residues = count_residues(group)
    if residues is not None:
        return tuple((residue,) for residue in range(residues))
    every = permutations(range(POINTS[group]))
    return tuple(p for p in every if group != "A5" or _is_even(p))


@lru_cache
def tabulate_products(group: str, device: "torch.device") -> Int64[Tensor, " products"]:
    """Tabulate the products of a group: entry a·|G| + b is the number of a·b."""
    element = torch.tensor(list_elements(group))
    order = len(element)
    if count_residues(group) is not None:
        product = (element + element.T) % order
    else:
        left = element[:, None].expand(-1, order, -1)
        right = element[None].expand(order, -1, -1)
        # As numbers in base n permutations of n points come in lexicographic order.
        n = POINTS[group]
        digits = n ** torch.arange(n - 1, -1, -1)
        code, wanted = (element * digits).sum(1), (right.gather(2, left) * digits).sum(2)
        product = torch.searchsorted(code, wanted)
    return product.flatten().to(device)


def _is_even(permutation: tuple[int, ...]) -> bool:
    """Whether an even number of pairs are in the wrong order."""
    return sum(left > right for left, right in combinations(permutation, 2)) % 2 == 0


ELEMENT = 0


@dataclass(frozen=True, kw_only=True)
class WordProblem(Task):
    """Multiply elements of a finite group from left to right.

    A row is T elements g₁ … g_T, independent and uniform. The target at position t is the product
    g₁·g₂·…·g_t. Token k is element k of the group in `list_elements`: a residue, or a
    permutation, in lexicographic order; 0 is the identity. A product of permutations applies its
    left factor first.

    With T = 8 and the residues modulo 2, row 0 of seed 0 is

    >>> batch = WordProblem(group="Z2", seq_len=8).batch(size=1)
    >>> batch.inputs.tolist()
    [[0, 1, 1, 1, 0, 1, 0, 1]]
    >>> batch.targets.tolist()
    [[0, 1, 0, 1, 1, 0, 0, 1]]

    The targets are the parities of the ones so far.

    There are |G|ᵀ different rows: short words over small groups recur across splits.

    Scored: every position. Chance: 1/|G|, with |G| = n, 6, 24, 120 and 60 for Zn, S3, S4, S5, A5.

    Links, int64 [b t]: query_pos.

    Raises:
        ValueError: for an option out of bounds.

    Source: Merrill, Petty and Sabharwal 2024 (The Illusion of State in State-Space Models), with
    Z60, A4 × Z5 and A5; Liu et al. 2023 (Transformers Learn Shortcuts to Automata). The word
    problem of a group that is not solvable, as A5 and S5, is complete for NC¹ (Barrington 1989): a
    model of constant depth in TC⁰ fails on long words, unless the classes are one. Those of Zn,
    S3 and S4 are in TC⁰.
    """

    name: ClassVar[str] = "word_problem"
    role_names: ClassVar[tuple[str, ...]] = ("element", "padding")
    separates: ClassVar[str] = "negative control: constant-depth models fail on A5"
    presets: ClassVar[dict[str, Preset]] = {
        "small": Preset({"group": "Z2", "seq_len": 14}, "LOG.md, small presets", stack="SM*2"),
        "published": Preset(
            {"group": "A5", "seq_len": 20},
            "Merrill, Petty and Sabharwal 2024: their released words have 2 to 20 elements",
        ),
    }
    evaluations: ClassVar[dict[str, tuple[int, ...]]] = {"seq_len": (16, 32, 64, 128, 256)}

    group: str = option("A5", "Zn for residues modulo n (Z2: parity), S3, S4, S5, or A5")
    seq_len: int = option(128, "elements per row")
    vocab_size: int = field(init=False, default=60)

    def validate(self) -> None:
        """Validate the options, and set vocab_size to the order of the group."""
        residues = count_residues(self.group)
        if residues is None:
            check_choice("group", self.group, ("Z2", "Z60", *POINTS))
        elif not 2 <= residues <= MOST_RESIDUES:
            raise ValueError(f"group={self.group}: n of Zn must be in 2 … {MOST_RESIDUES}")
        check_range("seq_len", self.seq_len, 2, MAX_SEQ_LEN)
        object.__setattr__(self, "vocab_size", len(list_elements(self.group)))

    def generate(self, split: str, numbers: Tensor, seed: int) -> Batch:
        """Build the rows with these numbers (int64 [b]) on the device of `numbers`.

        Products of 2, 4, … elements that end at a position are composed of two products of half as
        many: log₂T look-ups of whole rows.
        """
        order, t = self.vocab_size, self.seq_len
        inputs = counter.draw_below(self.draw_words(split, numbers, seed, t), order)
        table = tabulate_products(self.group, numbers.device)
        targets, length = inputs.clone(), 1
        while length < t:
            targets[:, length:] = table[targets[:, :-length] * order + targets[:, length:]]
            length *= 2
        position = torch.arange(t, device=numbers.device).expand_as(inputs)
        roles = torch.full((t,), ELEMENT, device=numbers.device).expand_as(inputs)
        return Batch(inputs, targets, roles, Links(lambda: {"query_pos": position}))

    def oracle(self, batch: Batch) -> Tensor:
        """Return the running products: residues added up, or things moved about."""
        elements = list_elements(self.group)
        number = {element: i for i, element in enumerate(elements)}
        answers = []
        for row in batch.inputs.tolist():
            product, answer = elements[0], []
            for token in row:
                if count_residues(self.group) is not None:
                    product = ((product[0] + token) % len(elements),)
                else:
                    product = tuple(elements[token][point] for point in product)
                answer.append(number[product])
            answers.append(answer)
        return torch.tensor(answers, device=batch.inputs.device)

    @property
    def chance(self) -> float:
        """The accuracy of a guess among the elements."""
        return 1 / self.vocab_size

    def shortcuts(self) -> dict[str, Predictor]:
        """Return predictors that look right without tracking the product.

        "last element" is the input itself: right at the first position, and where the product of
        all before is the identity, (1 + (T − 1)/|G|)/T. "last two" is the product of the last two,
        right at two positions: (2 + (T − 2)/|G|)/T. "position only" is at chance. A bigram table is
        "last element" again; the most recent match copies an input, and single inputs say nothing.
        """
        return {
            "last element": lambda batch: batch.inputs,
            "last two": self._multiply_last_two,
            "position only": predict_by_position(self),
        }

    def _multiply_last_two(self, batch: Batch) -> Tensor:
        table = tabulate_products(self.group, batch.inputs.device)
        before = batch.inputs.roll(1, 1)
        before[:, 0] = 0
        return table[before * self.vocab_size + batch.inputs]

    def format_token(self, token: int) -> str:
        """Return how an element is shown: a residue, or what a permutation makes of 0123 …"""
        return "".join(str(image) for image in list_elements(self.group)[token])
