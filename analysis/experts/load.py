"""Which experts are used? Every layer's choices and their load, beside uniform random choice.

n tokens, row after row    h retrieval heads    k experts a head    e experts    r ranks

The null: each head and token draws its k distinct experts uniformly. A head and token then choose
an expert with probability k/N; over n tokens and h heads, it is chosen Binomial(n h, k/N) times, so
that 1 − (1 − k/N)^(n h) of the experts are used. It serves a token, in any head, with probability
q = 1 − (1 − k/N)^h.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from textwrap import fill

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor

from analysis.base import Finding, NotApplicableError, Subject, Table, thin
from analysis.figures import Axis, Curves, Dots, Line, Pairs, curves, pairs
from analysis.plain import figure_only
from analysis.statistics import distributions
from analysis.words import name_layers, percent
from lab.hooks import HookPoint
from lab.layers.retrieval import RetrievedExperts
from lab.layers.routed import RoutedMoE
from lab.models import LanguageModel
from lab.models.evaluation import score
from lab.ops.product_keys import product_topk
from tasks.base import Batch, count_rows

__all__ = ["TITLE", "measure"]

TITLE = "Which experts are used"
TOKENS_AT_ONCE = 4096
"""Maximum number of tokens of a forward pass: the scores of many experts must fit into memory."""
ROUNDING = 4
"""Two scores tie if they differ by at most this many units in the last place of the largest."""
STANDING = 0.9
"""Share of the tokens that a standing expert serves; also the share of load that is a collapse."""
ROUNDS = 40
"""Draws of the null, enough to estimate its 2.5 % and 97.5 % quantiles."""
STANDING_ROUNDS = 1000
"""Draws of the null of standing experts: by chance, a layer exceeds all of them once in 1,000."""
MOST_RANKS = 160
"""Maximum number of points of a curve by rank, evenly spaced in the logarithm."""
PAIR_ENTRIES = 2**24
"""About how many pairs of chosen experts are compared for the overlap of heads, at most."""
LEAST = 1e-3
"""Smallest load that is drawn, in multiples of the mean."""
NAMED = 4
"""Layers that have a colour of their own in a figure."""
TABLED = 8
"""Layers that have a line in a table."""

Experts = RetrievedExperts | RoutedMoE


@dataclass(frozen=True)
class ExpertChoices:
    """What the tokens of a batch choose in one layer.

    Attributes:
        indices: int32, of the chosen experts; distinct for each head and token. A routed mixture
            counts as one head.
        weights: factors of the experts' outputs, any sign.
        margins: between the k-th and the (k + 1)-th best score, in standard deviations of all
            experts' scores for this token and head (of log p for a router), ≥ 0; NaN where k is
            all experts.
        tied: whether the two are equal up to rounding, so that the order of storage decides.
        shape: row keys and column keys, if experts have any; expert = row · columns + column.
        zero_keys: whether all of these are zero, so that all scores tie.
    """

    layer: int
    kind: str
    n_experts: int
    indices: Int[np.ndarray, "n h k"]
    weights: Float[np.ndarray, "n h k"]
    margins: Float[np.ndarray, "n h"]
    tied: Bool[np.ndarray, "n h"]
    ids: Int[np.ndarray, " n"]
    shape: tuple[int, int] | None = None
    zero_keys: bool = False


@torch.no_grad()
def record_choices(model: LanguageModel, batch: Batch) -> list[ExpertChoices]:
    """Record what the tokens of a batch choose in every layer with experts; hooks in place act.

    Raises:
        NotApplicableError: for a model without experts.
    """
    layers = find_expert_layers(model)
    parts: dict[int, dict[str, list[Tensor]]] = {layer: defaultdict(list) for layer in layers}

    def look(tensor: Tensor, point: HookPoint) -> None:
        _, layer, _, name = point.name.split(".")
        found = parts[int(layer)]
        if name.endswith("_scores"):
            margins, tied = measure_margins(layers[int(layer)], tensor.float())
            found["margins"].append(margins.cpu())
            found["tied"].append(tied.cpu())
        else:
            # [b t h k], or [b t k] of a router.
            heads = tensor if tensor.ndim == 4 else tensor[:, :, None]
            field = name.removeprefix("hook_expert_")
            number = torch.int32 if field == "indices" else torch.float32
            found[field].append(heads.flatten(0, 1).to("cpu", number))

    wanted = [
        f"blocks.{layer}.mlp.hook_{name}"
        for layer, module in layers.items()
        for name in (
            "router_scores" if isinstance(module, RoutedMoE) else "subkey_scores",
            "expert_indices",
            "expert_weights",
        )
    ]
    size = count_rows(TOKENS_AT_ONCE, batch.inputs.shape[1])
    with model.hooks([(wanted, look)]):
        for start in range(0, len(batch.inputs), size):
            score(model, batch[start : start + size], "fp32")
    chosen, ids = [], batch.inputs.flatten().cpu().numpy()
    for layer, module in layers.items():
        found = {name: torch.cat(tensors).numpy() for name, tensors in parts[layer].items()}
        shape, zero = None, False
        if isinstance(module, RetrievedExperts):
            rows, columns = module.shape
            shape, zero = (rows, columns), not (module.row_keys.any() or module.column_keys.any())
        kind, n_experts = type(module).__name__, len(module.down)
        known = ExpertChoices(layer, kind, n_experts, **found, ids=ids, shape=shape, zero_keys=zero)
        chosen.append(known)
    return chosen


def find_expert_layers(model: LanguageModel) -> dict[int, Experts]:
    """Find the state transforms that choose among experts, by index of the block.

    Raises:
        NotApplicableError: when there are none.
    """
    found = {i: block.mlp for i, block in enumerate(model.blocks) if isinstance(block.mlp, Experts)}
    if not found:
        raise NotApplicableError("no block chooses among experts")
    return found


def measure_margins(
    module: Experts, scores: Float[Tensor, "*b s"]
) -> tuple[Float[Tensor, "n h"], Bool[Tensor, "n h"]]:
    """Return `ExpertChoices.margins` and `ExpertChoices.tied` for the scores of a layer.

    Args:
        module: the layer.
        scores: [b t h rows+columns] for retrieval; the probabilities, [b t e], for a router.
    """
    if isinstance(module, RoutedMoE):
        # log p is the logit up to a constant, which changes neither margins nor their spread.
        logits = scores.clamp(min=torch.finfo(scores.dtype).tiny).log()[..., None, :]
        best = logits.topk(min(module.k + 1, module.n_experts), dim=-1).values
        variance, largest = logits.var(-1, correction=0), logits.abs().amax(-1)
    else:
        rows, columns = scores.split(module.shape, dim=-1)
        reached = rows.shape[-1] * columns.shape[-1]
        best = product_topk(rows, columns, min(module.k + 1, reached))[0]
        variance = rows.var(-1, correction=0) + columns.var(-1, correction=0)
        largest = rows.abs().amax(-1) + columns.abs().amax(-1)
    if best.shape[-1] == module.k:
        nothing = torch.full_like(variance, torch.nan).flatten(0, 1)
        return nothing, torch.zeros_like(nothing, dtype=torch.bool)
    gap = best[..., -2] - best[..., -1]
    tied = gap <= ROUNDING * torch.finfo(scores.dtype).eps * largest
    margins = torch.where(tied, 0.0, gap / variance.sqrt().clamp(min=1e-30))
    return margins.flatten(0, 1), tied.flatten(0, 1)


@dataclass(frozen=True)
class Spread:
    """How a load is spread over a layer's N experts.

    Attributes:
        effective: e^H, the number of equally loaded experts with the same entropy, 1 … N.
        covering: the fewest experts that hold 90 % of the load.
        top: share held by the h k most loaded experts, as many as one token chooses.
    """

    used: float
    effective: float
    gini: float
    covering: float
    top: float


def measure_spread(counts: Real[np.ndarray, " e"], size: int) -> Spread:
    """Measure how a load > 0 is spread, if a token chooses `size` experts."""
    p = distributions.compute_shares(counts)
    return Spread(
        used=float((counts > 0).mean()),
        effective=float(distributions.effective_number(p)),
        gini=float(distributions.gini(p)),
        covering=float(distributions.coverage(p, 0.9)),
        top=float(np.sort(p)[-size:].sum()),
    )


@lru_cache(maxsize=64)
def draw_uniform(
    total: int, heads: int, k: int, tokens: int, seed: int
) -> tuple[Spread, Float[np.ndarray, "r 2"]]:
    """Return the mean spread under the null, and the 95 % band of its loads by rank."""
    rng, size = np.random.default_rng(seed), heads * k
    spreads, curves = [], []
    for _ in range(ROUNDS):
        counts = rng.binomial(tokens * heads, k / total, size=total)
        # A few tokens and a million experts might draw no expert at all.
        counts[0] += counts.sum() == 0
        spreads.append(measure_spread(counts, size))
        curves.append(rank_loads(counts))
    means = np.mean([list(vars(spread).values()) for spread in spreads], axis=0).tolist()
    mean = Spread(1 - (1 - k / total) ** (tokens * heads), *means[1:])
    return mean, np.quantile(curves, [0.025, 0.975], axis=0).T


@lru_cache(maxsize=64)
def bound_standing(total: int, heads: int, k: int, tokens: int, seed: int) -> tuple[float, float]:
    """Return the share of the choices on standing experts under the null: its mean and maximum.

        mean = P(1 + B ≥ 0.9 n),  B ~ Binomial(n − 1, q)

    since an expert that is chosen serves one token for certain, the others with probability q.
    """
    from scipy.stats import binom

    q, fewest = 1 - (1 - k / total) ** heads, count_fewest(tokens)
    mean = float(binom.sf(fewest - 2, tokens - 1, q))
    # By Markov's inequality no draw has a standing expert, so there is no need to draw.
    if mean * tokens * q * total < 1e-6 * fewest:
        return mean, 0.0
    rng, most = np.random.default_rng(seed), 0.0
    for _ in range(STANDING_ROUNDS):
        served = rng.binomial(tokens, q, size=total)
        most = max(most, float(served[served >= fewest].sum() / max(1, served.sum())))
    return mean, most


def count_fewest(tokens: int) -> int:
    """Return the fewest tokens that a standing expert serves."""
    return math.ceil(STANDING * tokens - 1e-9)


def choose_ranks(total: int) -> Int[np.ndarray, " r"]:
    """Choose the ranks of a curve, from 1, evenly spaced in the logarithm."""
    return np.unique(np.geomspace(1, total, MOST_RANKS).round().astype(np.int64))


def rank_loads(counts: Real[np.ndarray, " e"]) -> Float[np.ndarray, " r"]:
    """Return the loads of the experts at `choose_ranks`, in multiples of the mean load."""
    return np.sort(counts)[::-1][choose_ranks(len(counts)) - 1] / (counts.mean() or 1.0)


def expect_overlap(total: int, k: int) -> float:
    """Return the mean Jaccard index of two random sets of k; their overlap is hypergeometric."""
    from scipy.stats import hypergeom

    both = np.arange(max(0, 2 * k - total), k + 1)
    return float((hypergeom.pmf(both, total, k, k) * both / (2 * k - both)).sum())


@dataclass(frozen=True)
class Load:
    """How one layer's experts are used.

    Attributes:
        n_experts: N.
        n_heads: h; 1 for a router.
        k: distinct experts per head.
        uniform: the same under the null, mean over draws; `used` is exact.
        standing_share: share of the choices on experts that at least 90 % of the tokens choose, in
            any head.
        standing_uniform, twice_uniform, overlap_uniform: exact means under the null.
        standing_chance: maximum of `standing_share` in a thousand draws of the null.
        twice: share of a token's h k choices that repeat another head's; NaN for one head.
        overlap: mean Jaccard index |A ∩ B| / |A ∪ B| of the experts of two heads, over tokens and
            pairs of heads, in [0, 1]; NaN for one head.
        margin: median over tokens and heads of `ExpertChoices.margins`; NaN where k = N.
        tied: share of tokens and heads whose k-th and (k + 1)-th score tie.
        by_rank: load by choices in multiples of the mean, at `choose_ranks`; 0 for unused experts.
        weighted_by_rank: the same by |weight|.
        band: 2.5 % and 97.5 % quantiles of `by_rank` under the null.
    """

    layer: int
    n_experts: int
    n_heads: int
    k: int
    choices: Spread
    uniform: Spread
    standing_share: float
    standing_uniform: float
    standing_chance: float
    twice: float
    twice_uniform: float
    overlap: float
    overlap_uniform: float
    margin: float
    tied: float
    by_rank: Float[np.ndarray, " r"] = figure_only()
    weighted_by_rank: Float[np.ndarray, " r"] = figure_only()
    band: Float[np.ndarray, "r 2"] = figure_only()

    @property
    def collapsed(self) -> bool:
        """Whether standing experts hold nearly all the load, more than by chance."""
        return self.stands_out and self.standing_share >= STANDING

    @property
    def stands_out(self) -> bool:
        """Whether standing experts hold more than random choice gives them."""
        return self.standing_share > self.standing_chance

    @property
    def evenness(self) -> float:
        """The effective experts, as a share of the null's."""
        return self.choices.effective / self.uniform.effective


