"""Language: strings of a random finite automaton, a new one each row; what comes next?"""

from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from tasks import counter
from tasks.base import IGNORE, Batch, Links, Predictor, Preset, Task
from tasks.bounds import MAX_SEQ_LEN, check_range, option
from tasks.lazy import Tensor, torch

SEPARATOR = 0
SYMBOL, BETWEEN, PADDING = range(3)
MAX_EDGES = 4
MIN_SYMBOLS = 4
"""Smallest alphabet of an automaton: the edges of a state have different symbols."""
MAX_STATES = 64
MAX_SYMBOLS = 2**20
MAX_STRINGS = MAX_LENGTH = 1024


class _Automata(NamedTuple):
    """One automaton for each row; edge e of state s exists if e < n_edges.

    Attributes:
        n_states: [b 1].
        n_edges: [b s], 1 … 4.
        symbol: [b s e], the token that an edge emits.
        following: [b s e], the state that it leads to.
    """

    n_states: Tensor
    n_edges: Tensor
    symbol: Tensor
    following: Tensor

    def mask_missing(self, table: Tensor) -> Tensor:
        """Set a table [b s e] to -1 where there is no edge or no state."""
        edge = torch.arange(MAX_EDGES, device=table.device) < self.n_edges[:, :, None]
        state = torch.arange(table.shape[1], device=table.device) < self.n_states
        return table.where(edge & state[:, :, None], -1)


