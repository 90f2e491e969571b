"""How a run trained and what it reached."""
