"""Capo: biographies of invented people; what is each one's birthplace, employer, …?"""

from dataclasses import dataclass, field
from functools import partial
from math import log2
from typing import ClassVar

from tasks import counter
from tasks.base import IGNORE, Batch, Links, Predictor, Preset, Task
from tasks.bounds import MAX_SEQ_LEN, check_range, option
from tasks.lazy import Tensor, torch
from tasks.shortcuts import look_up, tabulate_most_frequent

NAME, CUE, VALUE, PADDING = range(4)
PARTS = 3
"""Tokens of a name: first, middle and last."""
MAX_NAMES, MAX_ATTRIBUTES, MAX_WORDINGS, MAX_VALUES = 1024, 64, 256, 2**16
MASK = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class Capo(Task):
    """Tell what a person's biography said: knowledge that must be stored in training.

    Each of N people has a full name of three tokens and A attributes. Names are distinct, drawn
    from all n_names³; many people share a first name, few two parts. An attribute's value is one
    of n_values of its own. Names and values are drawn from the batch's seed: training and test
    tell of the same N·A·log₂(n_values) bits.

    A biography is the name, and then the attributes in random order: a cue, which says which
    attribute is meant in one of several wordings, and the value. A row is biographies of different
    people, drawn at random. Token 0 fills the end; then come first, middle and last names, cues by
    attribute, and values by attribute.

    With two people, two attributes in one wording and T = 7, row 0 of seed 0 is

    >>> sizes = {"n_people": 2, "n_names": 2, "n_attributes": 2, "n_values": 4, "n_wordings": 1}
    >>> task = Capo(seq_len=7, **sizes)
    >>> batch = task.batch(size=1)
    >>> batch.inputs.tolist()
    [[2, 4, 6, 8, 15, 7, 10]]
    >>> batch.targets.tolist()
    [[-100, -100, -100, 15, -100, 10, -100]]
    >>> " ".join(task.to_str_tokens(batch.inputs))
    'f1 m1 l1 a1.0 v1.2 a0.0 v0.1'

    The person f1 m1 l1 has value 2 of attribute 1, and value 1 of attribute 0.

    Scored: the cues; the answer is the value, which is the next input. Chance: 1/n_values.

    Links, int64 [b q] in order: query_pos, name_pos (the first token of the name that is meant),
    person, attribute; and map [b 1], the 64 bits of the key that names and values are drawn by.

    Raises:
        ValueError: for an option out of bounds.

    Source: Allen-Zhu 2025 (Physics of Language Models, part 4.1; 2512.17351), task Capo, which are
    the biographies bioS of Allen-Zhu and Li 2024 (parts 3.1 and 3.3): names of 400 first, 400
    middle and 1,000 last ones; birthday, birthplace, university, subject, employer and its city,
    46.6 bits a person; some fifty wordings of each sentence, in their generator.

    Departs: a name's part, a cue and a value are a token each, and all attributes have equally many
    values, independent of each other (their employer's city follows from the employer); a sentence
    does not name the person again, and its order is drawn anew for each biography.
    """

    name: ClassVar[str] = "capo"
    role_names: ClassVar[tuple[str, ...]] = ("name", "cue", "value", "padding")
    separates: ClassVar[str] = "storage of knowledge, bits per parameter"
    grows: ClassVar[tuple[str, ...]] = ()
    why_fixed: ClassVar[str] = "its facts are asked one by one, in rows of any length"
    presets: ClassVar[dict[str, Preset]] = {
        "small": Preset(
            {
                "seq_len": 44,
                "n_people": 64,
                "n_names": 8,
                "n_attributes": 4,
                "n_values": 32,
            },
            "LOG.md, small presets",
            seconds=43,
        ),
        "published": Preset(
            {
                "seq_len": 512,
                "n_people": 50_000,
                "n_names": 543,
                "n_attributes": 6,
                "n_values": 218,
                "n_wordings": 50,
            },
            "bioS: 1.6e8 names, as 400 · 400 · 1,000; 46.6 bits in six attributes",
        ),
    }

    seq_len: int = option(256, "tokens per row")
    n_people: int = option(1024, "people that the rows tell of")
    n_names: int = option(64, "first names; as many middle and last ones")
    n_attributes: int = option(6, "attributes of each person")
    n_values: int = option(128, "values of each attribute")
    n_wordings: int = option(4, "wordings of each attribute's cue")
    vocab_size: int = field(init=False, default=985)

    def validate(self) -> None:
        """Validate the options, and set vocab_size to what names, cues and values take."""
        check_range("n_names", self.n_names, 2, MAX_NAMES)
        check_range("n_attributes", self.n_attributes, 1, MAX_ATTRIBUTES)
        check_range("n_values", self.n_values, 2, MAX_VALUES)
        check_range("n_wordings", self.n_wordings, 1, MAX_WORDINGS)
        check_range("seq_len", self.seq_len, self.length, MAX_SEQ_LEN, "a biography's tokens")
        fewest, most = self.seq_len // self.length, self.n_names**PARTS
        check_range("n_people", self.n_people, fewest, most, "those in a row; n_names³")
        answers = self.n_attributes * (self.n_wordings + self.n_values)
        object.__setattr__(self, "vocab_size", 1 + PARTS * self.n_names + answers)

    @property
    def length(self) -> int:
        """The number of tokens of a biography."""
        return PARTS + 2 * self.n_attributes

    @property
    def bits(self) -> float:
        """The bits of knowledge in all values."""
        return self.n_people * self.n_attributes * log2(self.n_values)

    @property
    def first_cue(self) -> int:
        """The token of the first attribute's first cue."""
        return 1 + PARTS * self.n_names

    @property
    def first_value(self) -> int:
        """The token of the first attribute's first value."""
        return self.first_cue + self.n_attributes * self.n_wordings

    def generate(self, split: str, numbers: Tensor, seed: int) -> Batch:
        """Build the rows with these numbers (int64 [b]) on the device of `numbers`."""
        n_bios, n_attributes, device = (
            self.seq_len // self.length,
            self.n_attributes,
            numbers.device,
        )
        n_drawn = n_bios * n_attributes
        sizes = [counter.count_rounds(self.n_people), n_drawn, n_drawn]
        which, order, wording = self.draw_words(split, numbers, seed, sum(sizes)).split(sizes, 1)
        person = counter.draw_distinct(which, n_bios, self.n_people)
        # Each biography's attributes in an order of its own, [b bio a].
        attribute = counter.draw_order(order.reshape(-1, n_attributes))
        attribute = attribute.view(len(numbers), n_bios, n_attributes)
        cue = counter.draw_below(wording, self.n_wordings).view_as(attribute)
        key = counter.derive_key(f"{self.name} map", seed)
        name = self._draw_names(key, person)
        value = self._draw_values(key, name[:, :, None], attribute)

        used = n_bios * self.length
        inputs = torch.zeros(len(numbers), self.seq_len, dtype=torch.int64, device=device)
        bios = inputs[:, :used].unflatten(1, (n_bios, self.length))
        for part in range(PARTS):
            digit = name // self.n_names ** (PARTS - 1 - part) % self.n_names
            bios[:, :, part] = 1 + part * self.n_names + digit
        bios[:, :, PARTS::2] = self.first_cue + attribute * self.n_wordings + cue
        bios[:, :, PARTS + 1 :: 2] = value
        targets = torch.full_like(inputs, IGNORE)
        targets[:, :used].unflatten(1, (n_bios, self.length))[:, :, PARTS::2] = value
        roles = torch.full((self.seq_len,), PADDING, device=device)
        each = roles[:used].unflatten(0, (n_bios, self.length))
        each[:, :PARTS], each[:, PARTS::2], each[:, PARTS + 1 :: 2] = NAME, CUE, VALUE
        links = partial(self._make_links, person, attribute, key)
        return Batch(inputs, targets, roles.expand_as(inputs), Links(links))

    def _make_links(self, person: Tensor, attribute: Tensor, key: int) -> dict[str, Tensor]:
        """Link each cue to the name that it is about."""
        bio = torch.arange(attribute.shape[1], device=person.device)[:, None] * self.length
        cue = bio + PARTS + 2 * torch.arange(self.n_attributes, device=person.device)
        signed = ((key + 2**63) & MASK) - 2**63
        return {
            "query_pos": cue.expand_as(attribute).flatten(1),
            "name_pos": bio.expand_as(attribute).flatten(1),
            "person": person[:, :, None].expand_as(attribute).flatten(1),
            "attribute": attribute.flatten(1),
            "map": torch.full((len(person), 1), signed, device=person.device),
        }

    def _draw_names(self, key: int, person: Tensor) -> Tensor:
        """Draw the names of people, each a number in base n_names with a digit for each part."""
        n = self.n_names**PARTS
        row = torch.zeros(1, dtype=torch.int64, device=person.device)
        word = counter.draw_words(counter.derive_key("names", key), 0, row, counter.count_rounds(n))
        return counter.permute(word, person.reshape(1, -1), n).long().view(person.shape)

    def _draw_values(self, key: int, name: Tensor, attribute: Tensor) -> Tensor:
        """Draw the tokens of the values of an attribute of those with a name."""
        fact = name * self.n_attributes + attribute
        word = counter.draw_words(key, 0, fact.flatten(), 1)
        value = counter.draw_below(word, self.n_values).view(fact.shape)
        return self.first_value + attribute * self.n_values + value

    def oracle(self, batch: Batch) -> Tensor:
        """Return the value that each cue asks for of the person named last.

        No row shows the map: the key that it is drawn with is read from `links["map"]`, and each
        value is computed from it in plain integers.
        """
        answers = torch.full_like(batch.inputs, IGNORE)
        keys = batch.links["map"][:, 0].tolist()
        for row, answer, key in zip(batch.inputs.tolist(), answers, keys, strict=True):
            for begin in range(0, len(row) - self.length + 1, self.length):
                name = 0
                for part, token in enumerate(row[begin : begin + PARTS]):
                    name = name * self.n_names + token - 1 - part * self.n_names
                for query in range(begin + PARTS, begin + self.length, 2):
                    attribute = (row[query] - self.first_cue) // self.n_wordings
                    fact = name * self.n_attributes + attribute
                    half = counter.splitmix64(key & MASK, fact * 2**24) % 2**32
                    first = self.first_value + attribute * self.n_values
                    answer[query] = first + half * self.n_values // 2**32
        return answers

    @property
    def chance(self) -> float:
        """The accuracy of a guess among the values of the attribute."""
        return 1 / self.n_values

    def shortcuts(self) -> dict[str, Predictor]:
        """Return predictors that look right without knowing who is meant.

        "most frequent value" is that of the attribute among all people, "last name" that among
        people with the same last name, "last two names" that among those with the same middle and
        last: .02, .11 and .87 at the defaults, where a pair of names is rarely shared. All read the
        map from its link. People are drawn alike at all positions, and a row tells of each once:
        there is nothing to copy.
        """
        return {
            "most frequent value": lambda batch: self._find_most_frequent(batch, 0),
            "last name": lambda batch: self._find_most_frequent(batch, 1),
            "last two names": lambda batch: self._find_most_frequent(batch, 2),
        }

    def _find_most_frequent(self, batch: Batch, parts: int) -> Tensor:
        """Find the most frequent value among people who share so many of the last parts of a name.

        Of equally frequent values it is the lowest.
        """
        answers, n = torch.full_like(batch.inputs, IGNORE), self.n_names**parts
        person = torch.arange(self.n_people, device=answers.device)
        attribute = torch.arange(self.n_attributes, device=answers.device)
        query = batch.links["query_pos"]
        for key in batch.links["map"].unique().tolist():
            name = self._draw_names(key & MASK, person)[:, None]
            value = self._draw_values(key & MASK, name, attribute)
            table = tabulate_most_frequent(name % n * self.n_attributes + attribute, value)
            asked = self._draw_names(key & MASK, batch.links["person"])
            feature = asked % n * self.n_attributes + batch.links["attribute"]
            found = answers.scatter(1, query, look_up(table, feature))
            answers = found.where(batch.links["map"] == key, answers)
        return answers

    def format_token(self, token: int) -> str:
        """Return how a token is shown: f0, m0, l0 are names, a0.0 cues, v0.0 values, _ the rest.

        The first number of a cue or a value is its attribute.
        """
        if token == 0:
            return "_"
        if token < self.first_cue:
            part, number = divmod(token - 1, self.n_names)
            return f"{'fml'[part]}{number}"
        is_value = token >= self.first_value
        first, n = (
            (self.first_value, self.n_values) if is_value else (self.first_cue, self.n_wordings)
        )
        attribute, number = divmod(token - first, n)
        return f"{'v' if is_value else 'a'}{attribute}.{number}"
