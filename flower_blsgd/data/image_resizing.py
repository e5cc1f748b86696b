"""Make an image of any size and kind a square one of three colours."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

_REDUCING_GAP = 2.0
"""A much larger image is first reduced by a whole number, to no less than so many times the size:
faster, and hardly to be told from resizing at once."""

_SIXTEEN_BITS = "I;16"
_NO_KNOWN_WHITE = ("I", "F")
_WHITE, _SIXTEEN_BIT_WHITE = 255, 65535


def squared(image: "Image", side: int) -> tuple["Image", bool]:
    """Return the middle of an image, as RGB of `side` by `side` pixels.

    The shorter side is made `side` long, bilinearly and without aliasing, and of the longer one
    the middle is kept.

    Parameters
    ----------
    image : PIL.Image.Image
        Grey of 8 or 16 bits, with a palette, with transparency (which is dropped), CMYK or RGB;
        if it was only opened, a JPEG is decoded at a fraction of its size where that is large
        enough.
    side : int
        Height and width in pixels.

    Returns
    -------
    tuple
        The square, and whether the image had another size.

    Raises
    ------
    ValueError
        If nothing says which of its values is white.
    """
    from PIL.Image import Resampling

    resized = image.size != (side, side)
    if resized:
        enough = int(side * _REDUCING_GAP)
        image.draft(None, (enough, enough))
    colours = _eight_bits(image).convert("RGB")
    if colours.size != (side, side):
        width, height = colours.size
        shorter = min(width, height)
        left, upper = (width - shorter) / 2, (height - shorter) / 2
        middle = (left, upper, left + shorter, upper + shorter)
        colours = colours.resize(
            (side, side), Resampling.BILINEAR, box=middle, reducing_gap=_REDUCING_GAP
        )
    return colours, resized


def _eight_bits(image: "Image") -> "Image":
    """Return an image whose white is 255; PIL cuts larger values off there."""
    from PIL import Image

    if image.mode in _NO_KNOWN_WHITE:
        raise ValueError(f"its kind {image.mode} (32 bits) does not say what is white")
    if not image.mode.startswith(_SIXTEEN_BITS):
        return image
    values = np.asarray(image).astype(np.uint32)
    rounded = (values * _WHITE + _SIXTEEN_BIT_WHITE // 2) // _SIXTEEN_BIT_WHITE
    return Image.fromarray(rounded.astype(np.uint8))
