"""Estimates, intervals and tests, from arrays alone."""
