"""Build a language model from stack notation; the architectures that have a name."""

from collections.abc import Callable, Mapping
from typing import Any, Required, TypedDict, Unpack

import torch
from torch import nn

from lab.config import ModelConfig
from lab.layers.cdmoe import CDMoE
from lab.layers.mlp import MLP
from lab.layers.peer import PEER
from lab.layers.routed import RoutedMoE, SharedExpertMoE
from lab.models.block import Block
from lab.models.language_model import LanguageModel
from lab.models.mixers import MIXERS, read_parameters
from lab.models.stack import (
    MAX_BLOCKS,
    choose_arguments,
    make_layer,
    parse_stack,
    split_options,
)
from lab.models.user_mixer import USER_MIXER, convert_errors, load_class
from lab.models.vector_model import VectorModel
from tasks.bounds import check_kind
from tasks.near_names import ask, find_near

CLASSES: dict[str, type[nn.Module] | None] = {
    **{kind.letter or name: kind.cls for name, kind in MIXERS.items()},
    "N": None,
}
"""The mixers by their letter in stack notation, or their word."""
TRANSFORMS: dict[str, type[nn.Module] | None] = {
    "M": MLP,
    "E": CDMoE,
    "R": RoutedMoE,
    "X": SharedExpertMoE,
    "P": PEER,
    "N": None,
}
"""The state transforms by their letter in stack notation."""


def build(
    stack: str,
    *,
    vocab_size: int | None = None,
    d_input: int | None = None,
    d_output: int | None = None,
    d_model: int,
    n_heads: int | None = None,
    options: Mapping[str, Any] | None = None,
    model: str | None = None,
    tied: bool = True,
    train_embedding: bool = True,
    embedding_std: float = 1.0,
    logit_scale: float = 1.0,
    seed: int = 0,
) -> LanguageModel:
    """Build a language model from stack notation, or by an architecture's name.

    >>> model = build("SM*2 AM", vocab_size=64, d_model=16)
    >>> [type(block.mixer).__name__ for block in model.blocks]
    ['SSD', 'SSD', 'Attention']
    >>> model(torch.zeros(1, 8, dtype=torch.long)).shape
    torch.Size([1, 8, 64])

    Args:
        stack: pairs of letters; mixers A causal attention, S state space duality, I inner function
            attention, U your own, N none, or a word of `lab.models.mixers.MIXERS` and a plus sign
            ("ssd+M"); state transforms M MLP, E CDMoE, R routed MoE, X MoE with
            shared expert isolation, P PEER, N none; `*k` repeats a pair. Or a name in
            `ARCHITECTURES`.
        vocab_size: rows of the embedding table, of a model that reads tokens.
        d_input: numbers of a vector, of a model that reads vectors (`VectorModel`) in place of
            tokens; its head is never tied.
        d_output: numbers that it answers with.
        d_model: width of the residual stream; n_heads must divide it.
        n_heads: heads of every mixer that takes them; None: each one's default, 1 without one.
        options: constructor arguments by letter or by block and letter (see `lab.models.stack`).
        model: "module:Class" of the mixer behind the letter U.
        tied: whether the head is the embedding table.
        train_embedding: whether the embedding table is trained.
        embedding_std: standard deviation of the initial embedding table, > 0.
        logit_scale: fixed factor on the logits, > 0.
        seed: seed of the initial weights; torch's global generator is left as it was.

    Raises:
        ValueError: for an unknown letter or option, or a value of another type or out of bounds.
    """
    check_kind("stack", stack, str)
    vectors = {"d_input": d_input, "d_output": d_output}
    reads_vectors = any(size is not None for size in vectors.values())
    if reads_vectors and vocab_size is not None:
        raise ValueError(f"{vocab_size=}: must not be given where d_input and d_output are")
    ends: dict[str, Any] = vectors if reads_vectors else {"vocab_size": vocab_size}
    for name, size in {**ends, "d_model": d_model, "n_heads": n_heads}.items():
        check_kind(name, size, int | None if name == "n_heads" else int)
        if size is not None and size < 1:
            raise ValueError(f"{name}={size}: must be ≥ 1")
    for name, value in (("embedding_std", embedding_std), ("logit_scale", logit_scale)):
        check_kind(name, value, float)
        if not 0 < value < float("inf"):
            raise ValueError(f"{name}={value}: must be > 0 and finite")
    if stack in ARCHITECTURES and model is None:
        return ARCHITECTURES[stack](
            **ends,
            d_model=d_model,
            n_heads=n_heads,
            options=options,
            tied=tied,
            train_embedding=train_embedding,
            embedding_std=embedding_std,
            logit_scale=logit_scale,
            seed=seed,
        )
    near = find_near(stack, ARCHITECTURES) if stack.isalnum() and len(stack) > 2 else []
    if stack.islower() or near:
        raise ValueError(
            f"stack={stack!r}: must be pairs such as 'AM', 'SE*7' or 'ssd+M', or a name without "
            f"model=: {', '.join(ARCHITECTURES)}. {ask(near)}".rstrip(". ")
        )
    if model is None and any(word.startswith(USER_MIXER) for word in stack.split()):
        raise ValueError(
            f"stack={stack!r}: {USER_MIXER} is your own mixer; name its class with "
            "model=MODULE:CLASS (--model on the command line)"
        )
    mixers = CLASSES if model is None else {**CLASSES, USER_MIXER: load_class(model)}
    pairs = parse_stack(stack, mixers, TRANSFORMS)
    if model is not None and all(mixer != USER_MIXER for mixer, _ in pairs):
        raise ValueError(f"stack={stack!r}: has no {USER_MIXER}, the letter of model={model}")
    given = split_options(options or {}, pairs)
    sizes = {"d_model": d_model, "n_heads": n_heads}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would take a millisecond
        blocks = []
        for (mixer, transform), (of_mixer, of_transform) in zip(pairs, given, strict=True):
            blocks.append(
                Block(
                    d_model,
                    _make_layer(mixers, mixer, of_mixer, sizes),
                    _make_layer(TRANSFORMS, transform, of_transform, sizes),
                )
            )
        common: dict[str, Any] = {
            "d_model": d_model,
            "train_embedding": train_embedding,
            "embedding_std": embedding_std,
            "logit_scale": logit_scale,
        }
        if reads_vectors:
            return VectorModel(blocks, **ends, **common)
        return LanguageModel(blocks, **ends, **common, tied=tied)


