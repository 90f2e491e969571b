"""Interventions at hook points: replace or remove entries of the tensors that pass them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from analysis.interventions.places import (
    Indices,
    check_below,
    check_lengths,
    get_language_model,
    get_mixer,
    to_indices,
)
from lab.hooks import HookPoint, NamesFilter, find_points, hooks
from lab.layers.mixer import BiasedMixer
from lab.models import LanguageModel
from tasks.bounds import check_choice

Ablation = Literal["zero", "mean", "resample"]

POINT_AXES: dict[str, tuple[str, ...]] = {
    "hook_embed": ("b t d",),
    **dict.fromkeys(("hook_resid_pre", "hook_resid_mid", "hook_resid_post"), ("b t d",)),
    **dict.fromkeys(("hook_attn_out", "hook_mlp_out", "hook_normalized"), ("b t d",)),
    "hook_scale": ("b t 1",),
    **dict.fromkeys(("hook_pre", "hook_pre_linear", "hook_post"), ("b t f",)),
    **dict.fromkeys(
        ("hook_q", "hook_k", "hook_v", "hook_rot_q", "hook_rot_k", "hook_z"), ("b t h p",)
    ),
    "hook_dynamic_mask": ("b h 1 t",),
    **dict.fromkeys(("hook_attn_scores", "hook_pattern"), ("b h t s",)),
    **dict.fromkeys(("hook_value_scores", "hook_value_indices"), ("b t n",)),
    "hook_dt": ("b t h",),
    "hook_log_decay": ("b t h", "b t h n"),
    **dict.fromkeys(("hook_B_pre", "hook_B_rot", "hook_C_pre", "hook_C_rot"), ("b t h n",)),
    **dict.fromkeys(("hook_ssm_write", "hook_ssm_state"), ("b t h p n",)),
    "hook_ssm_out": ("b t h p",),
    "hook_subkey_scores": ("b t h k",),
    # Of retrieval heads, or of a router.
    **dict.fromkeys(
        ("hook_expert_scores", "hook_expert_indices", "hook_expert_weights"), ("b t h k", "b t k")
    ),
    "hook_router_scores": ("b t e",),
    "hook_expert_share": ("e",),
    "hook_balance_loss": ("",),
}
"""The axes of the tensor at a hook point, by the last part of its name; two where layers differ.

