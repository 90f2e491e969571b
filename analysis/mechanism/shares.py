"""Format shares of the margin and draw their intervals."""

import numpy as np
from jaxtyping import Float


def format_share(value: float) -> str:
    """Format a share with two digits, never as −0.00."""
    return f"{round(value, 2) + 0.0:.2f}"


def make_bars(share: Float[np.ndarray, " n"], ends: Float[np.ndarray, "n 2"]) -> dict[str, object]:
    """Return plotly error bars for shares and the ends of their intervals."""
    return {
        "type": "data",
        "symmetric": False,
        "array": np.nan_to_num(np.maximum(0, ends[:, 1] - share)),
        "arrayminus": np.nan_to_num(np.maximum(0, share - ends[:, 0])),
        "thickness": 1.2,
        "width": 4,
    }
