"""Exceptions that mean that a module was called in a way it does not support.

Modules themselves raise anything, and compilers of kernels classes of their own.
"""

from lab.files import describe_error


class RefusalError(ValueError):
    """A module takes no sequence, or returns none; the message says what was tried."""


class IncomparableError(RefusalError):
    """An adapter cannot give a module what a law compares, whatever the input."""


def describe_refusal(error: BaseException) -> str:
    """Describe in one line why a module was refused, or what it raised."""
    return str(error) if isinstance(error, RefusalError) else f"raised {describe_error(error)}"
