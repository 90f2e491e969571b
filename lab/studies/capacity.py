"""How many pairs does a state hold? SSD at several state sizes and numbers of pairs."""

from lab.sweeps.sweep import Cell, Sweep

STATES, PAIRS = (4, 8, 16, 32), (4, 8, 16, 32)
"""Width of the state of each channel; pairs in a row of four times as many tokens."""
FACTOR = "d_state"
LENGTHEN_AT, MAX_STEPS = 0.5, 1500
"""Rows grow before they are learned whole: a state too small for all pairs of the short rows would
otherwise never see the long ones. A run that never gets there is evaluated on them all the same."""


def build_study(*, seeds: int = 3, precision: str = "fp32") -> Sweep:
    """Return the study: two layers of SSD and MLP, every state size with each number of pairs.

    Args:
        seeds: runs of each setting.
        precision: of every run, the same for all.
    """
    return Sweep(
        "capacity",
        "How many pairs does the state of SSD hold?",
        tuple(
            Cell(
                {"d_state": state, "pairs": pairs, "seed": seed},
                "mqar",
                {
                    "seq_len": 4 * pairs,
                    "vocab_size": 256,
                    "stack": "SM*2",
                    "options": [f"S.d_state={state}"],
                    "lengthen_at": LENGTHEN_AT,
                    "max_steps": MAX_STEPS,
                    "seed": seed,
                    "precision": precision,
                },
                (4 * pairs,),
            )
            for seed in range(seeds)
            for pairs in PAIRS
            for state in STATES
        ),
    )
