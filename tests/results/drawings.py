"""What a picture shows, read from its figure."""

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle


def saved_figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Return a list to which every figure is appended instead of being saved, which is slow."""
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: saved.append(self))
    return saved


def bars(figure: Figure, panel: int, color: str) -> list[tuple[float, float, float]]:
    """Return (row, from, to) of the bars of a colour."""
    return [_span(p) for p in _rectangles(figure, panel) if _is(p, color)]


def hatched(figure: Figure, panel: int) -> list[tuple[float, float, float]]:
    """Return (row, from, to) of the hatched bars."""
    return [_span(p) for p in _rectangles(figure, panel) if p.get_hatch()]


def texts(figure: Figure) -> set[str]:
    """Return all that is written in a figure."""
    return {text.get_text() for text in figure.findobj(lambda a: hasattr(a, "get_text"))}


def _rectangles(figure: Figure, panel: int) -> list[Rectangle]:
    return [p for p in figure.axes[panel].patches if isinstance(p, Rectangle)]


def _is(patch: Rectangle, color: str) -> bool:
    return bool(to_hex(patch.get_facecolor()) == color.lower())


def _span(patch: Rectangle) -> tuple[float, float, float]:
    left = patch.get_x()
    middle = patch.get_y() + patch.get_height() / 2
    return round(middle, 6), round(left, 6), round(left + patch.get_width(), 6)
