# pip install transformers==5.23.0
"""Raises: xLSTM's cache rounds the widths of queries and values up to multiples of 64
(configuration_xlstm.py:161), its layers do not (modeling_xlstm.py:1041)."""

import sys
from importlib import import_module

import torch

transformers = import_module("transformers")
raised = ""
for width in (128, 96):
    config = transformers.xLSTMConfig(
        vocab_size=48, hidden_size=width, num_heads=2, num_hidden_layers=2, num_blocks=2
    )
    torch.manual_seed(0)
    model = transformers.xLSTMForCausalLM(config).eval()
    ids = torch.randint(3, 48, (1, 8))
    try:
        model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
        print(f"hidden_size={width}: generates")
    except ValueError as error:
        raised = str(error)
        print(f"hidden_size={width}: {raised}")
sys.exit(bool(raised))
