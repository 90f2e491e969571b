"""Grammar: sentences of a context-free grammar, the same in all rows; what comes next?"""

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import ClassVar

from tasks import counter
from tasks.base import Batch, Links, Predictor, Preset, Surprisal, Task
from tasks.bounds import MAX_SEQ_LEN, check_range, option
from tasks.lazy import Tensor, torch
from tasks.shortcuts import predict_by_context

SEPARATOR = 0
SYMBOL, BETWEEN = range(2)
MAX_DEPTH, MAX_SYMBOLS, MAX_RULES, MAX_LENGTH = 8, 26, 16, 8
MAX_GRAMMARS = 2**20
Side = tuple[int, ...]
"""The right-hand side of a rule: symbols 1 … n of the level below."""
Rules = tuple[tuple[tuple[Side, ...], ...], ...]
"""The right-hand sides of each symbol of each level, from the root down."""
_Item = tuple[int, Side, int, int, float, float]
"""Symbol, right-hand side, place in it, position where it began, outer and inner weight."""


@dataclass(frozen=True, kw_only=True)
class Grammar(Task):
    """Continue sentences of a grammar that must be learned in training.

    The grammar has `depth` levels of rules. The root is the only symbol of the first level, the
    others have n_symbols each, and below the last rules stand the tokens 1 … n_symbols. A symbol
    has min_rules … max_rules rules, uniform, each with min_length … max_length symbols of the next
    level on its right-hand side; lengths and symbols are uniform, but no two rules of a level have
    the same right-hand side. `grammar` numbers the grammars of the same sizes: rows of all splits
    and seeds are of one. A sentence takes each of a symbol's rules with equal probability.

    A row is one sentence after the other, token 0 before each, cut at T tokens.

    With two levels, two symbols and T = 12, row 0 of seed 0 is

    >>> sizes = {"n_symbols": 2, "max_rules": 2, "min_rules": 2}
    >>> task = Grammar(seq_len=12, depth=2, **sizes)
    >>> batch = task.batch(size=1)
    >>> batch.inputs.tolist()
    [[0, 2, 2, 1, 2, 2, 1, 0, 1, 2, 1, 1]]
    >>> batch.targets.tolist()
    [[2, 2, 1, 2, 2, 1, 0, 1, 2, 1, 1, 2]]
    >>> task.rules
    ((((2, 1), (1, 1)),), (((2, 2, 1), (1, 2, 1)), ((2, 2), (2, 1, 2))))
    >>> task.predict(batch.inputs)[0, 4:7].tolist()
    [[0.0, 0.5, 0.5], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]

    The root becomes 2 1 or 1 1. Below, 1 becomes 2 2 1 or 1 2 1, and 2 becomes 2 2 or 2 1 2. So the
    first sentence is 2 2 1 twice, below 1 1. Its first four tokens might also be 2 2 and the
    beginning of 1 2 1: after them 2 and 1 are equally likely. After 2 2 1 2 2 follows 1, and then
    the end.

    Scored: every position, the end of a sentence included. Chance: 1/(n_symbols + 1).

    Several tokens may come next. The loss is that of the one that came, whose mean is least for
    the exact probabilities, which `predict` computes: at the defaults 1.00 bits a token, .61 at
    "small", 1.12 at "published". Whether an answer is a token that can come says less: of the
    answers of the shortcut "bigram" .86, .72 and .993 can.

    Links, int64: query_pos [b t], every position; legal [b t v], the tokens that can come next, -1
    pads; and ancestors [b t l], the symbols that the next token stands below, from the root's on
    (-1 for a separator).

    Raises:
        ValueError: for an option out of bounds, sentences that do not end in a row, or more rules
            than there are right-hand sides.

    Source: Allen-Zhu 2025 (Physics of Language Models, part 4.1; 2512.17351), task Lano, whose
    grammars cfg3 are those of Allen-Zhu and Li 2023 (part 1): here with the same sizes and drawn by
    the same rule as their cfg3f, of six levels with three symbols, three or four rules of two or
    three symbols.

    Departs: the grammars are not theirs, but drawn alike; rows begin with a sentence.
    """

    name: ClassVar[str] = "grammar"
    role_names: ClassVar[tuple[str, ...]] = ("symbol", "separator")
    separates: ClassVar[str] = "hierarchical structure, ambiguity"
    grows: ClassVar[tuple[str, ...]] = ()
    why_fixed: ClassVar[str] = (
        "its answers are uncertain, so no accuracy tells when a length is learned"
    )
    presets: ClassVar[dict[str, Preset]] = {
        "small": Preset(
            {"seq_len": 64, "depth": 3, "min_rules": 2, "max_rules": 2},
            "LOG.md, small presets; two rules as in cfg3b",
            seconds=206,
        ),
        "published": Preset(
            {"seq_len": 512, "depth": 6},
            "Allen-Zhu and Li 2023: the sizes of cfg3f, rows of 512 tokens",
        ),
    }
    stochastic: ClassVar[bool] = True

    seq_len: int = option(256, "tokens per row")
    depth: int = option(4, "levels of rules")
    n_symbols: int = option(3, "symbols of each level, and tokens")
    min_rules: int = option(3, "fewest rules of a symbol")
    max_rules: int = option(4, "most rules of a symbol")
    min_length: int = option(2, "fewest symbols on a rule's right-hand side")
    max_length: int = option(3, "most symbols on a rule's right-hand side")
    grammar: int = option(0, "which of the grammars of these sizes")
    vocab_size: int = field(init=False, default=4)

    def validate(self) -> None:
        """Validate the options, and set vocab_size to the symbols and the separator."""
        check_range("n_symbols", self.n_symbols, 2, MAX_SYMBOLS)
        check_range("max_rules", self.max_rules, 1, MAX_RULES)
        check_range("min_rules", self.min_rules, 1, self.max_rules, "max_rules")
        check_range("max_length", self.max_length, 1, MAX_LENGTH)
        check_range("min_length", self.min_length, 1, self.max_length, "max_length")
        check_range("grammar", self.grammar, 0, MAX_GRAMMARS)
        check_range("depth", self.depth, 1, MAX_DEPTH)
        check_range("seq_len", self.seq_len, 2, MAX_SEQ_LEN)
        lengths = range(self.min_length, self.max_length + 1)
        sides, rules = (
            sum(self.n_symbols**length for length in lengths),
            self.n_symbols * self.max_rules,
        )
        if rules > sides:
            raise ValueError(
                f"max_rules={self.max_rules}: a level of {self.n_symbols} symbols may have {rules} "
                f"rules, must be ≤ {sides}, the right-hand sides of {self.min_length} to "
                f"{self.max_length} symbols"
            )
        shortest = self.min_length**self.depth
        if shortest >= self.seq_len:
            raise ValueError(
                f"depth={self.depth}: sentences have at least {shortest} tokens, so none ends in "
                f"a row, must be < seq_len={self.seq_len}"
            )
        object.__setattr__(self, "vocab_size", self.n_symbols + 1)

    @property
    def rules(self) -> Rules:
        """The right-hand sides of each symbol of each level."""
        sizes = self.depth, self.n_symbols, self.min_rules, self.max_rules
        return draw_rules(self.grammar, *sizes, self.min_length, self.max_length)

    def generate(self, split: str, numbers: Tensor, seed: int) -> Batch:
        """Build the rows with these numbers (int64 [b]) on the device of `numbers`.

        Level by level all symbols are replaced, as many as a row needs: T tokens cost O(T).
        """
        t, key, rows = self.seq_len, counter.derive_key(self.name, seed), len(numbers)
        sentences = t // (self.min_length**self.depth + 1) + 1
        symbol = torch.tensor([SEPARATOR, 1], device=numbers.device).repeat(rows, sentences)
        steps, tables = [], _tabulate_rules(self.rules, self.max_rules, self.max_length)
        for level, (n_rules, length, ahead) in enumerate(tables):
            width = symbol.shape[1]
            index = torch.arange(width, device=numbers.device)[None] * self.depth + level
            word = counter.draw_words_at(key, self.splits.index(split), numbers, index)
            rule = counter.draw_below(word, n_rules.to(word.device)[symbol])
            rule += symbol * self.max_rules
            end = length.to(word.device)[rule].cumsum(1)
            place = torch.arange(min(t + 1, width * self.max_length), device=word.device)
            place = place.repeat(rows, 1)
            # Past the end of all that was replaced stand separators, which no row shows.
            parent = torch.searchsorted(end, place, right=True).clamp_(max=width - 1)
            left = (end.gather(1, parent) - place).clamp_(min=0)
            taken = rule.gather(1, parent) * (self.max_length + 1) + left
            steps.append((symbol, parent))
            symbol = ahead.to(word.device)[taken]
        token = symbol[:, : t + 1]
        position = torch.arange(t, device=token.device).expand(rows, t)

        def links() -> dict[str, Tensor]:
            ancestors, below = [], position + 1
            for above, parent in reversed(steps):
                below = parent.gather(1, below)
                ancestors.insert(0, above.gather(1, below))
            stacked = torch.stack(ancestors, 2)
            return {
                "query_pos": position,
                "legal": _list_legal(self.predict(token[:, :-1])),
                "ancestors": stacked.where(stacked != SEPARATOR, -1),
            }

        inputs = token[:, :-1]
        return Batch(inputs, token[:, 1:], (inputs == SEPARATOR).long(), Links(links))

    def predict(self, inputs: Tensor) -> Tensor:
        """Return the probabilities of each next token given those before, float64 [b t v].

        They are exact, however many ways there are to derive the sentence so far. After a token
        that cannot come all are 0, up to the next sentence.
        """
        found, rules = [], self.rules
        for row in inputs.tolist():
            ahead, chart = [], None
            for token in row:
                if token == SEPARATOR:
                    chart = _Chart(rules)
                elif chart is not None and chart.chances.get(token):
                    chart.observe(token)
                else:
                    chart = None
                known = {} if chart is None else chart.chances
                ahead.append([known.get(token, 0.0) for token in range(self.vocab_size)])
            found.append(ahead)
        return torch.tensor(found, dtype=torch.float64, device=inputs.device)

    def oracle(self, batch: Batch) -> Tensor:
        """Return the likeliest next token, the lowest of equally likely ones.

        No predictor is right more often: .62 at the defaults, .74 at "small", .59 at "published".
        """
        return self.predict(batch.inputs).argmax(2)

    @property
    def chance(self) -> float:
        """The accuracy of a guess among the tokens."""
        return 1 / self.vocab_size

    def shortcuts(self) -> dict[str, Predictor]:
        """Return predictors that look right without knowing the rules.

        They answer with what was most frequent in 2¹⁹ training tokens: "unigram" overall, "bigram"
        and "trigram" after the same one or two tokens, "six tokens" after the same six, else after
        fewer. At the defaults .38, .43, .45 and .56, at "small" the last .69, at "published" .56.
        """
        return {
            "unigram": predict_by_context(self, 0),
            "bigram": predict_by_context(self, 1),
            "trigram": predict_by_context(self, 2),
            "six tokens": predict_by_context(self, 6),
        }

    def surprisals(self) -> dict[str, Surprisal]:
        """Return the exact probabilities: no predictor takes fewer bits in the mean."""

        def rule(batch: Batch) -> Tensor:
            chances = self.predict(batch.inputs)
            return -chances.gather(2, batch.targets[..., None])[..., 0].log2()

        return {"oracle": rule}

    def format_token(self, token: int) -> str:
        """Return how a token is shown: a letter, or | between sentences."""
        return "|" if token == SEPARATOR else chr(ord("a") + token - 1)


