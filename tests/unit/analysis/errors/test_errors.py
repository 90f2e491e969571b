"""Planted mistakes go to the causes that they were planted with; rules are loops over the row."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from analysis import errors
from analysis.base import NotApplicableError, Subject
from analysis.errors import Ledger, attribute_errors
from analysis.errors.causes import (
    DECAYED,
    DECOY,
    IN_ROW,
    MASKED,
    OTHER_PAIR,
    OUTRANKED,
    READS,
    UNKNOWN,
)
from analysis.plain import to_plain
from lab.layers.attention import Attention
from lab.layers.mask import SoftMask
from lab.layers.mixer import take_positions
from lab.layers.ssd import SSD
from lab.models import build
from tasks.base import Batch
from tasks.mqar import MQAR

TASK = MQAR(seq_len=24, vocab_size=32, n_pairs=4)
STRONG = 100.0
"""What an answer adds to the residual stream, where the token itself adds 1."""


def tokens_of(x):
    return x.argmax(-1)


def right_values(tokens):
    """Return for each position where the first later-valued occurrence of its token was followed.

    Keys come first in their pair, so that is where its value is; −1 where it is new.
    """
    found = torch.full_like(tokens, -1)
    for b, row in enumerate(tokens.tolist()):
        for t, token in enumerate(row):
            if token in row[:t]:
                found[b, t] = row.index(token) + 1
    return found


def answer(x, positions, at=None):
    """Return an output that makes the model answer with the tokens at these positions."""
    tokens = tokens_of(x)
    chosen = tokens.gather(1, positions.clamp(min=0))
    answers = STRONG * nn.functional.one_hot(chosen, x.shape[-1]).to(x.dtype)
    return answers if at is None else take_positions(answers, at)


class Rule(nn.Module):
    """A mixer that answers with the token at the place that a rule names."""

    def __init__(self, place):
        super().__init__()
        self.place = place

    def forward(self, x):
        return answer(x, self.place(tokens_of(x)))


def latest_match(tokens):
    """Return where the latest earlier occurrence of each token was followed: it takes decoys."""
    found = torch.full_like(tokens, -1)
    for b, row in enumerate(tokens.tolist()):
        for t, token in enumerate(row):
            earlier = [s for s in range(t) if row[s] == token]
            if earlier:
                found[b, t] = earlier[-1] + 1
    return found


def next_pair(tokens):
    """Return the value stored after the right one; the first pair's for the last."""
    return (right_values(tokens) + 2) % 8


class Hidden(Attention):
    """Reads right values unless its mask hides them; of hidden ones it answers the first token."""

    def forward(self, x, at=None):
        """Return the answers."""
        place = right_values(tokens_of(x))
        positions = torch.arange(x.shape[1])
        v = torch.zeros(len(x), self.n_kv_heads, x.shape[1], 1)
        bias = self._key_bias(x, v, positions)
        assert bias is not None
        seen = bias[:, 0].gather(1, place.clamp(min=0)) > -5
        return answer(x, torch.where(seen, place, 0), at)


class Fading(SSD):
    """Answers with what its matrix weights most: 1.3 for the right value, 0.3 for others."""

    def forward(self, x, at=None):
        """Return the answers."""
        tokens = tokens_of(x)
        one_hot = nn.functional.one_hot(tokens, x.shape[-1]).to(x.dtype)
        stored = torch.arange(x.shape[1]) % 2 * (torch.arange(x.shape[1]) < 8)
        before = one_hot.roll(1, 1)
        even = torch.full((*tokens.shape, 1), 0.3**0.5)
        C, B = (torch.cat([z, even], -1)[:, :, None] for z in (one_hot, before))
        dt = stored.to(x.dtype).expand(tokens.shape)[..., None]
        log_decay = torch.full_like(dt, -0.4)
        dt, log_decay = self.hook_dt(dt), self.hook_log_decay(log_decay)
        B, C = self.hook_B_rot(B), self.hook_C_rot(C)
        total = log_decay.cumsum(1)
        M = torch.einsum("btgn,bsgn->bts", C, B) * dt.mT * (total - total.mT).exp()
        return answer(x, M.tril().argmax(-1), at)


def model_of(mixer: nn.Module):
    """Return a model of one mixer, whose residual stream is one-hot: token i is axis i."""
    model = build("AN", vocab_size=32, d_model=32)
    model.blocks[0].mixer = mixer
    with torch.no_grad():
        model.embed.weight.copy_(torch.eye(32))
    return model.eval()


def measured(mixer, task=TASK, rows=80):
    subject = Subject(task, model_of(mixer), task.batch(split="test", size=rows))
    return (*attribute_errors(subject), subject)


def shares(ledger: Ledger) -> dict[str, float]:
    return {cause.name: cause.share for cause in ledger.causes}


def test_who_takes_decoys_is_said_to():
    ledger, examples, subject = measured(Rule(latest_match))
    decoys = subject.batch.links["decoy"].bool()
    # The token after a decoy may happen to be the right value.
    assert 0 < ledger.wrong <= decoys.sum()
    assert ledger.scored == 4 * 80
    assert shares(ledger)[DECOY] == 1
    assert MASKED not in shares(ledger)
    assert DECAYED not in shares(ledger)
    [cause] = [cause for cause in ledger.causes if cause.name == DECOY]
    assert cause.chance < 0.2 < cause.interval[0]
    for example in examples.errors:
        row = subject.batch.inputs[example.row].tolist()
        assert row[example.position] == example.token
        assert example.answered in [
            row[s + 1] for s in range(8, example.position) if row[s] == example.token
        ]
        assert example.cause == DECOY


