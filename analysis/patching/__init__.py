"""Patch in one call: at every layer and position, at every head, along every edge.

All take the tokens of a clean and a corrupt row [b t] (or several, patched alike) and a metric of
the logits [b t v], as in TransformerLens.
"""

from analysis.patching.edges import EdgeEffects as EdgeEffects
from analysis.patching.edges import attribute_edges as attribute_edges
from analysis.patching.edges import patch_edges as patch_edges
from analysis.patching.sweeps import PatchSweep as PatchSweep
from analysis.patching.sweeps import sweep_heads as sweep_heads
from analysis.patching.sweeps import sweep_positions as sweep_positions
