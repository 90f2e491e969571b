"""The trainability map: what shortens the first stage of training, one factor at a time.

Attention spends hundreds of steps on a plateau before it recalls anything. On rows of one length,
how many steps does it take until 99 % of validation answers are right?
"""

from collections.abc import Mapping
from typing import Any

from lab.sweeps.sweep import Cell, Sweep

BASELINE = "the lab's protocol"
SETTING: dict[str, Any] = {
    "seq_len": 64,
    "vocab_size": 2048,
    "d_model": 64,
    "stack": "AM*2",
    "start_len": 64,
    "max_steps": 700,
    "eval_every": 10,
}
"""Options of all cells, which their factor changes. Rows have 16 pairs, a quarter of the row."""


def _use_variant(name: str, *options: str) -> dict[str, Any]:
    """Return the options of a mixer of `lab.studies.variants`, with a head as the lab's have."""
    given = {"options": list(options)} if options else {}
    return {"model": f"lab.studies.variants:{name}", "stack": "UM*2", "n_heads": 1, **given}


CHANGES: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "recipe before": {"logit_scale": 1.0, "table_learning_rate": 3e-3},
    "rows lengthen from 8": {"start_len": 8},
    "half the channels rotated": _use_variant("PartialRotary", "U.share=0.5"),
    "keys shifted on half the channels": _use_variant("ShiftedKeys"),
    "convolution on q, k, v": _use_variant("ConvolvedAttention"),
    "normed q and k": _use_variant("NormedAttention"),
    "V and out near identity": _use_variant("NearIdentityAttention"),
    "Q and K near identity": _use_variant("AlignedAttention"),
    "Muon on mixers alone": {"muon_on": "mixers"},
    "Muon on MLPs alone": {"muon_on": "mlps"},
    "logit scale 1": {"logit_scale": 1.0},
    "table rate 3e-3": {"table_learning_rate": 3e-3},
    "4 to 16 pairs mixed": {"n_pairs": "4,8,16"},
    "2^13 rows repeated": {"train_rows": 2**13},
    "batch 32": {"batch_size": 32},
    "batch 128": {"batch_size": 128},
    "AdamW": {"optimizer": "adamw"},
    "learning rate 1e-3": {"learning_rate": 1e-3},
    "learning rate 6e-3": {"learning_rate": 6e-3},
    "table rate 1e-2": {"table_learning_rate": 1e-2},
    "table rate 4e-2": {"table_learning_rate": 4e-2},
    "2 heads": {"n_heads": 2},
    "4 heads": {"n_heads": 4},
    "no position in layer 2": {"options": ["1.A.position=none"]},
    "RoPE base 100": {"options": ["A.rope_base=100"]},
    "RoPE base 1e6": {"options": ["A.rope_base=1e6"]},
    "a quarter of the channels rotated": _use_variant("PartialRotary", "U.share=0.25"),
    "embedding std 0.5": {"embedding_std": 0.5},
    "embedding std 0.1": {"embedding_std": 0.1},
    "MLP half as wide": {"options": ["M.d_ff=128"]},
    "MLP twice as wide": {"options": ["M.d_ff=512"]},
    "weight decay 0.1": {"weight_decay": 0.1},
}
"""Factor → the options that it changes. "recipe before" is the lab's before it scaled logits by
1/√d and trained the table faster. Runs on mixed pairs are also evaluated on mixed pairs."""
BASELINE_SEEDS = 6
"""Seeds of the baseline for each seed of a factor. With three against eighteen runs, a factor whose
runs are all faster is significant among thirty factors; with three against three, none can be."""


def build_study(*, seeds: int = 3, precision: str = "fp32") -> Sweep:
    """Return the study: every factor with the first seed, then with the next.

    Args:
        seeds: runs of each factor.
        precision: of every run, the same for all.
    """
    title = "What shortens the first stage of training?"
    return build_map("trainability", title, SETTING, CHANGES, seeds, precision)


def build_map(
    name: str,
    title: str,
    setting: Mapping[str, Any],
    changes: Mapping[str, Mapping[str, Any]],
    seeds: int,
    precision: str,
) -> Sweep:
    """Return a study of one change at a time to a setting of hard recall, `BASELINE` among them.

    Args:
        name: of the study.
        title: its question.
        setting: options of all runs.
        changes: factor → the options that it changes.
        seeds: runs of each factor; the baseline has `BASELINE_SEEDS` times as many.
        precision: of every run.
    """
    runs = [(seed, change) for seed in range(seeds) for change in changes]
    runs += [(seed, BASELINE) for seed in range(seeds, BASELINE_SEEDS * seeds)]
    return Sweep(
        name,
        title,
        tuple(
            Cell(
                {"factor": change, "seed": seed},
                "mqar",
                {**setting, "seed": seed, "precision": precision, **changes[change]},
                (setting["seq_len"],),
            )
            for seed, change in runs
        ),
    )
