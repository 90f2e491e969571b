# pip install flash-linear-attention==0.6.0
"""Options: RodimusBlock reads residual_in_fp32 in place of block_residual_in_fp32
(models/rodimus/modeling_rodimus.py:50), so by default RodimusModel raises."""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
import torch
from fla.models import RodimusConfig, RodimusModel
from triton.runtime.autotuner import Autotuner

Autotuner._bench = lambda self, *args, **kwargs: [0.0]
sizes = {"block_type": "rodimus", "hidden_size": 32, "expand_ratio": 8, "vocab_size": 40}
raised = []
for residual_in_fp32 in (True, False):
    config = RodimusConfig(**sizes, num_hidden_layers=2, residual_in_fp32=residual_in_fp32)
    model = RodimusModel(config).eval()
    for layer in model.layers:  # the fault is beside the mixers
        layer.get_submodule("mixer").forward = lambda hidden_states, **options: (
            hidden_states,
            None,
            None,
        )
    try:
        model(torch.ones(1, 8, dtype=torch.long))
    except AssertionError as error:
        print(error)
        raised.append(residual_in_fp32)
print(f"RodimusModel raises with residual_in_fp32 of {raised}; True is the default")
sys.exit(bool(raised))
