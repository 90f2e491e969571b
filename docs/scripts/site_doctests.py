"""An extension of griffe: keeps Markdown from quoting a docstring's examples and bounds."""

import re

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)
"""From a prompt to the next empty line."""
BOUND = re.compile(r"^( +\w+: )(?=>)", re.MULTILINE)
"""What stands before a bound, as in "base: > 0"."""


class Doctests(griffe.Extension):
    """Makes the examples of docstrings code blocks, and keeps the sign of bounds."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            text = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
            obj.docstring.value = BOUND.sub(r"\1\\", text)
