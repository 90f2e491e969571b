"""A foreign language model in the form of the lab's own: blocks, mixers, hook points, decoding."""

from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lab.foreign.mixer import ForeignMixer, Route, is_close, map_output, pass_copied
from lab.foreign.norm import ForeignMLP, find_type, watch_mlp, watch_norm
from lab.foreign.parts import Parts
from lab.hooks import HookPoint, hook_points
from lab.laws.adapters import Carried, DecodingAdapter, advance_cache, call_model, list_caches
from lab.layers.mixer import MatrixMixer, Mixer
from lab.layers.state import check_decoding
from lab.models.block import Block
from lab.models.language_model import LanguageModel, ModelState
from lab.models.sizes import ModelSizes, find_common
from lab.ops.precision import promote


class ForeignMixers(Mixer):
    """The mixers of a layer that has several, by their names in it; together they offer no matrix.

    Each is called by its layer. `mixers.self_attn.mixer` is a mixer with the points and the matrix
    of its kind, and `mixers.self_attn.hook_out` is what it returns.
    """

    def __init__(self, routes: dict[str, Route]):
        super().__init__()
        for name, route in routes.items():
            self.add_module(name, route)


class ForeignMLPs(nn.ModuleDict):
    """The MLPs of a layer that has several, by their names in it; the layer calls each."""


