# pip install transformers==5.23.0
"""Raises: a decoder of BART's kind with more layers than its encoder, as Blenderbot's by default,
makes its cache with as many layers as the encoder has (modeling_blenderbot.py:580)."""

import sys
from importlib import import_module

import torch

transformers = import_module("transformers")
sizes = {"vocab_size": 48, "d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
ids, raised = torch.arange(3, 13)[None], 0
for name in ("Blenderbot", "Bart"):
    for layers in (2, 4):
        config = getattr(transformers, f"{name}Config")(
            **sizes, **heads, encoder_layers=2, decoder_layers=layers
        )
        for kind in ("ForCausalLM", "ForConditionalGeneration"):
            model = getattr(transformers, f"{name}{kind}")(config).eval()
            given = {} if kind == "ForCausalLM" else {"decoder_input_ids": ids}
            try:
                model(ids, **given)
                found = "runs"
            except IndexError as error:
                raised, found = raised + 1, f"IndexError: {error}"
            print(f"{name}{kind}, 2 layers of encoder, {layers} of decoder: {found}")
sys.exit(raised > 0)
