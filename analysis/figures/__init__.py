"""Four kinds of figure, which a finding fills with data and labels.

`pairs` are dots with intervals, a line for each thing; `bars` are bars with their values; `curves`
are quantities along an axis; `heat` are matrices with names. All have the theme's colours, room for
their titles and legends, and hover texts with names and units.
"""

from analysis.figures.axes import Axis
from analysis.figures.bars import Bars, bars
from analysis.figures.curves import Curves, Line, curves, offer_views
from analysis.figures.heads import draw_heads, make_head_lines, name_heads
from analysis.figures.heat import Colors, Map, heat
from analysis.figures.pairs import Dots, Pairs, pairs

__all__ = [
    "Axis",
    "Bars",
    "Colors",
    "Curves",
    "Dots",
    "Line",
    "Map",
    "Pairs",
    "bars",
    "curves",
    "draw_heads",
    "heat",
    "make_head_lines",
    "name_heads",
    "offer_views",
    "pairs",
]
