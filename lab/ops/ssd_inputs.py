"""The arguments of `lab.ops.ssd.ssd`, which its backends take as one."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor


class SSDInputs(NamedTuple):
    """What state space duality is computed from; `lab.ops.ssd.ssd` describes each."""

    x: Float[Tensor, "b t h p"]
    dt: Float[Tensor, "b t h"]
    A: Float[Tensor, " h"]
    B: Float[Tensor, "b t g n"]
    C: Float[Tensor, "b t g n"]
    D: Float[Tensor, " h"] | None
    chunk_len: int
    initial_state: Float[Tensor, "b h p n"] | None

    def check(self) -> None:
        """Check all shapes against x's and B's, before a kernel reads past the end of a tensor.

        Raises:
            ValueError: for shapes that do not fit, or chunk_len < 1.
        """
        b, t, h, p = self.x.shape
        g, n = self.B.shape[-2:]
        if t < 1:
            raise ValueError("x has t=0 tokens, must have at least 1")
        if self.chunk_len < 1:
            raise ValueError(f"chunk_len={self.chunk_len} must be at least 1")
        if g < 1 or h % g:
            raise ValueError(f"B has g={g} groups, must divide x's h={h} heads")
        expected = {
            "dt [b t h]": (self.dt, (b, t, h)),
            "A [h]": (self.A, (h,)),
            "B [b t g n]": (self.B, (b, t, g, n)),
            "C [b t g n]": (self.C, (b, t, g, n)),
            "D [h]": (self.D, (h,)),
            "initial_state [b h p n]": (self.initial_state, (b, h, p, n)),
        }
        for name, (tensor, shape) in expected.items():
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{name} is {list(tensor.shape)}, must be {list(shape)}")
