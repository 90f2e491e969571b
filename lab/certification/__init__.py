"""Certify a module in a process of its own: one that hangs or quits takes nothing with it."""
