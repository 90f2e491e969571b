"""Interventions: changes to what a model computes, for the length of a `with` block.

>>> import torch
>>> from lab.models import build
>>> model, tokens = build("AM SM", vocab_size=8, d_model=16), torch.tensor([[1, 2, 3, 4]])
>>> before = model(tokens)
>>> with block_edges(model, 1, targets=[3], sources=[0]):  # of the SSD's matrix
...     without = model(tokens)
>>> (before - without).abs().amax(-1)[0] > 1e-4  # only position 3 changes
tensor([False, False, False,  True])
>>> torch.equal(model(tokens), before)
True

Each yields the model and acts on every forward and backward pass inside the block. It is undone
afterwards, also after an exception. Interventions nest: the inner one acts on the outer one's
result.

Positions are those of the tokens in their rows, also in `prefill`, `step` and `generate`, which
read further tokens after a state: an intervention at position 3 acts when that token is read. As in
all decoding, padding counts no position.
"""

from analysis.interventions.experts import knock_out_experts as knock_out_experts
from analysis.interventions.experts import transplant_experts as transplant_experts
from analysis.interventions.matrix import block_edges as block_edges
from analysis.interventions.matrix import edit_matrix as edit_matrix
from analysis.interventions.matrix import swap_values as swap_values
from analysis.interventions.points import POINT_AXES as POINT_AXES
from analysis.interventions.points import ablate as ablate
from analysis.interventions.points import override_mask as override_mask
from analysis.interventions.points import patch as patch
