"""The list that every law of rows runs on: options of each task, small and odd ones."""

from typing import Any

CASES: dict[str, list[dict[str, Any]]] = {
    "mqar": [
        {"seq_len": 16, "vocab_size": 18},
        {"seq_len": 30, "vocab_size": 64, "n_pairs": 2, "fillers": "fresh"},
        {"seq_len": 30, "vocab_size": 64, "n_pairs": (1, 3), "fillers": "zero"},
    ],
    "overwrite": [
        {"seq_len": 4, "n_pairs": 1, "rewrites": 0, "vocab_size": 4},
        {"seq_len": 51, "n_pairs": 5, "spacing": 2, "vocab_size": 41},
        {"seq_len": 64, "n_pairs": 4, "rewrites": (0, 3), "spacing": (1, 3), "vocab_size": 32},
    ],
    "compositional": [
        {"seq_len": 24, "n_pairs": 4, "vocab_size": 12},
        {"seq_len": 59, "n_pairs": 9, "vocab_size": 43},
        {"seq_len": (100, 120), "n_pairs": (4, 16), "vocab_size": 32},
    ],
    "hops": [
        {"seq_len": 13, "n_pairs": 3, "hops": 1, "vocab_size": 9},
        {"seq_len": 31, "n_pairs": 7, "hops": 5, "vocab_size": 13},
        {"seq_len": 40, "n_pairs": (7, 9), "hops": (1, 2, 5), "vocab_size": 20},
    ],
    "fuzzy": [
        {"seq_len": 4, "n_pairs": 1, "max_key_len": 1, "max_value_len": 1, "vocab_size": 6},
        {"seq_len": 37, "n_pairs": 3, "max_key_len": 2, "max_value_len": 4, "vocab_size": 9},
        {"seq_len": 48, "n_pairs": (2, 4), "max_value_len": (1, 3), "vocab_size": 16},
    ],
    "selective_copy": [
        {"seq_len": 2, "n_tokens": 1, "vocab_size": 4},
        {"seq_len": 33, "n_tokens": 16, "vocab_size": 5},
        {"seq_len": (16, 21), "n_tokens": (2, 8)},
    ],
    "copy": [
        {"seq_len": 2, "vocab_size": 3},
        {"mode": "prefix", "seq_len": 41, "vocab_size": 5, "query_len": 3},
        {"mode": "suffix", "seq_len": 20, "vocab_size": 17, "repeats": False},
        {"mode": ("copy", "prefix", "suffix"), "seq_len": (16, 31), "vocab_size": 9},
    ],
    "induction": [
        {"seq_len": 3, "vocab_size": 3},
        {"seq_len": 40},
        {"seq_len": (8, 20, 33), "vocab_size": 5},
    ],
    "flip_flop": [
        {"seq_len": 4},
        {"seq_len": 30, "p_ignore": 0.0},
        {"seq_len": (8, 26), "p_ignore": (0.5, 1.0)},
    ],
    "word_problem": [
        {"group": "S5", "seq_len": 2},
        {"group": "Z7", "seq_len": 33},
        {"group": "S3", "seq_len": 4},
        {"group": ("Z2", "A5"), "seq_len": (5, 12)},
    ],
    "memorize": [
        {"seq_len": 2, "n_facts": 2, "vocab_size": 6},
        {"seq_len": 50, "n_facts": 2**20, "vocab_size": 20},
        {"seq_len": (9, 16), "n_facts": (5, 1000), "vocab_size": 64},
    ],
    "regression": [
        {"seq_len": 4, "n_dims": 1},
        {"seq_len": 14, "n_dims": 11, "active_dims": 9},
        {"seq_len": (8, 22), "n_dims": 6, "active_dims": (2, 5)},
    ],
    "language": [
        {"seq_len": 2, "max_states": 2, "min_states": 2, "n_symbols": 4, "max_length": 1},
        {"seq_len": 70, "max_states": 40, "n_symbols": 1000, "min_strings": 2, "max_strings": 3},
        {"seq_len": (20, 33), "max_states": (4, 7), "n_symbols": (4, 30), "max_length": 9},
    ],
    "bytes": [
        {"seq_len": 1, "test_share": 0.9},
        {"seq_len": 33, "path": __file__},
        {"seq_len": (3, 17), "test_share": (0.1, 0.5)},
    ],
    "stack": [
        {"seq_len": 6, "n_stacks": 1, "vocab_size": 8},
        {"seq_len": 50, "n_stacks": 5, "vocab_size": 17},
        {"seq_len": (20, 33), "n_stacks": (1, 3), "vocab_size": 32},
    ],
    "palindrome": [
        {"seq_len": 2, "vocab_size": 3},
        {"seq_len": (16, 30), "vocab_size": 5},
    ],
    "sort": [
        {"seq_len": 2, "vocab_size": 3},
        {"seq_len": (16, 30), "vocab_size": (4, 50)},
    ],
    "brackets": [
        {"seq_len": 4, "n_kinds": 2, "max_depth": 2, "p_gap": 0.0},
        {"seq_len": 30, "n_kinds": 1, "max_depth": 3, "p_gap": 1.0, "ask": "depth"},
        {"seq_len": (20, 34), "n_kinds": (2, 9), "max_depth": (2, 10), "ask": ("kind", "depth")},
    ],
    "grammar": [
        {"seq_len": 3, "depth": 1, "n_symbols": 2, "min_rules": 1, "max_rules": 1},
        {"seq_len": 70, "depth": 2, "n_symbols": 26, "max_rules": 16, "max_length": 8},
        {"seq_len": (20, 33), "depth": (1, 3), "grammar": (0, 5), "min_length": 1},
    ],
    "capo": [
        {"seq_len": 5, "n_people": 2, "n_names": 2, "n_attributes": 1, "n_values": 2},
        {"seq_len": 61, "n_people": 10_000, "n_names": 100, "n_wordings": 1, "n_values": 1000},
        {"seq_len": (20, 33), "n_people": (8, 27), "n_names": 3, "n_attributes": 3},
    ],
    "addition": [
        {"seq_len": 5, "base": 2},
        {"order": "plain", "seq_len": 31, "base": 1024, "p_chain": 0.0},
        {"order": ("reversed", "sum-reversed"), "seq_len": (11, 20), "p_chain": (0.1, 1.0)},
    ],
    "depo": [
        {"seq_len": 10, "n_nodes": 3, "n_queries": 1, "hops": 1, "max_name_len": 1},
        {"seq_len": 77, "n_nodes": 7, "n_queries": 2, "hops": 9, "n_letters": 2, "max_name_len": 4},
        {"seq_len": 60, "n_nodes": 9, "n_queries": (1, 4), "min_nodes": 3, "hops": (2, 5)},
    ],
    "brevo": [
        {"seq_len": 12, "n_nodes": 3, "vocab_size": 6},
        {"seq_len": 60, "n_nodes": 12, "min_nodes": 3, "max_degree": 2, "vocab_size": 20},
        {"seq_len": (50, 61), "n_nodes": (5, 8), "max_degree": (1, 3)},
    ],
    "mano": [
        {"seq_len": 5, "length": 1, "modulus": 2, "operators": "+"},
        {"seq_len": 20, "length": 7, "modulus": 7, "operators": "+-*/"},
        {"seq_len": 31, "length": (3, 13), "operators": ("+-", "+-*")},
    ],
    "joint_recall": [
        {"seq_len": 21, "n_contexts": 2, "n_keys": 2, "vocab_size": 8},
        {"seq_len": 99, "n_contexts": 4, "n_keys": 5, "vocab_size": 40},
        {"seq_len": 80, "n_contexts": (2, 3), "n_keys": (2, 4)},
    ],
}
"""Beside them every task is tried at its defaults."""

PAIRS = [(name, options) for name, cases in CASES.items() for options in [{}, *cases]]
