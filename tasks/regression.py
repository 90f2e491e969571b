"""Regression: examples of a linear function, a new one each row; what is its next value?"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from typing import ClassVar

from tasks.base import Batch, Predictor, Preset
from tasks.bounds import check_range, option
from tasks.lazy import Tensor, torch
from tasks.vectors import VectorTask

X, Y = range(2)
MAX_SEQ_LEN, MAX_DIMS = 4096, 1024
"""Together they need fewer random words than a row has."""
LEVELS = 16
"""Bits that choose a normal number: one of 2¹⁶ quantiles."""
SCALE = 2**13
"""Normal numbers are odd multiples of 1/SCALE: sums of their products are whole, and exact."""
NEIGHBOURS = 3


@dataclass(frozen=True, kw_only=True)
class Regression(VectorTask):
    """Learn a linear function from examples in the row.

    A row is x₁ y₁ x₂ y₂ … x_K y_K, K = T/2. Each row has weights w of its own; w and every x are
    drawn from N(0, I) in d dimensions, and y = w·x/√d, so that y has variance 1. A vector has
    n_dims + 1 numbers: x stands in the first d, y in the last, and all others are 0.

    With T = 6 and d = 2, row 0 of seed 0 is

    >>> batch = Regression(seq_len=6, n_dims=2).batch(size=1)
    >>> for vector in batch.inputs[0].tolist():
    ...     print(*(f"{number:5.2f}" for number in vector))
     0.87 -1.33  0.00
     0.00  0.00 -0.07
     0.91  0.66  0.00
     0.00  0.00 -0.59
     1.71  0.18  0.00
     0.00  0.00 -0.85
    >>> [round(y, 2) for y in batch.targets[0, :, 0].tolist()]
    [-0.07, nan, -0.59, nan, -0.85, nan]

    From the first two examples follows w/√2 = (−0.47, −0.25), and from that y₃ = −0.85.

    Scored: every x; the answer is the y that follows. So the answer to x_k rests on k − 1 examples.
    Chance: 0, the explained variance of answering zero.

    Links, int64 [b q]: query_pos, where each x is, and n_examples, how many stand before it.

    Raises:
        ValueError: for an option out of bounds.

    Source: Garg, Tsipras, Liang, Valiant 2022 (What Can Transformers Learn In-Context?, arXiv
    2208.01066), linear functions: squared error over d by number of examples, beside least squares,
    averaging and 3 nearest neighbours. Its curriculum is a schedule of active_dims, such as 5:20.

    Departs: y is divided by √d, which makes the squared error that over d; y has a place of its own
    in a vector, where theirs shares the first with x; normal numbers are rounded to 2¹⁶ values.
    """

    name: ClassVar[str] = "regression"
    role_names: ClassVar[tuple[str, ...]] = ("x", "y", "padding")
    separates: ClassVar[str] = "in-context learning of what no key–value table holds"
    grows: ClassVar[tuple[str, ...]] = ()
    why_fixed: ClassVar[str] = "fewer examples of as many dimensions are no easier"
    presets: ClassVar[dict[str, Preset]] = {
        "small": Preset(
            {"seq_len": 64, "n_dims": 2}, "two dimensions, and many examples", stack="gdn+M*2"
        ),
        "published": Preset(
            {"seq_len": 82, "n_dims": 20}, "Garg et al. 2022, their linear functions"
        ),
    }

    seq_len: int = option(80, "vectors per row; even, half of them examples' x")
    n_dims: int = option(20, "dimensions of x")
    active_dims: int | None = option(None, "dimensions d in which x is not 0", "n_dims")

    def validate(self) -> None:
        """Validate the options."""
        check_range("seq_len", self.seq_len, 4, MAX_SEQ_LEN, "two examples, each x and y")
        if self.seq_len % 2:
            raise ValueError(f"seq_len={self.seq_len}: must be even, because an example is x and y")
        check_range("n_dims", self.n_dims, 1, MAX_DIMS)
        check_range("active_dims", self.active, 1, self.n_dims, "n_dims")

    @property
    def active(self) -> int:
        """The number of dimensions d in which x is not 0."""
        return self.n_dims if self.active_dims is None else self.active_dims

    @property
    def d_input(self) -> int:
        """Numbers of an input vector: those of x, and y."""
        return self.n_dims + 1

    def generate(self, split: str, numbers: Tensor, seed: int) -> Batch:
        """Build the rows with these numbers (int64 [b]) on the device of `numbers`."""
        t, d = self.seq_len, self.active
        word = self.draw_words(split, numbers, seed, d + d * t // 2)
        normal = _make_quantiles(numbers.device)[(word >> 64 - LEVELS) & (1 << LEVELS) - 1]
        w, x = normal[:, :d], normal[:, d:].unflatten(1, (t // 2, d))
        y = ((w[:, None] * x).sum(-1).double() / (SCALE**2 * sqrt(d))).float()
        inputs = torch.zeros(len(numbers), t, self.d_input, device=numbers.device)
        inputs[:, ::2, :d], inputs[:, 1::2, -1] = x.float() / SCALE, y
        targets = torch.full_like(inputs[:, :, :1], torch.nan)
        targets[:, ::2, 0] = y
        place = torch.arange(t, device=numbers.device).expand(len(numbers), -1)
        query = place[:, ::2]
        links = {"query_pos": query, "n_examples": query // 2}
        return Batch(inputs, targets, place % 2, links)

    def oracle(self, batch: Batch) -> Tensor:
        """Return what the least-squares weights of least norm give, from the examples before.

        No other answer has a smaller mean squared error: they are the mean of all weights that fit
        the examples. Of examples beyond d nothing is left to learn. In an orthonormal basis q of
        the first d, in order (QR), the weights' parts c solve Rᵀc = y, and x_k has the answer
        Σ_{j<k} (x_k·q_j) c_j.
        """
        x, y = self._split(batch)
        known = min(x.shape[1], self.active)
        basis, upper = torch.linalg.qr(x[:, :known].mT)
        part = torch.linalg.solve_triangular(upper.mT, y[:, :known, None], upper=False)
        seen = (x @ basis).tril(-1)
        return self._answer(batch, (seen @ part.nan_to_num())[:, :, 0])

    def shortcuts(self) -> dict[str, Predictor]:
        """Return predictors that use the examples without solving for the weights.

        "averaging" takes the mean of y·x as weights. "nearest examples" answers with the mean y of
        the three nearest x. "one gradient step" takes Σ y·x/(k + d) as weights: the best single
        step of gradient descent after k − 1 examples, which a layer of linear attention can do.
        With 41 examples of 20 dimensions they score 0 (worse than zero), .16 and .58.
        """
        return {
            "averaging": lambda batch: self._sum(batch, lambda n: n.clamp(min=1)),
            "nearest examples": self._copy_nearest,
            "one gradient step": lambda batch: self._sum(batch, lambda n: n + self.active + 1),
        }

    def _sum(self, batch: Batch, divide: Callable[[Tensor], Tensor]) -> Tensor:
        """Answer with the sum of y·x over the examples before, divided by a function of their n."""
        x, y = self._split(batch)
        weights = (y[:, :, None] * x).cumsum(1).roll(1, 1)
        weights[:, 0] = 0
        count = divide(torch.arange(x.shape[1], device=x.device))
        return self._answer(batch, (x * weights).sum(-1) / count)

    def _copy_nearest(self, batch: Batch) -> Tensor:
        """Answer with the mean y of the nearest examples before."""
        x, y = self._split(batch)
        far = torch.cdist(x, x)
        before = torch.ones_like(far, dtype=torch.bool).tril(-1)
        near = far.masked_fill(~before, torch.inf).argsort(-1)[:, :, :NEIGHBOURS]
        known = before.gather(2, near)
        found = y[:, None].expand_as(far).gather(2, near) * known
        return self._answer(batch, found.sum(-1) / known.sum(-1).clamp(min=1))

    def _split(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the x [b k d] and y [b k] of a batch, in float64."""
        vectors = batch.inputs.double()
        return vectors[:, ::2, : self.active], vectors[:, 1::2, -1]

    def _answer(self, batch: Batch, values: Tensor) -> Tensor:
        """Return answers [b t 1] from their values [b k], NaN where nothing is asked."""
        answers = torch.full_like(batch.inputs[:, :, :1], torch.nan)
        answers[:, ::2, 0] = values.float()
        return answers


@lru_cache(maxsize=8)
def _make_quantiles(device: "torch.device") -> Tensor:
    """Return the 2¹⁶ middle quantiles of N(0, 1), as whole multiples of 1/SCALE: all odd."""
    share = (torch.arange(1 << LEVELS, dtype=torch.float64) + 0.5) / (1 << LEVELS)
    quantile = torch.special.ndtri(share) * SCALE
    return (2 * torch.floor(quantile / 2) + 1).long().to(device)
