"""The committed tables of the studies hold the runs that today's studies ask for."""

from pathlib import Path

import polars as pl
import pytest

from lab.api.options import SweepOptions
from lab.api.sweeping import SweepJob
from lab.studies import capacity, recall, trainability, trainability_ssd

RESULTS = Path(__file__).parents[3] / "docs" / "results"
STUDIES = {
    "capacity": capacity,
    "recall": recall,
    "trainability": trainability,
    "trainability-ssd": trainability_ssd,
}


@pytest.mark.parametrize("name", STUDIES)
def test_every_run_of_a_committed_table_counts(name, tmp_path):
    """If the options of a study change, its printed command no longer shows the runs of its table.

    A changed default that no study sets is not seen: `Run.settings` leaves out defaults.
    """
    study, file = STUDIES[name].build_study(), RESULTS / f"{name}.csv"
    found = SweepJob(study, tmp_path, SweepOptions(table=file)).read_earlier()
    table = pl.read_csv(file).drop_nulls("settings")
    assert len(table) > 0
    assert not found.others
    assert sum(map(len, found.rows.values())) == len(table)
