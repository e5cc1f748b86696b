"""The paper's figures: their series, worked by hand from made runs."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from flower_blsgd.config import RunConfig
from flower_blsgd.experiments.comparison import Run, read_run
from flower_blsgd.paper.figures import (
    draw_features,
    draw_learning_curves,
    draw_schedule,
    draw_timing,
)
from flower_blsgd.results.folder import RunFolder

from ..experiments.fake_training import write_run
from ..experiments.made_runs import made_run
from ..results.drawings import bars, texts
from ..results.records import record, row

PATH = Path("nowhere.png")  # nothing is saved
COMPUTE, WAIT, MOVE = "#0072B2", "#E69F00", "#BBBBBB"
FAST = {"compute_seconds": 1.0, "waiting_seconds": 2.0, "completed_steps": 4}
SLOW = {"fast": False, "compute_seconds": 3.0, "completed_steps": 4}


def folder_of(out: Path, longer: float = 1.0, clock: str = "wall") -> Path:
    """Write a run of three rounds of 4 s: the first one warms up, and took longer."""
    workers = [
        {"device": f"cpu:{n}", "seconds_per_step_alone": alone} for n, alone in ((0, 0.5), (1, 1))
    ]
    folder = write_run(RunConfig(out=str(out)), workers=workers, clock=clock, device_seconds=12.0)
    for number in (1, 2, 3):
        scale = 5 if number == 1 else longer
        fast, slow = (
            {k: v * scale if "seconds" in k else v for k, v in d.items()} for d in (FAST, SLOW)
        )
        rows = [row(0, start_seconds=0.5, **fast), row(1, start_seconds=0.5, **slow)]
        RunFolder(folder).add_round(record(*rows, round=number, round_seconds=4.0 * scale))
    return folder


def run_of(folder: Path) -> Run:
    run = read_run(folder)
    assert run is not None
    return run


def test_learning_curves_over_epochs_and_seconds(figures: list[Figure]) -> None:
    runs = {
        "sync-sgd": [
            made_run(seed=0, accuracies=(0.5, 0.8)),
            made_run(seed=1, accuracies=(0.6, 0.9)),
        ],
        "another": [made_run(seed=0, accuracies=(None, 0.7), seconds_per_epoch=3.0)],
    }
    draw_learning_curves(runs, PATH)
    epochs, seconds = figures[0].axes
    for axes, ends in ((epochs, ([1, 2], [2])), (seconds, ([2, 4], [6]))):
        for line, x, y in zip(axes.lines, ends, ([55, 85], [70]), strict=True):
            np.testing.assert_allclose(line.get_xdata(), x)
            np.testing.assert_allclose(line.get_ydata(), y)
    assert (epochs.get_ylabel(), seconds.get_xlabel()) == ("test accuracy (%)", "training time (s)")
    (legend,) = figures[0].legends
    assert [text.get_text() for text in legend.get_texts()] == list(runs)
    assert len({line.get_color() for line in epochs.lines}) == 2


def test_features_have_a_bar_a_deviation_and_a_dot_per_seed(figures: list[Figure]) -> None:
    finals = {"unbiased-local-sgd": (0.60, 0.62, 0.64), "dlb": (0.70, 0.70, 0.70)}
    runs = {
        label: [made_run(seed=seed, accuracies=[a]) for seed, a in enumerate(accuracies)]
        for label, accuracies in finals.items()
    }
    draw_features(runs, PATH)
    (axes,) = figures[0].axes
    # 12 % of the span of 10 points below 60, the lowest
    assert axes.get_ylabel() == "final test accuracy (%), axis starts at 58.8"
    tops = [patch.get_y() + patch.get_height() for patch in axes.patches]  # type: ignore[attr-defined]
    assert tops == pytest.approx([62, 70])
    assert {"62.00", "70.00", "unbiased", "dlb"} <= texts(figures[0])
    np.testing.assert_allclose(axes.collections[0].get_segments()[0][:, 1], [60, 64])  # type: ignore[attr-defined]


def test_timing_on_both_clocks(tmp_path: Path, figures: list[Figure]) -> None:
    """Of 4 s (the second seed: 8 s) a round: 1 and 3 s computing, 2 s waiting, the rest moving."""
    seeds = [run_of(folder_of(tmp_path / str(n), longer=n)) for n in (1, 2)]
    draw_timing({"dlb": seeds}, PATH)
    (figure,) = figures
    assert bars(figure, 0, COMPUTE) == [(0, 0, 1.5), (1, 0, 4.5)]
    assert bars(figure, 0, WAIT) == [(0, 1.5, 4.5), (1, 4.5, 4.5)]
    assert bars(figure, 0, MOVE) == [(0, 0, 6), (1, 0, 6)]  # below the others
    assert figure.axes[0].get_xlabel() == "time per round (s)"
    assert {"dlb", "fast-0 (cpu:0)", "waiting for the last worker"} <= texts(figure)
    # Alone 4 steps take 2 and 4 s; of 4 s measured 3 were computing, so 1 s is moved.
    draw_timing({"dlb": [run_of(folder_of(tmp_path / "device", clock="device"))]}, PATH)
    assert bars(figures[1], 0, COMPUTE) == [(0, 0, 2), (1, 0, 4)]
    assert bars(figures[1], 0, WAIT) == [(0, 2, 4), (1, 4, 4)]
    assert bars(figures[1], 0, MOVE) == [(0, 0, 5), (1, 0, 5)]
    assert "simulated devices" in figures[1].axes[0].get_xlabel()


def test_schedule_has_one_axis_of_time(tmp_path: Path, figures: list[Figure]) -> None:
    unknown = folder_of(tmp_path / "c")
    (unknown / "rounds.jsonl").unlink()
    runs = {
        "long": [run_of(folder_of(tmp_path / "a", longer=2))],
        "short": [run_of(folder_of(tmp_path / "b"))],
        "none": [run_of(unknown)],
    }
    draw_schedule(runs, PATH)
    (figure,) = figures
    assert [axes.get_xlim() for axes in figure.axes] == [(0, 16), (0, 16)]
    # Worker 0 is on top; the first of the three rounds is left out.
    assert bars(figure, 0, COMPUTE) == [
        (1, 0.5, 2.5),
        (0, 0.5, 6.5),
        (1, 8.5, 10.5),
        (0, 8.5, 14.5),
    ]
    assert bars(figure, 1, COMPUTE) == [(1, 0.5, 1.5), (0, 0.5, 3.5), (1, 4.5, 5.5), (0, 4.5, 7.5)]
    assert {"long, from round 2", "short, from round 2"} <= texts(figure)
    draw_schedule({"none": runs["none"]}, PATH)
    assert "the times of the rounds are unknown" in texts(figures[1])
