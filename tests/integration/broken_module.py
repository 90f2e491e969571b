"""A user's module that cannot be imported."""

raise RuntimeError("fails on import")
