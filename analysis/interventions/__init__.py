"""What if it were otherwise? Changes to a model's insides for the length of a `with` block.

>>> with block_edges(model, 1, queries, values):  # doctest: +SKIP
...     without = scored(model, batch).accuracy

Each yields the model, acts in whatever runs it, gradients included, and is gone afterwards, on an
exception too. They nest: the inner one acts on what the outer one left.
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
