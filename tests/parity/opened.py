"""Small models of transformers and flash-linear-attention in fp64, each opened once."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lab
from lab.foreign.mixer import ForeignMixer
from lab.foreign.opened import OpenedModel
from lab.models import Block
from lab.peers import load

V, T, ROWS = 40, 9, 3
TOKENS = torch.randint(V, (ROWS, T), generator=torch.Generator().manual_seed(0))
SIZES = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2}
HEADS = {"intermediate_size": 24, "num_attention_heads": 4}
GPT2 = {"vocab_size": V, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
SSD = {"state_size": 8, "num_heads": 4, "head_dim": 8, "expand": 2, "chunk_size": 4}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**SIZES, **HEADS, "num_key_value_heads": 2}),
    "gpt2": ("GPT2", {**GPT2, "bos_token_id": 1, "eos_token_id": 1}),
    "gpt_neox": ("GPTNeoX", {**SIZES, **HEADS}),
    "gemma2": (
        "Gemma2",
        {**SIZES, **HEADS, "num_key_value_heads": 2, "head_dim": 4, "sliding_window": 3}
        | {"final_logit_softcapping": None},
    ),
    "doge": ("Doge", {**SIZES, **HEADS, "num_key_value_heads": 2, "keep_window_size": 4}),
    "mamba": ("Mamba", {**SIZES, "state_size": 4}),
    "falcon_mamba": ("FalconMamba", {**SIZES, "state_size": 4}),
    "mamba2": ("Mamba2", {**SIZES, **SSD, "n_groups": 2}),
    "fla mamba": ("Mamba", {**SIZES, "state_size": 4, "fuse_cross_entropy": False}),
    "fla mamba2": ("Mamba2", {**SIZES, **SSD, "n_groups": 1, "fuse_cross_entropy": False}),
}
ATTENTIONS = ("llama", "gpt2", "gpt_neox", "gemma2", "doge")
SCANS = ("mamba", "falcon_mamba", "mamba2", "fla mamba", "fla mamba2")
every_model = pytest.mark.parametrize("name", CONFIGS)
every_attention = pytest.mark.parametrize("name", ATTENTIONS)
every_scan = pytest.mark.parametrize("name", SCANS)

WITHIN = {name: 1e-5 if name in SCANS else 1e-6 for name in CONFIGS}
"""transformers computes every softmax, and decays of Mamba and its norms, in fp32."""


def make(name: str, **options: Any) -> Any:
    """Return a model of its library, with weights large enough that every term shows."""
    word, sizes = CONFIGS[name]
    library = name.split()[0] if name.startswith("fla") else "transformers"
    of = load(f"fla.models.{name.split()[1]}" if library == "fla" else "transformers")
    config = getattr(of, f"{word}Config")(**sizes, **options)
    torch.manual_seed(0)
    if library == "fla":
        model = getattr(of, f"{word}ForCausalLM")(config)
    else:
        model = load("transformers").AutoModelForCausalLM.from_config(config, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 5)
    return model.double().eval()


@cache
def pair(name: str) -> tuple[Any, OpenedModel]:
    """Return a model and its opened form."""
    model = make(name)
    return model, lab.open("fla" if name.startswith("fla") else "hf", model)


def mixer_of(model: OpenedModel, layer: int) -> Any:
    block = model.blocks[layer]
    assert isinstance(block, Block)
    assert isinstance(block.mixer, ForeignMixer)
    return block.mixer


def read_input(model: OpenedModel, layer: int) -> Tensor:
    """Return what a layer's mixer reads."""
    name = f"blocks.{layer}.hook_resid_pre"
    block = model.blocks[layer]
    assert isinstance(block, Block)
    assert isinstance(block.norm_mixer, nn.Module)
    return block.norm_mixer(model.run_with_cache(TOKENS, name)[1][name])


def difference(found: Tensor, asked: Tensor) -> float:
    return float((found - asked).abs().max() / asked.abs().max())
