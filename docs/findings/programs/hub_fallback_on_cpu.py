# pip install transformers==5.23.0 flash-linear-attention==0.6.0 triton==3.7.1
"""Raises: with flash-linear-attention installed, Qwen3-Next and other models with a delta rule call
its Triton kernels on the CPU too (integrations/hub_kernels.py:1012)."""

import sys
from importlib import import_module

import torch

transformers = import_module("transformers")
sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
linear = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention"],
}
config = transformers.Qwen3NextConfig(**sizes, **heads, **linear, mlp_only_layers=[0])
model = transformers.Qwen3NextForCausalLM(config).eval()
try:
    model(torch.arange(3, 13)[None], use_cache=False)
except Exception as error:  # which one depends on the driver: there may be none
    print(f"on the CPU: {type(error).__name__}: {str(error).splitlines()[0]:.70}")
    sys.exit(1)
print("on the CPU: the model runs")
