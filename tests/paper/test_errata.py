"""The record as a whole: every row is there, runs, and could say otherwise."""

import json
import re
import subprocess
import sys
from dataclasses import asdict
from math import isqrt
from typing import Any

import pytest
import torch

from lab.errata import ERRATA, Erratum, cdmoe, figures, mask, rotation, run, ssd, tables
from lab.errata.erratum import refusal
from lab.layers import printed
from lab.layers.cdmoe import CDMoE
from lab.layers.printed.attention import MaskAfterSoftmaxAttention, PlainAttention
from lab.layers.printed.rotation import skewed_rotation
from lab.layers.printed.ssd import ssd_by_chunk_matrix
from lab.models import MIXERS, TRANSFORMS
from lab.ops.rope import rotate
from lab.stack import make_layer

ROWS = (
    *("R1", "R2", "R3", "R4", "R5", "R6", "R7"),
    *("S1", "S2", "S3", "S4"),
    *("D1", "D2", "D3"),
    *("I1", "I2", "I3", "I4"),
    *("C1", "C2", "C3", "C4", "C5"),
    "T1",
)


def test_every_row_of_the_errata_is_here():
    assert tuple(ERRATA) == ROWS


@pytest.mark.parametrize("row", ROWS)
def test_printed_fails_and_meant_holds(row: str):
    before = torch.random.get_rng_state()
    found = ERRATA[row]()
    assert isinstance(found, Erratum)
    assert found.row == row
    assert found.fails, found.printed_evidence
    assert found.holds, found.meant_evidence
    assert re.search(r"\d", found.printed_evidence), "evidence has numbers"
    assert re.search(r"\d", found.meant_evidence)
    assert json.loads(json.dumps(asdict(found))) == asdict(found)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(12345)
    assert ERRATA[row]() == found, "the same whatever was drawn before"


def test_run_chooses_rows_and_refuses_unknown_ones():
    assert [found.row for found in run(["T1", "R2"])] == ["T1", "R2"]
    with pytest.raises(ValueError, match="row='Z9' must be one of R1, R2"):
        run(["R2", "Z9"])


def test_a_refusal_is_the_named_error_in_words_that_do_not_change():
    def shows_a_set() -> None:
        raise RuntimeError("one\ntwo: {'a', 'b'}\n\n")

    assert refusal(ValueError, lambda: int("7")) is None
    assert refusal(ValueError, lambda: int("x")) == (
        "ValueError: invalid literal for int() with base 10: 'x'"
    )
    assert refusal(RuntimeError, silent) == "RuntimeError: without words"
    assert refusal(RuntimeError, shows_a_set) == "RuntimeError: two"
    with pytest.raises(RuntimeError, match="one"):
        refusal(ValueError, shows_a_set)


def silent() -> None:
    raise RuntimeError


def test_listing_the_rows_imports_no_torch():
    code = "import sys, lab.errata; print(len(lab.errata.ERRATA), 'torch' in sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == [str(len(ROWS)), "False"]


def interleaved(x, positions, base=10000.0):
    return rotate(x, positions, base, "interleaved")


def always(summed: str):
    return lambda *args: ssd_by_chunk_matrix(*args[:-1], summed)  # type: ignore[arg-type]


def normal_keys(*args: Any, key_init: str = "normal", **options: Any) -> CDMoE:
    return CDMoE(*args, **options)


SOUND = {name: (scores, sum(scores) / 7) for name, (scores, _) in figures.AVERAGES.items()}


@pytest.mark.parametrize(
    ("row", "module", "name", "other", "verdict"),
    [
        ("R1", rotation, "skewed_rotation", interleaved, "fails"),
        ("R1", rotation, "rotate", lambda x, j, **_: skewed_rotation(x, j), "holds"),
        ("R5", rotation, "HeadRotatedAttention", PlainAttention, "fails"),
        ("R6", rotation, "dynamic_base", lambda base, *_, **__: base, "fails"),
        ("S2", ssd, "ssd_by_chunk_matrix", always("source"), "fails"),
        ("S2", ssd, "ssd_by_chunk_matrix", always("target"), "holds"),
        ("D2", mask, "MaskAfterSoftmaxAttention", PlainAttention, "fails"),
        ("D2", mask, "PlainAttention", MaskAfterSoftmaxAttention, "holds"),
        ("C3", cdmoe, "CDMoE", normal_keys, "fails"),
        ("C4", cdmoe, "factor", lambda n: (isqrt(n), isqrt(n)), "holds"),
        ("T1", tables, "AVERAGES", SOUND, "fails"),
    ],
)
def test_a_verdict_turns_with_the_code(monkeypatch, row, module, name, other, verdict):
    """The printed reading made right, or the meant one made wrong: the row must say so."""
    monkeypatch.setattr(module, name, other)
    assert getattr(ERRATA[row](), verdict) is False


@pytest.mark.parametrize("row", ROWS)
def test_options_named_in_a_row_exist(row: str):
    found = ERRATA[row]()
    for text in (found.printed_option or "", found.meant_option):
        given: dict[str, dict[str, str]] = {}
        for letter, name, value in re.findall(r"--option ([A-Z])\.(\w+)=([\w-]+)", text):
            given.setdefault(letter, {})[name] = value
        for letter, options in given.items():
            cls = {**MIXERS, **TRANSFORMS}[letter]
            assert cls is not None
            make_layer(cls, letter, {"d_model": 128, "n_heads": 2}, options)
        for name in re.findall(r"lab\.layers\.printed:(\w+)", text):
            assert getattr(printed, name) is printed.PRINTED[row]
    assert (row in printed.PRINTED) == (":" in (found.printed_option or ""))
