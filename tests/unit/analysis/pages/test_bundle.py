"""Cutting plotly.js to the trace types of a page; the tests of pages draw with what is left."""

from plotly.offline import get_plotlyjs

from analysis.pages.bundle import pack_plotly
from analysis.record import deflate


def test_a_page_gets_what_it_draws_and_not_what_it_does_not():
    lines, matrices = (len(pack_plotly(types)) for types in (["scatter"], ["heatmap", "bar"]))
    assert lines < matrices < 0.6 * 2**20
    assert pack_plotly(["a type of tomorrow"]) == deflate(get_plotlyjs().encode())
