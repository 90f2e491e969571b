"""Check layer options that have a fixed set of values."""


def require_one_of(field: str, value: str, known: tuple[str, ...]) -> None:
    """Check an option against its known names.

    Raises:
        ValueError: for an unknown one; lists the known.
    """
    if value not in known:
        raise ValueError(f"{field}={value!r} must be one of {', '.join(known)}")
