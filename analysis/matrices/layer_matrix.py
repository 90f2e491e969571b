"""A layer's matrix, under its earlier name."""

from analysis.matrices import SHOWS, LayerMatrix

__all__ = ["SHOWS", "LayerMatrix"]
