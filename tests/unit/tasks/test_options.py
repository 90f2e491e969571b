"""What tasks are at their defaults, their roles and tokens, and the options they refuse."""

from typing import Any

import pytest
import torch

from tasks import TASKS
from tasks.meanings import MEANINGS
from tasks.mixture import MAX_SETTINGS
from tasks.schedule import Schedule
from tests.task_cases import PAIRS

DEFAULTS: dict[str, tuple[dict[str, Any], float]] = {
    "mqar": (
        {"seq_len": 256, "vocab_size": 8192, "n_pairs": None, "power": 0.01, "fillers": "any"},
        1 / 4096,
    ),
    "overwrite": (
        {"seq_len": 256, "n_pairs": 16, "rewrites": 3, "spacing": None, "vocab_size": 8192},
        1 / 4096,
    ),
    "compositional": ({"seq_len": 256, "n_pairs": 36, "vocab_size": 8192}, 1 / 4096),
    "hops": ({"seq_len": 256, "n_pairs": 32, "hops": 2, "vocab_size": 8192}, 1 / 8186),
    "fuzzy": (
        {"seq_len": 256, "n_pairs": 16, "max_key_len": 3, "max_value_len": 3, "vocab_size": 64},
        1 / 32,
    ),
    "induction": ({"seq_len": 256, "vocab_size": 16}, 1 / 15),
    "regression": ({"seq_len": 80, "n_dims": 20, "active_dims": None}, 0),
    "language": ({"min_states": 4, "max_states": 12, "n_symbols": 18}, 1 / 18),
    "bytes": ({"path": None}, 1 / 256),
    "stack": ({"seq_len": 256, "n_stacks": 8, "vocab_size": 256}, 1 / 128),
    "palindrome": ({"seq_len": 256, "vocab_size": 64}, 1 / 63),
    "sort": ({"seq_len": 128, "vocab_size": 64}, 1 / 63),
    "brackets": ({"seq_len": 128, "n_kinds": 8, "max_depth": 8, "p_gap": 0.5}, 1 / 8),
    "grammar": ({"seq_len": 256, "depth": 4, "n_symbols": 3, "grammar": 0}, 1 / 4),
    "capo": ({"seq_len": 256, "n_people": 1024, "n_names": 64, "n_attributes": 6}, 1 / 128),
    "addition": ({"seq_len": 62, "shortest": None, "base": 10, "p_chain": 0.5}, 1 / 10),
    "depo": ({"n_nodes": 40, "min_nodes": None, "hops": 8, "exact_hops": None}, 1 / 100),
    "mano": ({"length": 13, "exact_length": None, "modulus": 23, "operators": "+-*"}, 1 / 23),
    "joint_recall": ({"n_contexts": 8, "n_keys": 6, "vocab_size": 50}, 1 / 16),
}
"""Options at their defaults and the chance level."""


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults(name: str):
    task, (options, chance) = TASKS[name](), DEFAULTS[name]
    assert {option: task.options[option] for option in options} == options
    assert task.chance == chance


@pytest.mark.parametrize(
    ("name", "options", "counts", "asked"),
    [
        ("mqar", {}, {"key": 64, "value": 64, "query": 64, "filler": 64}, "query"),
        ("overwrite", {}, {"key": 64, "value": 64, "query": 16, "filler": 112}, "query"),
        (
            "compositional",
            {},
            {"first key": 72, "second key": 36, "value": 36, "query": 36, "filler": 76},
            "query",
        ),
        (
            "hops",
            {},
            {"source": 32, "target": 32, "hops": 1, "query": 32, "filler": 159},
            "query",
        ),
        ("induction", {}, {"trigger": 1, "follower": 1, "query": 1, "filler": 253}, "query"),
        (
            "memorize",
            {"seq_len": 33, "n_facts": 4_096, "vocab_size": 64},
            {"key": 24, "query": 8, "padding": 1},
            "query",
        ),
        ("selective_copy", {}, {"content": 16, "insert": 16, "blank": 224}, "insert"),
        (
            "brackets",
            {"p_gap": 1.0, "ask": "depth"},
            {"open": 64, "close": 0, "gap": 64, "padding": 0},
            "gap",
        ),
        ("regression", {}, {"x": 40, "y": 40, "padding": 0}, "x"),
        ("capo", {}, {"name": 51, "cue": 102, "value": 102, "padding": 1}, "cue"),
        (
            "mano",
            {"exact_length": 9},
            {"length": 1, "operator": 9, "number": 10, "query": 1, "padding": 11},
            "query",
        ),
        (
            "joint_recall",
            {},
            {
                "context": 16,
                "key": 48,
                "value": 48,
                "separator": 1,
                "query": 48,
                "answer": 48,
                "filler": 47,
            },
            "query",
        ),
    ],
)
def test_positions_of_each_role_and_what_is_asked(name, options, counts, asked):
    batch = (task := TASKS[name](**options)).batch(size=20)
    role = {name: batch.roles == number for number, name in enumerate(task.role_names)}
    assert {name: there.sum(1).unique().tolist() for name, there in role.items()} == {
        name: [count] for name, count in counts.items()
    }
    assert batch.scored.equal(role[asked])


