"""The record as a whole: every row is there, runs, and is confirmed."""

import json
import re
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

from lab.errata import ERRATA, Erratum, run
from lab.errata.erratum import MINIATURE, catch_refusal
from lab.layers import printed
from lab.models import CLASSES, TRANSFORMS
from lab.models.stack import make_layer
from tests.paper.conftest import Run

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
def test_printed_fails_and_meant_holds(row: str, erratum: Run):
    found = erratum(row)
    assert isinstance(found, Erratum)
    assert found.row == row
    assert found.fails, found.printed_evidence
    assert found.holds, found.meant_evidence
    assert re.search(r"\d", found.printed_evidence), "evidence has numbers"
    assert re.search(r"\d", found.meant_evidence)
    assert json.loads(json.dumps(asdict(found))) == asdict(found)
    torch.manual_seed(12345)
    before = torch.random.get_rng_state()
    assert ERRATA[row]() == found, "the same whatever was drawn before"
    assert torch.equal(torch.random.get_rng_state(), before)


def test_run_chooses_rows_and_refuses_unknown_ones():
    assert [found.row for found in run(["T1", "R2"])] == ["T1", "R2"]
    with pytest.raises(ValueError, match="row='Z9': must be one of R1, R2"):
        run(["R2", "Z9"])


def test_a_refusal_is_the_named_error_in_words_that_do_not_change():
    def shows_a_set() -> None:
        raise RuntimeError("one\ntwo: {'a', 'b'}\n\n")

    assert catch_refusal(ValueError, lambda: int("7")) is None
    assert catch_refusal(ValueError, lambda: int("x")) == (
        "ValueError: invalid literal for int() with base 10: 'x'"
    )
    assert catch_refusal(RuntimeError, silent) == "RuntimeError: without words"
    assert catch_refusal(RuntimeError, shows_a_set) == "RuntimeError: two"
    with pytest.raises(RuntimeError, match="one"):
        catch_refusal(ValueError, shows_a_set)


def silent() -> None:
    raise RuntimeError


def test_listing_the_rows_imports_no_torch():
    code = "import sys, lab.errata; print(len(lab.errata.ERRATA), 'torch' in sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == [str(len(ROWS)), "False"]


def test_rows_that_show_a_miniature_say_so(erratum: Run):
    """Nothing of the lab turns their printed side; the meant side does: `test_verdicts.py`."""
    assert [row for row in ROWS if MINIATURE in erratum(row).note] == ["R4", "S1", "C2"]


@pytest.mark.parametrize("row", ROWS)
def test_options_named_in_a_row_exist(row: str, erratum: Run):
    found = erratum(row)
    for text in (found.printed_option or "", found.meant_option):
        given: dict[str, dict[str, str]] = {}
        for letter, name, value in re.findall(r"--option ([A-Z])\.(\w+)=([\w-]+)", text):
            given.setdefault(letter, {})[name] = value
        for letter, options in given.items():
            cls = {**CLASSES, **TRANSFORMS}[letter]
            assert cls is not None
            make_layer(cls, letter, {"d_model": 128, "n_heads": 2}, options)
        for name in re.findall(r"lab\.layers\.printed:(\w+)", text):
            assert getattr(printed, name) is printed.PRINTED[row]
    assert (row in printed.PRINTED) == (":" in (found.printed_option or ""))
