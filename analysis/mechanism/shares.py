"""Format shares of the margin."""


def format_share(value: float) -> str:
    """Format a share with two digits, never as −0.00."""
    return f"{round(value, 2) + 0.0:.2f}"
