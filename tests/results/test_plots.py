"""The pictures of a run: accuracy, chosen samples, and how long each worker waited."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from flower_blsgd.results.folder import EpochRow
from flower_blsgd.results.plots import draw_learning_curve, draw_sampling, draw_timeline

from .drawings import bars, hatched, texts
from .records import epoch, nothing_recorded, record, row, stats, two_rounds

NAN = float("nan")
COMPUTE, WAIT, MOVE = "#0072B2", "#E69F00", "#BBBBBB"


def test_learning_curve(tmp_path: Path, figures: list[Figure]) -> None:
    rows = [epoch(n, accuracy=a) for n, a in ((1, 0.5), (2, None), (3, 0.9), (4, 0.8))]
    path = tmp_path / "learning_curve.png"
    draw_learning_curve(rows, "biased-local-sgd, digits", path)

    (figure,) = figures
    left, right = figure.axes
    # An epoch that was not evaluated is left out, on both axes.
    np.testing.assert_allclose(left.lines[0].get_xydata(), [(1, 50), (3, 90), (4, 80)])
    np.testing.assert_allclose(right.lines[0].get_xydata(), [(2, 50), (6, 90), (8, 80)])
    assert (left.get_xlabel(), left.get_ylabel()) == ("epoch", "test accuracy (%)")
    assert right.get_xlabel() == "training time (s)"
    assert figure.get_suptitle() == "biased-local-sgd, digits"
    assert {"best 90.0 % in epoch 3 (circle)", "best 90.0 % after 6 s (circle)"} <= texts(figure)
    for axes, where in ((left, 3), (right, 6)):
        assert axes.lines[1].get_ydata()[0] == pytest.approx(90)
        np.testing.assert_allclose(axes.lines[2].get_xydata(), [(where, 90)])
        assert axes.get_xlim()[0] == 0


@pytest.mark.parametrize("rows", [[], [epoch(1, accuracy=None)]], ids=["no epoch", "not measured"])
def test_learning_curve_without_accuracy_says_so(
    tmp_path: Path, figures: list[Figure], rows: list[object]
) -> None:
    path = tmp_path / "learning_curve.png"
    draw_learning_curve(rows, "stopped early", path)  # type: ignore[arg-type]
    assert "no test accuracy was measured" in texts(figures[0])
    assert not any(text.startswith("best") for text in texts(figures[0]))


@pytest.mark.parametrize(
    ("devices", "seconds", "unit"),
    [
        ((0.5, 1.0), [0.5, 1.0], "training time on simulated devices (s, computed)"),
        ((0.5, None), [2.0, 4.0], "training time (s)"),  # not all are known
    ],
)
def test_learning_curve_on_the_device_clock(
    tmp_path: Path,
    figures: list[Figure],
    devices: tuple[float | None, ...],
    seconds: list[float],
    unit: str,
) -> None:
    rows = [epoch(n, device_seconds=device) for n, device in enumerate(devices, 1)]
    draw_learning_curve(rows, "x", tmp_path / "learning_curve.png", "device")
    right = figures[0].axes[1]
    np.testing.assert_allclose(right.lines[0].get_xdata(), seconds)
    assert right.get_xlabel() == unit


# --- sampling


def rows_of(epochs: int, **values: float) -> list[EpochRow]:
    """Return epochs of which the first knows nothing."""
    later = [epoch(n, sampling=stats(**values)) for n in range(2, epochs + 1)]
    return [epoch(1, sampling=nothing_recorded()), *later]


def line(axes: Axes, label: str) -> np.ndarray:
    (found,) = [line for line in axes.lines if line.get_label() == label]
    return np.asarray(found.get_xydata())


def test_sampling_hand_worked(tmp_path: Path, figures: list[Figure]) -> None:
    path = tmp_path / "sampling.png"
    rows = [
        *rows_of(2),
        epoch(3, sampling=stats(fast_picked_loss_mean=1.25, left_out_age_epochs_mean=2.5)),
    ]
    draw_sampling(rows, "biased-local-sgd, digits", path)

    (figure,) = figures
    left, right = figure.axes
    for axes, label, values in (
        (left, "given to fast workers, mean", (1.5, 1.25)),
        (left, "given to slow workers, mean", (1.125, 1.125)),
        (left, "all samples, mean", (1.0, 1.0)),
        (right, "all samples, mean", (0.5, 0.5)),
        (right, "all samples, 90th percentile", (1.0, 1.0)),
        (right, "not given to a fast worker, mean", (1.75, 2.5)),
        (right, "not given to a fast worker, 90th percentile", (3.0, 3.0)),
    ):
        np.testing.assert_allclose(line(axes, label), list(zip((2, 3), values, strict=True)))
    (band,) = [c for c in left.collections if isinstance(c, PolyCollection)]
    assert band.get_label() == "all samples, from the 10th to the 90th percentile"
    corners = band.get_paths()[0].vertices
    assert (corners[:, 1].min(), corners[:, 1].max()) == (0.25, 2.0)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (rows_of(1), "samples are chosen by their losses from the second epoch on"),
        ([epoch(n, sampling=nothing_recorded()) for n in (1, 2)], "no worker reported its losses"),
    ],
)
def test_sampling_with_nothing_to_draw_says_why(
    tmp_path: Path, figures: list[Figure], rows: list[EpochRow], words: str
) -> None:
    path = tmp_path / "sampling.png"
    draw_sampling(rows, "x", path)
    assert any(text.startswith(words) for text in texts(figures[0]))


def test_sampling_leaves_out_lines_of_which_nothing_is_known(
    tmp_path: Path, figures: list[Figure]
) -> None:
    unknown = dict.fromkeys(
        ("slow_picked_loss_mean", "left_out_age_epochs_mean", "left_out_age_epochs_p90"), NAN
    )
    draw_sampling(rows_of(4, **unknown), "x", tmp_path / "sampling.png")
    assert not any("slow" in text or "not given" in text for text in texts(figures[0]))


@pytest.mark.parametrize(
    ("lowest", "easiest", "scale"),
    [
        (0.5, 0.25, "linear"),
        (0.01, 0.0, "log"),
        (0.5, 1e-7, "linear"),  # the easiest samples alone do not ask for it
        (0.0, 0.0, "linear"),
    ],
)
def test_sampling_scale(
    tmp_path: Path, figures: list[Figure], lowest: float, easiest: float, scale: str
) -> None:
    """The 90th percentile is 2."""
    end = stats(all_loss_mean=lowest, slow_picked_loss_mean=lowest, all_loss_p10=easiest)
    draw_sampling([*rows_of(2), epoch(3, sampling=end)], "x", tmp_path / "sampling.png")
    left = figures[0].axes[0]
    assert left.get_yscale() == scale
    bottom, top = left.get_ylim()
    assert bottom < lowest < 2 < top


# --- the timeline


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
    assert {"shares", "computing", "waiting for the last worker", "failed, counts 0"} <= written
    # A share below 15 % has no room for its number.
    assert {"81 %", "25 %", "31 %", "69 %", "19 %"} <= written
    assert "6 %" not in written


def test_timeline_shows_the_last_rounds_only(tmp_path: Path, figures: list[Figure]) -> None:
    rounds = [
        record(row(0, compute_seconds=0.5), round=n + 1, round_seconds=1.0) for n in range(20)
    ]
    draw_timeline(rounds, "many", tmp_path / "timeline.png")
    (figure,) = figures
    assert bars(figure, 0, COMPUTE) == [(0, n, n + 0.5) for n in range(8)]
    assert {"the last 8 of 20 rounds (their numbers on top)", "13", "20"} <= texts(figure)
    assert "12" not in texts(figure)
    assert bars(figure, 1, COMPUTE) == [(0, 0, 50)]


def test_timeline_failures_hand_worked(tmp_path: Path, figures: list[Figure]) -> None:
    """The second worker fails in the last two of three rounds of 10 s."""
    good = row(1, compute_seconds=5.0)
    bad = row(1, failure="the process died")
    rounds = [
        record(row(0, compute_seconds=8.0), second, round=n + 1)
        for n, second in enumerate((good, bad, bad))
    ]
    path = tmp_path / "timeline.png"
    draw_timeline(rounds, "failures", path)
    (figure,) = figures
    assert hatched(figure, 0) == [(0, 10, 20), (0, 20, 30)]
    assert bars(figure, 0, MOVE) == [(1, 0, 10), (0, 0, 10), (1, 10, 20), (1, 20, 30)]
    (share,) = hatched(figure, 1)
    assert share == pytest.approx((0, 100 / 3, 100), abs=1e-5)
    assert {"failed 2x", "failed, counts 0"} <= texts(figure)
