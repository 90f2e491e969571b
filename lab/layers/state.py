"""Decoding: the state that a mixer keeps of the tokens it has read, and their positions.

Every mixer decodes by three methods; its forward is the second of them without a state:

    start(batch, position=0) → state             before any token
    prefill(x [b t d], state, keep) → y, state   t ≥ 1 further tokens at once
    step(x [b d], state) → y [b d], state        one further token

`keep` [b t] is False where a row is padded: no token reads padding, and it has no position. The
outputs at padding are finite and meaningless.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lab.abilities import Decoder as Decoder
from lab.abilities import State as State


def token_positions(
    t: int,
    device: torch.device,
    start: State | None = None,
    keep: Bool[Tensor, "b t"] | None = None,
) -> Int[Tensor, " t"] | Int[Tensor, "b t"]:
    """Return the positions of t further tokens: [t] without state and padding, else [b t].

    A token comes after the kept tokens before it; padding before the first token has its position.
    """
    if keep is None:
        positions = torch.arange(t, device=device)
        return positions if start is None else start.position[:, None] + positions
    positions = (keep.cumsum(1) - 1).clamp(min=0)
    return positions if start is None else start.position[:, None] + positions


def next_position(
    x: Tensor, start: State | None = None, keep: Bool[Tensor, "b t"] | None = None
) -> Int[Tensor, " b"]:
    """Return the position of each row's next token, after the t tokens of x [b t …]."""
    counted = x.new_full((x.shape[0],), x.shape[1], dtype=torch.long)
    if keep is not None:
        counted = keep.sum(1)
    return counted if start is None else start.position + counted


def check_decoding(
    x: Tensor, state: State | None, keep: Tensor | None = None, kind: type = tuple
) -> None:
    """Check a state and a padding mask against the tokens x [b t …] that they come with.

    Args:
        kind: the class that the state must be of.

    Raises:
        ValueError: for a state of another layer or batch, or a mask of another shape or type.
    """
    if state is not None and not isinstance(state, kind):
        raise ValueError(f"state is {type(state).__name__}, must be {kind.__name__}")
    if state is not None and state.position.shape[0] != x.shape[0]:
        raise ValueError(f"state has batch {state.position.shape[0]}, must be x's {x.shape[0]}")
    if keep is not None and (keep.dtype != torch.bool or keep.shape != x.shape[:2]):
        raise ValueError(
            f"keep is {keep.dtype} {list(keep.shape)}, must be bool {list(x.shape[:2])}"
        )
