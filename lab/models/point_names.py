"""Short names of hook points, as in TransformerLens: `"pattern", 1` for the pattern of block 1."""

import re
from collections.abc import Collection
from typing import Any

from lab.hooks import to_own_name
from tasks.near_names import find_near

Key = str | tuple[Any, ...]
"""A point's name, or (name, layer) or (name, layer, part): "pattern", 1 or "scale", 0, "ln1"."""

SHORT = {
    "attn": "pattern",
    "attn_logits": "attn_scores",
    "query": "q",
    "key": "k",
    "value": "v",
    "mlp_pre": "pre",
    "mlp_post": "post",
}
"""TransformerLens's other names of points."""
PARTS = {"a": "attn", "attention": "attn", "m": "mlp", "b": "", "block": "", "blocks": ""}
"""TransformerLens's other names of a block's parts."""


def find_name(names: Collection[str], key: Key, n_layers: int) -> str:
    """Return the full name that a key stands for.

    Args:
        names: the full names to choose from.
        key: a full name, the lab's or TransformerLens's, or a short one.
        n_layers: blocks of the model; negative layers count from the end.

    Raises:
        KeyError: when there is none, or when several have this short name.
    """
    if isinstance(key, str):
        own = to_own_name(key)
        if key in names or own in names:
            return key if key in names else own
    last, layer, part = _parse(key, n_layers)
    found = [known for known in names if _matches(known, last, layer, part)]
    depth = min((known.count(".") for known in found), default=0)
    found = [known for known in found if known.count(".") == depth]
    if len(found) > 1:
        raise KeyError(f"{key}: may be {' or '.join(found)}; give the part, such as 'ln1'")
    if not found:
        inside = [known for known in names if known.startswith("blocks.") and _ends(known, last)]
        if layer is None and inside:
            example = last.removeprefix("hook_"), int(inside[0].split(".")[1])
            raise KeyError(f"{key}: give its block, too, as in {example}")
        near = find_near(f"blocks.{layer}.{last}", names)
        if layer is None:
            near = find_near(last, {known.rpartition(".")[2] for known in names})
        raise KeyError(f"{key}: no such tensor was kept; near names: {', '.join(near) or 'none'}")
    return found[0]


def find_pattern_blocks(key: Key, n_layers: int) -> list[int]:
    """Return the blocks whose attention patterns a key may stand for; none for another key."""
    if isinstance(key, str):
        match = re.fullmatch(r"blocks\.(\d+)\.mixer\.hook_pattern", to_own_name(key))
        if match is not None:
            return [int(match[1])]
    last, layer, _ = _parse(key, n_layers)
    if last != "hook_pattern":
        return []
    return list(range(n_layers)) if layer is None else [layer]


def _parse(key: Key, n_layers: int) -> tuple[str, int | None, str | None]:
    """Return what a short name stands for: the point's last name, the block, and its part.

    Raises:
        KeyError: for a key of another form.
    """
    if isinstance(key, str):
        match = re.fullmatch(r"([A-Za-z_]+?)(\d+)(\w*)", key)
        key = (key,) if match is None else (match[1], int(match[2]), match[3] or None)
    parts: list[Any] = [*(key if isinstance(key, tuple) else (key,)), None, None]
    name, layer, part = parts[:3]
    if not isinstance(name, str) or not isinstance(layer, int | None):
        raise KeyError(f"{key}: must be a name, (name, layer) or (name, layer, part)")
    if layer is not None and layer < 0:
        layer += n_layers
    return f"hook_{SHORT.get(name, name)}", layer, part


def _matches(known: str, last: str, layer: int | None, part: str | None) -> bool:
    """Whether a point has this last name, in this block (None: in none) and this part of it."""
    way = known.split(".")[:-1]
    blocks = [] if layer is None else ["blocks", str(layer)]
    inside = way[len(blocks) :]
    if (
        not _ends(known, last)
        or way[: len(blocks)] != blocks
        or (layer is None and "blocks" in way)
    ):
        return False
    if part is None:
        return True
    own = to_own_name(PARTS.get(part, part))
    return inside[:1] == [own] if own else not inside


def _ends(known: str, last: str) -> bool:
    """Whether a point has this last name."""
    return known.rpartition(".")[2] == last
