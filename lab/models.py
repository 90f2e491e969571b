"""From stack notation to a language model."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lab import hooks
from lab.layers.attention import Attention
from lab.layers.cdmoe import CDMoE
from lab.layers.inner_function import InnerFunctionAttention
from lab.layers.mlp import MLP
from lab.layers.ssd import SSD
from lab.stack import layer_options, make_layer, parse_stack

MIXERS: dict[str, type[nn.Module] | None] = {
    "A": Attention,
    "S": SSD,
    "I": InnerFunctionAttention,
    "N": None,
}
TRANSFORMS: dict[str, type[nn.Module] | None] = {"M": MLP, "E": CDMoE, "N": None}
USER_MIXER = "U"
"""The letter of a mixer class that is not the lab's own."""


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
        x = self.hook_resid_mid(x)
        if self.mlp is not None and self.norm_mlp is not None:
            x = x + self.mlp(self.norm_mlp(x))
        return self.hook_resid_post(x)


class LanguageModel(nn.Module):
    """Tokens [b t] → logits [b t v]: embedding, blocks, a last RMSNorm, a linear head.

    `hidden` stops before the head: training scores few positions, and the head is most of the
    cost of a small model. Build one with `build`.

    Args:
        blocks: the stack.
        embedding_std: the embedding table is drawn from N(0, std²). Recall appears early or late
            by this scale (LOG.md).
        tied: use the embedding table as the head.
        train_embedding: whether the table gets gradient.
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
    ):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, d_model)
        nn.init.normal_(self.embed.weight, std=embedding_std)
        self.embed.weight.requires_grad_(train_embedding)
        self.hook_embed = hooks.HookPoint()
        self.blocks = nn.ModuleList(blocks)
        self.norm_final = nn.RMSNorm(d_model)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        else:
            nn.init.normal_(self.head.weight, std=0.02)
        hooks.hook_points(self)

    def hidden(self, tokens: Int[Tensor, "b t"]) -> Float[Tensor, "b t d"]:
        """Return the normalised residual stream that the head reads."""
        x = self.hook_embed(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.norm_final(x)

    def forward(self, tokens: Int[Tensor, "b t"]) -> Float[Tensor, "b t v"]:
        """Return the logits of every position."""
        return self.head(self.hidden(tokens))

    def run_with_cache(
        self,
        tokens: Int[Tensor, "b t"],
        names_filter: hooks.NamesFilter = None,
        stop_at_layer: int | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `lab.hooks.run_with_cache`."""
        return hooks.run_with_cache(self, tokens, names_filter, stop_at_layer)

    def hooks(
        self, fwd_hooks: list[tuple[hooks.NamesFilter, hooks.HookFn]]
    ) -> AbstractContextManager[nn.Module]:
        """See `lab.hooks.hooks`."""
        return hooks.hooks(self, fwd_hooks)

    def parameter_count(self) -> int:
        """Return how many numbers the model holds, frozen ones included, tied ones once."""
        return sum(p.numel() for p in self.parameters())


