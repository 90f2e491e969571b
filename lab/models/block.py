"""One block of a stack: a sequence mixer and a state transform around the residual stream."""

from copy import deepcopy
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lab.abilities import StateCounter
from lab.files import describe_error
from lab.hooks import HookPoint
from lab.layers.mixer import Mixer, adapt, take_positions
from lab.layers.norm import HookedRMSNorm
from lab.layers.state import Decoder, State


class Block(nn.Module):
    """One pre-norm pair: x ← x + mixer(norm(x)), then x ← x + mlp(norm(x)). [b t d] → [b t d].

    Hook points, all [b t d]: `hook_resid_pre`, `hook_resid_mid` and `hook_resid_post`, x before,
    between and after the halves; `hook_attn_out` and `hook_mlp_out`, what each half adds. The names
    are TransformerLens's, also where the mixer is not attention and the transform no MLP: code that
    reads them works on every stack. A half that is missing has no point.

    Args:
        mixer: a sequence mixer of any class, which is adapted (`lab.layers.mixer.adapt`), or None.
        mlp: a state transform of whatever kind, or None.

    Source: § Architecture Design; no biases, RMSNorm.
    """

    adds_outputs = True
    """Whether it adds what its halves return, unchanged, as blocks of opened models may not."""

    mixer: Mixer | None

    def __init__(self, d_model: int, mixer: nn.Module | None, mlp: nn.Module | None):
        super().__init__()
        self.mixer = None if mixer is None else adapt(mixer)
        self.mlp = mlp
        self.norm_mixer = HookedRMSNorm(d_model) if mixer is not None else None
        self.norm_mlp = HookedRMSNorm(d_model) if mlp is not None else None
        self.hook_attn_out = HookPoint() if mixer is not None else None
        self.hook_mlp_out = HookPoint() if mlp is not None else None
        self.hook_resid_pre = HookPoint()
        self.hook_resid_mid = HookPoint()
        self.hook_resid_post = HookPoint()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a mixer that takes the place of another is adapted, too."""
        adapts = name == "mixer" and isinstance(value, nn.Module)
        super().__setattr__(name, adapt(value) if adapts else value)

    def forward(
        self, x: Float[Tensor, "b t d"], at: Int[Tensor, "b q"] | None = None
    ) -> Float[Tensor, "b q d"]:
        """Return the residual stream after both halves.

        With `at` [b q] it is computed at those positions alone, [b q d]: by the mixer if it can
        (`lab.layers.mixer.Mixer.takes_positions`), and by the state transform in any case.
        """
        x = self.hook_resid_pre(x)
        if at is None:
            if self.mixer is not None and self.norm_mixer is not None:
                x = self._add_mixed(x, self.mixer(self.norm_mixer(x)))
            return self._transform(x)
        read = take_positions(x, at)
        if self.mixer is not None and self.norm_mixer is not None:
            normed = self.norm_mixer(x)
            if self.mixer.takes_positions:
                y = self.mixer(normed, at=at)
            else:
                y = take_positions(self.mixer(normed), at)
            read = self._add_mixed(read, y)
        return self._transform(read)

    def start(self, batch: int, position: int = 0) -> State | None:
        """Return the mixer's state before the first token; None without a mixer.

        Raises:
            ValueError: for a mixer that cannot go on from a state.
        """
        return None if self.mixer is None else self._decoder().start(batch, position)

    def prefill(
        self,
        x: Float[Tensor, "b t d"],
        state: State | None = None,
        keep: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], State | None]:
        """Return the residual stream of further tokens, and the mixer's state after them."""
        x = self.hook_resid_pre(x)
        if self.mixer is not None and self.norm_mixer is not None:
            y, state = self._decoder().prefill(self.norm_mixer(x), state, keep)
            x = self._add_mixed(x, y)
        return self._transform(x), state

    def step(
        self, x: Float[Tensor, "b 1 d"], state: State | None
    ) -> tuple[Float[Tensor, "b 1 d"], State | None]:
        """Return the residual stream of one further token, and the mixer's state after it."""
        x = self.hook_resid_pre(x)
        if self.mixer is not None and self.norm_mixer is not None:
            if state is None:
                raise ValueError("state is of another model: it has none for this mixer")
            y, state = self._decoder().step(self.norm_mixer(x)[:, 0], state)
            x = self._add_mixed(x, y[:, None])
        return self._transform(x), state

    def state_bytes(self, length: int) -> int:
        """Return the bytes that the mixer keeps of one row after `length` tokens; 0 without one.

        A mixer may give the number (`lab.abilities.StateCounter`). Of any other, a copy reads a row
        of zeros, and all tensors of its state count but the row's position.

        Raises:
            ValueError: for a length below 1, and where the number is not known: the mixer has
                neither `state_bytes` nor start, prefill and step, or they raise.
        """
        if length < 1:
            raise ValueError(f"{length=} must be at least 1")
        if self.mixer is None:
            return 0
        name = type(self.mixer).__name__
        if not isinstance(self.mixer, StateCounter | Decoder):
            raise ValueError(f"{name} has neither state_bytes nor start, prefill and step")
        try:
            found = self._count_state(length)
        except Exception as error:  # the user's code may raise anything
            raise ValueError(f"{name} raised {describe_error(error)}") from error
        if not isinstance(found, int) or found < 0:
            raise ValueError(f"{name}.state_bytes({length}) is {found!r}, must be an integer ≥ 0")
        return found

    @torch.no_grad()
    def _count_state(self, length: int) -> int:
        from lab.laws.adapters import list_tensors

        if isinstance(self.mixer, StateCounter):
            return self.mixer.state_bytes(length)
        assert self.norm_mixer is not None
        x = self.norm_mixer.weight.new_zeros(1, length, self.norm_mixer.weight.shape[0])
        mixer: Any = deepcopy(self.mixer)
        mixer.eval()
        if x.is_meta and not type(mixer).__module__.startswith("lab."):
            # The lab's own compute shapes alone there; others may look at values.
            mixer, x = mixer.to_empty(device="cpu"), torch.zeros(x.shape, dtype=x.dtype)
            for held in (*mixer.parameters(), *mixer.buffers()):
                held.zero_()
        _, state = mixer.prefill(x, mixer.start(1))
        position = getattr(state, "position", None)
        return sum(part.nbytes for part in list_tensors(state) if part is not position)

    def _add_mixed(
        self, x: Float[Tensor, "b t d"], y: Float[Tensor, "b t d"]
    ) -> Float[Tensor, "b t d"]:
        assert self.hook_attn_out is not None
        return x + self.hook_attn_out(y)

    def _transform(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        x = self.hook_resid_mid(x)
        if self.mlp is not None and self.norm_mlp is not None:
            assert self.hook_mlp_out is not None
            x = x + self.hook_mlp_out(self.mlp(self.norm_mlp(x)))
        return self.hook_resid_post(x)

    def _decoder(self) -> Decoder:
        if not isinstance(self.mixer, Decoder):
            name = type(self.mixer).__name__
            raise ValueError(f"{name} cannot decode: it has no start, prefill and step")
        return self.mixer
