"""Typeset mathematics: known formulas in plain text become MathML, which browsers draw."""

from markupsafe import Markup, escape


def typeset(text: str) -> Markup:
    """Return a text as HTML, escaped; a number and its per cent sign stay on one line."""
    return escape(text.replace(" %", "\N{NO-BREAK SPACE}%"))
