"""What a picture shows, read from its file or from its figure."""

from pathlib import Path

import matplotlib.image
import numpy as np
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle


def pixels_of(path: Path, color: str) -> int:
    """Count the pixels of a colour; the file must be a picture."""
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    picture = matplotlib.image.imread(path)
    assert picture.shape[0] > 200
    assert picture.shape[1] > 600
    return int((np.abs(picture[..., :3] - to_rgb(color)).max(axis=-1) < 0.02).sum())


def bars(figure: Figure, place: int, color: str) -> list[tuple[float, float, float]]:
    """Return (row, from, to) of the bars of a colour."""
    return [_span(p) for p in _rectangles(figure, place) if _is(p, color)]


def hatched(figure: Figure, place: int) -> list[tuple[float, float, float]]:
    """Return (row, from, to) of the hatched bars."""
    return [_span(p) for p in _rectangles(figure, place) if p.get_hatch()]


def texts(figure: Figure) -> set[str]:
    """Return all that is written in a figure."""
    return {text.get_text() for text in figure.findobj(lambda a: hasattr(a, "get_text"))}


def _rectangles(figure: Figure, place: int) -> list[Rectangle]:
    return [p for p in figure.axes[place].patches if isinstance(p, Rectangle)]


def _is(patch: Rectangle, color: str) -> bool:
    return bool(to_hex(patch.get_facecolor()) == color.lower())


def _span(patch: Rectangle) -> tuple[float, float, float]:
    left = patch.get_x()
    middle = patch.get_y() + patch.get_height() / 2
    return round(middle, 6), round(left, 6), round(left + patch.get_width(), 6)
