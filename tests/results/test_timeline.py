"""The picture of who computed and who waited."""

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from flower_blsgd.results.timeline import draw_timeline

from .drawings import bars, hatched, pixels_of, texts
from .records import record, row, two_rounds

COMPUTE, WAIT, MOVE, FAILED = "#0072B2", "#E69F00", "#BBBBBB", "#D55E00"


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
    # A share below 15 % has no room for its number.
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
        "share of the time (%)",
        "seconds",
        "the last 2 of 2 rounds (their numbers on top)",
        "the whole run",
        "failed, counts 0",
    } <= texts(figure)


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


def test_timeline_worker_that_left_and_one_that_came(tmp_path: Path, figures: list[Figure]) -> None:
    rounds = [
        record(row(0, compute_seconds=5.0), row(1, compute_seconds=4.0)),
        record(row(0, compute_seconds=5.0), row(2, fast=False, compute_seconds=2.0), round=2),
    ]
    draw_timeline(rounds, "come and go", tmp_path / "timeline.png")
    (figure,) = figures
    assert bars(figure, 0, COMPUTE) == [(2, 0, 5), (1, 0, 4), (2, 10, 15), (0, 10, 12)]
    assert bars(figure, 1, COMPUTE) == [(0, 0, 10), (1, 0, 20), (2, 0, 50)]
    # While one is not there, its row is empty.
    assert bars(figure, 1, MOVE) == [(0, 0, 50), (1, 0, 50), (2, 0, 100)]


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
    assert pixels_of(path, FAILED) > 500
    (figure,) = figures
    assert hatched(figure, 0) == [(0, 10, 20), (0, 20, 30)]
    assert bars(figure, 0, MOVE) == [(1, 0, 10), (0, 0, 10), (1, 10, 20), (1, 20, 30)]
    (share,) = hatched(figure, 1)
    assert share == pytest.approx((0, 100 / 3, 100), abs=1e-5)
    assert {"failed 2x", "failed, counts 0"} <= texts(figure)


def test_timeline_without_a_failure_does_not_explain_one(
    tmp_path: Path, figures: list[Figure]
) -> None:
    draw_timeline(two_rounds()[:1], "x", tmp_path / "timeline.png")
    assert not any("failed" in text for text in texts(figures[0]))


@pytest.mark.parametrize(
    ("devices", "starts", "told"),
    [
        (("cpu:0", "cpu:0"), (0.0, 4.0), True),
        (("cpu:0", "cpu:0"), (0.0, 3.0), False),
        (("cpu:0", "cpu:1"), (0.0, 4.0), False),
    ],
    ids=["one after the other", "side by side", "two devices"],
)
def test_timeline_tells_of_a_queue_where_there_may_be_one(
    tmp_path: Path,
    figures: list[Figure],
    devices: tuple[str, str],
    starts: tuple[float, float],
    told: bool,
) -> None:
    rows = [
        replace(row(i, start_seconds=starts[i], compute_seconds=4.0), label=f"x ({devices[i]})")
        for i in (1, 0)
    ]
    draw_timeline([record(*rows)], "x", tmp_path / "timeline.png")
    assert any("queued" in text for text in texts(figures[0])) is told


def test_timeline_long_labels_keep_their_device(tmp_path: Path, figures: list[Figure]) -> None:
    names = [f"gpu-node-{i:02}.rack-7.cluster.example.org" for i in range(10)]
    rows = [
        replace(row(i, compute_seconds=4.0), label=f"{name} (cuda:{i})")
        for i, name in enumerate(names)
    ]
    draw_timeline([record(*rows)], "x", tmp_path / "timeline.png")
    labels = [label.get_text() for label in figures[0].axes[0].get_yticklabels()]
    assert max(len(label) for label in labels) <= 32
    assert len(set(labels)) == 10
    assert labels[-1].startswith("gpu-node-00.rack")
    assert labels[-1].endswith("\N{HORIZONTAL ELLIPSIS} (cuda:0)")


def test_timeline_nothing_overlaps_the_axes(tmp_path: Path, figures: list[Figure]) -> None:
    """The numbers of the rounds stand above the bars, inside the axes."""
    draw_timeline(two_rounds(), "x", tmp_path / "timeline.png")
    left = figures[0].axes[0]
    top = max(p.get_y() + p.get_height() for p in left.patches if isinstance(p, Rectangle))
    numbers = [text for text in left.texts if text.get_text() in ("1", "2")]
    assert [text.get_position()[1] > top for text in numbers] == [True, True]
    assert all(text.get_position()[1] < left.get_ylim()[1] for text in numbers)
