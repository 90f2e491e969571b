"""The mixers of 2020–2026 that hold a matrix as state, a file each (`lab.layers.recurrence`)."""
