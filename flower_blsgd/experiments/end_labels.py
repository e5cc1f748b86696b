"""Names at the ends of lines, where there is room for them."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

_PLACES = (
    ((6, 0), "left", "center"),
    ((0, 6), "right", "bottom"),
    ((0, -6), "right", "top"),
    ((-8, 0), "right", "center"),
)
"""Where a name may stand: its distance from the end in points, and its alignment."""
_SIZE = 8
_FROM_LINES, _FROM_MARKS = 6, 20
"""Pixels between a name and the lines of others, and the marks at their ends."""
_DARKER = 0.7
"""Thin letters in the colours of lines would be hard to read."""


def label_ends(axes: Axes, lines: Mapping[str, Line2D]) -> None:
    """Write each line's name at its end, unless it would lie on a line or on another name.

    Call it last: the room depends on the final layout.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    figure.draw_without_rendering()
    taken: list[Bbox] = []
    drawn = {name: _pixels(axes, line) for name, line in lines.items()}
    for name, line in lines.items():
        end = _corners(line)[-1]
        for offset, across, upright in _PLACES:
            text = axes.annotate(
                name,
                (end[0], end[1]),
                offset,
                textcoords="offset points",
                ha=across,
                va=upright,
                fontsize=_SIZE,
                color=[_DARKER * part for part in to_rgb(line.get_color())],
                annotation_clip=True,
            )
            text.set_in_layout(False)
            box = text.get_window_extent(renderer)
            others = [points for other, points in drawn.items() if other != name]
            if _is_free(box, axes.bbox, taken, drawn[name], others):
                taken.append(box)
                break
            text.remove()


def _corners(line: Line2D) -> NDArray[np.float64]:
    return np.column_stack([np.asarray(line.get_xdata()), np.asarray(line.get_ydata())])


def _pixels(axes: Axes, line: Line2D) -> NDArray[np.float64]:
    """Return points along a line, close to each other, on the canvas."""
    corners = axes.transData.transform(_corners(line))
    along = np.linspace(0, len(corners) - 1, 400)
    places = np.arange(len(corners))
    return np.column_stack([np.interp(along, places, corners[:, axis]) for axis in (0, 1)])


def _is_free(
    box: Bbox,
    inside: Bbox,
    taken: list[Bbox],
    own: NDArray[np.float64],
    others: list[NDArray[np.float64]],
) -> bool:
    within = inside.x0 <= box.x0 and box.x1 <= inside.x1
    within = within and inside.y0 <= box.y0 and box.y1 <= inside.y1
    if not within or box.count_contains(own) or box.count_overlaps(taken):
        return False
    # A name close to another line, or to its mark, would be taken for that line's.
    near, around = box.padded(_FROM_LINES), box.padded(_FROM_MARKS)
    return not any(near.count_contains(line) or around.count_contains(line[-1:]) for line in others)
