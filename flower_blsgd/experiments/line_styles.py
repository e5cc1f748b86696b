"""How each algorithm looks in every picture: colour, kind of line, mark."""

from dataclasses import dataclass

from ..results.picture_style import BLUE, DARK, GREEN, ORANGE, PURPLE, VERMILION

_SKY = "#56B4E9"
_SOLID, DASHED, _DOTTED = "-", (0, (5, 1.5)), (0, (1, 1))

LineKind = str | tuple[int, tuple[float, ...]]


@dataclass(frozen=True)
class LineStyle:
    """Colour, kind of line and mark, as matplotlib names them."""

    color: str
    line: LineKind
    marker: str


# Solid: several local steps between averages; dashed: an average after every step. The colours
# are Okabe and Ito's, so within a kind all can be told apart with any kind of colour vision.
_STYLES = {
    "biased-local-sgd": LineStyle(GREEN, _SOLID, "o"),
    "unbiased-local-sgd": LineStyle(BLUE, _SOLID, "s"),
    "weighted-local-sgd": LineStyle(ORANGE, _SOLID, "^"),
    "sampled-local-sgd": LineStyle(PURPLE, _SOLID, "D"),
    "balanced-local-sgd": LineStyle(VERMILION, _SOLID, "v"),
    "fast-only-local-sgd": LineStyle(DARK, _SOLID, "P"),
    "fednova": LineStyle(_SKY, _SOLID, "X"),
    "sync-sgd": LineStyle(BLUE, DASHED, "<"),
    "sync-sgd-fast-only": LineStyle(DARK, DASHED, ">"),
    "byteps": LineStyle(ORANGE, DASHED, "p"),
    "dlb": LineStyle(VERMILION, DASHED, "h"),
}
_OTHER_COLORS = (PURPLE, GREEN, _SKY, BLUE, ORANGE, VERMILION, DARK)


def styles_of(algorithms: list[str]) -> dict[str, LineStyle]:
    """Return the looks by name; one that we do not know is dotted."""
    unknown = [name for name in algorithms if name not in _STYLES]
    other = {
        name: LineStyle(_OTHER_COLORS[place % len(_OTHER_COLORS)], _DOTTED, "*")
        for place, name in enumerate(unknown)
    }
    return {name: _STYLES.get(name) or other[name] for name in algorithms}