def describe_user_mixers(config: ModelConfig) -> list[str]:
    """Say how the user's mixer is constructed, once for each choice of arguments in the stack.

    Raises:
        ValueError: for a class that cannot be imported, or options that it does not have.
    """
    if config.model is None:
        return []
    cls = load_class(config.model)
    pairs = parse_stack(config.stack, {**CLASSES, USER_MIXER: cls}, TRANSFORMS)
    sizes = {"d_model": config.d_model, "n_heads": config.n_heads}
    found: dict[str, list[int]] = {}
    for i, (options, _) in enumerate(split_options(config.options, pairs)):
        if pairs[i][0] == USER_MIXER:
            own = {n: default for n, (_, default) in read_parameters(cls).items()}
            chosen = own | choose_arguments(cls, USER_MIXER, sizes, options)
            says = " ".join(f"{n}={value!r}" for n, value in chosen.items())
            found.setdefault(says or "no options", []).append(i)
    return [
        f"{config.model} in block {', '.join(map(str, blocks))}: {says}"
        for says, blocks in found.items()
    ]


def _make_layer(
    classes: Mapping[str, type[nn.Module] | None],
    letter: str,
    options: Mapping[str, Any],
    sizes: Mapping[str, int],
) -> nn.Module | None:
    cls = classes[letter]
    if letter == USER_MIXER and cls is not None:
        return make_layer(cls, letter, sizes, options, construct=convert_errors(cls, cls))
    if cls is not None:
        return make_layer(cls, letter, sizes, options)
    if options:
        raise ValueError(f"option {letter}.{next(iter(options))}: {letter} is not a layer")
    return None


class Sizes(TypedDict, total=False):
    """The arguments that every architecture passes on to `build`; described there."""

    vocab_size: int
    d_input: int
    d_output: int
    d_model: Required[int]
    n_heads: int | None
    options: Mapping[str, Any] | None
    tied: bool
    train_embedding: bool
    embedding_std: float
    logit_scale: float
    seed: int


def cheems(
    *,
    n_layers: int = 8,
    n_values: int = 2,
    n_experts: int = 1024,
    d_retrieval: int | None = None,
    d_ff: int | None = None,
    d_state: int = 128,
    **sizes: Unpack[Sizes],
) -> LanguageModel:
    """Build the paper's model: seven blocks of SSD to one of inner function attention, all CDMoE.

    Rotary positions on C/B and on Q/K; the dynamic mask that values decide.

    Source: § Architecture Design, fig:lm_architecture. Departs: the mask is the reading that
        trains (erratum D1).
    """
    own = {"S.d_state": d_state, **_cheems_options(n_values, n_experts, d_retrieval, d_ff)}
    return _build_repeated(["SE"] * 7 + ["IE"], n_layers, own, sizes)