def measure_load(chosen: ExpertChoices, seed: int) -> Load:
    """Measure how a layer's experts are used; null and sample of tokens are drawn from the seed."""
    tokens, heads, k = chosen.indices.shape
    total, size, several = chosen.n_experts, heads * k, heads > 1
    counts = np.bincount(chosen.indices.ravel(), minlength=total)
    sizes = np.abs(chosen.weights).ravel().astype(np.float64)
    weighted = np.bincount(chosen.indices.ravel(), sizes, total)
    by_token = np.sort(chosen.indices.reshape(tokens, size), axis=-1)
    first = np.diff(by_token, axis=-1, prepend=-1) > 0
    standing = np.bincount(by_token[first], minlength=total) >= count_fewest(tokens)
    uniform, band = draw_uniform(total, heads, k, tokens, seed)
    by_chance, most = bound_standing(total, heads, k, tokens, seed)
    distinct = total * (1 - (1 - k / total) ** heads)
    margins = chosen.margins[~np.isnan(chosen.margins)]
    return Load(
        layer=chosen.layer,
        n_experts=total,
        n_heads=heads,
        k=k,
        choices=measure_spread(counts, size),
        uniform=uniform,
        standing_share=float(counts[standing].sum() / counts.sum()),
        standing_uniform=by_chance,
        standing_chance=most,
        twice=float(1 - first.mean()) if several else math.nan,
        twice_uniform=1 - distinct / size if several else math.nan,
        overlap=_measure_overlap(chosen.indices, np.random.default_rng(seed)),
        overlap_uniform=expect_overlap(total, k) if several else math.nan,
        margin=float(np.median(margins)) if margins.size else math.nan,
        tied=float(chosen.tied.mean()),
        by_rank=rank_loads(counts),
        weighted_by_rank=rank_loads(weighted),
        band=band,
    )


