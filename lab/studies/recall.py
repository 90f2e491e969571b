"""The paper's figure of hard recall: accuracy by width, row length and mixer."""

from collections.abc import Sequence

from lab.config import PAPER_SEQ_LENS, get_protocol_defaults
from lab.sweeps.sweep import Cell, Sweep

GO_ON: dict[str, object] = {"unlearned": "lengthen", "stage_steps": 600, "max_steps": 6000}
"""Rows grow also where they are not learned, so that a state which is too small for some lengths
is trained at all of them."""
MIXERS: dict[str, dict[str, object]] = {
    "attention": {"stack": "AM*2"},
    "value mask": {"stack": "AM*2", "options": ["A.mask=value"]},
    "SSD, RoPE": {"stack": "SM*2", "options": ["S.d_state=128"]},
    "soft mask": {"stack": "AM*2", "options": ["A.mask=soft"]},
    "straight-through mask": {"stack": "AM*2", "options": ["A.mask=straight-through"]},
    "oracle mask": {"stack": "AM*2", "options": ["A.mask=oracle"]},
    "inner function attention": {"stack": "IM*2"},
    "Cheems pair": {"stack": "SE IE", "options": ["S.d_state=128", "1.I.mask=value"]},
    "SSD, convolution": {"stack": "SM*2", "options": ["S.d_state=128", "S.position=conv"]},
    "literal mask": {"stack": "AM*2", "options": ["A.mask=literal"]},
    "SSD, RoPE, short then long memory": {
        "stack": "SM*2",
        "options": ["S.d_state=128", "0.S.memory=2", "1.S.memory=1024"],
        **GO_ON,
    },
    "SSD, convolution, long memory": {
        "stack": "SM*2",
        "options": ["S.d_state=128", "S.position=conv", "S.dt_init=long"],
        **GO_ON,
    },
}
"""Mixers by name, the most informative first. SSD has the paper's state of 128 per channel."""
WIDTHS = (64, 32, 128, 256)
"""In the order in which they are run."""
LENGTHS = tuple(sorted(PAPER_SEQ_LENS))
VOCAB_SIZE = 8192
MULTIPLES = {"half": 0.5, "double": 2.0}
"""Of the lab's learning rate, which depends on the width; by name."""
TEST_ROWS = 256
"""Test rows of each length. With 64 or more queries a row, its error is well below ±0.02."""


def build_study(
    *, seeds: int = 3, learning_rates: Sequence[float] = (), precision: str = "fp32"
) -> Sweep:
    """Return the study; each run lengthens its rows to 2,048 tokens and gives all four lengths.

    Args:
        seeds: runs of each setting.
        learning_rates: rates to try; if empty, the lab's own, and then its `MULTIPLES`.
        precision: of every run, the same for all.
    """
    return Sweep(
        "recall",
        "How accurate is each mixer on hard recall, by width and row length?",
        tuple(
            Cell(
                {
                    "mixer": name,
                    "d_model": width,
                    "learning_rate": rate,
                    "seed": seed,
                },
                "mqar",
                {
                    "seq_len": max(LENGTHS),
                    "vocab_size": VOCAB_SIZE,
                    "d_model": width,
                    "seed": seed,
                    "test_rows": TEST_ROWS,
                    "precision": precision,
                    **model,
                    **_choose_rate(rate, width),
                },
                LENGTHS,
            )
            for rate in learning_rates or ("lab", *MULTIPLES)
            for seed in range(seeds)
            for width in WIDTHS
            for name, model in MIXERS.items()
        ),
    )


def _choose_rate(rate: str | float, width: int) -> dict[str, float]:
    """Return the option of a rate by its value or its name; none for the lab's own."""
    if rate == "lab":
        return {}
    if isinstance(rate, str):
        defaults = get_protocol_defaults("lab", max(LENGTHS), VOCAB_SIZE, width)
        rate = MULTIPLES[rate] * defaults["learning_rate"]
    return {"learning_rate": float(rate)}
