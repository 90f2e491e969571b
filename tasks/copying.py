"""Copying: a string, a marker, and the string again, or what follows some of its tokens."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, get_args

from tasks import counter
from tasks.base import IGNORE, Batch, Links, Predictor, Preset, Task
from tasks.bounds import MAX_SEQ_LEN, MAX_VOCAB_SIZE, check_choice, check_range, option
from tasks.lazy import Tensor, torch
from tasks.shortcuts import (
    copy_first_match,
    copy_latest_match,
    copy_two_token_match,
    predict_by_position,
    predict_by_token,
)

MARKER = 0
STRING, MARK, KEY, ECHO, PADDING = range(5)
Mode = Literal["copy", "prefix", "suffix"]
MAX_QUERY_LEN = 16
SHORT = 5
"""The longest string is this many times as long as the shortest, if `shortest` is not given."""


@dataclass(frozen=True, kw_only=True)
class Copy(Task):
    """Repeat a string token by token, each right answer being the next input.

    A string s₁ … s_n has tokens 1 … V − 1 at random, independent or, without `repeats`, no token
    twice; n is uniform in shortest … longest. Token 0 is the marker |, and also fills the rest of
    the row:

        copy    s₁ … s_n | s₁ … s_n₋₁                     longest = T/2
        prefix  k₁ … k_g | s₁ … s_n | c₁ … c_g₋₁          longest = T − 2g − 1
        suffix  s₁ … s_n | k₁ … k_g c₁ … c_g₋₁            longest = T − 2g

    In the lookups k₁ … k_g are g = `query_len` consecutive tokens from a random place of the
    string, and c₁ … c_g those that follow their first occurrence in it.

    With T = 8, strings of two to four tokens and V = 9, row 0 of seed 0 is

    >>> batch = Copy(seq_len=8, shortest=2, vocab_size=9).batch(size=1)
    >>> batch.inputs.tolist()
    [[1, 2, 3, 3, 0, 1, 2, 3]]
    >>> batch.targets.tolist()
    [[-100, -100, -100, -100, 1, 2, 3, 3]]

    The string is 1 2 3 3. Its 3 is followed once by 3 and once by the end: the last token alone
    does not tell which.

    Scored: in "copy" the marker and the tokens after it, n in all; in the lookups g, from the
    last marker on ("prefix") or from k_g on ("suffix"). Chance: 1/(V − 1).

    At a longer T, as evaluated, both ends of the lengths grow unless `shortest` is given: T = 200
    has strings of 20 … 100 tokens and T = 800 of 80 … 400, among them few of a length trained on.
    `shortest` = longest makes all strings one length.

    Links, int64 [b q] in the order of the answer: query_pos, value_pos (the answer's position in
    the string), key_pos (value_pos − 1, the token that the query repeats; −1 at the marker of
    "copy", before whose answer there is none) and distance (query_pos − value_pos). Columns
    past a row's answer are −1.

    Raises:
        ValueError: for an option out of bounds.

    Source: Jelassi et al. 2024 (Repeat After Me): copying, and n-gram lookup with a prefix or
    suffix key, over 26 letters.

    Departs: a row holds one string; an n-gram may occur again, and the first occurrence decides;
    the answer to a lookup is as long as its key.
    """

    name: ClassVar[str] = "copy"
    role_names: ClassVar[tuple[str, ...]] = ("string", "marker", "key", "echo", "padding")
    separates: ClassVar[str] = "length generalisation, RoPE"
    presets: ClassVar[dict[str, Preset]] = {
        "small": Preset({"seq_len": 32}, "LOG.md, small presets", seconds=98),
        "published": Preset(
            {"seq_len": 100, "shortest": 8, "vocab_size": 27},
            "Jelassi et al. 2024, lengths by default in their code, 8 to 50, over 26 letters",
        ),
    }
    evaluations: ClassVar[dict[str, tuple[int, ...]]] = {"seq_len": (200, 400, 800)}

    mode: Mode = option(
        "copy", "copy the string, or what follows a key before (prefix) or after it (suffix)"
    )
    seq_len: int = option(200, "tokens per row")
    shortest: int | None = option(None, "length of the shortest string", "a fifth of the longest")
    vocab_size: int = option(64, "size of the vocabulary; token 0 is the marker")
    repeats: bool = option(True, "whether a token may recur in a string")
    query_len: int = option(2, "length of a lookup's key")

    def validate(self) -> None:
        """Validate the options."""
        check_choice("mode", self.mode, get_args(Mode))
        check_range("query_len", self.query_len, 1, MAX_QUERY_LEN)
        room = 2 if self.mode == "copy" else 4 * self.query_len + (self.mode == "prefix")
        check_range("seq_len", self.seq_len, room, MAX_SEQ_LEN, f"mode={self.mode}")
        if self.shortest is not None:
            check_range(
                "shortest", self.shortest, self._fewest, self.longest, "what a row has room for"
            )
        if self.repeats:
            check_range("vocab_size", self.vocab_size, 3, MAX_VOCAB_SIZE)
        else:
            why = f"no token twice in {self.longest}, and a marker"
            check_range("vocab_size", self.vocab_size, self.longest + 1, MAX_VOCAB_SIZE, why)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest string that the row has room for."""
        t, g = self.seq_len, self.query_len
        return {"copy": t // 2, "prefix": t - 2 * g - 1, "suffix": t - 2 * g}[self.mode]

    @property
    def least(self) -> int:
        """The length of the shortest string."""
        return max(self._fewest, self.longest // SHORT) if self.shortest is None else self.shortest

    @property
    def _fewest(self) -> int:
        """The fewest tokens that have room for a key and what follows it."""
        return 1 if self.mode == "copy" else 2 * self.query_len

    def generate(self, split: str, numbers: Tensor, seed: int) -> Batch:
        """Build the rows with these numbers (int64 [b]) on the device of `numbers`.

        After the head of "prefix", its key and a marker, a row is the string, a marker, and an
        echo: the string again from `begin` on. In "suffix" the echo starts with the key; the tokens
        after the key are the answer.
        """
        length, string, place = self._draw(split, numbers, seed)
        g, position = self.query_len, torch.arange(self.seq_len, device=numbers.device)
        head, key = g + 1 if self.mode == "prefix" else 0, g if self.mode == "suffix" else 0
        answer = length
        if self.mode != "copy":
            place, answer = _find_first(string, place, g), torch.full_like(length, g)
        begin = place + g if head else place
        stored = position - head
        echoed = stored - length - 1
        is_string, is_mark = (stored >= 0) & (echoed < -1), echoed == -1
        is_echo = (echoed >= 0) & (echoed < key + answer - 1)

        roles = torch.full_like(is_echo, PADDING, dtype=torch.int64)
        for role, there in ((STRING, is_string), (MARK, is_mark), (ECHO, is_echo)):
            roles.masked_fill_(there, role)
        roles.masked_fill_(is_echo & (echoed < key), KEY)
        source = stored.where(is_string, begin + echoed).clamp(0, self.longest - 1)
        inputs = string.gather(1, source).where(is_string | is_echo, MARKER)
        if head:
            inputs[:, :g] = string.gather(1, place + position[:g])
            roles[:, :g], roles[:, g] = KEY, MARK
        scored = (is_mark | is_echo) & (echoed >= key - 1)
        following = (begin + echoed + 1).clamp(0, self.longest - 1)
        targets = string.gather(1, following).where(scored, IGNORE)
        links = partial(self._make_links, head + length + key, head + begin + key, answer)
        return Batch(inputs, targets, roles, Links(links))

    def _draw(self, split: str, numbers: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw lengths [b 1], strings [b longest] that end there, and positions of keys [b 1]."""
        n_symbols, longest = self.vocab_size - 1, self.longest
        drawn = longest if self.repeats else counter.count_rounds(n_symbols)
        word = self.draw_words(split, numbers, seed, drawn + 2)
        length = counter.draw_below(word[:, :1], longest - self.least + 1) + self.least
        if self.repeats:
            string = counter.draw_below(word[:, 2:], n_symbols) + 1
        else:
            string = counter.draw_distinct(word[:, 2:], longest, n_symbols) + 1
        if self.mode == "copy":
            return length, string, torch.zeros_like(length)
        places = length - 2 * self.query_len + 1
        return length, string, counter.draw_below(word[:, 1:2], places)

    def _make_links(self, query: Tensor, value: Tensor, answer: Tensor) -> dict[str, Tensor]:
        """Link the answer to the string, from its first query and value [b 1] and its length."""
        widest = self.longest if self.mode == "copy" else self.query_len
        nth = torch.arange(widest, device=query.device)
        links = {
            "query_pos": query + nth,
            "key_pos": value + nth - 1,
            "value_pos": value + nth,
            "distance": (query - value).expand(-1, widest),
        }
        return {name: link.where(nth < answer, -1) for name, link in links.items()}

    def oracle(self, batch: Batch) -> Tensor:
        """Return the string after its marker, or what follows the first occurrence of the key."""
        g, answers = self.query_len, torch.full_like(batch.inputs, IGNORE)
        for row, answer in zip(batch.inputs.tolist(), answers, strict=True):
            begin = g + 1 if self.mode == "prefix" else 0
            end = row.index(MARKER, begin)
            string, query = row[begin:end], end
            if self.mode != "copy":
                key = row[:g] if self.mode == "prefix" else row[end + 1 : end + 1 + g]
                query = end if self.mode == "prefix" else end + g
                found = next(i for i in range(len(string)) if string[i : i + g] == key)
                string = string[found + g : found + 2 * g]
            for i, token in enumerate(string):
                answer[query + i] = token
        return answers

    @property
    def chance(self) -> float:
        """The accuracy of a guess among the tokens that are not the marker."""
        return 1 / (self.vocab_size - 1)

    def shortcuts(self) -> dict[str, Predictor]:
        """Return predictors that look right without solving the task.

        "most recent match" copies what last followed the token, in the string or in the echo so
        far, and errs where tokens recur: .36 at the defaults. "first match" copies what followed
        it first: .61, and .83 at "small". "two tokens" matches the last two, or one where they are
        new: .975, .90 at "small", where it misses little but the marker, and .993 of the suffix
        lookup. So n-grams of a few tokens nearly solve random strings, as the hash of n-grams that
        Jelassi et al. construct says: only strings whose n-grams recur, of few symbols or longer,
        ask for more. Without `repeats` all three are right except after a marker, so that they
        solve the suffix lookup. In the prefix lookup the key is
        itself the first match, and two tokens are no better than one: .24. "last token" is the
        input itself; with "bigram" and "position only" it is near chance.
        """
        return {
            "most recent match": copy_latest_match,
            "first match": copy_first_match,
            "two tokens": copy_two_token_match,
            "last token": lambda batch: batch.inputs,
            "bigram": predict_by_token(self),
            "position only": predict_by_position(self),
        }

    def format_token(self, token: int) -> str:
        """Return how a token is shown: the marker is |."""
        return "|" if token == MARKER else str(token)


def _find_first(string: Tensor, place: Tensor, count: int) -> Tensor:
    """Find the first occurrence in a string [b n] of its `count` tokens from a place [b 1] on."""
    starts = string.shape[1] - count + 1
    same = torch.ones_like(string[:, :starts], dtype=torch.bool)
    for i in range(count):
        same &= string[:, i : starts + i] == string.gather(1, place + i)
    start = torch.arange(starts, device=string.device)
    return start.expand_as(same).where(same, starts).amin(1, keepdim=True)
