"""Look up by content: fetch the answer from the position that gathered the query's key."""

import math
from dataclasses import dataclass
from itertools import count

import torch

from lab.constructions import heads, states
from lab.constructions.cannot import CannotError
from lab.constructions.codes import Channels, compare_spread_codes, find_channels, spread, welch
from lab.constructions.residual import ANSWER_SIZE, CONSTANT, KIND, SEEN, Residual
from lab.layers.attention import Attention
from lab.layers.mask import has_oracle_mask
from lab.layers.ssd import SSD

ALLOWED = 0.25
"""Largest bound on the share of wrong answers at which weights are set; about a hundredth of the
answers is then wrong."""


@dataclass(frozen=True)
class SuperposedMemory:
    """A sum of writes, each the outer product of a key's code and an answer's.

    A query reads its own answer once, and each of w other answers times the product of the two
    keys. So its own answer leads any other by 1, with noise of variance 2 w κ² ν². Here κ and ν are
    Welch's bounds: no codes of that width have smaller root mean square products. The product of
    two answers adds ν² to the variance; that of two keys adds κ² where the other answer is written.

    Attributes:
        n_keys: how many keys there are.
        n_answers: how many answers.
        writes: writes other than the right one; a write of weight w counts w² times.
    """

    n_keys: int
    n_answers: int
    writes: int

    def bound_misses(self, key_width: int, answer_width: int, own: float = 1.0) -> float:
        """Return a bound on the expected share of wrong answers, as if all products were normal.

        Args:
            key_width: channels of the keys' codes.
            answer_width: channels of the answers' codes.
            own: product of a key with itself; less than 1 where it is rotated.
        """
        key = welch(self.n_keys, key_width) ** 2
        answer = welch(self.n_answers, answer_width) ** 2
        noise = self.compute_noise(key_width, answer_width) ** 2
        written = self.writes * _compute_tail(own, noise + key + answer)
        others = (self.n_answers - 1) * _compute_tail(own, noise + answer)
        return min(1.0, written + others)

    def compute_noise(self, key_width: int, answer_width: int) -> float:
        """Return the standard deviation of what other writes add to an answer's lead."""
        key, answer = welch(self.n_keys, key_width), welch(self.n_answers, answer_width)
        return math.sqrt(2 * self.writes) * key * answer

    def find_needed_width(self) -> int:
        """Return the least width of both codes at which at most one answer in 1,000 is missed."""
        return next(width for width in count(2) if self.bound_misses(width, width) <= 0.001)


def _compute_tail(lead: float, variance: float) -> float:
    """Return how often a normal deviate of that variance exceeds the lead."""
    return 0.5 * math.erfc(lead / math.sqrt(2 * variance)) if variance > 0 else 0.0


SUM_OF_MATCHES = (
    "a sum over all matches cannot prefer the earliest: an earlier and a later key of the same "
    "name add up"
)
KIND_WEIGHT = 0.4
"""Weight in the score of being an answer, where a matching key has 1: it takes both to win."""
OWN_WEIGHTS = (0.3, 0.4, 0.5, 0.6, 0.7)
"""Weights to try for the own key, subtracted from a gathered one where all tokens are keys: the
first token of a row gathers itself, and must not look like its own successor."""
EARLY_ANGLE = 0.8
"""Maximum angle of the pair that prefers the earliest, over a row: its sine must still grow."""
ON = 15.0
"""Value of a one-hot key before the convolution's SiLU; for other keys it is −15 or less."""
HEAVIEST_KIND = 1.3
"""A factor larger than any change of the norm's divisor by what was gathered."""


