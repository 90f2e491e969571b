"""Induction: a trigger occurred once before; what followed it?"""

from dataclasses import dataclass
from typing import ClassVar

from tasks import counter
from tasks.base import IGNORE, Batch, Links, Predictor, Preset, Task
from tasks.bounds import MAX_SEQ_LEN, MAX_VOCAB_SIZE, check_range, option
from tasks.lazy import Tensor, torch
from tasks.shortcuts import look_back, predict_by_position, predict_by_token, predict_most_frequent

TRIGGER = 0
BEFORE, AFTER, QUERY, FILLER = range(4)


@dataclass(frozen=True, kw_only=True)
class Induction(Task):
    """Predict what followed the only earlier occurrence of the trigger.

    A row is random tokens 1 … V − 1, except for the trigger, token 0, which is at the last position
    and at one other, uniform in 0 … T − 3, so that at least one token lies between.

    With T = 8 and V = 6, row 0 of seed 0 is

    >>> batch = Induction(seq_len=8, vocab_size=6).batch(size=1)
    >>> batch.inputs.tolist()
    [[0, 1, 4, 2, 1, 3, 3, 0]]
    >>> batch.targets.tolist()
    [[-100, -100, -100, -100, -100, -100, -100, 1]]

    Scored: the last position. Chance: 1/(V − 1).

    Links, int64 [b 1]: query_pos, key_pos (the trigger), value_pos (what followed it), distance
    (query_pos − value_pos).

    Raises:
        ValueError: for an option out of bounds.

    Source: Gu and Dao 2023 (Mamba), § 4.1.2: T = 256, V = 16, tested at 64 to 1,048,576; Olsson
    et al. 2022 for the name.
    """

    name: ClassVar[str] = "induction"
    role_names: ClassVar[tuple[str, ...]] = ("trigger", "follower", "query", "filler")
    separates: ClassVar[str] = "RoPE on C/B; the horizon of a state"
    presets: ClassVar[dict[str, Preset]] = {
        "small": Preset({"seq_len": 64, "vocab_size": 16}, "LOG.md, small presets", seconds=15),
        "published": Preset(
            {"seq_len": 256, "vocab_size": 16}, "Gu and Dao 2023 (Mamba), tab. 2 and § E.1"
        ),
    }
    evaluations: ClassVar[dict[str, tuple[int, ...]]] = {"seq_len": (64, 128, 256, 512, 1024)}

    seq_len: int = option(256, "tokens per row")
    vocab_size: int = option(16, "size of the vocabulary; token 0 is the trigger")

    def validate(self) -> None:
        """Validate the options."""
        check_range("seq_len", self.seq_len, 3, MAX_SEQ_LEN)
        check_range("vocab_size", self.vocab_size, 3, MAX_VOCAB_SIZE)

    def generate(self, split: str, numbers: Tensor, seed: int) -> Batch:
        """Build the rows with these numbers (int64 [b]) on the device of `numbers`."""
        t = self.seq_len
        word = self.draw_words(split, numbers, seed, t)
        inputs = counter.draw_below(word, self.vocab_size - 1) + 1
        # The last position holds the trigger, so its word draws where the trigger occurs first.
        trigger = counter.draw_below(word[:, -1:], t - 2)
        inputs[:, -1] = TRIGGER
        inputs.scatter_(1, trigger, TRIGGER)
        targets = torch.full_like(inputs, IGNORE)
        targets[:, -1:] = inputs.gather(1, trigger + 1)
        roles = torch.full_like(inputs, FILLER)
        roles.scatter_(1, trigger, BEFORE).scatter_(1, trigger + 1, AFTER)
        roles[:, -1] = QUERY

        def links() -> dict[str, Tensor]:
            query = torch.full_like(trigger, t - 1)
            return {
                "query_pos": query,
                "key_pos": trigger,
                "value_pos": trigger + 1,
                "distance": query - trigger - 1,
            }

        return Batch(inputs, targets, roles, Links(links))

    def oracle(self, batch: Batch) -> Tensor:
        """Return what followed the first trigger, at the last position."""
        answers = torch.full_like(batch.inputs, IGNORE)
        for row, answer in zip(batch.inputs.tolist(), answers, strict=True):
            answer[-1] = row[row.index(TRIGGER) + 1]
        return answers

    @property
    def chance(self) -> float:
        """The accuracy of a guess among the tokens that are not the trigger."""
        return 1 / (self.vocab_size - 1)

    def shortcuts(self) -> dict[str, Predictor]:
        """Return predictors that look right without solving the task.

        "last value" is the token before the query, "bigram" and "position only" what is most often
        right: near chance. "most frequent token" is the row's, except the trigger, and above
        chance, as the follower may be any of the row's tokens: .096 at the defaults and .130 at
        "small", where chance is .067. "most recent match" solves the task, and is left out.
        """
        return {
            "last value": look_back(1),
            "most frequent token": predict_most_frequent(TRIGGER + 1),
            "bigram": predict_by_token(self),
            "position only": predict_by_position(self),
        }
