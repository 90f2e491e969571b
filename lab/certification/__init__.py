"""Certifying a module in a separate process, so that a crash or a hang stops only that process."""
