"""How shares of the margin, and their intervals, are written and drawn."""

import numpy as np
from jaxtyping import Float


def format_share(value: float) -> str:
    """Return a share with two digits, and never −0.00."""
    return f"{round(value, 2) + 0.0:.2f}"


def make_bars(share: Float[np.ndarray, " n"], ends: Float[np.ndarray, "n 2"]) -> dict[str, object]:
    """Return plotly's error bars for shares with these interval ends."""
    return {
        "type": "data",
        "symmetric": False,
        "array": np.nan_to_num(np.maximum(0, ends[:, 1] - share)),
        "arrayminus": np.nan_to_num(np.maximum(0, share - ends[:, 0])),
        "thickness": 1.2,
        "width": 4,
    }
