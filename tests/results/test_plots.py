"""The pictures of a run: accuracy, chosen samples, and how long each worker waited."""

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from flower_blsgd.results.folder import EpochRow
from flower_blsgd.results.metric import Metric
from flower_blsgd.results.plots import draw_learning_curve, draw_sampling, draw_timeline
from flower_blsgd.strategy.round_metrics import WorkerRound

from .drawings import bars, texts
from .records import epoch, nothing_recorded, record, row, stats, two_rounds

COMPUTE, WAIT, MOVE = "#0072B2", "#E69F00", "#BBBBBB"
PATH = Path("nowhere.png")  # nothing is saved


def test_learning_curve(figures: list[Figure]) -> None:
    accuracies = ((1, 0.5), (2, None), (3, 0.9), (4, 0.8), (5, math.nan))
    rows = [epoch(n, accuracy=a) for n, a in accuracies]
    draw_learning_curve(rows, "biased-local-sgd, digits", PATH)
    (figure,) = figures
    left, right = figure.axes
    # An epoch that was not evaluated, or to no number, is left out, on both axes.
    np.testing.assert_allclose(left.lines[0].get_xydata(), [(1, 50), (3, 90), (4, 80)])
    np.testing.assert_allclose(right.lines[0].get_xydata(), [(2, 50), (6, 90), (8, 80)])
    assert (left.get_xlabel(), left.get_ylabel()) == ("epoch", "test accuracy (%)")
    assert right.get_xlabel() == "training time (s)"
    assert figure.get_suptitle() == "biased-local-sgd, digits"
    assert {"best 90.0 % in epoch 3 (circle)", "best 90.0 % after 6 s (circle)"} <= texts(figure)


def test_metric_to_minimize_is_drawn_with_its_name_and_its_lowest_value(
    figures: list[Figure],
) -> None:
    rows = [epoch(n, accuracy=None, metric=value) for n, value in ((1, 3.0), (2, 1.0), (3, 1.5))]
    draw_learning_curve(rows, "x", PATH, metric=Metric("rmse", "min"))
    left, _ = figures[0].axes
    np.testing.assert_allclose(left.lines[0].get_xydata(), [(1, 3.0), (2, 1.0), (3, 1.5)])
    np.testing.assert_allclose(left.lines[1].get_xydata(), [(2, 1.0)])
    assert left.get_ylabel() == "test rmse"
    assert left.get_title(loc="left") == "best 1 in epoch 2 (circle)"


@pytest.mark.parametrize(
    ("devices", "seconds", "unit"),
    [
        ((0.5, 1.0), [0.5, 1.0], "training time on simulated devices (s, computed)"),
        ((0.5, None), [2.0, 4.0], "training time (s)"),  # not all are known
    ],
)
def test_learning_curve_on_the_device_clock(
    figures: list[Figure], devices: tuple[float | None, ...], seconds: list[float], unit: str
) -> None:
    rows = [epoch(n, device_seconds=device) for n, device in enumerate(devices, 1)]
    draw_learning_curve(rows, "x", PATH, "device", Metric(split="validation"))
    left, right = figures[0].axes
    assert left.get_ylabel() == "validation accuracy (%)"
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


def test_sampling_hand_worked(figures: list[Figure]) -> None:
    end = stats(fast_picked_loss_mean=1.25, left_out_age_epochs_mean=2.5)
    draw_sampling([*rows_of(2), epoch(3, sampling=end)], "biased-local-sgd, digits", PATH)
    left, right = figures[0].axes
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
    corners = band.get_paths()[0].vertices
    assert (corners[:, 1].min(), corners[:, 1].max()) == (0.25, 2.0)


def test_sampling_with_nothing_to_draw_says_why(figures: list[Figure]) -> None:
    draw_sampling(rows_of(1), "x", PATH)
    assert any(text.startswith("no epoch started with recorded") for text in texts(figures[0]))


def test_axis_of_a_single_epoch_has_whole_numbers(figures: list[Figure]) -> None:
    draw_sampling(rows_of(2), "x", PATH)
    for axes in figures[0].axes:
        low, high = axes.get_xlim()
        assert [tick for tick in axes.get_xticks() if low <= tick <= high] == [2]


# --- names of the user


def test_name_is_drawn_literally(tmp_path: Path) -> None:
    """In a picture's title, in labels, and where the axis is logarithmic."""
    name = r"_a$\frac$ a^{b"
    labelled = record(WorkerRound(0, name, True, 4, completed_steps=4, compute_seconds=5.0))
    draw_timeline([labelled], name, tmp_path / "timeline.png")
    wide = [epoch(n, sampling=stats(all_loss_mean=x)) for n, x in ((1, 1.0), (2, 1e-4))]
    draw_sampling(wide, name, tmp_path / "sampling.svg")
    assert (tmp_path / "timeline.png").stat().st_size
    assert "mathdefault" not in (tmp_path / "sampling.svg").read_text()


# --- the timeline


def test_timeline_hand_worked(figures: list[Figure]) -> None:
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
    draw_timeline(rounds, "two rounds", PATH)
    (figure,) = figures
    # The first worker is on top, at 1; the second one at 0.
    assert bars(figure, 0, COMPUTE) == [(1, 1, 4), (0, 1, 9), (1, 10.5, 11.5), (0, 10.5, 13.5)]
    assert bars(figure, 0, WAIT) == [(1, 4, 9), (1, 11.5, 13.5)]
    assert bars(figure, 0, MOVE) == [(1, 0, 10), (0, 0, 10), (1, 10, 14), (0, 10, 14)]
    assert figure.axes[0].get_xlim() == (0, 14)
    ticks = figure.axes[0].get_yticks(), figure.axes[0].get_yticklabels()
    assert {label.get_text(): tick for tick, label in zip(*ticks, strict=True)} == {
        "fast-0 (cpu:0)": 1,
        "slow-1 (cpu:1)": 0,
    }


def test_timeline_shares_of_the_whole_run(figures: list[Figure]) -> None:
    draw_timeline(two_rounds(), "shares", PATH)
    (figure,) = figures
    # Of 16 s: worker 0 computed 11 and waited 3; worker 1 4 and 5; worker 2 13 and 1.
    assert bars(figure, 1, COMPUTE) == [(0, 0, 81.25), (1, 0, 25), (2, 0, 68.75)]
    assert bars(figure, 1, WAIT) == [(0, 81.25, 87.5), (1, 25, 56.25), (2, 68.75, 87.5)]
    written = texts(figure)
    assert {"shares", "computing", "waiting for the last worker", "failed, weight 0"} <= written
    # A share below 15 % has no room for its number.
    assert {"81 %", "25 %", "31 %", "69 %", "19 %"} <= written
    assert "6 %" not in written


def test_timeline_failures_hand_worked(figures: list[Figure]) -> None:
    """The second worker fails in the last two of three rounds of 10 s."""
    good = row(1, compute_seconds=5.0)
    bad = row(1, failure="the process died")
    rounds = [
        record(row(0, compute_seconds=8.0), second, round=n + 1)
        for n, second in enumerate((good, bad, bad))
    ]
    draw_timeline(rounds, "failures", PATH)
    (figure,) = figures
    assert bars(figure, 0) == [(0, 10, 20), (0, 20, 30)]  # hatched
    assert bars(figure, 0, MOVE) == [(1, 0, 10), (0, 0, 10), (1, 10, 20), (1, 20, 30)]
    (share,) = bars(figure, 1)
    assert share == pytest.approx((0, 100 / 3, 100), abs=1e-5)
    assert {"failed 2x", "failed, weight 0"} <= texts(figure)
