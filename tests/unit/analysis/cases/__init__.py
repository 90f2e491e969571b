"""Findings that are planted by hand, a file for each room of `analysis/`."""
