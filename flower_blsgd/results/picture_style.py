"""What the pictures of a run have in common: colours, axes without a frame, how they are saved."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's colours can be told apart with any kind of colour vision.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE = "#CC79A7"
GREY = "#BBBBBB"
DARK = "#555555"

_MANY_POINTS = 40


def plain(axes: Axes) -> None:
    """Take the frame away where no axis is."""
    axes.spines[["top", "right"]].set_visible(False)


def marker_size(points: int) -> float:
    """Return a size at which neighbouring points do not run into one another."""
    return 4.0 if points <= _MANY_POINTS else 1.5


def epochs_below(axes: Axes) -> None:
    """Name the lower axis, and write whole numbers on it."""
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))


def say_instead(axes: Axes, text: str) -> None:
    """Write a text where there is nothing to draw."""
    axes.set_axis_off()
    axes.text(
        0.5, 0.5, text, ha="center", va="center", color=DARK, fontsize=13, transform=axes.transAxes
    )


def save(figure: Figure, path: Path) -> None:
    """Write a PNG file."""
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=130)
