"""Experts: which are used, for what, since when, which are needed, and what each one holds.

Five analyses: `load`, `roles`, `key_map`, `training` and `knockout`, the last with `storage`.
"""
