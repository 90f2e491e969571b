"""Flip-flop: bits are written, ignored and read; which was written last?"""

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from tasks import counter
from tasks.base import IGNORE, Batch, Links, Predictor, Preset, Task
from tasks.bounds import MAX_SEQ_LEN, check_range, option
from tasks.lazy import Tensor, torch
from tasks.shortcuts import copy_latest_match, look_at, look_back

SYMBOLS = "01wir"
WRITE, SKIP, READ = 2, 3, 4
INSTRUCTION, BIT, QUERY, PADDING = range(4)


@dataclass(frozen=True, kw_only=True)
class FlipFlop(Task):
    """Recall the bit written last, whatever bits came since.

    A row is T/2 pairs of an instruction and a bit, tokens 0, 1, write 2, ignore 3 and read 4. The
    first instruction is write and the last is read; each between is ignore with probability
    `p_ignore`, else write or read, equally likely. A bit that is written or ignored is random; a
    bit that is read is the one written last.

    With T = 16 and p_ignore = .5, row 0 of seed 0 is

    >>> task = FlipFlop(seq_len=16, p_ignore=0.5)
    >>> batch = task.batch(size=1)
    >>> " ".join(task.format_token(token) for token in batch.inputs[0].tolist())
    'w 1 r 1 r 1 r 1 w 1 r 1 i 0 r 1'
    >>> batch.targets.tolist()
    [[-100, -100, 1, -100, 1, -100, 1, -100, -100, -100, 1, -100, -100, -100, 1, -100]]

    The last read is of the second write: the 0 between is ignored.

    Scored: the read instructions; the target is the bit that comes next. Chance: 1/2.

    Links, int64 [b T/2], one column for each read and −1 past the last: query_pos, key_pos (the
    latest write instruction), value_pos (its bit), distance (query_pos − value_pos).

    Raises:
        ValueError: for an option out of bounds.

    Source: Liu et al. 2023 (Exposing Attention Glitches with Flip-Flop Language Modeling):
    T = 512, trained at p_ignore = .8, tested at .8 and in the tails, .98 and .1.
    """

    name: ClassVar[str] = "flip_flop"
    role_names: ClassVar[tuple[str, ...]] = ("instruction", "bit", "read", "padding")
    separates: ClassVar[str] = "rare errors of a hard mask"
    presets: ClassVar[dict[str, Preset]] = {
        "small": Preset({"seq_len": 64}, "LOG.md, small presets", seconds=52),
        "published": Preset({"seq_len": 512, "p_ignore": 0.8}, "Liu et al. 2023, FFL(.8)"),
    }
    evaluations: ClassVar[dict[str, tuple[float, ...]]] = {"p_ignore": (0.98, 0.1)}

    seq_len: int = option(512, "tokens per row; even")
    p_ignore: float = option(0.8, "probability of ignore; write and read share the rest")
    vocab_size: int = field(init=False, default=len(SYMBOLS))

    def validate(self) -> None:
        """Validate the options."""
        check_range("seq_len", self.seq_len, 4, MAX_SEQ_LEN, "a write and a read")
        if self.seq_len % 2:
            raise ValueError(f"seq_len={self.seq_len}: must be even, instructions have a bit each")
        check_range("p_ignore", self.p_ignore, 0, 1)

    def generate(self, split: str, numbers: Tensor, seed: int) -> Batch:
        """Build the rows with these numbers (int64 [b]) on the device of `numbers`."""
        word = self.draw_words(split, numbers, seed, self.seq_len // 2)
        write = WRITE + 2 * ((word >> 32) & 1)
        instruction = write.masked_fill(counter.draw_truth(word, self.p_ignore), SKIP)
        instruction[:, 0], instruction[:, -1] = WRITE, READ
        pair = torch.arange(self.seq_len // 2, device=numbers.device).expand_as(word)
        written = pair.where(instruction == WRITE, 0).cummax(1).values
        bit, read = (word >> 33) & 1, instruction == READ
        bit = bit.gather(1, written).where(read, bit)

        inputs = torch.stack((instruction, bit), 2).flatten(1)
        unscored = torch.full_like(bit, IGNORE)
        targets = torch.stack((bit.where(read, IGNORE), unscored), 2).flatten(1)
        role = torch.full_like(bit, INSTRUCTION).masked_fill(read, QUERY)
        roles = torch.stack((role, torch.full_like(bit, BIT)), 2).flatten(1)
        return Batch(inputs, targets, roles, Links(partial(self._make_links, read, written)))

    def _make_links(self, read: Tensor, written: Tensor) -> dict[str, Tensor]:
        """Link each read to the latest write, given which pairs are reads and their writes."""
        order = (~read).long().argsort(dim=1, stable=True)
        key = 2 * written.gather(1, order)
        links = {
            "query_pos": 2 * order,
            "key_pos": key,
            "value_pos": key + 1,
            "distance": 2 * order - key - 1,
        }
        there = read.gather(1, order)
        return {name: link.where(there, -1) for name, link in links.items()}

    def oracle(self, batch: Batch) -> Tensor:
        """Return the bit in memory at every read instruction."""
        answers = torch.full_like(batch.inputs, IGNORE)
        for row, answer in zip(batch.inputs.tolist(), answers, strict=True):
            memory = IGNORE
            for position in range(0, len(row), 2):
                if row[position] == WRITE:
                    memory = row[position + 1]
                elif row[position] == READ:
                    answer[position] = memory
        return answers

    @property
    def chance(self) -> float:
        """The accuracy of a guess between the bits."""
        return 1 / 2

    def shortcuts(self) -> dict[str, Predictor]:
        """Return predictors that look right without distinguishing writes from the rest.

        "most recent bit" is the bit of any instruction: right if the last was not ignore, else by
        chance, about 1 − p_ignore/2. "most recent match" is the bit read last: right if no write
        came since, else by chance, 3/4 where a read came before. "first write" is right until the
        second, else by chance: .52, or .63 at p_ignore = .98. "majority", of the bits
        so far, reaches .58.
        A bigram table and the position are at chance: neither depends on the bits.
        """
        return {
            "most recent bit": look_back(1),
            "most recent match": copy_latest_match,
            "first write": look_at(1),
            "majority": _predict_majority,
        }

    def format_token(self, token: int) -> str:
        """Return a bit, or the first letter of an instruction."""
        return SYMBOLS[token]


def _predict_majority(batch: Batch) -> Tensor:
    """Return the more frequent bit so far at each position, 1 if both are equally frequent."""
    lead = (batch.inputs == 1).long() - (batch.inputs == 0).long()
    return (lead.cumsum(1) >= 0).long()