@pytest.mark.parametrize(
    "name",
    [
        *("overwrite", "compositional", "hops", "fuzzy", "selective_copy"),
        *("depo", "brevo", "mano", "joint_recall"),
    ],
)
def test_what_is_not_used_is_zero(name: str):
    batch = (task := TASKS[name]()).batch(size=20)
    unused = batch.roles == len(task.role_names) - 1
    assert unused.any()
    assert unused.equal(batch.inputs == 0)


@pytest.mark.parametrize(
    ("name", "options", "shown"),
    [
        ("hops", {}, {0: "0", 1: "h1", 5: "h5", 6: "6"}),
        ("flip_flop", {}, dict(enumerate("01wir"))),
        ("selective_copy", {}, {0: "_", 1: "?", 2: "2"}),
        ("word_problem", {"group": "Z60"}, {59: "59"}),
        ("word_problem", {"group": "A5"}, {0: "01234"}),
        ("memorize", {"vocab_size": 20}, {0: "?", 1: "0", 9: "8", 10: "v0", 19: "v9"}),
        ("language", {}, {0: "|", 1: "a", 18: "r"}),
        ("language", {"n_symbols": 27}, {27: "27"}),
        ("stack", {}, {0: "_", 1: "+", 2: "-", 3: "s0", 10: "s7", 11: "11", 128: "128"}),
        ("palindrome", {}, {0: "|", 63: "63"}),
        ("sort", {}, {0: "|", 63: "63"}),
        ("brackets", {"ask": "depth"}, {0: "?", 1: "(", 8: ">", 9: "(4", 16: ")7", 17: "d0"}),
        ("grammar", {}, {0: "|", 1: "a", 3: "c"}),
        (
            "capo",
            {"n_people": 99, "n_names": 8, "n_attributes": 2, "n_values": 4, "n_wordings": 3},
            {0: "_", 1: "f0", 16: "m7", 24: "l7", 25: "a0.0", 30: "a1.2", 31: "v0.0", 38: "v1.3"},
        ),
        ("addition", {}, {9: "9", 10: "+", 11: "=", 12: "_"}),
        (
            "depo",
            {},
            {0: "_", 1: "h1", 32: "h32", 33: "=", 34: "1", 83: "50", 84: "1.", 133: "50."},
        ),
        ("brevo", {}, {0: "_", 1: "?", 2: "=", 3: "3", 63: "63"}),
        ("mano", {}, {0: "_", 1: "l1", 32: "l32", 33: "+", 36: "/", 37: "=", 38: "0", 60: "22"}),
        ("bytes", {}, {97: "a", 126: "~", 10: "⏎", 9: "⇥", 32: "␣", 0: "x00", 233: "xe9"}),
    ],
)
def test_tokens_are_shown(name: str, options: dict[str, Any], shown: dict[int, str]):
    task = TASKS[name](**options)
    assert {token: task.format_token(token) for token in shown} == shown


