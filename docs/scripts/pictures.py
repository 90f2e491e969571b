"""Pictures small enough to commit."""

from io import BytesIO
from pathlib import Path

from PIL import Image

COLORS = 128
"""Of a palette: a quarter of the bytes, without a difference that one sees."""


def shrink(path: Path) -> None:
    """Reduce a PNG to a palette."""
    packed = BytesIO()
    picture = Image.open(path).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    picture.save(packed, "PNG", optimize=True)
    path.write_bytes(packed.getvalue())