def doge(
    *,
    n_layers: int = 4,
    n_values: int = 2,
    n_experts: int = 1024,
    d_retrieval: int | None = None,
    d_ff: int | None = None,
    **sizes: Unpack[Sizes],
) -> LanguageModel:
    """Build Cheems without SSD: one inner function attention, then four state transforms.

    Source: § Discussion, fig:doge; it says "multiple" transforms, but not how many.
    """
    own = _cheems_options(n_values, n_experts, d_retrieval, d_ff)
    return _build_repeated(["IE"] + ["NE"] * 3, n_layers, own, sizes)


def llama(
    *, n_layers: int = 2, n_experts: int = 4, d_ff: int | None = None, **sizes: Unpack[Sizes]
) -> LanguageModel:
    """Build the paper's baseline Llama: attention with rotary positions, and a mixture of experts.

    Source: § Evaluation Parameters. Departs from Llama: experts in place of one gated MLP.
    """
    return _build_repeated(["AX"], n_layers, _moe_options(n_experts, d_ff), sizes)


def mamba2(
    *,
    n_layers: int = 2,
    n_experts: int = 4,
    d_ff: int | None = None,
    d_state: int = 128,
    **sizes: Unpack[Sizes],
) -> LanguageModel:
    """Build the paper's baseline Mamba-2: SSD with convolution and gate, twice as wide inside.

    Source: § Evaluation Parameters. Departs from Mamba-2: a mixture of experts after each mixer.
    """
    own = {**_mamba2_options(sizes["d_model"], d_state), **_moe_options(n_experts, d_ff)}
    return _build_repeated(["SX"], n_layers, own, sizes)


def jamba(
    *,
    n_layers: int = 8,
    n_experts: int = 4,
    d_ff: int | None = None,
    d_state: int = 128,
    **sizes: Unpack[Sizes],
) -> LanguageModel:
    """Build the paper's baseline Jamba: seven blocks of Mamba-2's SSD to one of attention.

    Attention has no positions: as in Jamba, the convolutions and decays before it provide them.

    Source: § Evaluation Parameters. Departs from Jamba: Mamba-2's mixer in place of Mamba's.
    """
    mixers = {**_mamba2_options(sizes["d_model"], d_state), "A.position": "none"}
    own = {**mixers, **_moe_options(n_experts, d_ff)}
    return _build_repeated(["SX"] * 7 + ["AX"], n_layers, own, sizes)


ARCHITECTURES: dict[str, Callable[..., LanguageModel]] = {
    "cheems": cheems,
    "doge": doge,
    "llama": llama,
    "mamba2": mamba2,
    "jamba": jamba,
}
"""The paper's architectures by name; `build` takes the name in place of a stack."""


def _cheems_options(
    n_values: int, n_experts: int, d_retrieval: int | None, d_ff: int | None
) -> dict[str, Any]:
    return {
        "I.n_values": n_values,
        "I.mask": "value",
        "E.n_experts": n_experts,
        "E.d_retrieval": d_retrieval,
        "E.d_ff": d_ff,
    }


def _moe_options(n_experts: int, d_ff: int | None) -> dict[str, Any]:
    return {"X.n_experts": n_experts, "X.d_ff": d_ff, "X.gated": True}


def _mamba2_options(d_model: int, d_state: int) -> dict[str, Any]:
    return {
        "S.d_state": d_state,
        "S.position": "conv",
        "S.gate": "norm",
        "S.d_inner": 2 * d_model,
    }


def _build_repeated(
    unit: list[str], n_layers: int, own: Mapping[str, Any], sizes: Sizes
) -> LanguageModel:
    """Build n_layers blocks of a repeated unit; the user's options take precedence over `own`."""
    if not 1 <= n_layers <= MAX_BLOCKS:
        raise ValueError(f"{n_layers=} must be in 1 … {MAX_BLOCKS}")
    pairs = [unit[i % len(unit)] for i in range(n_layers)]
    letters = set("".join(pairs))
    options = {key: value for key, value in own.items() if key[0] in letters}
    given = sizes.get("options") or {}
    return build(" ".join(pairs), **{**sizes, "options": {**options, **given}})