@dataclass(frozen=True)
class Lookup:
    """What is looked up.

    Attributes:
        n_keys: how many keys there are.
        width: channels of their codes, those of `spread`.
        seq_len: T.
        writes: most other pairs of a key and its answer in a row; a pair that is written twice
            counts four times, as its square does.
        earliest: "query" where the first of several matches is right, "kind" where tokens of kind 1
            ask for the first of all positions, else "never".
        reach: tokens before a query among which the earliest is sought.
        own: how much of its own key a token has gathered in addition to the previous token's.
    """

    n_keys: int
    width: int
    seq_len: int
    writes: int
    earliest: str
    reach: int
    own: float

    @property
    def added(self) -> float:
        """The most squared units that gathering adds."""
        return (1 + self.own) ** 2


def match(mixer: Attention | SSD, residual: Residual, lookup: Lookup) -> float:
    """Fetch the answer at the position whose gathered key equals the own key.

    Returns:
        The noise in the answer's lead over others (`SuperposedMemory.compute_noise`); 0 for
            attention.

    Raises:
        CannotError: when keys or positions cannot be distinguished well enough.
    """
    if isinstance(mixer, Attention):
        _attend(mixer, residual, lookup)
        return 0.0
    return _read(mixer, residual, lookup)


def _attend(attention: Attention, residual: Residual, lookup: Lookup) -> None:
    """Make queries the own keys, keys the gathered ones, and values the answers."""
    channels = find_channels(attention)
    places = channels.choose_places(lookup.width, lookup.seq_len, 1)
    own, high, low = channels.compare_codes(lookup.n_keys, lookup.width, places, lookup.seq_len)
    shared = residual.key == residual.answer
    slow = math.cos(channels.theta(channels.width // 2 - 1) * lookup.seq_len)
    ratio = residual.scale_by_norm(0) / residual.scale_by_norm(1)
    if shared:
        margin, weight = max(
            (own - w * high - max(high - w * low, 1 - w, -ratio * w * low), w) for w in OWN_WEIGHTS
        )
    else:
        weight = KIND_WEIGHT
        wrong = max(high + weight, ratio * weight, 1 - weight * slow)
        margin = own + weight * slow - wrong
    what = f"to tell {lookup.n_keys} keys apart in {len(places)} of {channels.width} channels"
    hint = "" if channels.layout is None else "; position=none for that block leaves all of them"
    score = heads.find_needed_score(margin, lookup.seq_len, what, hint)
    pair, early = 0, 0.0
    # The mask "oracle" hides what comes later than the pairs.
    hidden = has_oracle_mask(attention)
    earliest = "never" if hidden and lookup.earliest == "query" else lookup.earliest
    if earliest != "never":
        pair, early = _choose_early_pair(channels, lookup)
        if earliest == "query":
            # Content must outweigh position.
            score += early * HEAVIEST_KIND / margin
    heads.check_open(attention, lookup.seq_len)

    target, query = residual.scale_by_norm(1), residual.scale_by_norm(lookup.added)
    gain = (score * channels.width**0.5 / (target * query)) ** 0.5
    used = heads.carry(
        attention, residual.answer, residual.answer, ANSWER_SIZE * residual.unit / target
    )
    heads.clear(attention, used)
    starts = zip(
        places,
        range(residual.key.start, residual.key.stop),
        range(residual.gathered.start, residual.gathered.stop),
        strict=True,
    )
    for place, key, gathered in starts:
        heads.add_score(attention, used, place, (key, gain), (gathered, gain))
        off = lookup.own + (weight if shared else 0.0)
        heads.add_score(attention, used, place, (key, gain), (key, -off * gain))
    place = 0 if channels.layout is None else channels.pair(channels.width // 2 - 1)[0]
    if not shared:
        kind = residual.kind.max().item()
        heads.add_score(attention, used, place, (CONSTANT, gain), (KIND, weight * gain / kind))
    if earliest != "never":
        first, second = channels.pair(pair)
        asks = CONSTANT if earliest == "query" else KIND
        gain = (early * channels.width**0.5 / (target * query)) ** 0.5
        # The product is sin θl: query and key are a quarter turn apart.
        heads.add_score(attention, used, first, (asks, gain), (CONSTANT, 0.0))
        heads.add_score(attention, used, second, (CONSTANT, 0.0), (CONSTANT, gain))


def _choose_early_pair(channels: Channels, lookup: Lookup) -> tuple[int, float]:
    """Return the pair whose sine makes the earliest key lead, and the scale that this takes.

    Raises:
        CannotError: without rotation, or when the scale is too large for fp32.
    """
    what = "to prefer the earliest of several keys"
    if channels.layout is None:
        raise CannotError(f"A.position=none: {what} without rotation; rope would work")
    places = set(channels.choose_places(lookup.width, lookup.seq_len, 1))
    pairs = [
        m
        for m in range(channels.width // 2)
        if channels.theta(m) * lookup.reach <= EARLY_ANGLE and not places & set(channels.pair(m))
    ]
    if not pairs:
        raise CannotError(f"{what}: {channels.what} has no slow pair left for it")
    pair = pairs[0]
    theta = channels.theta(pair)
    slope = math.sin(theta * lookup.reach) - math.sin(theta * (lookup.reach - 1))
    return pair, heads.find_needed_score(slope, lookup.seq_len, what)


@torch.no_grad()
def _read(ssd: SSD, residual: Residual, lookup: Lookup) -> float:
    """Make B the gathered key, C the own key and x the answer, and let nothing fade."""
    if ssd.position == "conv":
        raise CannotError("S.position=conv cannot read keys that another layer gathered")
    opening = lookup.earliest == "kind"
    if lookup.earliest == "query" or (opening and not residual.marks_first):
        raise CannotError(SUM_OF_MATCHES)
    channels = find_channels(ssd)
    a = lookup.width
    places = channels.choose_slowest(a + opening, lookup.seq_len)
    noise = _bound_noise(channels, places[:a], residual, lookup)
    shared = residual.key == residual.answer
    # A query has gathered its own key, if those are added, and else nothing that matters, except
    # where all tokens are keys.
    target = residual.scale_by_norm(1 + SEEN**2 * opening)
    query = target if shared else residual.scale_by_norm(lookup.own**2)
    gate = states.open_gate(ssd, query)
    # Half a percent is lost over the whole row.
    states.keep_time(ssd, target, 0.005 / lookup.seq_len)
    states.clear(ssd)
    for i, place in enumerate(places[:a]):
        states.add_score(
            ssd,
            place,
            (residual.key.start + i, 1 / query),
            (residual.gathered.start + i, 1 / target),
        )
        if not lookup.own:
            continue
        states.add_score(
            ssd,
            place,
            (residual.key.start + i, 1 / query),
            (residual.key.start + i, -lookup.own / target),
        )
    amount = ANSWER_SIZE * residual.unit / (target * gate)
    if ssd.norm_weight is not None:
        amount = states.find_normed_amount(ssd, residual)
    states.carry(ssd, residual.answer, residual.answer, "read", amount)
    if opening:
        _open(ssd, residual, places[a], target)
    if ssd.D is not None:
        # Subtract the own token where its code stands among answers.
        ssd.D.fill_(-1 / ANSWER_SIZE if shared else 0)
    return noise


def _bound_noise(
    channels: Channels, places: tuple[int, ...], residual: Residual, lookup: Lookup
) -> float:
    """Return `SuperposedMemory.compute_noise`; 0 where other writes cannot hide an answer.

    Raises:
        CannotError: when other writes often hide an answer.
    """
    n, a = lookup.n_keys, lookup.width
    own, high, low = channels.compare_codes(n, a, places, lookup.seq_len)
    n_answers, b = int((residual.answers.norm(dim=1) > 0).sum()), residual.answers.shape[1]
    nearest = compare_spread_codes(n_answers, b).highest
    if lookup.writes * max(high, -low) * (1 + nearest) < 0.9 * own * (1 - nearest):
        return 0.0
    memory = SuperposedMemory(n, n_answers, lookup.writes)
    share = memory.bound_misses(a, b, own)
    if share <= ALLOWED:
        return memory.compute_noise(a, b)
    width = memory.find_needed_width()
    raise CannotError(
        f"SSD returns Σ (C·B) x, no softmax: {n} keys in {a} channels and {n_answers} answers in "
        f"{b} are so alike that what other tokens wrote would hide up to {100 * share:.0f} % of "
        f"the answers. S.position=conv makes keys one-hot; d_model={2 + 2 * width} with "
        f"d_state={width} and S.position=decay would work"
    )


@torch.no_grad()
def _open(ssd: SSD, residual: Residual, place: int, target: float) -> None:
    """Let the marker read what the first token wrote; both differ from all others in `KIND`."""
    kind = residual.kind.max().item()
    first, marker = (
        residual.scale_by_norm(0),
        residual.scale_by_norm(1 + (kind - SEEN) ** 2 - kind**2),
    )
    read = 1 / (kind * marker)
    write = target / (SEEN * first**2)
    states.add_score(ssd, place, (KIND, read), (KIND, write))
    for row in states.list_rows(ssd, place):
        ssd.C_proj.weight[row, CONSTANT] = SEEN * read
        ssd.B_proj.weight[row, CONSTANT] = SEEN * write


@torch.no_grad()
def bind(ssd: SSD, residual: Residual, lookup: Lookup) -> None:
    """Gather and match in one layer with a convolution: B is the previous token's key, one-hot.

    The SiLU after the convolution is a threshold: other codes reach 3e-7 of what the own code
    reaches. So each key needs a channel of the state, but not of the stream.
    """
    states.check_taps(ssd, 1)
    n_keys, d_state = lookup.n_keys, ssd.B_proj.out_features // ssd.n_groups
    opening = lookup.earliest == "kind"
    if n_keys + opening > d_state:
        raise CannotError(
            f"S.d_state={d_state}: {n_keys + opening} one-hot keys need as many channels; "
            f"d_state={n_keys + opening} would work"
        )
    if lookup.earliest == "query":
        raise CannotError(SUM_OF_MATCHES)
    amplitude = residual.scale_by_norm(0)
    other = compare_spread_codes(n_keys, lookup.width).highest
    steep = 2 * ON / (amplitude * (1 - other))
    threshold = -steep * amplitude * (1 + other) / 2
    gate = states.open_gate(ssd, amplitude)
    states.keep_time(ssd, amplitude, 0.005 / lookup.seq_len)
    states.clear(ssd)
    product = states.silu(ON) ** 2
    amount = ANSWER_SIZE * residual.unit / (amplitude * gate * product)
    if ssd.norm_weight is not None:
        amount = states.find_normed_amount(ssd, residual)
    states.carry(ssd, residual.answer, residual.answer, "read", amount)
    if ssd.D is not None:
        ssd.D.zero_()
    assert ssd.conv is not None
    codes = (steep * spread(n_keys, lookup.width)).to(ssd.B_proj.weight)
    previous = -2
    for start in range(0, ssd.B_proj.out_features, d_state):
        own = slice(start, start + n_keys)
        for weight in (ssd.B_proj.weight, ssd.C_proj.weight):
            weight[own, residual.key] = codes
        for part in (states.get_write_part, states.get_read_part):
            part(ssd, ssd.conv.bias)[start : start + d_state] = threshold
        taps = states.get_write_part(ssd, ssd.conv.weight)
        taps[own] = 0
        taps[own, previous] = 1
        if opening:
            # On for the first token of a row alone, and read by the tokens that ask for it.
            row, both = start + n_keys, 2 * ON / amplitude
            ssd.B_proj.weight[row, CONSTANT] = -both
            taps[row] = 0
            taps[row, previous] = 1
            states.get_write_part(ssd, ssd.conv.bias)[row] = ON
            ssd.C_proj.weight[row, KIND] = both / residual.kind.max().item()
            states.get_read_part(ssd, ssd.conv.bias)[row] = -ON
