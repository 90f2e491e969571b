"""Interventions at hook points: replace or remove entries of the tensors that pass them.

Also here: where any intervention acts (the model, a block, its mixer, lists of indices).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lab.hooks import HookPoint, NamesFilter, find_points, hooks, unwrap
from lab.layers.mixer import Mixer, adapt
from lab.models import Block, LanguageModel
from tasks.bounds import check_choice

Ablation = Literal["zero", "mean", "resample"]
Indices = Tensor | np.ndarray | Sequence[int]
"""A list of integers ≥ 0."""

_POINTS = {
    "b t d": "embed resid_pre resid_mid resid_post attn_out mlp_out normalized",
    "b t 1": "scale",
    "b t f": "pre pre_linear post",
    "b t h p": "q k v rot_q rot_k z ssm_out",
    "b h 1 t": "dynamic_mask",
    "b h t s": "attn_scores pattern",
    "b t n": "value_scores value_indices",
    "b t h": "dt log_decay beta",
    "b t h n": "B_pre B_rot C_pre C_rot log_decay beta match",
    "b t r h n": "match",
    "b t h n p": "state",
    "b t h p n": "ssm_write ssm_state",
    "b t h k": "subkey_scores expert_scores expert_indices expert_weights",
    "b t k": "expert_scores expert_indices expert_weights",
    "b t e": "router_scores",
    "e": "expert_share",
    "": "balance_loss",
}
POINT_AXES: dict[str, tuple[str, ...]] = {
    f"hook_{name}": tuple(axes for axes, named in _POINTS.items() if name in named.split())
    for names in _POINTS.values()
    for name in names.split()
}
"""The axes of the tensor at a hook point, by the last part of its name; two where layers differ.

b is the row. t is the position: the target in a pattern, the key in a dynamic mask. h is the head:
of keys and values in k, v and the mask; a group in B and C; a retrieval head in experts.
"""
_LETTERS = {"rows": "b", "positions": "t", "heads": "h"}
"""The letter in `POINT_AXES` of what each argument restricts."""


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
    place = _check_place(model, name, rows=rows, positions=positions, heads=heads)
    inner = get_language_model(model)

    def replace(tensor: Tensor, point: HookPoint) -> Tensor:
        at = _find_positions(inner, tensor, point.name)
        marks, other = _mark(place, tensor, point.name, at), source.to(tensor.device)
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
    place = _check_place(model, name, rows=rows, positions=positions, heads=heads)
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
        marks = _mark(place, tensor, point.name, _find_positions(inner, tensor, point.name))
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
        ValueError: for a mixer without a place for a bias (`bias_hook`), or a bias that is not
            finite; while it runs, for another shape.
    """
    mixer = get_mixer(model, layer)
    if mixer.bias_hook is None:
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


def _check_place(
    model: nn.Module, name: NamesFilter, **given: Indices | None
) -> dict[str, Int[Tensor, " _"]]:
    """Return the given rows, positions and heads; check that the points have these axes."""
    place = {field: to_indices(field, of) for field, of in given.items() if of is not None}
    if {"rows", "positions"} <= place.keys():
        check_lengths(rows=place["rows"], positions=place["positions"])
    for point in find_points(get_language_model(model), name):
        for field in place:
            forms = list_axes(point)
            if not any(_LETTERS[field] in form for form in forms):
                raise ValueError(_explain_missing_axis(field, point, forms))
    return place


def _mark(
    place: dict[str, Int[Tensor, " _"]],
    tensor: Tensor,
    point: str,
    at: Int[Tensor, "*b t"] | None,
) -> Bool[Tensor, "*axes"]:
    """Return a mask that is True at the entries and broadcasts to the tensor's shape.

    Args:
        place: rows, positions and heads of the entries; all, where one is missing.
        tensor: what passes the point.
        point: its name.
        at: the positions of a decoding call; None: the tensor has all positions.
    """
    marks = torch.ones((), dtype=torch.bool)
    if not place:
        return marks.to(tensor.device)
    form = find_axes(tensor, point)
    for field, found in place.items():
        if _LETTERS[field] not in form:
            raise ValueError(_explain_missing_axis(field, point, [form] if form else []))
        if field != "positions" or at is None:
            axis = form.index(_LETTERS[field])
            check_below(field, found, tensor.shape[axis], f"{field} at {point}")
    sizes = dict(zip(form, tensor.shape, strict=True))
    if at is not None and "positions" in place:
        # Of all positions so far; those of the call are picked below.
        sizes["t"] = int(torch.cat([at.cpu().flatten(), place["positions"]]).max()) + 1
    # Rows and positions go together, entry by entry; heads are crossed with them.
    for fields in ([field for field in place if field != "heads"], ["heads"]):
        if given := [field for field in fields if field in place]:
            letters = [_LETTERS[field] for field in given]
            flags = torch.zeros([sizes[letter] for letter in letters], dtype=torch.bool)
            flags[tuple(place[field] for field in given)] = True
            marks = marks & flags.view([sizes[a] if a in letters else 1 for a in form])
    if at is not None and "positions" in place:
        index, axis = _lay_along(at.cpu(), form)
        marks = marks.take_along_dim(index.clamp(min=0), axis) & (index >= 0)
    return marks.to(tensor.device)


