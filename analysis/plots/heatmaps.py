"""The picture of a matrix, under its earlier name."""

from analysis.figures.picture import *  # noqa: F403
