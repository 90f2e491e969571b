"""Attention of transformers' models, with its scores, pattern and values at hook points."""

from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any, Literal, NamedTuple, TypeAlias, TypeGuard, get_args

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from lab import peers
from lab.foreign.mixer import Call, ForeignMixer, is_close
from lab.hooks import HookPoint
from lab.ops.attention import repeat_heads
from lab.ops.precision import promote
from lab.ops.rope import Layout

Angles: TypeAlias = tuple[Float[Tensor, "b t w"], Float[Tensor, "b t w"]]
"""cos and sin of the angles, of w channels or of w pairs of channels."""
FACTOR = 2.0
"""Multiplies the cosines and sines of a trial: a norm after the rotation would undo it."""


class ForeignRotation(NamedTuple):
    """The channels of a head that are rotated, and how they pair up.

    Attributes:
        width: how many channels; 0 where a layer does not rotate.
        last: whether they are the last of the head; otherwise they are the first.
        layout: as in `lab.ops.rope`.
        table: how cosines and sines are laid out: one for each pair of channels, or twice in one of
            the layouts, which need not be that of the channels.
    """

    width: int
    last: bool
    layout: Layout
    table: Layout | Literal["pairs"] = "half"

    def turn(self, x: Float[Tensor, "b h t p"], angles: Angles) -> Float[Tensor, "b h t p"]:
        """Return heads rotated by angles."""
        if self.width == 0:
            return x
        kept = x.shape[-1] - self.width
        parts = [kept, self.width] if self.last else [self.width, kept]
        first, second = x.split(parts, -1)
        if self.last:
            return torch.cat([first, self._turn_all(second, angles)], -1)
        return torch.cat([self._turn_all(first, angles), second], -1)

    def _turn_all(self, x: Float[Tensor, "b h t w"], angles: Angles) -> Float[Tensor, "b h t w"]:
        cos, sin = (self._widen(table)[:, None] for table in angles)
        if self.layout == "half":
            one, other = x.chunk(2, -1)
            crossed = torch.cat([-other, one], -1)
        else:
            crossed = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        # In the order of the libraries' own operations: what is only looked at keeps its bits.
        return x * cos + crossed * sin

    def _widen(self, table: Float[Tensor, "b t w"]) -> Float[Tensor, "b t n"]:
        """Return a number for each channel."""
        if self.table == "half":
            table = table[..., : self.width // 2]
        elif self.table == "interleaved":
            table = table[..., ::2]
        if self.layout == "half":
            return torch.cat([table, table], -1)
        return table.repeat_interleave(2, -1)


Heads: TypeAlias = tuple[Float[Tensor, "b h t p"], Float[Tensor, "b g t p"]]
"""Queries and keys."""


def is_table(given: object, t: int) -> TypeGuard[Angles]:
    """Whether what a layer is given are cosines and sines, one row for each of t tokens."""
    if not (isinstance(given, tuple) and len(given) == 2):
        return False
    return all(isinstance(x, Tensor) and x.ndim == 3 and x.shape[1] == t for x in given)


def find_rotation(before: Heads, after: Heads, angles: Angles) -> ForeignRotation | None:
    """Return how heads were rotated; None where it is done in another way.

    Args:
        before: the heads without a rotation.
        after: the heads rotated by the angles.
        angles: of a length other than 1, as `FACTOR` makes them.
    """
    for rotation in _list_rotations(before[0].shape[-1], angles[0].shape[-1]):
        found = [rotation.turn(x, angles) for x in before]
        if all(is_close(x, asked) for x, asked in zip(found, after, strict=True)):
            return rotation
    return None


def _list_rotations(p: int, w: int) -> Iterator[ForeignRotation]:
    """Yield the rotations of heads of p channels that tables of width w may mean."""
    yield ForeignRotation(0, False, "half")
    for table in ("half", "interleaved", "pairs"):
        width = 2 * w if table == "pairs" else w
        if width > p or width % 2:
            continue
        for last in (False, True) if width < p else (False,):
            for layout in get_args(Layout):
                yield ForeignRotation(width, last, layout, table)


IMPLEMENTATION = "wonderful_lab"
"""The name under which transformers knows `attend`."""
ANGLES = "position_embeddings"
"""What transformers calls the cosines and sines that a layer is given."""
EXPLICIT = ("softcap", "s_aux")
"""Options of an attention function that torch's fast one does not have."""


class ForeignAttention(ForeignMixer):
    """Attention that transformers computes through its attention interface. [b t d] → [b t d].

    forward(x) = project(x, matrix(x) @ values(x)), where the matrix is the pattern after the
    softmax: what `output_attentions=True` returns. Where heads may attend to no token, as in
    GPT-OSS, its rows sum to less than 1.
    """

    matrix_form = "pattern A, rows sum to 1"
    takes_rows = True
    scores_hook = "hook_attn_scores"
    heads_hook = "hook_z"

    def __init__(self, module: nn.Module, rehearse: Callable[[Tensor], object] | None = None):
        super().__init__(module, rehearse)
        self.rotated = ANGLES in signature(module.forward).parameters
        # Rotated queries and keys have TransformerLens's names of such.
        if self.rotated:
            self.hook_rot_q, self.hook_rot_k = HookPoint(), HookPoint()
        else:
            self.hook_q, self.hook_k = HookPoint(), HookPoint()
        self.rotation: ForeignRotation | None = None
        self._angles: Angles | None = None
        self.hook_v = HookPoint()
        self.hook_attn_scores = HookPoint()
        self.hook_pattern = HookPoint()
        self.hook_z = HookPoint()
        self._wants: str | Tensor | Angles | None = None
        self._rows: slice | None = None
        foreign: Any = module
        foreign.lab_attend = self.attend

    def matrix(
        self, x: Float[Tensor, "b s d"], rows: slice | None = None
    ) -> Float[Tensor, "b h t s"]:
        """Return the attention pattern, or some of its rows; quadratic, for analysis."""
        self._rows = rows
        try:
            return self._take("matrix", x)
        finally:
            self._rows = None

    def values(self, x: Float[Tensor, "b s d"]) -> Float[Tensor, "b h s p"]:
        """Return what the matrix mixes, for each query head."""
        return self._take("values", x)

    def project(
        self, x: Float[Tensor, "b t d"], z: Float[Tensor, "b h t p"]
    ) -> Float[Tensor, "b t d"]:
        """Return the heads' mixed values as an output."""
        self._prepare(x)
        self._wants = z
        try:
            return self.run(x)
        finally:
            self._wants = None

    @torch.no_grad()
    def watch_rotation(self, x: Float[Tensor, "b t d"]) -> None:
        """Add hook points before the rotation, where the layer rotates in a known way.

        With them, the layer is called with angles of 0, and its queries and keys are rotated here.

        Args:
            x: an input to try it on.
        """
        angles = self.find_call(x).kwargs.get(ANGLES)
        if not is_table(angles, x.shape[1]):
            return
        cos, sin = angles
        trial = FACTOR * cos, FACTOR * sin
        before, after = self._take_heads(x, _build_zeros(angles)), self._take_heads(x, trial)
        self.rotation = find_rotation(before, after, trial)
        if self.rotation is not None:
            self.hook_q, self.hook_k = HookPoint(), HookPoint()

    def attend(
        self,
        query: Float[Tensor, "b h t p"],
        key: Float[Tensor, "b h_kv s p"],
        value: Float[Tensor, "b h_kv s p_v"],
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **options: Any,
    ) -> tuple[Float[Tensor, "b t h p_v"], Float[Tensor, "b h t s"] | None]:
        """Return the mixed values, and the pattern where it was computed."""
        heads = query.shape[1]
        if isinstance(self._wants, Tensor):
            return self.hook_z(rearrange(self._wants, "b h t p -> b t h p")), None
        if self._wants == "values":
            raise _FoundError(repeat_heads(self._pass_heads(self.hook_v, value), heads))
        if isinstance(self._wants, tuple):
            raise _FoundError((query, key))
        query, key = self._pass_compared(query, key)
        watched = self.hook_attn_scores.active or self.hook_pattern.active
        explicit = watched or any(options.get(name) is not None for name in EXPLICIT)
        if self._wants is None and not explicit:
            value = self._pass_heads(self.hook_v, value)
            of = peers.load("transformers.integrations.sdpa_attention")
            mixed, _ = of.sdpa_attention_forward(
                self.module, query, key, value, attention_mask, dropout, scaling, **options
            )
            return self.hook_z(mixed), None
        pattern = self._compute_pattern(query, key, attention_mask, scaling, options)
        if self._wants == "matrix":
            raise _FoundError(pattern)
        dropped = F.dropout(pattern, dropout, self.module.training)
        mixed = dropped @ repeat_heads(self._pass_heads(self.hook_v, value), heads)
        return self.hook_z(rearrange(mixed, "b h t p -> b t h p")), pattern

    def _compute_pattern(
        self,
        query: Float[Tensor, "b h t p"],
        key: Float[Tensor, "b h_kv s p"],
        mask: Tensor | None,
        scaling: float | None,
        options: dict[str, Any],
    ) -> Float[Tensor, "b h t s"]:
        t, s = query.shape[2], key.shape[2]
        first, last, _ = (self._rows or slice(None)).indices(t)
        if mask is None:
            mask = torch.ones(t, s, dtype=torch.bool, device=query.device).tril(s - t)
        mask = mask[..., first:last, :s]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = query[:, :, first:last] @ repeat_heads(key, query.shape[1]).mT * scale
        cap = options.get("softcap")
        if cap is not None:
            scores = (scores / cap).tanh() * cap
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        else:
            # transformers writes −∞ as the least number.
            closed = mask <= torch.finfo(mask.dtype).min / 2
            scores = (scores + mask).masked_fill(closed, -torch.inf)
        scores = self.hook_attn_scores(scores)
        sinks = options.get("s_aux")
        if sinks is None:
            pattern = scores.softmax(-1, dtype=promote(scores))
        else:  # a score that each head gives to no token, as in GPT-OSS
            column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
            both = torch.cat([scores, column], -1)
            pattern = both.softmax(-1, dtype=promote(scores))[..., :-1]
        return self.hook_pattern(pattern.to(query.dtype).nan_to_num(0.0))

    def _change_call(self, call: Call) -> Call:
        """Return a call with angles of 0 where queries or keys are wanted before the rotation."""
        self._angles = None
        if isinstance(self._wants, tuple):
            return Call(call.args, call.kwargs | {ANGLES: self._wants})
        if self.rotation is None or not (self.hook_q.active or self.hook_k.active):
            return call
        self.refuse_decoding("pass queries and keys before their rotation")
        angles: Angles = call.kwargs[ANGLES]
        self._angles = angles
        return Call(call.args, call.kwargs | {ANGLES: _build_zeros(angles)})

    def _pass_compared(
        self, query: Float[Tensor, "b h t p"], key: Float[Tensor, "b h_kv s p"]
    ) -> tuple[Float[Tensor, "b h t p"], Float[Tensor, "b h_kv s p"]]:
        """Return queries and keys, rotated, after their hook points."""
        if not self.rotated:
            return self._pass_heads(self.hook_q, query), self._pass_heads(self.hook_k, key)
        if self._angles is not None:
            assert self.rotation is not None
            query = self.rotation.turn(self._pass_heads(self.hook_q, query), self._angles)
            key = self.rotation.turn(self._pass_heads(self.hook_k, key), self._angles)
        return self._pass_heads(self.hook_rot_q, query), self._pass_heads(self.hook_rot_k, key)

    def _pass_heads(self, point: HookPoint, heads: Tensor) -> Tensor:
        """Return heads [b h t p] after a hook point that sees them as [b t h p]."""
        return point(heads.transpose(1, 2)).transpose(1, 2) if point.active else heads

    def _prepare(self, x: Tensor) -> None:
        """Find out how the layer is called, before it is asked for a part of what it computes."""
        self.refuse_decoding("apply a matrix")
        self.find_call(x)

    def _take_heads(self, x: Tensor, angles: Angles) -> Heads:
        """Return queries and keys as the layer rotates them by given angles."""
        return self._take(angles, x)

    def _take(self, wanted: str | Angles, x: Tensor) -> Any:
        """Run the layer until what is wanted is there."""
        self._prepare(x)
        self._wants = wanted
        try:
            self.run(x)
        except _FoundError as found:
            return found.found
        finally:
            self._wants = None
        raise ValueError(f"{type(self.module).__name__} did not call its attention function")


class _FoundError(Exception):
    """Carries what is wanted out of a layer, the rest of which need not run."""

    def __init__(self, found: Tensor | Heads):
        self.found = found


def _build_zeros(angles: Angles) -> Angles:
    """Return cosines and sines of angles of 0."""
    cos, sin = angles
    return torch.ones_like(cos), torch.zeros_like(sin)


def register_attention() -> None:
    """Tell transformers of an attention function that passes the hook points of its module."""
    utils = peers.load("transformers.modeling_utils")
    masks = peers.load("transformers.masking_utils")
    utils.AttentionInterface.register(IMPLEMENTATION, _attend)
    masks.AttentionMaskInterface.register(IMPLEMENTATION, masks.sdpa_mask)


def _attend(module: Any, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    if "lab_attend" in vars(module):
        return module.lab_attend(*args, **options)
    # Attention that is not a layer's mixer, such as one within another part.
    of = peers.load("transformers.integrations.sdpa_attention")
    return of.sdpa_attention_forward(module, *args, **options)
