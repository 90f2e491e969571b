"""A mixture of multilayer perceptrons by grouped matrix products: each serves some of the tokens.

    y_t = Σ_k weights[t, k] φ_{indices[t, k]}(x_t),    φ_e(x) = σ(x up_e) down_e,
                                               gated:  φ_e(x) = (σ(x gate_e) ⊙ x up_e) down_e

Both backends give the same values and gradients, and drop no token: an expert serves every token
that chose it.

    loop        one expert after the other: any device and dtype
    grouped_mm  tokens sorted by expert, then torch's grouped product over all experts at once: a
                GPU need not wait for the counts, as it does in "loop". float32, bfloat16 or float16
                (compiled: bfloat16 only); rows of x and of the hidden layer a multiple of 16 bytes

"auto" is grouped_mm where it can run, else loop. `apply_experts_naively` is the reference. Axis
letter of this file, besides the package's: f hidden width.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from lab.ops.derivatives import needs_plain
from tasks.bounds import check_choice

Backend = Literal["auto", "loop", "grouped_mm"]
Activation = Callable[[Tensor], Tensor]

GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GROUPED_ALIGNMENT = 16
"""Bytes that a row must be a multiple of."""


class ExpertWeights(NamedTuple):
    """The weights of e multilayer perceptrons."""

    up: Float[Tensor, "e d f"]
    down: Float[Tensor, "e f d"]
    gate: Float[Tensor, "e d f"] | None = None


def apply_experts(
    x: Float[Tensor, "tokens d"],
    weights: Float[Tensor, "tokens k"],
    indices: Int[Tensor, "tokens k"],
    experts: ExpertWeights,
    activation: Activation,
    backend: str = "auto",
) -> Float[Tensor, "tokens d"]:
    """Return the weighted sum of the outputs of each token's chosen experts.

    Under autocast the products are in its dtype, like a linear layer's; float64 stays float64.

    Args:
        x: the experts' input.
        weights: factor of each chosen expert's output.
        indices: the chosen experts, int64 in 0 … e − 1.
        experts: the experts' parameters.
        activation: σ, elementwise.
        backend: "loop", "grouped_mm", or "auto".

    Raises:
        ValueError: for an unknown backend, or one that cannot take this dtype or these widths.
    """
    dtype = _product_dtype(x)
    _, width, d_ff = experts.up.shape
    form = {"loop": _apply_loop, "grouped_mm": _apply_grouped}[
        resolve_grouped_backend(backend, dtype=dtype, widths=(width, d_ff))
    ]
    return _apply(x, weights, indices, *experts, activation, form)


def _apply(x, weights, indices, up, down, gate, activation, form):
    experts = ExpertWeights(up, down, gate)
    if needs_plain() and not torch.compiler.is_exporting():
        return apply_experts_naively(x, weights, indices, experts, activation)
    return form(x, weights, indices, experts, activation)


def resolve_grouped_backend(backend: str, *, dtype: torch.dtype, widths: tuple[int, ...]) -> str:
    """Return the backend for experts of these widths whose products are in this dtype.

    Raises:
        ValueError: for an unknown backend, or grouped_mm where it cannot run.
    """
    check_choice("backend", backend, get_args(Backend))
    if backend == "loop":
        return backend
    obstacle = _find_obstacle(dtype, widths)
    if obstacle is None:
        return "grouped_mm"
    if backend == "grouped_mm":
        raise ValueError(f"{backend=} {obstacle}")
    return "loop"


def apply_experts_naively(
    x: Float[Tensor, "tokens d"],
    weights: Float[Tensor, "tokens k"],
    indices: Int[Tensor, "tokens k"],
    experts: ExpertWeights,
    activation: Activation,
) -> Float[Tensor, "tokens d"]:
    """The obvious form, every expert on every token: the reference for `apply_experts`."""
    up, down, gate = experts
    hidden = _compute_hidden(lambda w: einsum(x, w, "n d, e d f -> n e f"), up, gate, activation)
    each = einsum(hidden, down, "n e f, e f d -> n e d")
    # Unlike F.one_hot, torch.func.vmap can run it.
    chosen = (indices[..., None] == torch.arange(len(up), device=up.device)).to(weights.dtype)
    return einsum(weights, chosen, each, "n k, n k e, n e d -> n d")


def _apply_loop(
    x: Tensor, weights: Tensor, indices: Tensor, experts: ExpertWeights, activation: Activation
) -> Tensor:
    up, down, gate = experts
    parts, places = [], []
    for e in range(len(up)):
        tokens, rank = (indices == e).nonzero(as_tuple=True)
        multiply = partial(torch.matmul, x[tokens])
        hidden = _compute_hidden(multiply, up[e], None if gate is None else gate[e], activation)
        parts.append(weights[tokens, rank, None] * (hidden @ down[e]))
        places.append(tokens)
    y = torch.cat(parts)
    return y.new_zeros(x.shape).index_add(0, torch.cat(places), y)


def _apply_grouped(
    x: Tensor, weights: Tensor, indices: Tensor, experts: ExpertWeights, activation: Activation
) -> Tensor:
    up, down, gate = experts
    k = indices.shape[1]
    sorted_experts, order = indices.flatten().sort(stable=True)
    numbers = torch.arange(len(up), device=x.device)
    ends = torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)
    rows = x.to(_product_dtype(x)).index_select(0, order // k)
    hidden = _compute_hidden(partial(_multiply_groups, ends, rows), up, gate, activation)
    each = _multiply_groups(ends, hidden, down)
    unsorted = torch.empty_like(each).index_copy(0, order, each).unflatten(0, (-1, k))
    return (weights[..., None] * unsorted).sum(1)


def _multiply_groups(ends: Tensor, rows: Tensor, w: Tensor) -> Tensor:
    return F.grouped_mm(rows, w.to(rows.dtype), offs=ends)


def _compute_hidden(
    multiply: Callable[[Tensor], Tensor], up: Tensor, gate: Tensor | None, activation: Activation
) -> Tensor:
    """Return the hidden layer; `multiply` returns the product of the tokens with its argument."""
    if gate is None:
        return activation(multiply(up))
    return activation(multiply(gate)) * multiply(up)


def _product_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    casts = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if casts else x.dtype


def _find_obstacle(dtype: torch.dtype, widths: tuple[int, ...]) -> str | None:
    """Return why grouped_mm cannot run, as a clause that follows its name, or None."""
    if dtype not in GROUPED_DTYPES:
        return f"takes float32, bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
    if torch.compiler.is_compiling() and dtype != torch.bfloat16:
        # PyTorch 2.13 runs the others, but knows the shape of bfloat16's result alone.
        return f"takes bfloat16 alone in a compiled model, not {str(dtype).removeprefix('torch.')}"
    for width in widths:
        if width * dtype.itemsize % GROUPED_ALIGNMENT:
            return (
                f"takes rows of a multiple of {GROUPED_ALIGNMENT} bytes, not the "
                f"{width * dtype.itemsize} of width {width}"
            )
    return None