b is the row. t is the position: the target in a pattern, the key in a dynamic mask. h is the head:
of keys and values in k, v and the mask; a group in B and C; a retrieval head in experts.
"""


@contextmanager
def patch(
    model: nn.Module,
    name: str,
    source: Tensor,
    *,
    rows: Indices | None = None,
    positions: Indices | None = None,
    heads: Indices | None = None,
) -> Iterator[nn.Module]:
    """Replace what passes a hook point, or some of its entries, by a tensor.

    >>> from lab.models import build
    >>> model, name = build("AM*2", vocab_size=8, d_model=16), "blocks.1.hook_resid_pre"
    >>> clean, corrupt = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[5, 2, 3, 4]])
    >>> logits, cache = model.run_with_cache(clean, name)
    >>> with patch(model, name, cache[name], positions=[1, 2, 3]):
    ...     restored = model(corrupt)  # the clean stream everywhere but at the corrupt token

    Args:
        model: a language model.
        name: of the point; `POINT_AXES` says which of its axes are positions and heads.
        source: the replacement, of the same shape; another run's cache, for example. In decoding,
            that of a whole row: tokens after its last position keep their own.
        rows: of the batch; None: all. Given with positions [n]: the row of each position.
        positions: along t; None: all.
        heads: along h; None: all.

    Raises:
        ValueError: for a name that matches no point, an axis that the point lacks, or lists of
            different lengths; while it runs, for an index out of bounds, or a source of another
            shape.
    """
    place = _Place.of(rows, positions, heads)
    place.check(model, name)
    inner = get_language_model(model)

    def replace(tensor: Tensor, point: HookPoint) -> Tensor:
        at = _find_positions(inner, tensor, point.name)
        marks, other = place.mark(tensor, point.name, at), source.to(tensor.device)
        if at is not None:
            other, known = _take_positions(other, tensor, point.name, at)
            marks = marks & known
            if not marks.any():
                return tensor
        if other.shape != tensor.shape:
            raise ValueError(
                f"source is {list(other.shape)}, must be {list(tensor.shape)} as at {point.name}"
            )
        return torch.where(marks, other.to(tensor), tensor)

    with hooks(model, [(name, replace)]):
        yield model


@contextmanager
def ablate(
    model: nn.Module,
    name: NamesFilter,
    how: Ablation = "zero",
    *,
    rows: Indices | None = None,
    positions: Indices | None = None,
    heads: Indices | None = None,
    seed: int = 0,
) -> Iterator[nn.Module]:
    """Remove what passes hook points, or only what distinguishes one row from another.

        zero       replaced by 0
        mean       replaced by the mean over all rows of the batch, position by position
        resample   replaced by another row's tensor at the same position; the pairing of rows is a
                   permutation, and the same at all points

    Scores of −∞ stay as they are under zero and mean: no token reads ahead. A zeroed row of a
    pattern mixes nothing.

    Args:
        model: a language model.
        name: of points: one, several, or a predicate.
        how: what replaces it.
        rows: of the batch; None: all. Given with positions [n]: the row of each position.
        positions: along t (`POINT_AXES`); None: all.
        heads: along h; None: all.
        seed: of the pairing of rows.

    Raises:
        ValueError: as `patch`, and for an unknown `how`; while it runs, for a batch of one row with
            mean or resample, and for zeros or means of indices.
    """
    check_choice("how", how, get_args(Ablation))
    place = _Place.of(rows, positions, heads)
    place.check(model, name)
    inner = get_language_model(model)

    def replace(tensor: Tensor, point: HookPoint) -> Tensor:
        if how != "resample" and not tensor.is_floating_point():
            raise ValueError(f"{how=} at {point.name}: indices have no {how}; resample, or patch")
        if how != "zero" and (tensor.ndim == 0 or len(tensor) < 2):
            raise ValueError(f"{how=} at {point.name}: needs at least 2 rows of a batch")
        if how == "zero":
            other = torch.zeros_like(tensor)
        elif how == "mean":
            other = tensor.mean(0, keepdim=True)
        else:
            other = tensor[draw_derangement(len(tensor), seed).to(tensor.device)]
        marks = place.mark(tensor, point.name, _find_positions(inner, tensor, point.name))
        if how != "resample":
            marks = marks & ~torch.isneginf(tensor) & ~torch.isneginf(other)
        return torch.where(marks, other, tensor)

    with hooks(model, [(name, replace)]):
        yield model


@contextmanager
def override_mask(
    model: nn.Module, layer: int, bias: Float[Tensor, "*axes t"]
) -> Iterator[nn.Module]:
    """Replace the dynamic mask's bias of each key, or add one where there is no mask.

    Args:
        model: a language model.
        layer: index of the block, of attention or IFA.
        bias: added to the scores of the keys, [t], [h_kv t] or [b h_kv t];
            `lab.ops.attention.MASKED` removes a key. In decoding, t counts the keys of a whole
            row: those after them keep their own.

    Raises:
        ValueError: for a mixer without a place for a bias (`BiasedMixer`), or a bias that is not
            finite; while it runs, for another shape.
    """
    mixer = get_mixer(model, layer)
    if not isinstance(mixer, BiasedMixer):
        raise ValueError(f"{layer=}: {type(mixer).__name__} has no place for a dynamic mask")
    if not bias.isfinite().all():
        raise ValueError("bias must be finite; lab.ops.attention.MASKED removes a key")

    inner = get_language_model(model)

    def replace(tensor: Tensor, point: HookPoint) -> Tensor:
        b, h, _, t = tensor.shape
        at = inner.find_positions(t)
        if at is not None:
            t = bias.shape[-1]
        if bias.ndim > 3 or tuple(bias.shape) != (b, h, t)[-bias.ndim :]:
            raise ValueError(
                f"bias is {list(bias.shape)}, must be {[t]}, {[h, t]} or {[b, h, t]} as the keys"
            )
        whole = bias.to(tensor).expand(b, h, t)[:, :, None]
        if at is None:
            return whole
        found, known = _take_positions(whole, tensor, point.name, at)
        return torch.where(known, found, tensor)

    with hooks(model, [(f"blocks.{layer}.mixer.{mixer.bias_hook}", replace)]):
        yield model


def draw_derangement(n: int, seed: int) -> Int[Tensor, " n"]:
    """Draw for each of n ≥ 2 rows another row, each taken once: a cycle in random order."""
    order = np.random.default_rng(seed).permutation(n)
    other = np.empty_like(order)
    other[order] = np.roll(order, 1)
    return torch.from_numpy(other)


@dataclass(frozen=True)
class _Place:
    """Which entries of a tensor at a hook point are meant, by row, position and head; None: all."""

    rows: Int[Tensor, " n"] | None
    positions: Int[Tensor, " n"] | None
    heads: Int[Tensor, " m"] | None

    @classmethod
    def of(cls, rows: Indices | None, positions: Indices | None, heads: Indices | None) -> "_Place":
        given = {"rows": rows, "positions": positions, "heads": heads}
        place = cls(**{k: None if v is None else to_indices(k, v) for k, v in given.items()})
        if place.rows is not None and place.positions is not None:
            check_lengths(rows=place.rows, positions=place.positions)
        return place

    @property
    def restricted(self) -> dict[str, Int[Tensor, " _"]]:
        """The given indices by argument name."""
        return {name: found for name in _LETTERS if (found := getattr(self, name)) is not None}

    def check(self, model: nn.Module, name: NamesFilter) -> None:
        """Check that the points have the axes that are restricted.

        Raises:
            ValueError: for a name that matches no point, or a point without the axis.
        """
        for point in find_points(get_language_model(model), name):
            for field in self.restricted:
                forms = list_axes(point)
                if not any(_LETTERS[field] in form for form in forms):
                    raise ValueError(_explain_missing_axis(field, point, forms))

    def mark(
        self, tensor: Tensor, point: str, at: Int[Tensor, "*b t"] | None = None
    ) -> Bool[Tensor, "*axes"]:
        """Return a mask that is True at the entries and broadcasts to the tensor's shape.

        Args:
            tensor: what passes the point.
            point: its name.
            at: the positions of a decoding call; None: the tensor has all positions.
        """
        marks = torch.ones((), dtype=torch.bool)
        if not self.restricted:
            return marks.to(tensor.device)
        forms = [form for form in list_axes(point) if len(form) == tensor.ndim]
        for field, found in self.restricted.items():
            if not forms or _LETTERS[field] not in forms[0]:
                raise ValueError(_explain_missing_axis(field, point, forms))
            axis = forms[0].index(_LETTERS[field])
            if field != "positions" or at is None:
                check_below(field, found, tensor.shape[axis], f"{field} at {point}")
        sizes = dict(zip(forms[0], tensor.shape, strict=True))
        if at is not None and self.positions is not None:
            # Of all positions so far; those of the call are picked below.
            sizes["t"] = int(torch.cat([at.cpu().flatten(), self.positions]).max()) + 1
        groups: list[tuple[str, ...]] = [(field,) for field in self.restricted]
        if {"rows", "positions"} <= self.restricted.keys():
            groups.append(("rows", "positions"))
        for fields in groups:
            letters = [_LETTERS[field] for field in fields]
            flags = torch.zeros([sizes[letter] for letter in letters], dtype=torch.bool)
            flags[tuple(self.restricted[field] for field in fields)] = True
            marks = marks & flags.view([sizes[a] if a in letters else 1 for a in forms[0]])
        if at is not None and self.positions is not None:
            index, axis = _lay_along(at.cpu(), forms[0])
            marks = marks.take_along_dim(index.clamp(min=0), axis) & (index >= 0)
        return marks.to(tensor.device)


def _find_positions(model: LanguageModel, tensor: Tensor, point: str) -> Int[Tensor, "*b t"] | None:
    """Return the positions of what passes a point; None if they are all, or it has no such axis."""
    forms = [form for form in list_axes(point) if len(form) == tensor.ndim]
    if not forms or "t" not in forms[0]:
        return None
    return model.find_positions(tensor.shape[forms[0].index("t")])


def _take_positions(
    source: Tensor, tensor: Tensor, point: str, at: Int[Tensor, "*b t"]
) -> tuple[Tensor, Bool[Tensor, "*axes"]]:
    """Return a tensor's entries at some positions, and whether it has them."""
    if source.ndim != tensor.ndim:
        return source, torch.ones((), dtype=torch.bool, device=tensor.device)
    form = next(form for form in list_axes(point) if len(form) == tensor.ndim)
    index, axis = _lay_along(at.to(tensor.device), form)
    known = (index >= 0) & (index < source.shape[axis])
    return source.take_along_dim(index.clamp(0, source.shape[axis] - 1), axis), known


def _lay_along(at: Int[Tensor, "*b t"], form: list[str]) -> tuple[Int[Tensor, "*axes"], int]:
    """Return positions as an index along a tensor's axis t, and that axis."""
    sizes = {"b": at.shape[0] if at.ndim == 2 else 1, "t": at.shape[-1]}
    return at.view([sizes.get(letter, 1) for letter in form]), form.index("t")


_LETTERS = {"rows": "b", "positions": "t", "heads": "h"}
"""The letter in `POINT_AXES` of what each argument restricts."""


def list_axes(point: str) -> list[list[str]]:
    """Return the axes that a point may have, from `POINT_AXES`; none for an unknown point."""
    return [axes.split() for axes in POINT_AXES.get(point.rpartition(".")[2], ())]


def _explain_missing_axis(field: str, point: str, forms: list[list[str]]) -> str:
    axes = " or ".join(f"[{' '.join(form)}]" for form in forms) or "axes without names"
    return f"{field}: {point} has {axes}, no axis {_LETTERS[field]}"