def test_vectors_are_shown_by_their_first_numbers():
    shown = TASKS["regression"](n_dims=5).to_str_tokens(
        torch.tensor([[0.1, 0, -2.345, 1, 3, 0], [0, 0, 0, 0, 0, -1], [0] * 6])
    )
    assert shown == ["0.10 -2.35 1.00 …", "-1.00", "0"]


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("brackets", {"seq_len": 2}, r"seq_len=2: must be in 4 … 1048576"),
    ("brackets", {"seq_len": 31}, r"seq_len=31: must be even"),
    ("brackets", {"n_kinds": 1}, r"n_kinds=1: must be in 2 … 65536 \(ask=kind\)"),
    ("brackets", {"n_kinds": 0, "ask": "depth"}, r"n_kinds=0: must be in 1 … "),
    ("brackets", {"max_depth": 1}, r"max_depth=1: must be in 2 … 64 \(seq_len / 2\)"),
    ("brackets", {"seq_len": 14}, r"max_depth=8: must be in 2 … 7 \(seq_len / 2\)"),
    ("brackets", {"p_gap": 1.5}, r"p_gap=1\.5: must be in 0 … 1"),
    ("brackets", {"ask": "height"}, "ask='height': must be one of kind, depth"),
    ("addition", {"seq_len": 4}, r"seq_len=4: must be in 5 … 1048576 \(two numbers of a digit"),
    ("addition", {"shortest": 21}, r"shortest=21: must be in 1 … 20 \(\(seq_len − 2\) / 3\)"),
    ("addition", {"base": 1}, "base=1: must be in 2 … 1024"),
    ("addition", {"p_chain": 1.5}, r"p_chain=1\.5: must be in 0 … 1"),
    (
        "addition",
        {"order": "backwards"},
        "order='backwards': must be one of reversed, plain, sum-r",
    ),
    ("bytes", {"seq_len": 0}, r"seq_len=0: must be in 1 … 1048576"),
    ("bytes", {"test_share": 0.95}, r"test_share=0\.95: must be in 0\.001 … 0\.9"),
    ("bytes", {"test_share": float("nan")}, r"test_share=nan: must be in"),
    ("bytes", {"path": "nowhere.txt"}, r"path='nowhere\.txt': No such file"),
    ("bytes", {"path": 3}, "path=3: must be text"),
    ("bytes", {"digest": ""}, r"digest=: path=None has changed since"),
    (
        "bytes",
        {"path": __file__, "seq_len": 100_000},
        r"path=.*short, \d+ of its \d+ bytes are train, must be ≥ seq_len \+ 1 = 100001",
    ),
    ("bytes", {"path": __file__, "seq_len": 4_000}, r"path=.* bytes are test, must be ≥"),
    ("capo", {"seq_len": 14}, r"seq_len=14: must be in 15 … 1048576 \(a biography's tokens\)"),
    ("capo", {"n_people": 16}, r"n_people=16: must be in 17 … 262144 \(those in a row; n_names³\)"),
    ("capo", {"n_names": 8}, r"n_people=1024: must be in 17 … 512 "),
    ("capo", {"n_values": 1}, "n_values=1: must be in 2 …"),
    ("brevo", {"n_nodes": 2}, r"n_nodes=2: must be in 3 … 256"),
    ("brevo", {"n_nodes": 31}, r"seq_len=256: must be in 262 … .*room for the most edges"),
    ("brevo", {"min_nodes": 2}, r"min_nodes=2: must be in 3 … 24 \(n_nodes\)"),
    ("brevo", {"min_nodes": 25}, r"min_nodes=25: must be in 3 … 24 \(n_nodes\)"),
    ("brevo", {"max_degree": 9}, r"max_degree=9: must be in 1 … 8"),
    ("brevo", {"vocab_size": 26}, r"vocab_size=26: must be in 27 … 1073741824 \(n_nodes \+ 3\)"),
    ("compositional", {"seq_len": 23}, r"seq_len=23: must be in 24 … .*a grid of 2 × 2"),
    ("compositional", {"n_pairs": 49}, r"n_pairs=49: must be in 4 … 42 \(seq_len / 6\)"),
    ("compositional", {"n_pairs": (4, 35)}, r"n_pairs=35: must be a square, 25 and 36 are near"),
    ("compositional", {"vocab_size": 71}, r"=71: must be in 72 … 1073741824.*half of them values"),
    ("copy", {"mode": "lookup"}, "mode='lookup': must be one of copy, prefix, suffix"),
    ("copy", {"seq_len": 1}, r"seq_len=1: must be in 2 … 1048576 \(mode=copy\)"),
    ("copy", {"seq_len": 8, "mode": "prefix"}, "seq_len=8: must be in 9 …"),
    ("copy", {"seq_len": 7, "mode": "suffix"}, "seq_len=7: must be in 8 …"),
    ("copy", {"seq_len": 40, "shortest": 21}, "shortest=21: must be in 1 … 20"),
    ("copy", {"shortest": 3, "mode": "suffix"}, "shortest=3: must be in 4 … 196"),
    ("copy", {"vocab_size": 2}, "vocab_size=2: must be in 3 …"),
    ("copy", {"repeats": False}, r"vocab_size=64: must be in 101 … .*no token twice in 100"),
    ("copy", {"repeats": "no"}, "repeats='no': must be true or false"),
    ("copy", {"query_len": 17}, "query_len=17: must be in 1 … 16"),
    ("depo", {"hops": 33}, r"hops=33: must be in 1 … 32"),
    ("depo", {"exact_hops": 9}, r"exact_hops=9: must be in 1 … 8 \(hops\)"),
    ("depo", {"seq_len": 219}, r"seq_len=219: must be in 220 … .*longest names of all links"),
    ("depo", {"n_letters": 3, "n_nodes": 13}, r"n_nodes=13: must be in 3 … 12 \(names of these"),
    ("depo", {"n_letters": 1}, r"n_letters=1: must be in 2 … 65536"),
    ("depo", {"max_name_len": 3}, r"max_name_len=3: must be in 1 … 2 \(≤ 65536 names of up to"),
    ("depo", {"min_name_len": 3}, r"min_name_len=3: must be in 1 … 2 \(max_name_len\)"),
    ("depo", {"n_queries": 41}, r"n_queries=41: must be in 1 … 40 \(n_nodes\)"),
    ("depo", {"min_nodes": (3, 41)}, r"min_nodes=41: must be in 3 … 40 \(n_nodes\)"),
    ("flip_flop", {"seq_len": 2}, "seq_len=2: must be in 4 …"),
    ("flip_flop", {"seq_len": 31}, "seq_len=31: must be even"),
    ("flip_flop", {"p_ignore": 1.5}, r"p_ignore=1\.5: must be in 0 … 1"),
    ("flip_flop", {"p_ignore": float("nan")}, "p_ignore=nan: must be in 0 … 1"),
    ("fuzzy", {"seq_len": 3}, r"seq_len=3: must be in 4 … .*a pair, twice"),
    ("fuzzy", {"vocab_size": 5}, r"vocab_size=5: must be in 6 … 1073741824.*two tokens for keys"),
    ("fuzzy", {"max_key_len": 7}, r"max_key_len=7: must be in 1 … 6 .*\^max_key_len ≤ 1073741824"),
    ("fuzzy", {"vocab_size": 8192}, r"max_key_len=3: must be in 1 … 2 "),
    ("fuzzy", {"seq_len": 6}, r"max_key_len=3: must be in 1 … 2 \(seq_len / 2 − 1"),
    ("fuzzy", {"max_value_len": 126}, r"=126: must be in 1 … 125 \(seq_len / 2 − max_key"),
    ("fuzzy", {"n_pairs": 22}, r"=22: must be in 1 … 21 \(seq_len / \(2·max_key_len \+ 2·max_v"),
    ("fuzzy", {"vocab_size": 32}, r"n_pairs=16: must be in 1 … 15 .*vocab_size / 2 − 1"),
    ("fuzzy", {"max_key_len": (1, 6)}, r"n_pairs=16: must be in 1 … 14"),
    ("grammar", {"n_symbols": 27}, "n_symbols=27: must be in 2 … 26"),
    ("grammar", {"min_rules": 5}, r"min_rules=5: must be in 1 … 4 \(max_rules\)"),
    (
        "grammar",
        {"max_rules": 13},
        r"max_rules=13: .* 3 symbols may have 39 rules, must be ≤ 36, the right-hand sides of 2 ",
    ),
    (
        "grammar",
        {"depth": 8},
        "depth=8: sentences have at least 256 tokens, so none ends in a row, must be < seq_len=256",
    ),
    ("hops", {"hops": 6}, r"hops=6: must be in 1 … 5"),
    ("hops", {"seq_len": 16}, r"seq_len=16: must be in 17 … .*hops \+ 2 pairs and slots"),
    ("hops", {"n_pairs": 3}, r"n_pairs=3: must be in 4 … 63 \(hops \+ 2; \(seq_len − 1\) / 4\)"),
    ("hops", {"hops": (2, 5), "n_pairs": 6}, r"n_pairs=6: must be in 7 … 63"),
    ("hops", {"vocab_size": 37}, r"vocab_size=37: must be in 38 … 1073741824 \(n_pairs \+ 6\)"),
    ("induction", {"seq_len": 2}, "seq_len=2: must be in 3 … 1048576"),
    ("induction", {"vocab_size": 2}, "vocab_size=2: must be in 3 … 1073741824"),
    ("regression", {"seq_len": 2}, "seq_len=2: must be in 4 … 4096"),
    ("regression", {"seq_len": 31}, "seq_len=31: must be even"),
    ("regression", {"n_dims": 0}, "n_dims=0: must be in 1 … 1024"),
    ("regression", {"active_dims": 21}, r"active_dims=21: must be in 1 … 20 \(n_dims\)"),
    ("regression", {"n_dims": (2, 3)}, "n_dims: rows have vectors of 3, 4 numbers, must be one"),
    ("joint_recall", {"seq_len": 20}, r"seq_len=20: must be in 21 … .*two contexts with two keys"),
    ("joint_recall", {"n_keys": 32}, r"n_keys=32: must be in 2 … 31 \(room for two contexts\)"),
    ("joint_recall", {"n_contexts": 10}, r"=10: must be in 2 … 9 \(.seq_len − 1. / .4·n_keys \+ 2"),
    ("joint_recall", {"vocab_size": 25}, r"vocab_size=25: must be in 26 … .*a third keys"),
    ("language", {"seq_len": 1}, r"seq_len=1: must be in 2 … 1048576"),
    ("language", {"max_states": 65}, r"max_states=65: must be in 2 … 64"),
    ("language", {"max_states": 3}, r"min_states=4: must be in 2 … 3 \(max_states\)"),
    ("language", {"n_symbols": 3}, r"n_symbols=3: must be in 4 … 1048576"),
    ("language", {"min_strings": 21}, r"min_strings=21: must be in 2 … 20 \(max_strings\)"),
    ("language", {"max_strings": 1025}, r"max_strings=1025: must be in 2 … 1024"),
    ("language", {"max_length": 0}, r"max_length=0: must be in 1 … 1024"),
    ("mano", {"seq_len": 4}, r"seq_len=4: must be in 5 … .*room for one operation"),
    ("mano", {"length": 15}, r"length=15: must be in 1 … 14 \(\(seq_len − 3\) / 2\)"),
    ("mano", {"length": 33, "seq_len": 90}, r"length=33: must be in 1 … 32"),
    ("mano", {"exact_length": 14}, r"exact_length=14: must be in 1 … 13 \(length\)"),
    ("mano", {"modulus": 1}, r"modulus=1: must be in 2 … 32768"),
    ("mano", {"operators": "/"}, r"operators='/': must be one of \+, \+-, \+-\*, \+-\*/"),
    (
        "mano",
        {"operators": "+-*/", "modulus": 91},
        r"modulus=91: must be prime where operators have /; 7 divides it",
    ),
    ("memorize", {"n_facts": 0}, "n_facts=0: must be in 1 … 1048576"),
    ("memorize", {"vocab_size": 4}, "vocab_size=4: must be in 6 …"),
    ("memorize", {"vocab_size": 9}, "vocab_size=9: must be even"),
    ("memorize", {"seq_len": 2}, r"seq_len=2: must be in 3 … 1048576 \(a fact takes 3 tokens\)"),
    ("mqar", {"seq_len": 2}, r"seq_len=2: too short, must be ≥ 4"),
    ("mqar", {"seq_len": 2**18, "vocab_size": 2**20}, r"=262144: too long, must be ≤ 131072"),
    ("mqar", {"seq_len": 33}, r"seq_len=33: must be even"),
    ("mqar", {"vocab_size": 256}, r"vocab_size=256: must be > seq_len=256"),
    ("mqar", {"vocab_size": 2**31}, r"vocab_size=2147483648: .* ≤ 1073741824"),
    ("mqar", {"vocab_size": 301}, r"vocab_size=301: must be even"),
    ("mqar", {"n_pairs": 65}, r"n_pairs=65: must be in 1 … 64 .*longer seq_len"),
    ("mqar", {"n_pairs": (4, 65)}, r"n_pairs=65: must be in 1 … 64"),
    ("mqar", {"n_pairs": Schedule(1, 65, rows=10)}, r"n_pairs=65: must be in 1 … 64"),
    ("mqar", {"n_pairs": ()}, r"n_pairs=\(\): must name at least one value"),
    ("mqar", {"n_pairs": 2.5}, "n_pairs=2.5: must be a whole number"),
    ("mqar", {"n_pairs": True}, "n_pairs=True: must be a whole number"),
    ("mqar", {"n_pairs": (4, "4")}, "n_pairs='4': must be a whole number"),
    (
        "mqar",
        {"n_pairs": tuple(range(1, 65)), "power": tuple(0.01 * i for i in range(1, 66))},
        rf"n_pairs, power: make 4160 settings together, must be ≤ {MAX_SETTINGS}",
    ),
    ("mqar", {"power": 0.0}, r"power=0\.0: must be > 0"),
    ("mqar", {"power": float("nan")}, r"power=nan: must be > 0 and finite"),
    ("mqar", {"power": "x"}, "power='x': must be a number"),
    ("mqar", {"fillers": "none"}, r"fillers='none': must be one of any, fresh, zero"),
    ("overwrite", {"seq_len": 3}, r"seq_len=3: must be in 4 … "),
    ("overwrite", {"rewrites": 127}, r"rewrites=127: must be in 0 … 126 \(seq_len / 2 − 2\)"),
    ("overwrite", {"n_pairs": 26}, r"=26: must be in 1 … 25 \(seq_len / \(2·rewrites \+ 4\)\)"),
    ("overwrite", {"spacing": 17}, r"spacing=17: must be in 1 … 16 \(n_pairs\)"),
    ("overwrite", {"vocab_size": 127}, r"=127: must be in 128 … .*as many values as writes"),
    ("overwrite", {"rewrites": 0, "vocab_size": 33}, r"vocab_size=33: must be in 34 … "),
    ("palindrome", {"seq_len": 0}, "seq_len=0: must be in 2 …"),
    ("palindrome", {"seq_len": 31}, "seq_len=31: must be even"),
    ("palindrome", {"vocab_size": 2}, "vocab_size=2: must be in 3 …"),
    ("selective_copy", {"seq_len": 1}, "seq_len=1: must be in 2 …"),
    ("selective_copy", {"n_tokens": 0}, "n_tokens=0: must be in 1 … 128"),
    ("selective_copy", {"seq_len": 31}, r"n_tokens=16: must be in 1 … 15 \(seq_len / 2\)"),
    ("selective_copy", {"vocab_size": 3}, "vocab_size=3: must be in 4 …"),
    ("sort", {"seq_len": 31}, "seq_len=31: must be even"),
    ("sort", {"vocab_size": 2}, "vocab_size=2: must be in 3 …"),
    ("stack", {"seq_len": 5}, r"seq_len=5: must be in 6 … 1048576 \(a push and a pop\)"),
    ("stack", {"vocab_size": 7}, "vocab_size=7: must be in 8 …"),
    ("stack", {"n_stacks": 0}, "n_stacks=0: must be in 1 … 125"),
    ("stack", {"vocab_size": 20}, r"n_stacks=8: must be in 1 … 7 \(vocab_size / 2 − 3\)"),
    ("word_problem", {"group": "A4"}, "group='A4': must be one of Z2, Z60, S3, S4, S5, A5"),
    ("word_problem", {"group": "Z1"}, "group=Z1: n of Zn must be in 2 … 1024"),
    ("word_problem", {"seq_len": 1}, "seq_len=1: must be in 2 … 1048576"),
]


