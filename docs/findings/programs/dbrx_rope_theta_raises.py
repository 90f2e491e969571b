# pip install transformers==5.23.0
"""Raises: DBRX with its default configuration. It asks for a rope_theta that the configuration no
longer has (modeling_dbrx.py:184), and then clamps by clip_qkv, which is None (:204)."""

import sys
from importlib import import_module

import torch

transformers = import_module("transformers")
sizes = {"d_model": 32, "n_heads": 4, "n_layers": 1, "vocab_size": 48, "max_seq_len": 64}
experts = {"hidden_size": 32, "ffn_hidden_size": 48}
config = transformers.DbrxConfig(**sizes, ffn_config=experts)
try:
    logits = transformers.DbrxForCausalLM(config).eval()(torch.arange(3, 13)[None]).logits
except (AttributeError, RuntimeError) as error:
    print(f"a model of DbrxConfig() raises {type(error).__name__}: {error}")
    sys.exit(1)
print(f"a model of DbrxConfig() returns {list(logits.shape)}")
