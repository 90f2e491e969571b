"""The terminal that commands write to, which no text of a file or a name may control."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from lab.files import escape_controls


class _SafeConsole(Console):
    """A console that shows control characters in what it is given as escapes."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the segments of something that can be shown."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else escape_controls(text), style, control)


def open_console(*, stderr: bool = False) -> Console:
    """Return a console for sentences: it breaks only lines of a terminal, between words."""
    console = open_table_console(stderr=stderr)
    console.soft_wrap = not console.is_terminal
    return console


def open_table_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return a console for tables. `[x]` and `:x:` are text on every console of the lab."""
    return _SafeConsole(stderr=stderr, quiet=quiet, highlight=False, markup=False, emoji=False)
