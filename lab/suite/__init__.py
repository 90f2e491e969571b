"""The task suite as a whole: its table, its audit, its export."""
