"""The theme, under its earlier name."""

from analysis.figures.theme import *  # noqa: F403