def test_who_answers_with_the_next_pair_is_said_to():
    ledger, _, _ = measured(Rule(next_pair))
    # Three of four pairs have a next one; a decoy may be followed by just that value.
    assert shares(ledger)[OTHER_PAIR] > 0.95
    assert shares(ledger)[OTHER_PAIR] + shares(ledger)[DECOY] == pytest.approx(1)
    assert ledger.wrong == ledger.scored
    assert ledger.neighbours == pytest.approx(0.75, abs=0.02)
    # Of three other pairs one is beside the first and the last, two are beside the middle ones.
    assert ledger.by_chance == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("hides", ["key", "value"])
def test_what_a_mask_hides_is_masked_away(hides):
    mixer = Hidden(32, mask="soft", max_seq_len=24)
    with torch.no_grad():
        # Pair 1 is stored at 2 and 3. Its key alone is not what this model needs to see.
        assert isinstance(mixer.mask, SoftMask)
        mixer.mask.l[0, 2 if hides == "key" else 3] = -40.0
        mixer.mask.l[0, 7] = -3.0
    ledger, _, subject = measured(mixer)
    rows = len(subject.batch.inputs)
    assert ledger.wrong == (0 if hides == "key" else rows)
    if hides == "value":
        # Answered with the first token, which may have followed a decoy.
        assert shares(ledger)[MASKED] > 0.95
        assert shares(ledger)[MASKED] + shares(ledger)[DECOY] == pytest.approx(1)
        assert ledger.masked == rows
        [cause] = [cause for cause in ledger.causes if cause.name == MASKED]
        assert cause.chance == 0


def test_what_a_mask_hides_without_harm_is_not_blamed():
    class Elsewhere(Hidden):
        """Answers with the next pair's value, whatever the mask says."""

        def forward(self, x, at=None):
            self._key_bias(x, torch.zeros(len(x), 1, x.shape[1], 1), torch.arange(x.shape[1]))
            return answer(x, next_pair(tokens_of(x)), at)

    mixer = Elsewhere(32, mask="soft", max_seq_len=24)
    with torch.no_grad():
        assert isinstance(mixer.mask, SoftMask)
        mixer.mask.l[0, 3] = -40.0
    ledger, _, _ = measured(mixer)
    assert ledger.masked == 80
    assert shares(ledger)[MASKED] == 0


def test_what_decays_below_its_rival_is_said_to():
    mixer = Fading(32)
    ledger, _, subject = measured(mixer)
    assert ledger.reader is not None
    assert (ledger.reader.layer, ledger.reader.head) == (0, 0)
    assert ledger.reader.contrast > READS
    # The last value is 0.3 and the first one 1.3 e^{−0.4·6} = 0.12 of it: only early pairs lose.
    lost = {0, 1}
    links = subject.batch.links
    expected = sum(slot in lost for row in links["store_slot"].tolist() for slot in row)
    assert ledger.wrong == expected
    assert shares(ledger)[DECAYED] + shares(ledger)[DECOY] == pytest.approx(1)
    assert shares(ledger)[DECAYED] > 0.95


def test_no_error_is_bounded_from_above():
    mixer = Rule(right_values)
    subject = Subject(TASK, model_of(mixer), TASK.batch(split="test", size=20))
    [ledger] = errors.measure(subject)
    assert isinstance(ledger, Ledger)
    assert ledger.wrong == 0
    assert ledger.figure() is None
    # Wilson's upper end for none of n: z²/(n + z²).
    bound = 3.8415 / (80 + 3.8415)
    assert ledger.interval == pytest.approx((0, bound), abs=1e-4)
    json.dumps(to_plain(ledger))


def test_without_pairs_there_are_three_causes():
    batch = TASK.batch(split="test", size=40)
    bare = Batch(batch.inputs, batch.targets, batch.roles, {})
    ledger, _ = attribute_errors(Subject(TASK, model_of(Rule(next_pair)), bare))
    assert list(shares(ledger)) == [IN_ROW, OUTRANKED, UNKNOWN]
    assert shares(ledger)[IN_ROW] == 1
    random = build("AM", vocab_size=32, d_model=16).eval()
    ledger, _ = attribute_errors(Subject(TASK, random, bare))
    assert sum(shares(ledger).values()) == pytest.approx(1)


def test_rows_without_a_scored_position_do_not_apply():
    batch = TASK.batch(split="test", size=2)
    bare = Batch(batch.inputs, torch.full_like(batch.targets, -100), batch.roles, {})
    with pytest.raises(NotApplicableError, match="no position is scored"):
        errors.measure(Subject(TASK, model_of(Rule(next_pair)), bare))


def test_rank_and_probability_are_those_of_the_softmax():
    model = build("AM SM", vocab_size=32, d_model=16).eval()
    batch = TASK.batch(split="test", size=10)
    _, examples = attribute_errors(Subject(TASK, model, batch))
    assert len(examples.errors) == 12
    with torch.no_grad():
        logits = model(batch.inputs)
    for example in examples.errors:
        row = logits[example.row, example.position].tolist()
        assert example.right == batch.targets[example.row, example.position]
        assert row[example.answered] == max(row)
        assert example.rank == 1 + sum(other > row[example.right] for other in row)
        probability = np.exp(row[example.right]) / np.exp(row).sum()
        assert example.probability == pytest.approx(probability, rel=1e-4)


def test_everything_is_recorded():
    ledger, examples, _ = measured(Rule(latest_match), rows=80)
    json.dumps(to_plain([ledger, examples]))
    assert sum(cause.count for cause in ledger.causes) == ledger.wrong
    # The rank of the right value is no matter of what was answered.
    unset = {cause.name for cause in ledger.causes if np.isnan(cause.chance)}
    assert unset == {OUTRANKED, UNKNOWN}
    assert len(examples.numbers().rows) == len(examples.errors)
