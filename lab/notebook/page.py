"""A page inside a notebook."""

import html
from dataclasses import dataclass, field

HEIGHT = 720
"""Height of a page in a notebook, px."""


@dataclass(frozen=True)
class Page:
    """A page of HTML that a notebook shows in a frame of its own, so that styles do not mix.

    Attributes:
        content: the whole page, which needs no network.
        where: the file that it is in, or what it says in words.
    """

    content: str = field(repr=False)
    where: str

    def _repr_html_(self) -> str:
        frame = html.escape(self.content, quote=True)
        style = f"width:100%;height:{HEIGHT}px;border:0"
        return f'<iframe srcdoc="{frame}" style="{style}"></iframe>'
