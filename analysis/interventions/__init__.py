"""Interventions: changes to what a model computes, for the length of a `with` block.

>>> with block_edges(model, 1, queries, values):  # doctest: +SKIP
...     without = scored(model, batch).accuracy

Each yields the model and acts on every forward and backward pass inside the block. It is undone
afterwards, also after an exception. Interventions nest: the inner one acts on the outer one's
result.
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
