"""What a module may offer beside `forward`. Laws, blocks, analyses ask for that, not a class."""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Int
from torch import Tensor


@runtime_checkable
class MatrixMixer(Protocol):
    """A mixer that can return its mixing as one matrix per head.

    forward(x) = project(x, matrix(x) @ values(x)).
    """

    def matrix(self, x: Tensor, /, rows: slice | None = None) -> Tensor:
        """Return the matrix [b h t s]; some of its target positions, if it `takes_rows`."""
        ...

    def values(self, x: Tensor, /) -> Tensor:
        """Return the values that it mixes [b h s p]."""
        ...

    def project(self, x: Tensor, z: Tensor, /) -> Tensor:
        """Return the output [b t d] from the mixed values z [b h t p]."""
        ...


@runtime_checkable
class StateCounter(Protocol):
    """A mixer or model that knows the size of its state."""

    def state_bytes(self, length: int, /) -> int:
        """Return the bytes that it keeps of one row after `length` tokens."""
        ...


@runtime_checkable
class State(Protocol):
    """The state of a mixer: a NamedTuple of tensors whose first axis is the batch."""

    @property
    def position(self) -> Int[Tensor, " b"]:
        """How many tokens each row has read, not counting padding: the next token's position."""
        ...


@runtime_checkable
class Decoder(Protocol):
    """A module that can go on from a state: a `State` in the lab's mixers, anything in others.

    To laws two more attributes are claims: `relative`, whether only differences of positions count,
    and `paddings`, which patterns of padding have no effect.
    """

    def start(self, batch: int, position: int = 0) -> Any:
        """Return the state before the first token, which will stand at `position`."""
        ...

    def prefill(
        self, x: Tensor, state: Any = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Return the outputs [b t …] of further tokens, and the state after them; `keep` [b t]."""
        ...

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return the output [b …] of one further token, and the state after it."""
        ...