def build(
    stack: str,
    *,
    vocab_size: int,
    d_model: int,
    n_heads: int = 1,
    options: Mapping[str, Any] | None = None,
    model: str | None = None,
    tied: bool = True,
    train_embedding: bool = True,
    embedding_std: float = 1.0,
    seed: int = 0,
) -> LanguageModel:
    """Build a language model from stack notation.

    >>> build("SE*7 IE", vocab_size=8192, d_model=64, n_heads=1)  # doctest: +SKIP

    Args:
        stack: pairs of letters; mixers A causal attention, S state space duality, I inner function
            attention, U your own, N none; state transforms M MLP, E CDMoE, N none; `*k` repeats.
        vocab_size: rows of the embedding table.
        d_model: width of the residual stream; n_heads must divide it.
        n_heads: heads of every mixer that takes them.
        options: constructor arguments by letter or by block and letter (see `lab.stack`).
        model: "module:Class" of the mixer behind the letter U.
        tied: use the embedding table as the head.
        train_embedding: whether the embedding table is trained.
        embedding_std: scale of the embedding table, > 0.
        seed: of the initial weights; torch's global generator is left as it was.

    Raises:
        ValueError: for an unknown letter or option, or a size out of bounds.
    """
    mixers = MIXERS if model is None else {**MIXERS, USER_MIXER: load_class(model)}
    pairs = parse_stack(stack, mixers, TRANSFORMS)
    if model is not None and all(mixer != USER_MIXER for mixer, _ in pairs):
        raise ValueError(f"stack={stack!r}: has no {USER_MIXER}, the letter of model={model}")
    given = layer_options(options or {}, pairs)
    sizes = {"d_model": d_model, "n_heads": n_heads}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        blocks = []
        for (mixer, transform), (of_mixer, of_transform) in zip(pairs, given, strict=True):
            blocks.append(
                Block(
                    d_model,
                    _layer(mixers, mixer, of_mixer, sizes),
                    _layer(TRANSFORMS, transform, of_transform, sizes),
                )
            )
        return LanguageModel(
            blocks,
            vocab_size=vocab_size,
            d_model=d_model,
            tied=tied,
            train_embedding=train_embedding,
            embedding_std=embedding_std,
        )


def _layer(
    classes: Mapping[str, type[nn.Module] | None],
    letter: str,
    options: Mapping[str, Any],
    sizes: Mapping[str, int],
) -> nn.Module | None:
    cls = classes[letter]
    if letter == USER_MIXER and cls is not None:
        return make_layer(cls, letter, sizes, options, construct=_answerable(cls, cls))
    if cls is not None:
        return make_layer(cls, letter, sizes, options)
    if options:
        raise ValueError(f"option {letter}.{next(iter(options))}: {letter} is no layer")
    return None


@contextmanager
def mixers_checked(model: LanguageModel) -> Iterator[None]:
    """Hold every mixer to its contract, [b t d] → [b t d], for the length of a `with` block.

    Raises:
        ValueError: when a mixer returns anything else; a broadcast would hide it. Or when one that
            is not the lab's own raises.
    """

    def check(module: nn.Module, args: tuple[Tensor, ...], output: object) -> None:
        given = tuple(args[0].shape)
        if not isinstance(output, Tensor) or output.shape != given:
            got = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                f"{type(module).__name__}.forward: must map [b t d] to [b t d]; "
                f"given {list(given)} it returned {got}"
            )

    with ExitStack() as stack:
        for block in model.blocks:
            assert isinstance(block, Block)
            if block.mixer is not None:
                stack.callback(block.mixer.register_forward_hook(check).remove)
                if type(block.mixer) not in MIXERS.values():
                    forward = block.mixer.forward
                    stack.callback(setattr, block.mixer, "forward", forward)
                    block.mixer.forward = _answerable(forward, type(block.mixer))
        yield


def _answerable(call: Callable[..., Any], cls: type) -> Callable[..., Any]:
    """Wrap a call into code that is not the lab's: whatever it raises becomes a ValueError."""

    def answer(*args: Any, **options: Any) -> Any:
        try:
            return call(*args, **options)
        except Exception as error:
            where = f"{cls.__module__}:{cls.__name__}"
            raise ValueError(f"model={where}: raised {type(error).__name__}: {error}") from error

    return answer


def load_class(path: str) -> type[nn.Module]:
    """Import the class named "module:Class".

    Raises:
        ValueError: when the path has another form, does not import, or names no nn.Module class.
    """
    module, colon, name = path.partition(":")
    if not (module and colon and name) or module.startswith("."):
        raise ValueError(f"model={path}: must look like package.module:Class")
    try:
        cls = getattr(importlib.import_module(module), name)
    # A user's module may raise anything while it is imported.
    except Exception as error:
        raise ValueError(f"model={path}: {type(error).__name__}: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ValueError(f"model={path}: {name} must be a subclass of torch.nn.Module")
    return cls
