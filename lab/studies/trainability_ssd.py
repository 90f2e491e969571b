"""The trainability map of state space duality: what lets its layers begin to recall?

The state of a layer forgets. The layer knows positions by a rotation of C and B, by its decay, or
by a convolution over neighbouring tokens. Which of these decides how soon two such layers recall 8
pairs?
"""

from typing import Any

from lab.studies.trainability import BASELINE, build_map
from lab.sweeps.sweep import Sweep

SETTING: dict[str, Any] = {
    "seq_len": 32,
    "vocab_size": 2048,
    "d_model": 64,
    "stack": "SM*2",
    "max_steps": 1000,
    "eval_every": 10,
}
"""Options of all cells, which their factor changes. Training begins with rows of 16 tokens."""


def _set(*options: str) -> dict[str, Any]:
    return {"options": list(options)}


CHANGES: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "long memory": _set("S.dt_init=long"),
    "long memory in layer 1 alone": _set("0.S.dt_init=long"),
    "long memory in layer 2 alone": _set("1.S.dt_init=long"),
    "convolution": _set("S.position=conv"),
    "convolution, long memory": _set("S.position=conv", "S.dt_init=long"),
    "no position but the decay": _set("S.position=decay"),
    "state of 256": _set("S.d_state=256"),
    "4 heads": {"n_heads": 4},
    "4 heads, long memory": {"n_heads": 4, **_set("S.dt_init=long")},
    "RoPE base 100": _set("S.rope_base=100"),
    "dt as in the paper": _set("S.dt_init=paper"),
    "dt as in the paper in layer 1, long memory in layer 2": _set(
        "0.S.dt_init=paper", "1.S.dt_init=long"
    ),
    **{
        f"memory {tokens} in layer 1, long in layer 2": _set(
            f"0.S.memory={tokens}", "1.S.memory=1024"
        )
        for tokens in (1, 2, 4, 16, 64)
    },
    "memory 4 in layer 1, 64 in layer 2": _set("0.S.memory=4", "1.S.memory=64"),
    "memory 4 in both layers": _set("S.memory=4"),
    "SiLU gate": _set("S.gate=silu"),
    "rows lengthen from 8": {"start_len": 8},
    "AdamW": {"optimizer": "adamw"},
    "learning rate 6e-3": {"learning_rate": 6e-3},
}
"""Factor → the options that it changes. The lab's protocol has RoPE on C and B, a state of 128, one
head a layer and the memory that Mamba-2's initial weights draw."""


def build_study(*, seeds: int = 3, precision: str = "fp32") -> Sweep:
    """Return the study: every factor with the first seed, then with the next.

    Args:
        seeds: runs of each factor.
        precision: of every run, the same for all.
    """
    title = "What lets state space duality begin to recall?"
    return build_map("trainability-ssd", title, SETTING, CHANGES, seeds, precision)
