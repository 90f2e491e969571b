"""Cutting plotly.js to the trace types of a page; the tests of pages draw with what is left."""

from analysis.pages.bundle import pack_plotly


def test_a_page_gets_what_it_draws_and_not_what_it_does_not():
    lines, matrices = (len(pack_plotly(types)) for types in (["scatter"], ["heatmap", "bar"]))
    assert lines < matrices < 0.6 * 2**20
    assert len(pack_plotly(["a type of tomorrow"])) > 3 * matrices
