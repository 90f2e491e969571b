"""The paper's models: which sizes it gives, and which it leaves open.

Given: d_model, layers, heads, d_state, n_v and experts (tab:downstream_evaluation:model), and that
the feed-forward widths were set so that all models of a size have about the same total. Not given:
those widths, the experts' heads, k and d_retrieval, how many of four experts a token takes, the
size of the vocabulary, whether the head is tied (erratum T1). Here: d_retrieval 256, the tied head,
widths that are the multiples of 16 whose totals come nearest to the size's name, and the lab's
defaults. It shows that no one recipe is behind both sizes of Cheems: the shared MLP has to be four
times as wide as the model at 320M and half as wide at 1.3B, where 8,192 experts in 24 layers are
805M parameters already.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lab.config import ModelConfig
from lab.models import ARCHITECTURES, build
from lab.models.language_model import LanguageModel
from tasks.bounds import check_choice

VOCAB_SIZE = 50_280
"""The NeoX tokenizer's 50,277 tokens, made a multiple of eight."""

NOMINAL = {"320M": 320_000_000, "1.3B": 1_300_000_000}
"""Parameters by the name of a size; the text says 360M where the tables say 320M (erratum T1)."""

SIZES: dict[str, dict[str, int]] = {
    "320M": {"d_model": 768, "n_layers": 24, "n_heads": 12},
    "1.3B": {"d_model": 2048, "n_layers": 24, "n_heads": 32},
}

OWN: dict[str, dict[str, dict[str, int]]] = {
    "cheems": {
        "320M": {"n_values": 6, "n_experts": 3072, "d_retrieval": 256, "d_ff": 3056},
        "1.3B": {"n_values": 16, "n_experts": 8192, "d_retrieval": 256, "d_ff": 1072},
    },
    "doge": {
        "320M": {"n_values": 6, "n_experts": 3072, "d_retrieval": 256, "d_ff": 3680},
        "1.3B": {"n_values": 16, "n_experts": 8192, "d_retrieval": 256, "d_ff": 2544},
    },
    "llama": {"320M": {"d_ff": 816}, "1.3B": {"d_ff": 1072}},
    "mamba2": {"320M": {"d_ff": 688}, "1.3B": {"d_ff": 784}},
    "jamba": {"320M": {"d_ff": 704}, "1.3B": {"d_ff": 816}},
}
"""Sizes of each architecture besides `SIZES`. The paper gives none for Doge: it has Cheems's."""


MOST = 2**24
"""The largest value of a size; its square is still small enough for torch."""


@dataclass(frozen=True)
class SizeComparison:
    """A model's total number of parameters compared with the paper's.

    Attributes:
        size: the paper's name of the size.
        parameters: the number that the name states.
        difference: (total − parameters) / parameters.
        because: the reason for the difference.
    """

    size: str
    parameters: int
    difference: float
    because: str


def compare_with_paper(name: str, size: str, total: int, own: bool = False) -> SizeComparison:
    """Compare a total of parameters with the paper's; `own`: the user has changed settings."""
    nominal = NOMINAL[size]
    whose = "and of Doge no size at all" if name == "doge" else "nor which vocabulary"
    because = (
        f"the paper gives no feed-forward width, {whose}; "
        f"d_ff={OWN[name][size]['d_ff']:,} is the multiple of 16 that comes nearest"
    )
    if own:
        because = "with settings that are not the paper's"
    return SizeComparison(size, nominal, (total - nominal) / nominal, because)


def build_at_paper_size(
    name: str,
    size: str = "320M",
    options: Mapping[str, Any] | None = None,
    vocab_size: int = VOCAB_SIZE,
) -> LanguageModel:
    """Build an architecture at a size of the paper; on the meta device, in less than a second.

    Args:
        name: in `ARCHITECTURES`.
        size: in `SIZES`.
        options: constructor arguments by letter or by block and letter (see `lab.models.stack`).
        vocab_size: rows of the embedding table.

    Raises:
        ValueError: for a name or a size that the paper does not have; the known are listed.
    """
    check_choice("name", name, ARCHITECTURES)
    check_choice("size", size, SIZES)
    return ARCHITECTURES[name](
        vocab_size=vocab_size, options=options, **SIZES[size], **OWN[name][size]
    )


def build_on_meta(
    name: str,
    size: str | None,
    given: Mapping[str, int],
    options: Mapping[str, Any],
    model: str | None = None,
) -> tuple[LanguageModel, str | None]:
    """Build the model that a user describes on the meta device, and say which paper size it has.

    Args:
        name: an architecture, or a stack.
        size: of the paper; None where the user gives sizes, else the smaller one.
        given: d_model, n_heads, n_layers, vocab_size, those that the user chose.
        options: of layers.
        model: "module:Class" of the mixer behind the letter U of a stack.

    Raises:
        ValueError: for a size out of bounds, or what cannot be built; a size beside sizes; a size
            or a number of layers for a stack.
    """
    for field, value in given.items():
        if value > MOST:
            raise ValueError(f"{field}={value}: must be at most {MOST:,}")
    own = sorted(given.keys() & {"d_model", "n_heads", "n_layers"})
    with torch.device("meta"):
        if name in ARCHITECTURES and model is None:
            if size is not None and own:
                raise ValueError(f"{size=} sets {own[0]} too: give one of them")
            if not own:
                size = size or next(iter(SIZES))
                return build_at_paper_size(name, size, options, **given), size
            whole = {"vocab_size": VOCAB_SIZE, "d_model": ModelConfig.d_model, **given}
            return ARCHITECTURES[name](options=options, **whole), None
        if size is not None or "n_layers" in given:
            field = f"{size=}" if size is not None else f"n_layers={given['n_layers']}"
            raise ValueError(
                f"{field}: applies only to a named architecture: {', '.join(ARCHITECTURES)}"
            )
        return build(
            name,
            vocab_size=given.get("vocab_size", VOCAB_SIZE),
            d_model=given.get("d_model", ModelConfig.d_model),
            n_heads=given.get("n_heads"),
            options=options,
            model=model,
        ), None
