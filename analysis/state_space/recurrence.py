"""A layer's recurrence on the rows of a batch: an SSD's, or one of the family's.

    h_t = exp(a_t) h_{t−1} + dt_t x_t ⊗ B_t,  y_t = h_t C_t + D x_t

    y = M̃ x + D x,  M̃_ij = L_ij (C_i·B_j) dt_j,  L_ij = exp Σ_{k=j+1..i} a_k

Here M̃ is without D, whereas `BlockMixer.matrix` has D on its diagonal. The family's recurrence is
in `lab.layers.recurrence`; its keys k are SSD's dt B, its queries q are C.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from analysis.base import NotApplicableError, Subject
from analysis.mixing import BLOCK_ENTRIES, BlockMixer, collect_mixers
from lab.hooks import run_with_cache
from lab.layers.family.log_linear import LogLinearAttention
from lab.layers.recurrence import Recurrence, Terms
from lab.layers.ssd import SSD
from lab.models import LanguageModel
from lab.ops.delta import delta
from lab.ops.ssd_forms import repeat_groups
from tasks.base import Batch

HELD = 0.9
"""The share of a row's magnitudes that lies inside its effective context."""
ENTRIES = 2**26
"""Matrix entries that are read in all; they decide how many rows of the batch are used."""
MOST_ROWS = 64
FACTORED = 2**19
"""Entries of a thin factor that are decomposed at once, in fp64."""
ROUNDING = 1e-7
HOOKS = ["hook_dt", "hook_log_decay", "hook_B_rot", "hook_C_rot", "hook_ssm_out"]


@dataclass(frozen=True)
class StateRecurrence(ABC):
    """What a layer that holds a state does to the rows of a batch.

    Attributes:
        mixer: the layer and its input.
        log_decay: a, ≤ 0, of each head or of each of its key channels.
        reads: what is read from the state, the output before gate and projection.
        terms: what the recurrence gets, of each write, as in `lab.ops.delta`.
    """

    mixer: BlockMixer
    log_decay: Float[Tensor, "b t h"] | Float[Tensor, "b t h n"]
    reads: Float[Tensor, "b t h p"]
    terms: Terms

    @property
    def n_heads(self) -> int:
        """The number of heads."""
        return self.log_decay.shape[2]

    @property
    def half_lives(self) -> Float[Tensor, " h"]:
        """ln 2 / mean(−a), tokens, over channels too; ∞ for a head that never forgets."""
        # |a| = −a, and −0 would make it −∞.
        return math.log(2) / self.log_decay.double().transpose(0, 2).flatten(1).mean(1).abs()

    @property
    def kept(self) -> Float[Tensor, "b t h"]:
        """The share of the state that a token keeps, e^a, mean over channels."""
        return self.log_decay.exp().reshape(*self.reads.shape[:3], -1).mean(-1)

    @property
    @abstractmethod
    def width(self) -> int:
        """Key channels n of a head's state."""

    @property
    @abstractmethod
    def step(self) -> Float[Tensor, "b t h"] | None:
        """The step dt; None without one."""

    @property
    @abstractmethod
    def writes(self) -> Float[Tensor, "b t h"]:
        """The Frobenius norm of what a token adds to the state."""

    @abstractmethod
    def blocks(self, row: int, multiple: int = 1) -> Iterator[tuple[slice, Float[Tensor, "h t s"]]]:
        """Yield M̃ of one row of the batch as `BlockMixer.blocks` does."""

    @abstractmethod
    def singular_values(self, split: int) -> Float[Tensor, "b h k"]:
        """Return the singular values of M̃[i ≥ split, j < split], largest first; k is its full rank.

        The block is a product of two thin factors, what later tokens read of each key channel of
        the state, and what earlier ones wrote there. Its singular values are those of R₁ R₂ᵀ, where
        R₁ and R₂ come from the factors' QR decompositions, in fp64.
        """

    @abstractmethod
    def measure_decay_share(self, row: int) -> Float[Tensor, " h"]:
        """Return var log L_ij / var log|M_ij| over j < i, where M = L ∘ CBᵀ.

        The rest is the share of log|C_i·B_j| and of their covariance. Entries of exactly 0 are left
        out. NaN where nothing varies, or M is no such product.
        """

    def measure_contexts(self, row: int) -> Int[Tensor, "h t"]:
        """Return each position's effective context, tokens in [1, i + 1].

        It is the smallest window of latest tokens, the position's own included, that holds
        `HELD` of Σ_j |M̃_ij|; 0 where that sum is 0.
        """
        found = []
        for rows, matrix in self.blocks(row):
            # In fp64: sums of thousands, of which a tenth differs from a little more.
            before = matrix.abs().double().cumsum(-1)
            # A window that holds exactly the share counts, whatever the rounding of the sums.
            dropped = (before <= (1 - HELD + ROUNDING) * before[..., -1:]).sum(-1)
            width = torch.arange(rows.start + 1, rows.stop + 1, device=matrix.device) - dropped
            found.append(torch.where(before[..., -1] > 0, width, 0))
        return torch.cat(found, dim=-1)