def _find_positions(model: LanguageModel, tensor: Tensor, point: str) -> Int[Tensor, "*b t"] | None:
    """Return the positions of what passes a point; None if they are all, or it has no such axis."""
    form = find_axes(tensor, point)
    return model.find_positions(tensor.shape[form.index("t")]) if "t" in form else None


def _take_positions(
    source: Tensor, tensor: Tensor, point: str, at: Int[Tensor, "*b t"]
) -> tuple[Tensor, Bool[Tensor, "*axes"]]:
    """Return a tensor's entries at some positions, and whether it has them."""
    if source.ndim != tensor.ndim:
        return source, torch.ones((), dtype=torch.bool, device=tensor.device)
    index, axis = _lay_along(at.to(tensor.device), find_axes(tensor, point))
    known = (index >= 0) & (index < source.shape[axis])
    return source.take_along_dim(index.clamp(0, source.shape[axis] - 1), axis), known


def _lay_along(at: Int[Tensor, "*b t"], form: list[str]) -> tuple[Int[Tensor, "*axes"], int]:
    """Return positions as an index along a tensor's axis t, and that axis."""
    sizes = {"b": at.shape[0] if at.ndim == 2 else 1, "t": at.shape[-1]}
    return at.view([sizes.get(letter, 1) for letter in form]), form.index("t")


def list_axes(point: str) -> list[list[str]]:
    """Return the axes that a point may have, from `POINT_AXES`; none for an unknown point."""
    return [axes.split() for axes in POINT_AXES.get(point.rpartition(".")[2], ())]


def find_axes(tensor: Tensor, point: str) -> list[str]:
    """Return the axes of a tensor that passes a point; none for an unknown point."""
    return next((form for form in list_axes(point) if len(form) == tensor.ndim), [])


def _explain_missing_axis(field: str, point: str, forms: list[list[str]]) -> str:
    axes = " or ".join(f"[{' '.join(form)}]" for form in forms) or "axes without names"
    return f"{field}: {point} has {axes}, no axis {_LETTERS[field]}"


def get_language_model(model: nn.Module) -> LanguageModel:
    """Return the language model, unwrapped if it is compiled.

    Raises:
        ValueError: for anything but a `LanguageModel`.
    """
    inner = unwrap(model)
    if not isinstance(inner, LanguageModel):
        raise ValueError(f"model is {type(inner).__name__}, must be LanguageModel")
    return inner


def get_block(model: nn.Module, layer: int) -> Block:
    """Return a block.

    Raises:
        ValueError: for a layer that the model does not have.
    """
    blocks = get_language_model(model).blocks
    if not 0 <= layer < len(blocks):
        raise ValueError(f"{layer=} must be in 0 … {len(blocks) - 1}: the model's blocks")
    block = unwrap(blocks[layer])
    assert isinstance(block, Block)
    return block


def get_mixer(model: nn.Module, layer: int) -> Mixer:
    """Return a block's sequence mixer.

    Raises:
        ValueError: for a layer that the model does not have, or one without a mixer.
    """
    mixer = get_block(model, layer).mixer
    if mixer is None:
        raise ValueError(f"{layer=} has no mixer")
    return adapt(unwrap(mixer))


def to_indices(field: str, given: Indices) -> Int[Tensor, " n"]:
    """Return a list of indices as a tensor.

    Raises:
        ValueError: for numbers that are not integers, another shape, or integers below 0.
    """
    found = torch.as_tensor(given)
    if found.numel() == 0:
        found = found.long()
    integral = not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)
    if found.ndim != 1 or not integral:
        raise ValueError(f"{field} is {found.dtype} {list(found.shape)}, must be integers [n]")
    if found.numel() and found.min() < 0:
        raise ValueError(f"{field} holds {int(found.min())}, must be at least 0")
    return found.long().cpu()


def check_below(field: str, found: Int[Tensor, " n"], size: int, what: str) -> None:
    """Check that indices are below a size.

    Raises:
        ValueError: for an index that is not.
    """
    if found.numel() and found.max() >= size:
        raise ValueError(f"{field} holds {int(found.max())}, must be below {size}, the {what}")


def check_lengths(**fields: Int[Tensor, " _"]) -> None:
    """Check that lists which belong together have one length.

    Raises:
        ValueError: for lists of different lengths.
    """
    lengths = {name: len(found) for name, found in fields.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{length} {name}" for name, length in lengths.items())
        raise ValueError(f"{counts}: must be equally many")
