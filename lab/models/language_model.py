"""A stack of blocks between an embedding table and a head: trained whole, decoded by token."""

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lab import hooks
from lab.layers.mixer import MatrixMixer
from lab.layers.norm import HookedRMSNorm
from lab.layers.state import State, check_decoding, next_position, token_positions
from lab.models.activation_cache import ActivationCache
from lab.models.block import Block
from lab.models.sizes import ModelSizes, read_sizes

Inputs = Int[Tensor, "b t"] | Float[Tensor, "b t i"]
"""Rows that a model reads: token ids, or vectors (`lab.models.vector_model.VectorModel`)."""


class ModelState(NamedTuple):
    """What a model carries from token to token: `position` [b], and each block's mixer's state."""

    position: Int[Tensor, " b"]
    blocks: tuple[State | None, ...]


class LanguageModel(nn.Module):
    """Tokens [b t] → logits [b t v]: embedding, blocks, a last RMSNorm, a linear head.

    `hidden` stops before the head: training scores few positions, and the head is most of the
    cost of a small model. `prefill` and `step` go on from a state, as a mixer's do
    (`lab.layers.state`). Build one with `lab.models.build`.

    Args:
        blocks: the stack.
        embedding_std: the embedding table is drawn from N(0, std²). Recall appears early or late
            by this scale (LOG.md).
        tied: use the embedding table as the head.
        train_embedding: whether the table gets gradient.
        logit_scale: fixed factor on what the head reads, and so on the logits.
    """

    embed_rest: str | None = None
    """Name of what is added to the embedding before block 0, in opened models; None: nothing."""
    _decoded: tuple[ModelState | None, Tensor | None] | None = None
    """State and padding mask of the decoding call in progress; None in any other call."""

    def __init__(
        self,
        blocks: list[Block],
        *,
        vocab_size: int,
        d_model: int,
        embedding_std: float = 1.0,
        tied: bool = True,
        train_embedding: bool = True,
        logit_scale: float = 1.0,
    ):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, d_model)
        nn.init.normal_(self.embed.weight, std=embedding_std)
        self.embed.weight.requires_grad_(train_embedding)
        self.hook_embed = hooks.HookPoint()
        self.blocks = nn.ModuleList(blocks)
        self.norm_final = HookedRMSNorm(d_model, logit_scale)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        else:
            nn.init.normal_(self.head.weight, std=0.02)
        hooks.hook_points(self)

    def forward(self, tokens: Inputs) -> Float[Tensor, "b t v"]:
        """Return the logits of every position.

        Raises:
            ValueError: for what is not a batch of token ids.
        """
        self.check_inputs(tokens)
        return self.head(self.hidden(tokens))

    def hidden(self, tokens: Inputs) -> Float[Tensor, "b t d"]:
        """Return the normalised residual stream that the head reads."""
        return self.forward_embeddings(self.hook_embed(self.embed(tokens)))

    def forward_embeddings(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return what `hidden` does, from embeddings x."""
        for block in self.blocks:
            x = block(x)
        return self.norm_final(x)

    def check_inputs(self, inputs: object) -> None:
        """Check that inputs are a batch of token ids.

        Raises:
            ValueError: for what is not.
        """
        if not isinstance(inputs, Tensor):
            raise ValueError(f"tokens: must be a tensor [b t], got a {type(inputs).__name__}")
        if inputs.ndim != 2 or inputs.dtype not in (torch.int64, torch.int32):
            got = f"{str(inputs.dtype).removeprefix('torch.')} {list(inputs.shape)}"
            raise ValueError(f"tokens: must be int64 or int32 [b t], got {got}")

    def start(self, batch: int, position: int = 0) -> ModelState:
        """Return the state before the first token of each row, which will stand at `position`.

        Raises:
            ValueError: for a mixer that cannot decode.
        """
        blocks = tuple(block.start(batch, position) for block in self.list_blocks())
        return ModelState(self.embed.weight.new_full((batch,), position, dtype=torch.long), blocks)

    def prefill(
        self,
        tokens: Inputs,
        state: ModelState | None = None,
        keep: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t v"], ModelState]:
        """Return the logits of t ≥ 1 further tokens, computed at once, and the state after them.

        Args:
            tokens: what follows.
            state: what came before; None is nothing.
            keep: False at padding, which is not read; its own logits mean nothing.

        Raises:
            ValueError: for a state or mask of another batch, or a mixer that cannot decode.
        """
        x = self._embed(tokens, state, keep)
        x, state = self.prefill_embeddings(x, state, keep)
        return self.head(x), state

    def step(
        self, tokens: Int[Tensor, " b"] | Float[Tensor, "b i"], state: ModelState
    ) -> tuple[Float[Tensor, "b v"], ModelState]:
        """Return the logits of one further token a row, and the state after it.

        Raises:
            ValueError: for a state of another batch, or a mixer that cannot decode.
        """
        x = self._embed(tokens[:, None], state)
        x, state = self.step_embeddings(x[:, 0], state)
        return self.head(x), state

    def prefill_embeddings(
        self,
        x: Float[Tensor, "b t d"],
        state: ModelState | None = None,
        keep: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], ModelState]:
        """Return `forward_embeddings` of t further tokens, and the state after them."""
        check_decoding(x, state, keep, ModelState)
        position = next_position(x, state, keep)
        before = self._list_states(state)
        after = []
        with self._decoding(state, keep):
            for block, carried in zip(self.list_blocks(), before, strict=True):
                x, carried = block.prefill(x, carried, keep)
                after.append(carried)
            return self.norm_final(x), ModelState(position, tuple(after))

    def step_embeddings(
        self, x: Float[Tensor, "b d"], state: ModelState
    ) -> tuple[Float[Tensor, "b d"], ModelState]:
        """Return `forward_embeddings` of one further token a row, and the state after it."""
        check_decoding(x, state, kind=ModelState)
        after, x = [], x[:, None]
        with self._decoding(state):
            for block, carried in zip(self.list_blocks(), self._list_states(state), strict=True):
                x, carried = block.step(x, carried)
                after.append(carried)
            return self.norm_final(x)[:, 0], ModelState(state.position + 1, tuple(after))

    @torch.no_grad()
    def generate(
        self,
        tokens: Int[Tensor, "b t"],
        n_tokens: int,
        *,
        keep: Bool[Tensor, "b t"] | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        seed: int = 0,
    ) -> Int[Tensor, "b t_n"]:
        """Return each row continued by n_tokens tokens, [b t + n_tokens].

        Args:
            tokens: the prompts, t ≥ 1; shorter ones are padded on the left, with any token.
            n_tokens: how many to add, ≥ 0.
            keep: False at padding; None keeps all.
            temperature: of the softmax that is drawn from; 0 takes the likeliest token.
            top_k: draw among the k likeliest only.
            seed: of the draws.

        Raises:
            ValueError: for an argument out of bounds, padding that is not on the left alone, or
                a mixer that cannot decode.
        """
        if n_tokens < 0:
            raise ValueError(f"{n_tokens=} must be at least 0")
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"{temperature=} must be at least 0, and finite")
        if top_k is not None and not 1 <= top_k <= self.head.out_features:
            raise ValueError(f"{top_k=} must be in 1 … {self.head.out_features}, the vocabulary")
        if tokens.shape[1] < 1:
            raise ValueError(f"tokens is {list(tokens.shape)}, must have at least one token a row")
        check_decoding(tokens, None, keep)
        if keep is not None and not (keep[:, -1].all() and (keep.int().diff(dim=1) >= 0).all()):
            raise ValueError("keep must be False on the left alone: what follows joins the right")
        generator = torch.Generator(tokens.device).manual_seed(seed)
        grown = [tokens]
        x, state = self.prefill_embeddings(self._embed(tokens, None, keep), None, keep)
        logits = self.head(x[:, -1])
        for added in range(n_tokens):
            token = _draw(logits, temperature, top_k, generator)
            grown.append(token[:, None])
            if added + 1 < n_tokens:
                logits, state = self.step(token, state)
        return torch.cat(grown, dim=1)

    def run_with_cache(
        self,
        tokens: Inputs,
        names_filter: hooks.NamesFilter = None,
        stop_at_layer: int | None = None,
    ) -> tuple[Tensor, ActivationCache]:
        """Return the logits and the tensors at the hook points: see `lab.hooks.run_with_cache`."""
        logits, cache = hooks.run_with_cache(self, tokens, names_filter, stop_at_layer)
        return logits, ActivationCache(cache, self)

    def matrices(
        self, tokens: Inputs, layers: Collection[int] | None = None
    ) -> dict[int, Float[Tensor, "b h t s"]]:
        """Return the matrices that the mixers apply to some tokens, by block.

        Blocks whose mixer offers no matrix (`lab.abilities.MatrixMixer`) are left out.

        Args:
            tokens: the tokens.
            layers: the blocks to look at; None: all. A matrix of t × t for each head, or for each
                channel of a Mamba, may take much memory.

        Raises:
            ValueError: for a layer that the model does not have.
        """
        blocks = dict(enumerate(self.list_blocks()))
        for layer in layers or ():
            if layer not in blocks:
                raise ValueError(f"layers: {layer} is none of the model's 0 … {len(blocks) - 1}")
        offered = {
            layer: block
            for layer, block in blocks.items()
            if isinstance(block.mixer, MatrixMixer) and (layers is None or layer in layers)
        }
        names = [f"blocks.{layer}.hook_resid_pre" for layer in offered]
        _, cache = hooks.run_with_cache(self, tokens, names)
        found = {}
        for (layer, block), name in zip(offered.items(), names, strict=True):
            assert isinstance(block.mixer, MatrixMixer)
            assert block.norm_mixer is not None
            found[layer] = block.mixer.matrix(block.norm_mixer(cache[name]))
        return found

    def run_with_hooks(
        self, tokens: Inputs, fwd_hooks: list[tuple[hooks.NamesFilter, hooks.HookFn]]
    ) -> Float[Tensor, "b t v"]:
        """See `lab.hooks.run_with_hooks`."""
        return hooks.run_with_hooks(self, tokens, fwd_hooks)

    def add_hook(self, name: hooks.NamesFilter, fn: hooks.HookFn) -> None:
        """Attach a hook that stays until `reset_hooks`, to a point, several, or by a predicate.

        Raises:
            ValueError: for a name that matches no point.
        """
        for point in hooks.find_points(self, name).values():
            point.add_hook(fn)

    def reset_hooks(self) -> None:
        """Remove every hook, including those of `with` blocks that are still open."""
        for point in hooks.hook_points(self).values():
            point.remove_hooks()

    def hooks(
        self, fwd_hooks: list[tuple[hooks.NamesFilter, hooks.HookFn]]
    ) -> AbstractContextManager[nn.Module]:
        """See `lab.hooks.hooks`."""
        return hooks.hooks(self, fwd_hooks)

    def find_positions(self, t: int) -> Int[Tensor, "b t"] | Int[Tensor, " t"] | None:
        """Return where the t tokens of the decoding call in progress stand; None in another call.

        For hooks: the tensors that pass them have these tokens alone. Padding is at −1.
        """
        if self._decoded is None:
            return None
        _, keep = self._decoded
        found = token_positions(t, self.embed.weight.device, *self._decoded)
        return found if keep is None else found.masked_fill(~keep, -1)

    def list_blocks(self) -> list[Block]:
        """Return the blocks, first to last."""
        found = []
        for block in self.blocks:
            assert isinstance(block, Block)
            found.append(block)
        return found

    def state_bytes(self, length: int) -> int:
        """Return the bytes that decoding keeps of one row after `length` tokens, in all blocks.

        Raises:
            ValueError: where it is not known (`lab.models.block.Block.state_bytes`).
        """
        return sum(block.state_bytes(length) for block in self.list_blocks())

    @property
    def W_U(self) -> Float[Tensor, "d v"]:  # noqa: N802
        """The head as a matrix: its weight, or what an adapter around it makes of unit vectors.

        `hidden(tokens) @ W_U` is the logits.
        """
        if type(self.head) is nn.Linear:
            return self.head.weight.mT
        like = next(self.head.parameters())
        units = torch.eye(self.cfg.d_model, dtype=like.dtype, device=like.device)
        return self.head(units) - self.head(torch.zeros_like(units[0]))

    @property
    def cfg(self) -> ModelSizes:
        """The model's sizes, by TransformerLens's names."""
        return read_sizes(self)

    def parameter_count(self) -> int:
        """Return the number of parameters, including frozen ones; tied ones count once."""
        return sum(p.numel() for p in self.parameters())

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of each entry of the state dict on the CPU; tied ones share no memory."""
        return {name: entry.detach().cpu().clone() for name, entry in self.state_dict().items()}

    @contextmanager
    def _decoding(self, state: ModelState | None, keep: Tensor | None = None) -> Iterator[None]:
        before, self._decoded = self._decoded, (state, keep)
        try:
            yield
        finally:
            self._decoded = before

    def _embed(
        self, tokens: Inputs, state: ModelState | None, keep: Tensor | None = None
    ) -> Float[Tensor, "b t d"]:
        with self._decoding(state, keep):
            return self.hook_embed(self.embed(tokens))

    def _list_states(self, state: ModelState | None) -> tuple[State | None, ...]:
        if state is None:
            return (None,) * len(self.blocks)
        if len(state.blocks) != len(self.blocks):
            raise ValueError(f"state has {len(state.blocks)} blocks, must be {len(self.blocks)}")
        return state.blocks


def _draw(
    logits: Float[Tensor, "b v"],
    temperature: float,
    top_k: int | None,
    generator: torch.Generator,
) -> Int[Tensor, " b"]:
    """Return a token a row."""
    if temperature == 0:
        return logits.argmax(-1)
    # topk, not a bound on the logits: of equal ones as many as asked for.
    best, tokens = logits.topk(top_k or logits.shape[-1])
    chances = ((best - best[:, :1]) / temperature).softmax(-1)
    return tokens.gather(1, torch.multinomial(chances, 1, generator=generator))[:, 0]
