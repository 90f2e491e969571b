"""How a module says that it will not be called so."""

REFUSALS = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    AttributeError,
    AssertionError,
    NameError,
)
"""What a module that is called in a way it was not written for raises."""


class RefusalError(ValueError):
    """A module takes no sequence, or gives none; the message says what was tried."""


def raised(error: BaseException) -> str:
    """Return an error in one line."""
    if isinstance(error, RefusalError):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    return f"raised {type(error).__name__}: {lines[0][:200]}"
