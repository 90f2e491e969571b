"""The list that every law of rows runs on: options of each task, small and odd ones."""

from typing import Any

CASES: dict[str, list[dict[str, Any]]] = {
    "mqar": [
        {"seq_len": 16, "vocab_size": 18},
        {"seq_len": 30, "vocab_size": 64, "n_pairs": 2, "fillers": "fresh"},
        {"seq_len": 30, "vocab_size": 64, "n_pairs": (1, 3), "fillers": "zero"},
    ],
    "induction": [
        {"seq_len": 3, "vocab_size": 3},
        {"seq_len": 40},
        {"seq_len": (8, 20, 33), "vocab_size": 5},
    ],
}
"""Beside them every task is tried at its defaults."""

PAIRS = [(name, options) for name, cases in CASES.items() for options in [{}, *cases]]
