"""What the tests of single rows share: each row of the errata, run once."""

from collections.abc import Callable
from functools import cache

import pytest

from lab.errata import ERRATA, Erratum

Run = Callable[[str], Erratum]


@pytest.fixture(scope="session")
def erratum() -> Run:
    """Run a row the first time it is asked for. Whether it is confirmed: `test_errata.py`."""
    return cache(lambda row: ERRATA[row]())