def _measure_overlap(indices: Int[np.ndarray, "n h k"], rng: np.random.Generator) -> float:
    """Measure the mean Jaccard index of the experts of two heads, on a sample of the tokens."""
    tokens, heads, k = indices.shape
    if heads == 1:
        return math.nan
    most = max(1, PAIR_ENTRIES // (heads * k) ** 2)
    if tokens > most:
        indices = indices[rng.choice(tokens, most, replace=False)]
    found = []
    for i, j in combinations(range(heads), 2):
        both = (indices[:, i, :, None] == indices[:, j, None, :]).sum((-1, -2))
        found.append((both / (2 * k - both)).mean())
    return float(np.mean(found))


@dataclass(frozen=True)
class LoadByRank(Finding):
    """The load of every layer's experts, by rank."""

    layers: tuple[Load, ...]

    title = "Load of the experts by rank, over all tokens"
    reading = (
        "Each layer's experts in order of load; 1 is the mean load. A curve ends at the last "
        "expert that any token chose. Above, every choice counts alike; below, choices count by "
        "|w|, the factor of the expert's output. Grey band: 95 % of loads if each head and token "
        "chose k distinct experts uniformly at random, whose values stand in brackets in the "
        "table. Effective experts are e^H of the choices."
    )

    @property
    def says(self) -> str:
        """How evenly experts are used in the least even layer, and which layers collapsed."""
        collapsed = [one for one in self.layers if one.collapsed]
        if collapsed:
            first = collapsed[0]
            return (
                f"Collapsed: in {name_layers([one.layer for one in collapsed])} nearly every token "
                f"chooses the same experts, which hold {percent(first.standing_share)} of layer "
                f"{first.layer}'s choices."
            )
        worst = min(self.layers, key=lambda one: one.evenness)
        return (
            f"The least even layer, layer {worst.layer}, uses its {worst.n_experts:,} experts like "
            f"{format_count(worst.choices.effective)} equal ones (random choice: "
            f"{format_count(worst.uniform.effective)})."
        )

    def numbers(self) -> Table:
        """Return the spread of each layer's load, with that of random choice in brackets."""
        columns = "layer", "experts", "effective", "chosen at all", "hold 90 %", "Gini"
        return Table(
            columns,
            tuple(
                (
                    str(one.layer),
                    f"{one.n_experts:,}",
                    f"{format_count(own.effective)} ({format_count(uniform.effective)})",
                    f"{percent(own.used)} ({percent(uniform.used)})",
                    f"{own.covering:,.0f} ({format_count(uniform.covering)})",
                    f"{own.gini:.2f} ({uniform.gini:.2f})",
                )
                for one in thin(self.layers, TABLED)
                for own, uniform in [(one.choices, one.uniform)]
            ),
        )

    def figure(self) -> go.Figure:
        """Draw load by rank on logarithmic axes, over the band of random choice."""
        bands, shown = {}, {"by choices": [], "by |w|": []}
        for one in self.layers:
            ranks, band = choose_ranks(one.n_experts), np.maximum(one.band, LEAST)
            size = one.n_experts, one.n_heads, one.k
            bands[size] = Line("random choice", ranks, band.mean(1), band, shape="band", look=-1)
            for name, load in zip(shown, (one.by_rank, one.weighted_by_rank), strict=True):
                shown[name].append((one.layer, ranks, np.where(load < LEAST, np.nan, load)))
        y = Axis("load, × mean", scale="log")
        panels = [
            Curves([*bands.values(), *draw_layers(layers)], y, name, height=190)
            for name, layers in shown.items()
        ]
        return curves(panels, Axis("rank of the expert by load", "count", scale="log"))


def draw_layers(
    layers: Sequence[tuple[int, Real[np.ndarray, " n"], Float[np.ndarray, " n"]]],
) -> list[Line]:
    """Return a line for each layer, x and y: a few have colours and names, the others are grey."""
    named = thin([layer for layer, _, _ in layers], NAMED)
    return [
        Line(
            f"layer {layer}" if layer in named else "",
            x,
            y,
            look=named.index(layer) if layer in named else -1,
            notes=[f"layer {layer}"] * len(y),
        )
        for layer, x, y in layers
    ]


def format_count(count: float) -> str:
    """Return an effective number as text, with one decimal below ten."""
    return f"{count:,.1f}" if count < 9.95 and count != round(count) else f"{count:,.0f}"


@dataclass(frozen=True)
class LoadComparison(Finding):
    """A few shares of every layer's load, next to what they are under uniform random choice.

    Attributes:
        loads: as in `LoadByRank`, where they are recorded.
    """

    loads: tuple[Load, ...] = figure_only()

    title = "How far the choice of experts is from random, layer by layer"
    reading = (
        "Coloured: measured. Grey: uniform random choice, independent for each head. “A token's "
        "worth” are the most loaded experts, as many as one token chooses. Standing experts "
        f"are chosen by at least {round(100 * STANDING)} % of the tokens. Overlap is "
        "|A ∩ B| / |A ∪ B|. A tie is a k-th score that equals the next one up to rounding: the "
        "order of storage decides. The lead is that of the last expert chosen over the next one, "
        "in standard deviations of the scores, median."
    )

    @property
    def says(self) -> str:
        """How much of a layer's choices standing experts hold, beyond chance or not."""
        worst = max(
            self.loads,
            key=lambda one: one.standing_share - one.standing_uniform + one.stands_out,
        )
        verdict = "more than" if worst.stands_out else "no more than"
        return (
            f"Standing experts hold {percent(worst.standing_share)} of layer {worst.layer}'s "
            f"choices, {verdict} chance can give (random choice: "
            f"{percent(worst.standing_uniform)})."
        )

    def numbers(self) -> Table:
        """Return ties and leads of each layer."""
        rows = (
            (str(one.layer), percent(one.tied), "–" if math.isnan(lead) else f"{lead:.2g}")
            for one in thin(self.loads, TABLED)
            for lead in [one.margin]
        )
        columns = "layer", "choices decided by a tie", "lead of the last expert chosen"
        return Table(columns, tuple(rows))

    def figure(self) -> go.Figure:
        """Draw each share of a few layers as a dot, and of random choice beside it."""
        names = (
            "experts used",
            "load on a token's worth of experts",
            "load on standing experts",
            "choices repeated by another head",
            "overlap of two heads",
            "choices decided by a tie",
        )
        table = np.array(
            [
                [
                    (one.choices.used, one.uniform.used),
                    (one.choices.top, one.uniform.top),
                    (one.standing_share, one.standing_uniform),
                    (one.twice, one.twice_uniform),
                    (one.overlap, one.overlap_uniform),
                    (one.tied, 0.0),
                ]
                for one in thin(self.loads, NAMED)
            ]
        )
        kept = [i for i in range(len(names)) if not np.isnan(table[:, i, 0]).all()]
        dots = []
        for one, shares in zip(thin(self.loads, NAMED), table, strict=True):
            dots.append(Dots(f"layer {one.layer}", shares[kept, 0]))
            dots.append(Dots("random choice", shares[kept, 1], look="chance"))
        return pairs([fill(names[i], 24) for i in kept], Pairs(dots, Axis("share", "share")))


def measure(subject: Subject) -> list[LoadByRank | LoadComparison]:
    """Measure the load of every layer with experts, and compare it with random choice.

    Raises:
        NotApplicableError: for a model without experts.
    """
    chosen = record_choices(subject.model, subject.batch)
    loads = tuple(measure_load(layer, subject.seed) for layer in chosen)
    return [LoadByRank(loads), LoadComparison(loads)]
