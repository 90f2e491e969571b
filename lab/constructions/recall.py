"""Recall by key: mqar, induction, and copies of strings in which no token recurs."""

from dataclasses import replace

import torch

from lab.constructions import heads, states
from lab.constructions.cannot import CannotError, check_bits
from lab.constructions.codes import find_channels, spread
from lab.constructions.gather import gather
from lab.constructions.match import Lookup, bind, match
from lab.constructions.questions import Recall
from lab.constructions.residual import (
    ANSWER_SIZE,
    Residual,
    look_up_codes,
    read_answers,
    write_tokens,
)
from lab.layers.attention import Attention
from lab.layers.ssd import SSD
from lab.models import LanguageModel

MOST_KEYS = 8192
"""With more keys, comparing all pairs of codes takes minutes."""
ANSWER_ROOM = 16
"""Channels in which hundreds of answers differ well enough, so that keys may have the rest."""
KIND_SIZE = 0.5
"""Value in the kind's channel: + for answers, − for other tokens."""
SUMMED_SHARE = 0.5
"""Share of the stream for keys that stand in it once, where a sum is read: it minimises noise."""
KEYS_SHARE = 0.3
"""Share of the stream for keys that stand in it twice, where it is too small for all codes."""


def solve(model: LanguageModel, recall: Recall) -> None:
    """Set the weights: in two layers, or in one SSD that convolves.

    Raises:
        CannotError: when every pair of layers fails; the message is that of the first.
    """
    if recall.n_keys > MOST_KEYS:
        raise CannotError(
            f"{recall.n_keys} keys: comparing the codes of more than {MOST_KEYS} takes minutes"
        )
    check_bits(model, recall.bits, "the answers of a row")
    mixers = [
        block.mixer for block in model.list_blocks() if isinstance(block.mixer, (Attention, SSD))
    ]
    convolving = [m for m in mixers if isinstance(m, SSD) and m.position == "conv"]
    ways = [lambda m=m: _solve_in_one(model, recall, m) for m in convolving[:1]]
    pairs = [(i, j) for j in reversed(range(len(mixers))) for i in range(j)]
    ways += [lambda i=i, j=j: _solve_in_two(model, recall, mixers[i], mixers[j]) for i, j in pairs]
    if not ways:
        raise CannotError(
            "one mixer in the stack: to bind a key to what follows it and then look it "
            "up takes two (one of attention would need a size that grows with T: Sanford, Hsu and "
            "Telgarsky 2024), or an SSD with S.position=conv"
        )
    before = {name: entry.clone() for name, entry in model.state_dict().items()}
    refusals = []
    for way in ways:
        try:
            return way()
        except CannotError as refusal:
            refusals.append(refusal)
            model.load_state_dict(before)
    raise refusals[0]


def _solve_in_two(
    model: LanguageModel, recall: Recall, first: Attention | SSD, second: Attention | SSD
) -> None:
    """Gather in one mixer, match in a later one.

    Where both are SSD and only answers gather, which are not keys, a gathered key shares the
    channels of a token's own. The first token of a row is recognised by having gathered nothing.
    """
    memory = isinstance(first, SSD) and first.position != "conv" and isinstance(second, SSD)
    marks = memory and recall.opening is not None
    if recall.opening is not None and isinstance(second, SSD) and not marks:
        raise CannotError(
            "an SSD cannot look up what the marker asks for if its keys were gathered by attention "
            "or a convolution"
        )
    room = min(_count_room(first), _count_room(second)) - marks
    # Checked first, so that a rotation too fast is not reported as a stream too narrow.
    find_channels(second).choose_places(
        min(2, recall.n_keys), recall.seq_len, _count_reserved(second)
    )
    twice = recall.shared or not memory
    still = _count_still(second, recall) - marks
    residual = _lay_out(recall, model, still, room, twice, SUMMED_SHARE if memory else KEYS_SHARE)
    residual = replace(residual, marks_first=marks)
    own = gather(first, residual, recall.seq_len)
    if recall.shared and own:
        raise CannotError(
            "S.skip=false does not work where every token is a key, which is then gathered "
            "together with the one before"
        )
    lookup = _build_lookup(recall, residual, own)
    noise = match(second, residual, lookup)
    _finish(model, residual, lookup, noise)


