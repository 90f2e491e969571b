"""What options are held to: each error names field, value and bound."""

from collections.abc import Sequence

MAX_SEQ_LEN = 2**20
MAX_VOCAB_SIZE = 2**30


def within(
    name: str, value: int | float, low: int | float, high: int | float, why: str = ""
) -> None:
    """Hold a number to low … high, both included.

    Raises:
        ValueError: when it is out of them, or not a number.
    """
    if not low <= value <= high:
        reason = f" ({why})" if why else ""
        raise ValueError(f"{name}={value}: must be in {low} … {high}{reason}")


def one_of(name: str, value: str, known: Sequence[str]) -> None:
    """Hold a text to the known ones.

    Raises:
        ValueError: when it is none of them.
    """
    if value not in known:
        raise ValueError(f"{name}={value!r}: must be {', '.join(known)}")
