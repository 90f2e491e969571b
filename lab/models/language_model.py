"""A stack of blocks between an embedding table and a head: trained whole, decoded by token."""

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lab import hooks
from lab.layers.state import Decoder, State, check_decoding, next_position


class Block(nn.Module):
    """One pre-norm pair: x ← x + mixer(norm(x)), then x ← x + mlp(norm(x)). [b t d] → [b t d].

    Args:
        mixer: a sequence mixer, or None.
        mlp: a state transform of whatever kind, or None.

    Source: § Architecture Design; no biases, RMSNorm.
    """

    def __init__(self, d_model: int, mixer: nn.Module | None, mlp: nn.Module | None):
        super().__init__()
        self.mixer, self.mlp = mixer, mlp
        self.norm_mixer = nn.RMSNorm(d_model) if mixer is not None else None
        self.norm_mlp = nn.RMSNorm(d_model) if mlp is not None else None
        self.hook_resid_pre = hooks.HookPoint()
        self.hook_resid_mid = hooks.HookPoint()
        self.hook_resid_post = hooks.HookPoint()

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return the residual stream after both halves."""
        x = self.hook_resid_pre(x)
        if self.mixer is not None and self.norm_mixer is not None:
            x = x + self.mixer(self.norm_mixer(x))
        return self._transform(x)

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
            x = x + y
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
            x = x + y[:, None]
        return self._transform(x), state

    def _transform(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        x = self.hook_resid_mid(x)
        if self.mlp is not None and self.norm_mlp is not None:
            x = x + self.mlp(self.norm_mlp(x))
        return self.hook_resid_post(x)

    def _decoder(self) -> Decoder:
        if not isinstance(self.mixer, Decoder):
            name = type(self.mixer).__name__
            raise ValueError(f"{name} cannot decode: it has no start, prefill and step")
        return self.mixer


class FinalNorm(nn.RMSNorm):
    """The last RMSNorm, times a fixed factor: x ← scale · gain · x / rms(x). [b t d] → [b t d].

    Args:
        d_model: width d.
        scale: 1/√d makes the first logits of a tied table of std 1 have a standard deviation of 1,
            where they would have √d: T5 scales its tied head so (Raffel et al. 2020).
    """

    def __init__(self, d_model: int, scale: float = 1.0):
        super().__init__(d_model)
        self.scale = scale

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return the scaled norm."""
        return F.rms_norm(x, self.normalized_shape, self.weight * self.scale, self.eps)


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
        self.norm_final = FinalNorm(d_model, logit_scale)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        else:
            nn.init.normal_(self.head.weight, std=0.02)
        hooks.hook_points(self)

    def forward(self, tokens: Int[Tensor, "b t"]) -> Float[Tensor, "b t v"]:
        """Return the logits of every position."""
        return self.head(self.hidden(tokens))

    def hidden(self, tokens: Int[Tensor, "b t"]) -> Float[Tensor, "b t d"]:
        """Return the normalised residual stream that the head reads."""
        return self.forward_embeddings(self.hook_embed(self.embed(tokens)))

    def forward_embeddings(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return what `hidden` does, from embeddings x."""
        for block in self.blocks:
            x = block(x)
        return self.norm_final(x)

    def start(self, batch: int, position: int = 0) -> ModelState:
        """Return the state before the first token of each row, which will stand at `position`.

        Raises:
            ValueError: for a mixer that cannot decode.
        """
        blocks = tuple(block.start(batch, position) for block in self._stack())
        return ModelState(self.embed.weight.new_full((batch,), position, dtype=torch.long), blocks)

    def prefill(
        self,
        tokens: Int[Tensor, "b t"],
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
        x = self.hook_embed(self.embed(tokens))
        x, state = self.prefill_embeddings(x, state, keep)
        return self.head(x), state

    def step(
        self, tokens: Int[Tensor, " b"], state: ModelState
    ) -> tuple[Float[Tensor, "b v"], ModelState]:
        """Return the logits of one further token a row, and the state after it.

        Raises:
            ValueError: for a state of another batch, or a mixer that cannot decode.
        """
        x = self.hook_embed(self.embed(tokens[:, None]))
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
        for block, carried in zip(self._stack(), before, strict=True):
            x, carried = block.prefill(x, carried, keep)
            after.append(carried)
        return self.norm_final(x), ModelState(position, tuple(after))

    def step_embeddings(
        self, x: Float[Tensor, "b d"], state: ModelState
    ) -> tuple[Float[Tensor, "b d"], ModelState]:
        """Return `forward_embeddings` of one further token a row, and the state after it."""
        check_decoding(x, state, kind=ModelState)
        after, x = [], x[:, None]
        for block, carried in zip(self._stack(), self._list_states(state), strict=True):
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
        x, state = self.prefill_embeddings(self.hook_embed(self.embed(tokens)), None, keep)
        logits = self.head(x[:, -1])
        for added in range(n_tokens):
            token = _draw(logits, temperature, top_k, generator)
            grown.append(token[:, None])
            if added + 1 < n_tokens:
                logits, state = self.step(token, state)
        return torch.cat(grown, dim=1)

    def run_with_cache(
        self,
        tokens: Int[Tensor, "b t"],
        names_filter: hooks.NamesFilter = None,
        stop_at_layer: int | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `lab.hooks.run_with_cache`."""
        return hooks.run_with_cache(self, tokens, names_filter, stop_at_layer)

    def run_with_hooks(
        self, tokens: Int[Tensor, "b t"], fwd_hooks: list[tuple[hooks.NamesFilter, hooks.HookFn]]
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

    def parameter_count(self) -> int:
        """Return the number of parameters, including frozen ones; tied ones count once."""
        return sum(p.numel() for p in self.parameters())

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of each entry of the state dict on the CPU; tied ones share no memory."""
        return {name: entry.detach().cpu().clone() for name, entry in self.state_dict().items()}

    def _list_states(self, state: ModelState | None) -> tuple[State | None, ...]:
        if state is None:
            return (None,) * len(self.blocks)
        if len(state.blocks) != len(self.blocks):
            raise ValueError(f"state has {len(state.blocks)} blocks, must be {len(self.blocks)}")
        return state.blocks

    def _stack(self) -> list[Block]:
        blocks = list(self.blocks)
        assert all(isinstance(block, Block) for block in blocks)
        return blocks  # type: ignore[return-value]


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
