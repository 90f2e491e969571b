"""Exceptions that mean that a module was called in a way it does not support.

Modules themselves raise anything, and compilers of kernels classes of their own.
"""


class RefusalError(ValueError):
    """A module takes no sequence, or returns none; the message says what was tried."""


class IncomparableError(RefusalError):
    """An adapter cannot give a module what a law compares, whatever the input."""


def describe_error(error: BaseException) -> str:
    """Describe an error in one line."""
    if isinstance(error, RefusalError):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    return f"raised {type(error).__name__}: {lines[0][:200]}".removesuffix(": ")
