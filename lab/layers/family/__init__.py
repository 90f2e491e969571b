"""The mixers of 2020–2026, a file each; most hold a matrix as state (`lab.layers.recurrence`)."""
