"""Resuming runs that an older version of the lab's protocol began."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lab.config import LAB_WIDEST, TrainConfig


def read_older_defaults(out: Path | None, fields: Iterable[str]) -> dict[str, Any]:
    """Return the values that an older protocol gave to the run in a folder.

    The lab's protocol of today always sets a learning rate for tables, schedule "error" and
    `shortest_len`, and a lower learning rate for models wider than `LAB_WIDEST`. A run of that
    protocol without one of them is older: what its protocol set, or did not know, is then the
    default for options that are not given, so that the same command resumes the run.

    Args:
        out: the run folder; None or a folder without a run has no such values.
        fields: what the protocol sets, fields of `ModelConfig` and `TrainConfig`.
    """
    from lab.files import RunError
    from lab.folder import Folder
    from lab.training.run_folder import RunFolder

    if out is None or not (out / "config.json").exists():
        return {}
    try:
        run = RunFolder.open(out)
    except RunError:  # `RunFolder.claim` reports it
        return {}
    written = Folder(out).read_json("config.json", f"{out} is not a run folder")["train"]
    older = (
        "shortest_len" not in written
        or run.train.table_learning_rate is None
        or run.train.schedule == "constant"
        or (run.model.d_model > LAB_WIDEST and run.train.learning_rate == TrainConfig.learning_rate)
    )
    if run.train.protocol != "lab" or not older:
        return {}
    recorded = {**run.model.to_dict(), **run.train.to_dict()}
    return {name: recorded[name] for name in fields}
