"""What a picture shows, read from its figure."""

from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle


def bars(figure: Figure, panel: int, color: str = "") -> list[tuple[float, float, float]]:
    """Return (row, from, to) of the bars of a colour; without one, of the hatched bars."""
    found = []
    for patch in figure.axes[panel].patches:
        assert isinstance(patch, Rectangle)
        if to_hex(patch.get_facecolor()) == color.lower() if color else patch.get_hatch():
            left, middle = patch.get_x(), patch.get_y() + patch.get_height() / 2
            found.append((round(middle, 6), round(left, 6), round(left + patch.get_width(), 6)))
    return found


def texts(figure: Figure) -> set[str]:
    """Return all that is written in a figure."""
    return {text.get_text() for text in figure.findobj(lambda a: hasattr(a, "get_text"))}
