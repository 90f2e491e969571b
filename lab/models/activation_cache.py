"""The tensors of one forward pass: found by short names, and taken apart as in TransformerLens."""

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lab.layers.mixer import MatrixMixer
from lab.layers.norm import PartsNorm
from lab.models.additions import read_added
from lab.models.head_results import split_heads
from lab.models.point_names import Key, find_name, find_pattern_blocks
from tasks.batch import IGNORE
from tasks.bounds import check_choice

if TYPE_CHECKING:
    from lab.models.language_model import LanguageModel

Positions = int | tuple[int | None, ...] | slice | list[int] | Tensor | None
"""Which positions to keep; None keeps all, one number drops the axis t, a tuple gives the arguments
of a slice, as in TransformerLens: (2, 5) is 2:5."""


class ActivationCache(dict[str, Tensor]):
    """Tensors by the name of their hook point; `cache["pattern", 1]` finds one by a short name.

    A short name is the point's name without "hook_", its layer (negative ones count from the end)
    and, where two parts of a block have such a point, the part: `cache["scale", 0, "ln1"]`. In a
    string they follow each other: `cache["pattern1"]`. Full names may be TransformerLens's:
    `cache["blocks.1.attn.hook_pattern"]`.

    The methods take the residual stream apart. It is a sum of the embedding and of what each half
    of each block adds, so after division by the last norm's scale the logits are such a sum too.

    Args:
        tensors: by the names of their points.
        model: the model that they are of.
    """

    def __init__(self, tensors: Mapping[str, Tensor], model: "LanguageModel"):
        super().__init__(tensors)
        self.model = model

    def __repr__(self) -> str:
        return f"ActivationCache of {len(self)} tensors: {', '.join(self)}"

    def __getitem__(self, key: Key) -> Tensor:
        """Return a tensor by its full or short name.

        Raises:
            KeyError: when there is none, or when several have this short name.
        """
        try:
            return super().__getitem__(find_name(self.keys(), key, len(self.model.blocks)))
        except KeyError as error:
            raise KeyError(f"{error.args[0]}{self._describe_matrix(key)}") from None

    @property
    def cache_dict(self) -> dict[str, Tensor]:
        """The tensors as a plain dictionary, by the full names of their points."""
        return dict(self)

    def to(self, device: torch.device | str) -> "ActivationCache":
        """Return the cache with its tensors on a device; the model stays where it is."""
        return ActivationCache({name: x.to(device) for name, x in self.items()}, self.model)

    def _describe_matrix(self, key: Key) -> str:
        """Return how to get the matrix of a mixer that has one, but no pattern as attention has."""
        blocks = self.model.blocks
        for layer in find_pattern_blocks(key, len(blocks)):
            mixer = blocks[layer].mixer if 0 <= layer < len(blocks) else None
            if isinstance(mixer, MatrixMixer) and not hasattr(mixer, "hook_pattern"):
                has = f"block {layer} has a matrix of another kind"
                return f"; {has}: model.matrices(tokens)[{layer}]"
        return ""

    def accumulated_resid(
        self,
        layer: int | None = None,
        *,
        incl_mid: bool = False,
        apply_ln: bool = False,
        mlp_input: bool = False,
        pos_slice: Positions = None,
        return_labels: bool = False,
    ) -> Any:
        """Return the residual stream before each block up to a layer, [n b t d].

        Args:
            layer: the last block before which to look; None or −1: also look after the last block.
            incl_mid: also look between the halves of each block.
            apply_ln: apply the norm that reads the last of them, as `apply_ln_to_stack` does; the
                last norm of the model is computed anew for each.
            mlp_input: look between the halves of block `layer` too, and apply its second norm.
            pos_slice: positions to keep.
            return_labels: return (stack, labels) with labels such as "0_pre" and "final_post".
        """
        depth, n_layers = self._count_blocks(layer), len(self.model.blocks)
        named = {}
        for i in range(depth + 1):
            if i == n_layers:
                named["final_post"] = self["resid_post", n_layers - 1]
                continue
            named[f"{i}_pre"] = self["resid_pre", i]
            if (incl_mid and i < depth) or (mlp_input and i == depth):
                named[f"{i}_mid"] = self["resid_mid", i]
        stack = torch.stack([_take(x, pos_slice) for x in named.values()])
        if apply_ln:
            stack = self.apply_ln_to_stack(
                stack,
                layer,
                mlp_input=mlp_input,
                pos_slice=pos_slice,
                recompute_ln=depth == n_layers,
            )
        return (stack, list(named)) if return_labels else stack

    def decompose_resid(
        self,
        layer: int | None = None,
        *,
        mlp_input: bool = False,
        mode: Literal["all", "mlp", "attn"] = "all",
        apply_ln: bool = False,
        pos_slice: Positions = None,
        incl_embeds: bool = True,
        return_labels: bool = False,
    ) -> Any:
        """Return what the embedding and each half of each block added, [n b t d].

        The stack's sum is the residual stream before block `layer`. Opened models may add more to
        the embedding: "pos_embed", or "embed_rest" if it depends on the tokens.

        Args:
            layer: the block before which to stop; None or −1: none, the sum is what the head reads.
            mlp_input: count the first half of block `layer` too.
            mode: which halves: both, or only one kind; the sum is then not the whole.
            apply_ln: divide by the scale of the norm that reads the sum (`apply_ln_to_stack`).
            pos_slice: positions to keep.
            incl_embeds: begin with the embedding.
            return_labels: return (stack, labels) with labels such as "embed" and "0_attn_out".

        Raises:
            ValueError: for another mode.
        """
        check_choice("mode", mode, ("all", "mlp", "attn"))
        depth = self._count_blocks(layer)
        named = self._read_embeddings() if incl_embeds else {}
        blocks = self.model.list_blocks()
        for i in range(depth + mlp_input):
            kinds = ("attn", "mlp") if mode == "all" else (mode,)
            for kind in kinds if i < depth else kinds[:1]:
                half = blocks[i].mixer if kind == "attn" else blocks[i].mlp
                if half is not None and (i < depth or kind == "attn"):
                    named[f"{i}_{kind}_out"] = read_added(self, blocks[i], i, kind)
        stack = torch.stack([_take(x, pos_slice) for x in named.values()])
        if apply_ln:
            stack = self.apply_ln_to_stack(stack, layer, mlp_input=mlp_input, pos_slice=pos_slice)
        return (stack, list(named)) if return_labels else stack

    def stack_head_results(
        self,
        layer: int | None = None,
        *,
        incl_remainder: bool = False,
        apply_ln: bool = False,
        pos_slice: Positions = None,
        return_labels: bool = False,
    ) -> Any:
        """Return what each head of each mixer before a layer added, [n b t d].

        A mixer counts as one head, "L0", if what it adds is not a sum over heads: SSD with
        gate="norm", a mixer without `heads_hook`, one whose output an opened model norms before it
        adds it. What a mixer adds without its heads is "L0rest".

        Args:
            layer: the block before which to stop; None or −1: none.
            incl_remainder: end with all else, so that the sum is the residual stream.
            apply_ln: divide by the scale of the norm that reads the sum.
            pos_slice: positions to keep.
            return_labels: return (stack, labels) with labels such as "L0H1" and "remainder".
        """
        depth = self._count_blocks(layer)
        named = {}
        for i, block in enumerate(self.model.blocks[:depth]):
            if block.mixer is not None:
                named |= {label: _take(x, pos_slice) for label, x in split_heads(self, i).items()}
        if incl_remainder:
            end = "final" if depth == len(self.model.blocks) else "pre"
            whole = self["resid_post", -1] if end == "final" else self["resid_pre", depth]
            named["remainder"] = _take(whole, pos_slice) - sum(named.values())
        stack = torch.stack(list(named.values()))
        if apply_ln:
            stack = self.apply_ln_to_stack(stack, layer, pos_slice=pos_slice)
        return (stack, list(named)) if return_labels else stack

    def apply_ln_to_stack(
        self,
        stack: Float[Tensor, "n *axes d"],
        layer: int | None = None,
        *,
        mlp_input: bool = False,
        pos_slice: Positions = None,
        recompute_ln: bool = False,
    ) -> Float[Tensor, "n *axes d"]:
        """Apply a norm to parts of the residual stream with the scale that the whole had.

        So the parts' norms add up to the norm of their sum, except for the shift of a LayerNorm,
        which belongs to no part (`compute_shift_logit`).

        Args:
            stack: the parts.
            layer: the block whose norm to apply; None or −1: the model's last norm.
            mlp_input: apply the block's second norm.
            pos_slice: the positions that the stack has.
            recompute_ln: give each part its own scale instead.

        Raises:
            ValueError: for a norm without `hook_scale`, whose formula the lab does not know, or
                one that the block does not have.

        Departs: the norm's weight is applied too; TransformerLens folds it into the next layer.
        """
        depth = self._count_blocks(layer)
        name = "norm_final"
        if depth < len(self.model.blocks):
            name = f"blocks.{depth}.norm_{'mlp' if mlp_input else 'mixer'}"
        norm = operator.attrgetter(name)(self.model)
        if norm is None:
            raise ValueError(f"{name}: the block has no such norm")
        if recompute_ln or isinstance(norm, nn.Identity):
            return norm(stack)
        if not isinstance(norm, PartsNorm):
            raise ValueError(
                f"{name} is {type(norm).__name__}, must have a point for its scale, hook_scale"
            )
        return norm.norm_part(stack, _take(self[f"{name}.hook_scale"], pos_slice))

    def logit_attrs(
        self,
        stack: Float[Tensor, "n *axes d"],
        tokens: Int[Tensor, "..."] | int,
        incorrect_tokens: Int[Tensor, "..."] | int | None = None,
        *,
        pos_slice: Positions = None,
    ) -> Float[Tensor, " n *axes"]:
        """Return what each part of the residual stream adds to a token's logit.

        Parts that add up to the residual stream after the last block (`decompose_resid`,
        `stack_head_results` with the remainder) have attributions that add up to the logit, less
        `compute_shift_logit`.

        Args:
            stack: the parts, without a norm applied.
            tokens: one for all, one per row [b], or one per position [b t]; NaN comes back where a
                target is −100.
            incorrect_tokens: subtract these tokens' attributions: a logit difference.
            pos_slice: the positions that the stack has; tokens [b t] have the same.
        """
        normed = self.apply_ln_to_stack(stack, pos_slice=pos_slice)
        right = self._get_directions(tokens, normed)
        if incorrect_tokens is not None:
            right = right - self._get_directions(incorrect_tokens, normed)
        return (normed * right).sum(-1)

    @torch.no_grad()
    def compute_shift_logit(
        self,
        tokens: Int[Tensor, "..."] | int,
        incorrect_tokens: Int[Tensor, "..."] | int | None = None,
    ) -> Float[Tensor, "..."]:
        """Return what the shift of the last norm adds to a token's logit; 0 for an RMSNorm.

        Arguments as of `logit_attrs`: with what that returns, it adds up to the logit.
        """
        shift = self.model.norm_final(torch.zeros_like(self.model.W_U[:, 0]))
        right = self._get_directions(tokens, shift)
        if incorrect_tokens is not None:
            right = right - self._get_directions(incorrect_tokens, shift)
        return right @ shift

    def logit_lens(
        self,
        *,
        incl_mid: bool = False,
        pos_slice: Positions = None,
        return_labels: bool = False,
    ) -> Any:
        """Return the logits that the head would read off the residual stream at each depth.

        [n b t v]: the last norm, with the scale that the stream has there, then the head. The last
        entry is the model's own logits.

        Args:
            incl_mid: also look between the halves of each block.
            pos_slice: positions to keep.
            return_labels: return (logits, labels).
        """
        stack, labels = self.accumulated_resid(
            incl_mid=incl_mid, apply_ln=True, pos_slice=pos_slice, return_labels=True
        )
        logits = self.model.head(stack)
        return (logits, labels) if return_labels else logits

    def _read_embeddings(self) -> dict[str, Tensor]:
        embedding = self["hook_embed"]
        rest = self.model.embed_rest
        return {"embed": embedding} | (
            {} if rest is None else {rest: self["resid_pre", 0] - embedding}
        )

    def _count_blocks(self, layer: int | None) -> int:
        """Return how many blocks come before a layer.

        Raises:
            ValueError: for a layer that the model does not have.
        """
        n_layers = len(self.model.blocks)
        if layer is None or layer == -1:
            return n_layers
        if not 0 <= layer <= n_layers:
            raise ValueError(f"{layer=} must be in 0 … {n_layers}, the blocks, or −1")
        return layer

    def _get_directions(
        self, tokens: Int[Tensor, "..."] | int, stack: Float[Tensor, "n *axes d"]
    ) -> Float[Tensor, "... d"]:
        """Return the head's rows of tokens, shaped to multiply a stack."""
        table = self.model.W_U.mT
        tokens = torch.as_tensor(tokens, device=table.device)
        scored = tokens != IGNORE
        if tokens[scored].numel() and not 0 <= tokens[scored].min() <= tokens.max() < len(table):
            raise ValueError(f"tokens must be in 0 … {len(table) - 1}, the vocabulary, or {IGNORE}")
        rows = table[tokens.clamp(min=0)].masked_fill(~scored[..., None], torch.nan)
        return rows[:, None] if tokens.ndim == 1 and stack.ndim == 4 else rows


def _take(x: Float[Tensor, "b t w"], positions: Positions) -> Float[Tensor, "b *kept w"]:
    if isinstance(positions, tuple):
        positions = slice(*positions)
    return x if positions is None else x[:, positions]