@pytest.mark.parametrize(("name", "options", "words"), BAD)
def test_bad_options_are_named(unchecked, name: str, options: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        TASKS[name](**options)
    with pytest.raises(ValueError, match=rf"unknown option 'seqlen' of {name}\. Did you mean seq_"):
        TASKS[name]().replace(seqlen=3)


@pytest.mark.parametrize(("name", "options"), PAIRS, ids=str)
def test_a_row_as_text_is_the_row_again(name, options):
    batch = (task := TASKS[name](**options)).batch(split="test", size=2)
    for part, row in zip(task.list_tasks(batch), batch.inputs, strict=True):
        shown = part.to_str_tokens(row)
        assert len(shown) == len(row)
        if task.vectors:
            with pytest.raises(ValueError, match=f"text: rows of {name} are vectors"):
                part.to_tokens(shown)
            continue
        assert torch.equal(part.to_tokens(shown), row[None])
        assert torch.equal(part.to_tokens(" ".join(shown)), row[None])


def test_a_word_that_is_no_token_says_so():
    task = TASKS["copy"](seq_len=8, vocab_size=5)
    assert task.to_tokens("3 | 4").tolist() == [[3, task.to_tokens("|").item(), 4]]
    with pytest.raises(ValueError, match="text: '9' is not a token of copy"):
        task.to_tokens("3 9")


def test_every_shortcut_has_a_meaning_in_words_and_no_meaning_is_left_over():
    names = {name for task in TASKS.values() for name in task().shortcuts()}
    assert names == MEANINGS.keys()
