"""Sweeps: many runs, resumable and in several processes, and one tidy table of them."""

from lab.sweeps.sweep import Cell, Sweep

__all__ = ["Cell", "Sweep"]