@dataclass(frozen=True)
class SSDRecurrence(StateRecurrence):
    """What one SSD layer does to the rows of a batch.

    Attributes:
        dt: > 0.
        B, C: as they are multiplied, after rotation, or convolution, and activation; one per group
            or per head.
        values: x, after convolution and activation, where there are any.
    """

    dt: Float[Tensor, "b t h"]
    B: Float[Tensor, "b t g n"]
    C: Float[Tensor, "b t g n"]
    values: Float[Tensor, "b t h p"]

    @classmethod
    def of(cls, mixer: BlockMixer) -> "SSDRecurrence":
        """Return what an SSD mixer does to its input."""
        module = mixer.module
        assert isinstance(module, SSD)
        seen = run_with_cache(module, mixer.x, HOOKS)[1]
        dt, log_decay, B, C, mixed = (seen[name] for name in HOOKS)
        if module.groups == "tiled":
            B, C = (z.repeat(1, 1, module.n_heads // module.n_groups, 1) for z in (B, C))
        values = module.values(mixer.x).transpose(1, 2)
        reads = mixed if module.D is None else mixed - module.D[:, None] * values
        n_heads = values.shape[2]
        q, k = repeat_groups(C, n_heads), dt[..., None] * repeat_groups(B, n_heads)
        terms = Terms(q, k, values, log_decay)
        return cls(mixer, log_decay, reads, terms, dt, B, C, values)

    @property
    def width(self) -> int:
        """d_state."""
        return self.B.shape[-1]

    @property
    def step(self) -> Float[Tensor, "b t h"]:
        """The step dt."""
        return self.dt

    @property
    def writes(self) -> Float[Tensor, "b t h"]:
        """‖dt_t x_t ⊗ B_t‖."""
        return self.dt * self.values.norm(dim=-1) * repeat_groups(self.B, self.n_heads).norm(dim=-1)

    def blocks(self, row: int, multiple: int = 1) -> Iterator[tuple[slice, Float[Tensor, "h t s"]]]:
        """Yield M̃ of one row of the batch as `BlockMixer.blocks` does."""
        module = self.mixer.module
        assert isinstance(module, SSD)
        for rows, matrix in self.mixer.blocks(row, multiple):
            if module.D is not None:
                matrix[..., rows.start :].diagonal(dim1=-2, dim2=-1).sub_(module.D[:, None])
            yield rows, matrix

    def singular_values(self, split: int) -> Float[Tensor, "b h k"]:
        """Return the singular values of M̃[i ≥ split, j < split], a few rows at a time.

        Its factors are C_i exp(Σ_{split..i} a) and B_j dt_j exp(Σ_{j+1..split−1} a).
        """
        seq_len, width = self.C.shape[1], self.C.shape[-1]
        rows_at_once = max(1, FACTORED // (seq_len * self.n_heads * width))
        every = (self.dt, self.log_decay.double(), self.B, self.C)
        found = []
        for dt, a, B, C in zip(*(z.split(rows_at_once) for z in every), strict=True):
            until = F.pad(a[:, 1:split].flip(1).cumsum(1).flip(1), (0, 0, 0, 1))
            target = a[:, split:].cumsum(1).exp()[..., None]
            source = (until.exp() * dt[:, :split])[..., None]
            factors = (
                target * repeat_groups(C[:, split:], self.n_heads),
                source * repeat_groups(B[:, :split], self.n_heads),
            )
            found.append(_decompose(*(z.double().transpose(1, 2) for z in factors)))
        return torch.cat(found)

    def measure_decay_share(self, row: int) -> Float[Tensor, " h"]:
        """Return var log L_ij / var log|M_ij| over j < i, where M = L ∘ CBᵀ."""
        past = self.log_decay[row].double().cumsum(0).T
        some = slice(row, row + 1)
        B, C = (repeat_groups(z[some], self.n_heads)[0].transpose(0, 1) for z in (self.B, self.C))
        place = torch.arange(past.shape[1], device=past.device)
        sums = past.new_zeros(5, self.n_heads)
        for rows in place.split(max(1, BLOCK_ENTRIES // past.numel())):
            scores = (C[:, rows] @ B.mT).abs()
            decay = past[:, rows, None] - past[:, None]
            kept = (place < rows[:, None]) & (scores > 0)
            content = torch.where(kept, scores, 1.0).double().log()
            decay = torch.where(kept, decay, 0.0)
            parts = (kept, decay, decay**2, content + decay, (content + decay) ** 2)
            sums += torch.stack([part.sum((1, 2), dtype=torch.float64) for part in parts])
        decay, decay_2, both, both_2 = sums[1:] / sums[0]
        return (decay_2 - decay**2) / (both_2 - both**2)


@dataclass(frozen=True)
class FamilyRecurrence(StateRecurrence):
    """What a layer of `lab.layers.recurrence` does to the rows of a batch.

    M̃ has what a token reads of its own value, too, unless that is a head of its own. Writes of one
    token count together: an entry of M̃ is the root of their sum of squares.

    Attributes:
        terms: what the recurrence gets, of each write.
    """

    terms: Terms

    @classmethod
    def of(cls, mixer: BlockMixer) -> "FamilyRecurrence":
        """Return what a mixer of the family does to its input."""
        module = mixer.module
        assert isinstance(module, Recurrence)
        terms = module.list_terms(mixer.x)
        reads = run_with_cache(module, mixer.x, ["hook_z"])[1]["hook_z"][:, :, : terms.q.shape[2]]
        log_decay = terms.log_decay
        if log_decay is None:
            log_decay = torch.zeros_like(terms.q[..., 0])
        return cls(mixer, log_decay, reads, terms)

    @property
    def n_writes(self) -> int:
        """Keys and values of a token."""
        return self.terms.k.shape[2] if self.terms.k.ndim > 4 else 1

    @property
    def width(self) -> int:
        """Key channels."""
        return self.terms.k.shape[-1]

    @property
    def step(self) -> None:
        """None: there is no step."""

    @property
    def writes(self) -> Float[Tensor, "b t h"]:
        """‖k_t v_tᵀ‖, of which the delta rule takes away what the state held at k_t."""
        size = self.terms.k.norm(dim=-1) * self.terms.v.norm(dim=-1)
        return size.norm(dim=2) if size.ndim > 3 else size

    def blocks(self, row: int, multiple: int = 1) -> Iterator[tuple[slice, Float[Tensor, "h t s"]]]:
        """Yield M̃ of one row of the batch as `BlockMixer.blocks` does."""
        module = self.mixer.module
        assert isinstance(module, Recurrence)
        for rows, matrix in self.mixer.blocks(row, multiple):
            if self.n_writes > 1:
                yield rows, matrix.unflatten(0, (self.n_writes, -1)).norm(dim=0)
            else:
                yield rows, matrix[: self.n_heads]

    def singular_values(self, split: int) -> Float[Tensor, "b h k"]:
        """Return the singular values of M̃[i ≥ split, j < split], with a column for each write."""
        n_rows, _, h, _ = self.terms.q.shape
        rows_at_once = max(1, FACTORED // (h * (split * self.n_writes) ** 2))
        found = []
        for first in range(0, n_rows, rows_at_once):
            some = slice(first, first + rows_at_once)
            terms: Any = (None if term is None else term[some].double() for term in self.terms)
            held, read = self._factor(Terms(*terms), split)
            found.append(_decompose(read, held))
        return torch.cat(found)

    def _factor(self, terms: Terms, split: int) -> tuple[Tensor, Tensor]:
        """Return what the state holds of earlier writes [b h s n], and what is read [b h t n]."""
        module = self.mixer.module
        assert isinstance(module, Recurrence)
        q, every = terms.q, terms[1:6]
        size, _, h, n = q.shape
        before: list[Any]
        after: list[Any]
        before, after = (
            [None if term is None else term[:, part] for term in every]
            for part in (slice(split), slice(split, None))
        )
        high: Any = {"dtype": q.dtype, "device": q.device}
        # A value of its own for each write, then a state with one for each key channel.
        own = torch.eye(split * self.n_writes, **high)
        before[1] = own.expand(size, h, -1, -1).transpose(1, 2).reshape(*before[0].shape[:-1], -1)
        after[1] = torch.zeros_like(after[0])
        start = torch.eye(n, **high).expand(size, h, n, n)
        options: Any = {"match_before_decay": module.match_before_decay}
        held = delta(q[:, :split], *before, **options)[1]
        if terms.own is not None:  # tokens read the state that they find
            options["own"] = terms.own[:, split:]
        read = delta(q[:, split:], *after, initial_state=start, **options)[0]
        read = module.divide(F.pad(read, (0, 0, 0, 0, split, 0)), terms)[:, split:]
        return held.mT, read.transpose(1, 2)

    def measure_decay_share(self, row: int) -> Float[Tensor, " h"]:
        """Return NaN: what decays, and what is read of it, is not one product for each entry."""
        return self.log_decay.new_full((self.n_heads,), math.nan)


def _decompose(read: Float[Tensor, "b h t n"], held: Float[Tensor, "b h s n"]) -> Tensor:
    """Return the singular values of read heldᵀ, largest first."""
    upper, lower = (torch.linalg.qr(z, mode="r").R for z in (read, held))
    return torch.linalg.svdvals(upper @ lower.mT)


def is_followed(module: nn.Module) -> bool:
    """Whether a module is a mixer of the family whose heads each hold one matrix as state."""
    several = LogLinearAttention  # states of a head
    return isinstance(module, Recurrence) and not (
        module.per_channel or isinstance(module, several)
    )


def choose_rows(subject: Subject, entries: int = ENTRIES) -> Batch:
    """Return the first rows of a subject's batch, as many as there is time to read matrices of.

    Args:
        entries: of the matrices of all heads, that are read at most.

    Raises:
        NotApplicableError: for a model without such a mixer.
    """
    every: Any = subject.model.modules()
    n_heads = sum(m.n_heads for m in every if isinstance(m, SSD) or is_followed(m))
    if not n_heads:
        raise NotApplicableError("no block has a mixer with a state: SSD, or one of its relatives")
    size, seq_len = subject.batch.roles.shape
    return subject.batch[: min(size, MOST_ROWS, max(1, entries // (n_heads * seq_len**2)))]


def collect_recurrences(model: LanguageModel, batch: Batch) -> list[StateRecurrence]:
    """Return the layers of a model that hold a state, on some rows."""
    found: list[StateRecurrence] = []
    for mixer in collect_mixers(model, batch):
        if isinstance(mixer.module, SSD):
            found.append(SSDRecurrence.of(mixer))
        elif is_followed(mixer.module):
            found.append(FamilyRecurrence.of(mixer))
    return found


def load_initial_model(subject: Subject) -> LanguageModel | None:
    """Return the model of a subject's run at step 0; None without one or if it is the subject's."""
    if subject.run is None or subject.step == 0:
        return None
    return subject.run.load_model(0).to(subject.batch.inputs.device)


def index_heads(
    found: Sequence[StateRecurrence],
) -> tuple[Int[np.ndarray, " h"], Int[np.ndarray, " h"]]:
    """Return the layer of each head of all layers, and the head's index in its layer."""
    counts = [layer.n_heads for layer in found]
    heads = np.concatenate([np.arange(n) for n in counts])
    return np.repeat([layer.mixer.layer for layer in found], counts), heads