def _solve_in_one(model: LanguageModel, recall: Recall, mixer: SSD) -> None:
    """Bind and match in one convolving SSD."""
    still = model.embed.weight.shape[1]
    residual = _lay_out(recall, model, still, _count_room(mixer), False, KEYS_SHARE)
    lookup = _build_lookup(recall, residual, 0.0)
    bind(mixer, residual, lookup)
    _finish(model, residual, lookup, 0.0)


def _build_lookup(recall: Recall, residual: Residual, own: float) -> Lookup:
    width = residual.keys.shape[1]
    return Lookup(
        recall.n_keys, width, recall.seq_len, recall.writes, recall.earliest, recall.reach, own
    )


def _finish(model: LanguageModel, residual: Residual, lookup: Lookup, noise: float) -> None:
    write_tokens(model, residual)
    # The token's own code, if it is an answer, is in the stream with the answer too.
    others = residual.energy + lookup.added
    size = ANSWER_SIZE - (residual.key == residual.answer)
    read_answers(model, residual, size, others, noise)


def _count_room(mixer: Attention | SSD) -> int:
    return heads.count_room(mixer) if isinstance(mixer, Attention) else states.count_room(mixer)


def _count_still(mixer: Attention | SSD, recall: Recall) -> int:
    """Return how many channels of a matching layer hold a key's code."""
    attends = isinstance(mixer, Attention)
    early = 2 if attends and recall.earliest != "never" and mixer.position == "rope" else 0
    return find_channels(mixer).count_room(recall.seq_len, _count_reserved(mixer)) - early


def _count_reserved(mixer: Attention | SSD) -> int:
    """Return how many of the slowest pairs hold no code: in attention the kind's."""
    return int(isinstance(mixer, Attention))


def _lay_out(
    recall: Recall, model: LanguageModel, still: int, room: int, twice: bool, share: float
) -> Residual:
    """Assign channels to the constant, the kind, keys and answers.

    Args:
        recall: what a row asks for.
        model: whose stream it is.
        still: channels that hold a key's code where it is looked up.
        room: channels that every layer carries.
        twice: whether keys stand in the stream twice, their own and the one gathered.
        share: of the stream, for one copy of the keys, where it is too small for all codes.

    Raises:
        CannotError: when less than a few channels are left for a code.
    """
    d = model.embed.weight.shape[1]
    times = 2 if twice else 1
    widest = min(still, room, recall.n_keys)
    if recall.shared:
        a = b = min(widest, (d - 2) // times) if twice else min(room, recall.n_keys, d - 2)
    else:
        a = min(widest, max(1, int(share * (d - 2))))
        exact = 2 + times * recall.n_keys + min(recall.n_answers, ANSWER_ROOM)
        if d >= exact and widest == recall.n_keys:
            a = recall.n_keys
        b = min(recall.n_answers, room, d - 2 - times * a)
        a = min(widest, (d - 2 - b) // times)
    # A code of one channel has no margin, unless there is one token.
    if a < min(2, recall.n_keys) or b < min(2, recall.n_answers):
        raise CannotError(
            f"d_model={d}: leaves {max(a, 0)} channels for {recall.n_keys} keys and {max(b, 0)} "
            f"for {recall.n_answers} answers; a larger d_model, or fewer heads, would work"
        )
    keys = look_up_codes(spread(recall.n_keys, a), recall.key)
    answers = keys if recall.shared else look_up_codes(spread(recall.n_answers, b), recall.answer)
    key = slice(2, 2 + a)
    gathered = slice(key.stop, key.stop + a) if twice else key
    end = gathered.stop
    if recall.shared:
        kind = torch.zeros(len(recall.key), dtype=torch.float64)
        kind[recall.key < 0] = 1
    else:
        kind = torch.where(recall.answer >= 0, KIND_SIZE, -KIND_SIZE).double()
    return Residual(
        d_model=d,
        kind=kind,
        key=key,
        gathered=gathered,
        answer=key if recall.shared else slice(end, end + b),
        keys=keys,
        answers=answers,
    )
