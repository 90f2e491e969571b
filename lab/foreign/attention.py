"""Attention of transformers' models, with its scores, pattern and values at hook points."""

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from lab import peers
from lab.foreign.mixer import ForeignMixer
from lab.hooks import HookPoint
from lab.ops.attention_kernels import repeat_heads
from lab.ops.precision import promote

IMPLEMENTATION = "wonderful_lab"
"""The name under which transformers knows `attend`."""
EXPLICIT = ("softcap", "s_aux")
"""Options of an attention function that torch's fast one does not have."""


class ForeignAttention(ForeignMixer):
    """Attention that transformers computes through its attention interface. [b t d] → [b t d].

    forward(x) = project(x, matrix(x) @ values(x)), where the matrix is the pattern after the
    softmax: what `output_attentions=True` returns.
    """

    matrix_form = "pattern A, rows sum to 1"
    scores_hook = "hook_attn_scores"
    heads_hook = "hook_z"

    def __init__(self, module: nn.Module, rehearse: Callable[[Tensor], object] | None = None):
        super().__init__(module, rehearse)
        self.rotated = "position_embeddings" in signature(module.forward).parameters
        # Rotated queries and keys have TransformerLens's names of such.
        if self.rotated:
            self.hook_rot_q, self.hook_rot_k = HookPoint(), HookPoint()
        else:
            self.hook_q, self.hook_k = HookPoint(), HookPoint()
        self.hook_v = HookPoint()
        self.hook_attn_scores = HookPoint()
        self.hook_pattern = HookPoint()
        self.hook_z = HookPoint()
        self._wants: str | Tensor | None = None
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
        q_point, k_point = (
            (self.hook_rot_q, self.hook_rot_k) if self.rotated else (self.hook_q, self.hook_k)
        )
        query, key = self._pass_heads(q_point, query), self._pass_heads(k_point, key)
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
        pattern = scores.softmax(-1, dtype=promote(scores)).to(query.dtype)
        return self.hook_pattern(pattern.nan_to_num(0.0))

    def _pass_heads(self, point: HookPoint, heads: Tensor) -> Tensor:
        """Return heads [b h t p] after a hook point that sees them as [b t h p]."""
        return point(heads.transpose(1, 2)).transpose(1, 2) if point.active else heads

    def _prepare(self, x: Tensor) -> None:
        """Find out how the layer is called, before it is asked for a part of what it computes."""
        self.refuse_decoding("apply a matrix")
        self.find_call(x)

    def _take(self, wanted: str, x: Tensor) -> Tensor:
        """Run the layer until what is wanted is there."""
        self._prepare(x)
        self._wants = wanted
        try:
            self.run(x)
        except _FoundError as found:
            return found.tensor
        finally:
            self._wants = None
        raise ValueError(f"{type(self.module).__name__} did not call its attention function")


class _FoundError(Exception):
    """Carries a tensor out of a layer, the rest of which need not run."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


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
