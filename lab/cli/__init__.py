"""The `lab` command. Heavy imports live inside commands, so `lab --help` is quick."""

from lab.cli.app import app, main

__all__ = ["app", "main"]
