"""Pure tensor functions; each has its slow, obvious form beside it, kept as the oracle."""
