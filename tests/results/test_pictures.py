"""The pictures of a run."""

from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from flower_blsgd.results.pictures import draw_learning_curve, draw_timeline

from .records import epoch, record, row, two_rounds

COMPUTE, WAIT, MOVE, LINE = "#0072B2", "#E69F00", "#BBBBBB", "#009E73"


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Keep the figures that are saved."""
    saved: list[Figure] = []
    save = Figure.savefig

    def keep(self: Figure, *arguments: object, **more: object) -> None:
        saved.append(self)
        save(self, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved


def pixels_of(path: Path, color: str) -> int:
    """Count the pixels of a colour; the file must be a picture."""
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    picture = matplotlib.image.imread(path)
    assert picture.shape[0] > 200
    assert picture.shape[1] > 600
    return int((np.abs(picture[..., :3] - to_rgb(color)).max(axis=-1) < 0.02).sum())


def bars(figure: Figure, place: int, color: str) -> list[tuple[float, float, float]]:
    """Return (row, from, to) of the bars of a colour."""
    found = [
        (p.get_y() + p.get_height() / 2, p.get_x(), p.get_x() + p.get_width())
        for p in figure.axes[place].patches
        if isinstance(p, Rectangle) and to_hex(p.get_facecolor()) == color.lower()
    ]
    return [tuple(round(value, 6) for value in bar) for bar in found]  # type: ignore[misc]


def texts(figure: Figure) -> set[str]:
    return {text.get_text() for text in figure.findobj(lambda a: hasattr(a, "get_text"))}


# --- learning curve -------------------------------------------------------------------------


def test_learning_curve(tmp_path: Path, figures: list[Figure]) -> None:
    rows = [epoch(n, accuracy=a) for n, a in ((1, 0.5), (2, None), (3, 0.9), (4, 0.8))]
    path = tmp_path / "learning_curve.png"
    draw_learning_curve(rows, "biased-local-sgd, digits", path)
    assert pixels_of(path, LINE) > 200

    (figure,) = figures
    left, right = figure.axes
    # An epoch that was not evaluated is left out, on both axes.
    np.testing.assert_allclose(left.lines[0].get_xydata(), [(1, 50), (3, 90), (4, 80)])
    np.testing.assert_allclose(right.lines[0].get_xydata(), [(2, 50), (6, 90), (8, 80)])
    assert (left.get_xlabel(), left.get_ylabel()) == ("epoch", "test accuracy (%)")
    assert right.get_xlabel() == "training time (s)"
    assert figure.get_suptitle() == "biased-local-sgd, digits"
    assert "best 90.0 %" in texts(figure)
    assert left.lines[1].get_ydata()[0] == pytest.approx(90)


@pytest.mark.parametrize("rows", [[], [epoch(1, accuracy=None)]], ids=["no epoch", "not measured"])
def test_learning_curve_without_accuracy(
    tmp_path: Path, figures: list[Figure], rows: list[object]
) -> None:
    path = tmp_path / "learning_curve.png"
    draw_learning_curve(rows, "stopped early", path)  # type: ignore[arg-type]
    assert pixels_of(path, LINE) == 0
    assert not any(text.startswith("best") for text in texts(figures[0]))


def test_learning_curve_of_one_epoch(tmp_path: Path) -> None:
    path = tmp_path / "learning_curve.png"
    draw_learning_curve([epoch(1, accuracy=0.0)], "x", path)
    assert pixels_of(path, LINE) > 10


# --- timeline -------------------------------------------------------------------------------


def test_timeline_hand_worked(tmp_path: Path, figures: list[Figure]) -> None:
    """A round of 10 s, then one of 4 s; the fast worker waits in both."""
    rounds = [
        record(
            row(0, start_seconds=1.0, compute_seconds=3.0, waiting_seconds=5.0),
            row(1, fast=False, start_seconds=1.0, compute_seconds=8.0),
        ),
        record(
            row(0, start_seconds=0.5, compute_seconds=1.0, waiting_seconds=2.0),
            row(1, fast=False, start_seconds=0.5, compute_seconds=3.0),
            round=2,
            round_seconds=4.0,
        ),
    ]
    path = tmp_path / "timeline.png"
    draw_timeline(rounds, "two rounds", path)
    assert pixels_of(path, COMPUTE) > 5_000
    assert pixels_of(path, WAIT) > 5_000
    assert pixels_of(path, MOVE) > 1_000

    (figure,) = figures
    # The first worker is on top, at 1; the second one at 0.
    assert bars(figure, 0, COMPUTE) == [(1, 1, 4), (0, 1, 9), (1, 10.5, 11.5), (0, 10.5, 13.5)]
    waited = [bar for bar in bars(figure, 0, WAIT) if bar[2] > bar[1]]
    assert waited == [(1, 4, 9), (1, 11.5, 13.5)]
    assert bars(figure, 0, MOVE) == [(1, 0, 10), (0, 0, 10), (1, 10, 14), (0, 10, 14)]
    assert figure.axes[0].get_xlim() == (0, 14)
    ticks = figure.axes[0].get_yticks(), figure.axes[0].get_yticklabels()
    assert {label.get_text(): tick for tick, label in zip(*ticks, strict=True)} == {
        "fast-0 (cpu:0)": 1,
        "slow-1 (cpu:1)": 0,
    }


def test_timeline_shares_of_the_whole_run(tmp_path: Path, figures: list[Figure]) -> None:
    draw_timeline(two_rounds(), "shares", tmp_path / "timeline.png")
    (figure,) = figures
    # Of 16 s: worker 0 computed 11 and waited 3; worker 1 4 and 5; worker 2 13 and 1.
    assert bars(figure, 1, COMPUTE) == [(0, 0, 81.25), (1, 0, 25), (2, 0, 68.75)]
    assert bars(figure, 1, WAIT) == [(0, 81.25, 87.5), (1, 25, 56.25), (2, 68.75, 87.5)]
    written = texts(figure)
    # A share below 12 % has no room for its number.
    assert {"81 %", "25 %", "31 %", "69 %", "19 %"} <= written
    assert "6 %" not in written


def test_timeline_labels(tmp_path: Path, figures: list[Figure]) -> None:
    draw_timeline(two_rounds(), "biased-local-sgd, digits", tmp_path / "timeline.png")
    (figure,) = figures
    assert {
        "biased-local-sgd, digits",
        "fast-0 (cpu:0)",
        "fast-1 (cpu:1)",
        "slow-2 (cpu:2)",
        "computing",
        "waiting for the last worker",
        "transfer and averaging",
        "share of the whole run (%)",
        "seconds (last 2 of 2 rounds; a line begins a round)",
    } <= texts(figure)


def test_timeline_shows_the_last_rounds_only(tmp_path: Path, figures: list[Figure]) -> None:
    rounds = [
        record(row(0, compute_seconds=0.5), round=n + 1, round_seconds=1.0) for n in range(20)
    ]
    draw_timeline(rounds, "many", tmp_path / "timeline.png")
    (figure,) = figures
    assert bars(figure, 0, COMPUTE) == [(0, n, n + 0.5) for n in range(8)]
    assert "seconds (last 8 of 20 rounds; a line begins a round)" in texts(figure)
    assert bars(figure, 1, COMPUTE) == [(0, 0, 50)]


def test_timeline_worker_that_left_and_one_that_came(tmp_path: Path, figures: list[Figure]) -> None:
    rounds = [
        record(row(0, compute_seconds=5.0), row(1, failure="gone")),
        record(row(0, compute_seconds=5.0), row(2, fast=False, compute_seconds=2.0), round=2),
    ]
    draw_timeline(rounds, "come and go", tmp_path / "timeline.png")
    (figure,) = figures
    computed = [bar for bar in bars(figure, 0, COMPUTE) if bar[2] > bar[1]]
    assert computed == [(2, 0, 5), (2, 10, 15), (0, 10, 12)]
    assert bars(figure, 1, COMPUTE) == [(0, 0, 10), (1, 0, 0), (2, 0, 50)]
