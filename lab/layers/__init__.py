"""Layers: one concept a file, plain constructor arguments."""