class OpenedBlock(Block):
    """One layer of an opened model. The layer itself computes; the block watches it.

    Its hook points are those of `Block`. `hook_resid_mid` exists where the layer has such a place:
    between a mixer and an MLP that follow each other. In a layer that is a mixer alone, it is the
    same as `hook_resid_post`. `hook_attn_out` and `hook_mlp_out` are what mixer and MLP return,
    before any norm or factor of the layer. `norm_mixer`, `norm_mlp` and `mlp` have the points of
    `ForeignNorm` and `ForeignMLP` where the layer's parts are such. Where a layer has several
    mixers or MLPs, `mixer` or `mlp` holds them (`ForeignMixers`, `ForeignMLPs`), and there is no
    point for what they add together.

    Args:
        parts: of the layer.
        routes: to the layer's mixers.
    """

    def __init__(self, parts: Parts, routes: list[Route]):
        nn.Module.__init__(self)
        first, *more = routes
        names = [seen.name for seen in parts.mixers]
        self.mixer = ForeignMixers(dict(zip(names, routes, strict=True))) if more else first.mixer
        self.hook_attn_out = None if more else first.hook_out
        watched = {seen.name: watch_mlp(seen.part, seen.given) for seen in parts.mlps}
        self.mlp = ForeignMLPs(watched) if len(watched) > 1 else next(iter(watched.values()), None)
        self.hook_mlp_out = HookPoint() if len(watched) == 1 else None
        self.norm_mixer = nn.Identity()
        if parts.norm_mixer is not None:
            self.norm_mixer = watch_norm(parts.norm_mixer)
        self.norm_mlp = None
        if parts.norm_mlp is not None:
            shared = parts.norm_mlp is parts.norm_mixer
            self.norm_mlp = self.norm_mixer if shared else watch_norm(parts.norm_mlp)
        self.hook_resid_pre = HookPoint()
        self.alone = parts.alone
        if parts.middle or parts.alone:
            self.hook_resid_mid = HookPoint()
        self.hook_resid_post = HookPoint()
        self.layer = parts.layer
        self._moved: Tensor | None = None
        self.layer.register_forward_pre_hook(self._enter, with_kwargs=True)
        self.layer.register_forward_hook(self._leave)
        if self.hook_mlp_out is not None:
            parts.mlps[0].part.register_forward_hook(self._pass_transformed)
        if parts.middle:
            reader = parts.norm_mlp or parts.mlps[0].part
            reader.register_forward_pre_hook(self._cross)

    def forward(
        self, x: Float[Tensor, "b t d"], at: Int[Tensor, "b q"] | None = None
    ) -> Float[Tensor, "b q d"]:
        """Refuse: a foreign layer needs what its model gives it.

        Raises:
            ValueError: always.
        """
        raise ValueError("a block of an opened model runs only as part of its model")

    def state_bytes(self, length: int) -> int:
        """Refuse: the model has one cache for all its layers.

        Raises:
            ValueError: always.
        """
        raise ValueError("an opened model has one cache, which is counted whole")

    def _enter(self, layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if args:
            return (self.hook_resid_pre(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self.hook_resid_pre(kwargs["hidden_states"])}

    def _cross(self, reader: nn.Module, args: Any) -> Any:
        x = self.hook_resid_mid(args[0])
        # The layer adds the MLP's output to a residual stream that it took before its norm.
        self._moved = None if x is args[0] else x - args[0]
        return (x, *args[1:])

    def _pass_transformed(self, mlp: nn.Module, args: Any, returned: Any) -> Any:
        assert self.hook_mlp_out is not None
        return map_output(partial(pass_copied, self.hook_mlp_out), returned)

    def _leave(self, layer: nn.Module, args: Any, returned: Any) -> Any:
        return map_output(self._finish, returned)

    def _finish(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        if self._moved is not None:
            x, self._moved = x + self._moved, None
        if self.alone:
            x = self.hook_resid_mid(x)
        return self.hook_resid_post(x)


class ScaledEmbedding(nn.Embedding):
    """A foreign embedding table, with a factor that the model puts on it."""

    def __init__(self, table: nn.Embedding, factor: float):
        super().__init__(table.num_embeddings, table.embedding_dim, device="meta")
        self.weight, self.factor = table.weight, factor

    def forward(self, input: Int[Tensor, "..."]) -> Float[Tensor, "... d"]:
        """Return the scaled rows of tokens."""
        return self.factor * super().forward(input)


class ScaledHead(nn.Linear):
    """A foreign head, with a factor that the model puts on its logits."""

    def __init__(self, head: nn.Linear, factor: float):
        super().__init__(head.in_features, head.out_features, bias=False, device="meta")
        self.weight, self.factor = head.weight, factor

    def forward(self, input: Float[Tensor, "*axes d"]) -> Float[Tensor, "*axes v"]:
        """Return the scaled logits."""
        return self.factor * super().forward(input)


class OpenedModel(LanguageModel):
    """A language model of transformers or flash-linear-attention, opened by `lab.open`.

    It has what a model of the lab has: hook points, `run_with_cache`, blocks whose mixers may offer
    a matrix, decoding, training. It is a copy that shares its weights with the given model, so
    training one trains both; hooks and settings of one do not touch the other.

    Args:
        foreign: the copy.
        backbone: its part from embeddings to the last hidden state.
        blocks: its layers.
        norm_final: gives the last hidden state.
    """

    def __init__(
        self,
        foreign: Any,
        backbone: nn.Module,
        blocks: list[OpenedBlock],
        norm_final: nn.Module,
    ):
        nn.Module.__init__(self)
        self.embed = foreign.get_input_embeddings()
        self.embed.register_forward_pre_hook(_check_tokens)
        self.hook_embed = HookPoint()
        self.blocks = nn.ModuleList(blocks)
        self.add_module("norm_final", watch_norm(norm_final))
        self.head = foreign.get_output_embeddings()
        ways = list(list_caches(backbone, given="inputs_embeds"))
        if not ways:
            raise ValueError(f"model={type(foreign).__name__}: takes no cache")
        options, _ = ways[0]
        self.decoder = DecodingAdapter(
            backbone, advance_cache, call_model, output="last_hidden_state", **options
        )
        self.foreign = foreign
        hook_points(self)

    @torch.no_grad()
    def find_factors(self, tokens: Int[Tensor, "b t"], logits: Float[Tensor, "b t v"]) -> None:
        """Put the fixed factors of the model on embedding and head.

        Granite and Cohere have one on the logits, Falcon-H1 one on the embeddings of tokens too.

        Args:
            tokens: what to try.
            logits: what the model returns for them.
        """
        streams: list[Tensor] = []
        with self.hooks([("blocks.0.hook_resid_pre", lambda x, hook: streams.append(x))]):
            self.foreign.base_model(input_ids=tokens, use_cache=False)
            self(tokens)
        asked, found = streams
        if not is_close(found, asked) and isinstance(self.embed, nn.Embedding):
            self.embed = ScaledEmbedding(self.embed, _measure_factor(found, asked))
            self.embed.register_forward_pre_hook(_check_tokens)
        found = self(tokens)
        if not is_close(found, logits) and isinstance(self.head, nn.Linear):
            self.head = ScaledHead(self.head, _measure_factor(found, logits))

    @torch.no_grad()
    def compare_stream(self, tokens: Int[Tensor, "b t"]) -> None:
        """Find out whether the residual stream is a sum of what its hook points see.

        Args:
            tokens: two different rows to try.
        """
        points = [name for name in hook_points(self) if name.count(".") in (0, 2)]
        _, seen = self.run_with_cache(tokens, points)
        embedding, first = seen["hook_embed"], seen["resid_pre", 0]
        if embedding.shape == first.shape and not is_close(embedding, first):
            same = is_close(first[:1] - embedding[:1], first[1:] - embedding[1:])
            self.embed_rest = "pos_embed" if same else "embed_rest"
        for i, block in enumerate(self.blocks):
            assert isinstance(block, OpenedBlock)
            if isinstance(block.mixer, ForeignMixers) or isinstance(block.mlp, ForeignMLPs):
                block.adds_outputs = False
                continue
            outputs = [seen["attn_out", i]] + ([] if block.mlp is None else [seen["mlp_out", i]])
            block.adds_outputs = _add_up(seen["resid_pre", i], outputs, seen["resid_post", i])

    def forward_embeddings(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return the last hidden state of embeddings x."""
        return self.decoder(x)

    def start(self, batch: int, position: int = 0) -> ModelState:
        """Return the state before the first token.

        Raises:
            ValueError: for a position other than 0 if the model takes no positions.
        """
        state = self.decoder.start(batch, position)
        return ModelState(state.position, (state,))

    def prefill_embeddings(
        self,
        x: Float[Tensor, "b t d"],
        state: ModelState | None = None,
        keep: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], ModelState]:
        """Return `forward_embeddings` of t further tokens, and the state after them.

        The state holds the model's own cache: `state.blocks[0].held`.
        """
        check_decoding(x, state, keep, ModelState)
        carried = None if state is None else state.blocks[0]
        assert carried is None or isinstance(carried, Carried)
        with self._decoding(state, keep):
            y, carried = self.decoder.prefill(x, carried, keep)
        return y, ModelState(carried.position, (carried,))

    def step_embeddings(
        self, x: Float[Tensor, "b d"], state: ModelState
    ) -> tuple[Float[Tensor, "b d"], ModelState]:
        """Return `forward_embeddings` of one further token a row, and the state after it."""
        y, state = self.prefill_embeddings(x[:, None], state)
        return y[:, 0], state

    @torch.no_grad()
    def state_bytes(self, length: int) -> int:
        """Return the bytes of the model's own cache for one row after `length` tokens.

        Raises:
            ValueError: for a length below 1.
        """
        if length < 1:
            raise ValueError(f"{length=} must be at least 1")
        weight = self.embed.weight
        _, state = self.prefill_embeddings(weight.new_zeros(1, length, weight.shape[1]))
        (carried,) = state.blocks
        assert isinstance(carried, Carried)
        return sum(tensor.nbytes for tensor in carried.tensors)

    def __repr__(self) -> str:
        """Return a line for the model, and one for blocks of the same kind; `foreign` has all."""
        sizes = self.cfg
        lines = [
            f"OpenedModel of {type(self.foreign).__name__}: {sizes.n_layers} blocks, "
            f"d_model {sizes.d_model}, a vocabulary of {sizes.d_vocab:,}"
        ]
        for kind, alike in groupby(enumerate(map(_describe_block, self.blocks)), itemgetter(1)):
            first, *rest = (i for i, _ in alike)
            where = f"blocks {first} to {rest[-1]}" if rest else f"block {first}"
            lines.append(f"  {where}: {kind}")
        return "\n".join(lines)

    @property
    def cfg(self) -> ModelSizes:
        """The model's sizes, by TransformerLens's names; the foreign configuration has the rest."""
        config, weight = self.foreign.config.get_text_config(), self.embed.weight
        n_heads = getattr(config, "num_attention_heads", None)
        d_head = None if n_heads is None else weight.shape[1] // n_heads
        mlps = [block.mlp for block in self.blocks]
        return ModelSizes(
            n_layers=len(self.blocks),
            d_model=weight.shape[1],
            d_vocab=weight.shape[0],
            n_heads=n_heads,
            d_head=getattr(config, "head_dim", None) or d_head,
            d_mlp=find_common(mlp.width if isinstance(mlp, ForeignMLP) else None for mlp in mlps),
            attn_only=all(mlp is None for mlp in mlps),
            normalization_type=find_type(self.norm_final, weight.new_zeros(weight.shape[1])),
            final_factor=self.head.factor if isinstance(self.head, ScaledHead) else 1.0,
            dtype=weight.dtype,
            device=weight.device,
        )


def _describe_block(block: nn.Module) -> str:
    """Return the foreign classes of a block's parts, and whether its mixer offers a matrix."""
    assert isinstance(block, OpenedBlock)
    mixers = [part for part in block.modules() if isinstance(part, ForeignMixer)]
    mlps = block.mlp.values() if isinstance(block.mlp, ForeignMLPs) else [block.mlp]
    said = []
    for mixer in mixers:
        offered = "with a matrix" if isinstance(mixer, MatrixMixer) else "without a matrix"
        said.append(f"{type(mixer.module).__name__} {offered}")
    for mlp in mlps:
        if mlp is not None:
            said.append(type(mlp.module if isinstance(mlp, ForeignMLP) else mlp).__name__)
    return ", ".join(said)


def _measure_factor(found: Tensor, asked: Tensor) -> float:
    """Return the factor that brings one tensor nearest to another."""
    found, asked = found.double(), asked.double()
    return float((found * asked).sum() / found.square().sum())


def _add_up(before: Tensor, outputs: list[Tensor], after: Tensor) -> bool:
    """Whether the residual stream after a block is what it was before, plus some outputs.

    The stream is rounded to its precision wherever something is added.
    """
    high = promote(before)
    if before.shape != outputs[0].shape:  # several streams, as in DeepSeek-V4
        return False
    asked = after.to(high) - before.to(high)
    found = torch.stack([output.to(high) for output in outputs]).sum(0)
    rounding = 4 * torch.finfo(before.dtype).eps * after.to(high).norm()
    return is_close(found, asked) or bool((found - asked).norm() <= rounding)


def _check_tokens(embed: nn.Module, args: tuple[Tensor, ...]) -> None:
    """Check that tokens are of the vocabulary.

    Raises:
        ValueError: for one that is not.
    """
    last = len(embed.get_parameter("weight")) - 1
    for token in (end for tokens in args if tokens.numel() for end in tokens.aminmax()):
        if not 0 <= token <= last:
            raise ValueError(f"tokens: one is {int(token)}, must be in 0 … {last}, the vocabulary")