@lru_cache(maxsize=64)
def draw_rules(
    grammar: int,
    depth: int,
    n_symbols: int,
    min_rules: int,
    max_rules: int,
    min_length: int,
    max_length: int,
) -> Rules:
    """Draw the rules of a grammar; `Grammar` says how, and what its options are."""
    key = counter.derive_key("grammar rules", grammar)
    words = (counter.splitmix64(key, i) & 0xFFFFFFFF for i in count())

    def draw(low: int, high: int) -> int:
        return low + (next(words) * (high - low + 1) >> 32)

    levels = []
    for level in range(depth):
        known: set[Side] = set()
        symbols = []
        for _ in range(n_symbols if level else 1):
            sides: list[Side] = []
            n_rules = draw(min_rules, max_rules)
            while len(sides) < n_rules:
                side = tuple(draw(1, n_symbols) for _ in range(draw(min_length, max_length)))
                if side not in known:
                    known.add(side)
                    sides.append(side)
            symbols.append(tuple(sides))
        levels.append(tuple(symbols))
    return tuple(levels)


@lru_cache(maxsize=64)
def _tabulate_rules(rules: Rules, most: int, longest: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Tabulate each level: rules by symbol, lengths by rule, symbols by rule and what is left.

    Rule r of symbol s is number s·most + r. Symbol 0, the separator, becomes itself.
    """
    tables = []
    for symbols in rules:
        n_rules = torch.ones(len(symbols) + 1, dtype=torch.int64)
        length = torch.ones(len(symbols) + 1, most, dtype=torch.int64)
        ahead = torch.zeros(len(symbols) + 1, most, longest + 1, dtype=torch.int64)
        for symbol, sides in enumerate(symbols, start=1):
            n_rules[symbol] = len(sides)
            for rule, side in enumerate(sides):
                length[symbol, rule] = len(side)
                ahead[symbol, rule, 1 : len(side) + 1] = torch.tensor(side[::-1])
        tables.append((n_rules, length.flatten(), ahead.flatten()))
    return tables


class _Chart:
    """All ways to derive a sentence so far: Earley's items, with their probabilities.

    An item is a symbol's right-hand side, the place in it that comes next, and the position at
    which it began. Its outer weight is the probability of all derivations that have it, given the
    tokens so far; its inner weight is that of what it has derived itself (Stolcke 1995). As every
    symbol derives lower levels only, items are completed level by level from below, and predicted
    from above.

    Attributes:
        chances: the probability of each next token, 0 for the end of the sentence.
    """

    def __init__(self, rules: Rules):
        self._rules = rules
        # Of each position and level, the items that wait for a symbol.
        self._waiting: list[list[dict[int, list[_Item]]]] = []
        sides = rules[0][0]
        first: list[dict[int, list[_Item]]] = [{} for _ in rules]
        for side in sides:
            first[0].setdefault(side[0], []).append((1, side, 0, 0, 1 / len(sides), 1 / len(sides)))
        self._predict(first, 0.0)

    def observe(self, token: int) -> None:
        """Read the next token of the sentence."""
        scale, ends = 1 / self.chances[token], 0.0
        moved: list[_Item] = [
            (symbol, side, place + 1, began, outer * scale, inner * scale)
            for symbol, side, place, began, outer, inner in self._waiting[-1][-1][token]
        ]
        here: list[dict[int, list[_Item]]] = [{} for _ in self._rules]
        for level in reversed(range(len(self._rules))):
            complete: dict[tuple[int, int], float] = {}
            for item in moved:
                symbol, side, place, began, outer, inner = item
                if place < len(side):
                    here[level].setdefault(side[place], []).append(item)
                elif level:
                    complete[symbol, began] = complete.get((symbol, began), 0.0) + inner
                else:
                    ends += outer
            weights: dict[tuple[int, Side, int, int], tuple[float, float]] = {}
            for (wanted, since), derived in complete.items():
                for symbol, side, place, began, outer, inner in self._waiting[since][level - 1][
                    wanted
                ]:
                    key = symbol, side, place + 1, began
                    out, within = weights.get(key, (0.0, 0.0))
                    weights[key] = out + outer * derived, within + inner * derived
            moved = [(*key, *pair) for key, pair in weights.items()]
        self._predict(here, ends)

    def _predict(self, here: list[dict[int, list[_Item]]], ends: float) -> None:
        """Add the right-hand sides of all symbols that items wait for at a position."""
        position = len(self._waiting)
        self._waiting.append(here)
        for level, symbols in enumerate(self._rules[1:], start=1):
            for symbol, items in here[level - 1].items():
                sides = symbols[symbol - 1]
                outer, inner = sum(item[4] for item in items) / len(sides), 1 / len(sides)
                for side in sides:
                    item = symbol, side, 0, position, outer, inner
                    here[level].setdefault(side[0], []).append(item)
        self.chances = {token: sum(i[4] for i in items) for token, items in here[-1].items()}
        self.chances[SEPARATOR] = ends


def _list_legal(chances: Tensor) -> Tensor:
    """List the tokens with a chance [b t v], in order, padded with -1."""
    n = chances.shape[2]
    token = torch.arange(n, device=chances.device).expand_as(chances)
    legal = token.where(chances > 0, n).sort(2).values
    return legal.where(legal < n, -1)