@dataclass(frozen=True, kw_only=True)
class Language(Task):
    """Continue strings of an automaton that only the row shows.

    A row has an automaton of its own. Its number of states n is uniform in min_states … max_states,
    the size of its alphabet in 4 … n_symbols, the alphabet a random subset of the tokens 1 …
    n_symbols. Each state has 1 … min(4, n − 1) edges, uniform, with distinct symbols of the
    alphabet, to distinct other states. A string is a walk from state 0 that takes each of a state's
    edges with equal probability; its length is uniform in 1 … max_length and says nothing about the
    state. The row is min_strings … max_strings of them, uniform, with token 0 between two; it is
    cut at T tokens, or filled with token 0.

    With T = 12, three states, four symbols and strings of up to 5, row 0 of seed 0 is

    >>> options = {"min_states": 3, "max_states": 3, "n_symbols": 4, "max_length": 5}
    >>> batch = Language(seq_len=12, **options).batch(size=1)
    >>> batch.inputs.tolist()
    [[3, 3, 1, 4, 0, 3, 3, 1, 0, 3, 3, 0]]
    >>> batch.targets.tolist()
    [[3, 1, 4, -100, 3, 3, 1, -100, 3, 3, -100, 1]]
    >>> batch.links["symbol_of"].tolist()
    [[[3, 1, -1, -1], [3, -1, -1, -1], [4, -1, -1, -1]]]
    >>> batch.links["next_state"].tolist()
    [[[1, 2, -1, -1], [0, -1, -1, -1], [1, -1, -1, -1]]]

    State 0 emits 3 and goes to state 1, or emits 1 and goes to state 2; from state 1 a 3 leads
    back, from state 2 a 4 leads to state 1. So the strings are 3 3 1 4, 3 3 1, 3 3 and 1 …

    Scored: the next token wherever it is a symbol; separators cannot be predicted.
    Chance: 1/n_symbols.

    Links, int64: symbol_of and next_state [b s e] are the automaton; state [b t] is the state
    of the walk after a scored position, and legal [b t e] the symbols of its edges. A prediction
    among them is right about the language, if not about the draw. -1 pads.

    Raises:
        ValueError: for an option out of bounds.

    Source: Akyürek, Wang, Kim, Andreas 2024 (In-Context Language Learning), RegBench, as its code
    draws it: 4 to 12 states, alphabets of 4 to 18 symbols, 10 to 20 strings of up to 50 symbols,
    separators unscored.

    Departs: four edges are as likely as one (the bounds of the code leave 1 … 3, and likewise up to
    19 strings of 49 symbols); strings are shorter, to fit in 256 tokens; automata are not
    minimised, which leaves the strings' distribution as it is; rows of two splits have automata
    drawn apart, not compared.
    """

    name: ClassVar[str] = "language"
    role_names: ClassVar[tuple[str, ...]] = ("symbol", "separator", "padding")
    separates: ClassVar[str] = "in-context language learning"
    grows: ClassVar[tuple[str, ...]] = ()
    why_fixed: ClassVar[str] = (
        "its answers are uncertain, so no accuracy tells when a length is learned"
    )
    presets: ClassVar[dict[str, Preset]] = {
        "small": Preset(
            {"seq_len": 128, "max_states": 6, "n_symbols": 8, "max_length": 12},
            "LOG.md, small presets",
        ),
        "published": Preset(
            {"seq_len": 1024, "max_length": 50},
            "Akyürek et al. 2024, RegBench; 1,024 tokens hold its longest row",
        ),
    }
    stochastic: ClassVar[bool] = True

    seq_len: int = option(256, "tokens per row")
    vocab_size: int = field(init=False, default=19)
    min_states: int = option(4, "fewest states of an automaton")
    max_states: int = option(12, "most states of an automaton")
    n_symbols: int = option(18, "number of symbols from which alphabets are drawn")
    min_strings: int = option(10, "fewest strings per row")
    max_strings: int = option(20, "most strings per row")
    max_length: int = option(30, "length of the longest string")

    def validate(self) -> None:
        """Validate the options."""
        check_range(
            "seq_len", self.seq_len, 2, MAX_SEQ_LEN, "a string of one symbol scores nothing"
        )
        check_range("max_states", self.max_states, 2, MAX_STATES)
        check_range("min_states", self.min_states, 2, self.max_states, "max_states")
        check_range("n_symbols", self.n_symbols, MIN_SYMBOLS, MAX_SYMBOLS)
        check_range("max_strings", self.max_strings, 2, MAX_STRINGS)
        check_range("min_strings", self.min_strings, 2, self.max_strings, "max_strings")
        check_range("max_length", self.max_length, 1, MAX_LENGTH)
        object.__setattr__(self, "vocab_size", self.n_symbols + 1)

    def generate(self, split: str, numbers: Tensor, seed: int) -> Batch:
        """Build the rows with these numbers (int64 [b]) on the device of `numbers`."""
        t, longest = self.seq_len, min(self.max_length, self.seq_len + 1)
        n_drawn = 2 + counter.count_rounds(self.n_symbols) + self.max_states * (1 + 2 * MAX_EDGES)
        sizes = [1, self.max_strings, n_drawn]
        count, length, drawn = self.draw_words(split, numbers, seed, sum(sizes)).split(sizes, dim=1)
        automata = self._draw_automata(drawn)
        count = (
            counter.draw_below(count, self.max_strings - self.min_strings + 1) + self.min_strings
        )
        # T + 1 tokens, of which the last is the last target, have room for no more strings.
        n_strings = min(self.max_strings, t // 2 + 1)
        length = counter.draw_below(length[:, :n_strings], self.max_length) + 1
        place = torch.arange(t + 1, device=numbers.device).expand(len(numbers), -1)
        start = (length + 1).cumsum(1) - length - 1
        used = torch.arange(n_strings, device=numbers.device) < count
        begins = torch.zeros_like(place[:, :1]).expand(-1, t + 2).clone()
        begins.scatter_(1, start.where(used, t + 1).clamp(max=t + 1), 1)
        string = begins[:, :-1].cumsum(1) - 1
        offset = place - start.gather(1, string)
        inside = offset < length.gather(1, string)
        # The words of a string's steps are adjacent; only those that the row needs are drawn.
        index = sum(sizes) + string * longest + offset.clamp(max=longest - 1)
        key = counter.derive_key(self.name, seed)
        word = counter.draw_words_at(key, self.splits.index(split), numbers, index)
        state, token = _walk(automata, start, length.where(used, 0), word)
        token, state = token.where(inside, SEPARATOR), state.where(inside, -1)[:, 1:]

        between = (offset == length.gather(1, string)) & (string < count - 1)
        roles = torch.full_like(token, PADDING).where(~between, BETWEEN).where(~inside, SYMBOL)
        targets = token[:, 1:].where(inside[:, 1:], IGNORE)

        def links() -> dict[str, Tensor]:
            symbol_of = automata.mask_missing(automata.symbol)
            known = state.clamp(min=0)[:, :, None].expand(-1, -1, MAX_EDGES)
            return {
                "symbol_of": symbol_of,
                "next_state": automata.mask_missing(automata.following),
                "state": state,
                "legal": symbol_of.gather(1, known).where(state[:, :, None] >= 0, -1),
            }

        return Batch(token[:, :-1], targets, roles[:, :-1], Links(links))

    def _draw_automata(self, word: Tensor) -> _Automata:
        """Draw an automaton for each row from its words [b i]."""
        states = torch.arange(self.max_states, device=word.device)
        sizes = [1, 1, counter.count_rounds(self.n_symbols), self.max_states]
        sizes += [self.max_states * MAX_EDGES] * 2
        first, second, mixing, edges, symbols, others = word.split(sizes, dim=1)
        n_states = (
            counter.draw_below(first, self.max_states - self.min_states + 1) + self.min_states
        )
        alphabet = counter.draw_below(second, self.n_symbols - MIN_SYMBOLS + 1) + MIN_SYMBOLS
        n_edges = counter.draw_below(edges, (n_states - 1).clamp(max=MAX_EDGES)) + 1
        rank = _draw_distinct(symbols.unflatten(1, (-1, MAX_EDGES)), alphabet)
        token = counter.permute(mixing, rank.flatten(1), self.n_symbols).long() + 1
        other = _draw_distinct(others.unflatten(1, (-1, MAX_EDGES)), n_states - 1)
        other += other >= states[:, None]
        return _Automata(n_states, n_edges, token.unflatten(1, (-1, MAX_EDGES)), other)

    def oracle(self, batch: Batch) -> Tensor:
        """Return the lowest of the symbols that may come next, by following the row's automaton.

        The automaton is read from `links`, which no model sees: an upper bound. All edges of a
        state are equally likely, so no answer is right more often than 1/(number of edges): .54 on
        average at the defaults, more than (1 + 1/2 + 1/3 + 1/4)/4 = .52, as walks stay where edges
        are few. Rows do not determine their automaton; the best from a row alone is lower.
        """
        symbol_of, next_state = (batch.links[name].tolist() for name in ("symbol_of", "next_state"))
        answers = []
        for row, symbols, states in zip(batch.inputs.tolist(), symbol_of, next_state, strict=True):
            state, answer = 0, []
            for token in row:
                state = 0 if token == SEPARATOR else states[state][symbols[state].index(token)]
                answer.append(min(symbol for symbol in symbols[state] if symbol >= 0))
            answers.append(answer)
        return torch.tensor(answers, device=batch.inputs.device)

    @property
    def chance(self) -> float:
        """The accuracy of a guess among the symbols."""
        return 1 / self.n_symbols

    def shortcuts(self) -> dict[str, Predictor]:
        """Return predictors that look right without knowing the automaton.

        They count within the row so far which symbol was most frequent: "unigram" overall, "bigram"
        after the same token, "trigram" after the same two tokens, else as the bigram. At the
        defaults they score about .27, .43 and .47. Tables over rows and positions do not apply:
        automata are drawn anew.
        """
        return {
            "unigram": lambda batch: _predict_most_frequent(batch, 0),
            "bigram": lambda batch: _predict_most_frequent(batch, 1),
            "trigram": lambda batch: _predict_most_frequent(batch, 2),
        }

    def format_token(self, token: int) -> str:
        """Return a letter, or the number where there are more symbols; | between strings."""
        if token == SEPARATOR:
            return "|"
        return chr(ord("a") + token - 1) if self.n_symbols <= 26 else str(token)


def _draw_distinct(word: Tensor, n: Tensor) -> Tensor:
    """Draw distinct numbers in 0 … n − 1 along the last axis, [b s e], each from one word.

    Number j is drawn from the n − j that are left; numbers from j = n on are meaningless.

    Args:
        word: [b s e].
        n: [b 1].
    """
    drawn = counter.draw_below(word[:, :, 0], n)[:, :, None]
    for j in range(1, word.shape[2]):
        rank = counter.draw_below(word[:, :, j], (n - j).clamp(min=1))
        for taken in drawn.sort(dim=2).values.unbind(2):
            rank += rank >= taken
        drawn = torch.cat((drawn, rank[:, :, None]), 2)
    return drawn


def _walk(
    automata: _Automata, start: Tensor, length: Tensor, word: Tensor
) -> tuple[Tensor, Tensor]:
    """Walk strings from state 0; return states and tokens, [b p] each, meaningless outside strings.

    Args:
        automata: of the rows.
        start: [b k], the place of each string's first token.
        length: [b k], 0 for a string that is not used; strings are cut at the last place.
        word: [b p], for the step at each place.
    """
    n_places = word.shape[1]
    length = length.minimum(n_places - start)
    length, order = length.sort(dim=1, descending=True, stable=True)
    place, state = start.gather(1, order), torch.zeros_like(start)
    symbol, following = automata.symbol.flatten(1), automata.following.flatten(1)
    # One more place, for steps past the ends of strings.
    word, taken = torch.nn.functional.pad(word, (0, 1)), word.new_zeros(len(word), n_places + 1)
    for step in range(int(length.max())):
        # With the longest first, at most n strings continue: all steps together cost p·log p.
        n = min(length.shape[1], n_places // (step + 1))
        now = (place[:, :n] + step).where(length[:, :n] > step, n_places)
        edge = counter.draw_below(word.gather(1, now), automata.n_edges.gather(1, state[:, :n]))
        edge += state[:, :n] * MAX_EDGES
        taken.scatter_(1, now, edge)
        state = following.gather(1, edge)
    taken = taken[:, :-1]
    return taken // MAX_EDGES, symbol.gather(1, taken)


def _predict_most_frequent(batch: Batch, order: int) -> Tensor:
    """Return the most frequent symbol so far after the last `order` tokens, or else after fewer.

    Of equally frequent symbols it is the lowest; -100 before the first. Separators count as
    context, but are never answers.
    """
    answers = []
    for row in batch.inputs.tolist():
        count: Counter[tuple[int, ...]] = Counter()
        best: dict[tuple[int, ...], int] = {}
        answer = []
        for position, token in enumerate(row):
            if token != SEPARATOR:
                for n in range(min(order, position) + 1):
                    behind = tuple(row[position - n : position])
                    count[*behind, token] += 1
                    rival = best.setdefault(behind, token)
                    if (count[*behind, token], rival) > (count[*behind, rival], token):
                        best[behind] = token
            contexts = (tuple(row[position + 1 - n : position + 1]) for n in range(order, -1, -1))
            answer.append(next((best[behind] for behind in contexts if behind in best), IGNORE))
        answers.append(answer)
    return torch.tensor(answers, device=batch.inputs.device)
