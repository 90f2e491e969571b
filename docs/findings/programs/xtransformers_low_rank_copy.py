# pip install x-transformers==2.31.10
"""Raises: a low-rank gate can be neither copied nor unpickled, because LoRALinear.__new__ wants
arguments (x_transformers.py:968). Averages of weights and checkpoints of whole models do both."""

import pickle
import sys
from copy import deepcopy
from importlib import import_module

sizes = {"dim": 32, "depth": 1, "heads": 2, "attn_dim_head": 16, "verbose": False}
raised = {}
for rank in (None, 8):
    decoder = import_module("x_transformers").Decoder(
        **sizes, attn_gate_values=True, attn_gate_values_rank=rank
    )
    for name, act in (("copy", deepcopy), ("load", lambda m: pickle.loads(pickle.dumps(m)))):
        try:
            act(decoder)
        except Exception as error:
            raised[name, rank] = f"{type(error).__name__}: {error}"
print(f"copying and loading raised {len(raised)} times, with rank 8:", raised.get(("copy", 8)))
sys.exit(("copy", 8) in raised or ("load", 8) in raised)
