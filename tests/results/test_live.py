"""What is known of a run while it goes on, from the files in its folder."""

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from flower_blsgd.config import RunConfig
from flower_blsgd.results.folder import RunFolder
from flower_blsgd.results.live import AppendedLines, LiveRun, LiveWorker
from flower_blsgd.results.metric import Metric
from flower_blsgd.strategy.budget import NO_LIMIT

from ..refusal import refusal
from .records import epoch, record, row, two_rounds


def run_folder(path: Path, **settings: Any) -> RunFolder:
    path.mkdir()
    folder = RunFolder(path)
    folder.write_config(RunConfig(**{"epochs": 2, **settings}).to_run_config())
    return folder


def live(folder: RunFolder) -> LiveRun:
    run = LiveRun(folder.path)
    run.update()
    return run


def test_shares_and_speeds_are_those_of_the_last_rounds(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", workers="1x cpu:0 fast; 1x cpu:1 role=evaluate name=eve")
    for each in two_rounds():  # 10.5 s and 6.25 s with planning
        folder.add_round(each)
    run = live(folder)
    assert (run.recent_seconds, len(run.rounds)) == (16.75, 2)
    assert run.workers == [
        LiveWorker("fast-0 (cpu:0)", "train", 4, 128 / 16.75, 11 / 16, 3 / 16),
        LiveWorker("fast-1 (cpu:1)", "train", 4, 64 / 16.75, 4 / 16, 5 / 16),
        LiveWorker("slow-2 (cpu:2)", "train", 2, 48 / 16.75, 13 / 16, 1 / 16),
        LiveWorker("eve (cpu:1)", "evaluate"),
    ]
    assert run.failures == {"fast-1 (cpu:1)": {"died": 1}}
    assert run.last_failure == "round 2: the process died"
    # The first round is no longer needed for 10 s.
    folder.add_round(record(row(0, compute_seconds=1.0), round=3, round_seconds=4.0))
    run.update()
    assert [each.round for each in run.rounds] == [2, 3]
    assert run.workers[0].computing == 6 / 10
    assert run.failures == {"fast-1 (cpu:1)": {"died": 1}}  # of the whole run


def test_worker_that_only_sums_models(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    folder.add_round(record(row(0, False, local_steps=0, summing_seconds=2.5)))
    assert live(folder).workers == [LiveWorker("slow-0 (cpu:0)", "sum", computing=0.25)]


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"epochs": 2}, 0.5),
        ({"epochs": NO_LIMIT, "rounds": 8}, 0.25),
        ({"epochs": NO_LIMIT, "samples": 960}, 0.25),
        ({"epochs": 4, "seconds": 33.5}, 0.5),
        ({"epochs": 4, "seconds": 33.5, "clock": "device"}, 0.25),
        ({"epochs": 1}, 1.0),
    ],
)
def test_time_left_follows_the_budget(
    tmp_path: Path, settings: dict[str, Any], share: float
) -> None:
    folder = run_folder(tmp_path / "run", **settings)
    run = live(folder)
    assert (run.share_done, run.seconds_left) == (0.0, None)
    for each in two_rounds():
        folder.add_round(each)
    # Evaluation takes half as long as training; simulated devices are twice as fast.
    folder.add_epoch(epoch(1, wall_seconds=3.0, training_seconds=2.0, device_seconds=1.0))
    run.update()
    assert run.share_done == share
    assert run.seconds_left == pytest.approx(16.75 * 1.5 * (1 - share) / share)


def test_curve_is_the_metric_and_before_that_the_loss(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    folder.metric = Metric("rmse", "min")
    run = live(folder)
    assert run.curve is None
    for number, loss in enumerate((2.0, float("nan"), 1.0), start=1):
        folder.add_round(record(round=number, train_loss=loss))
    folder.add_epoch(epoch(1, accuracy=None, metric=3.0))
    run.update()
    assert run.curve is not None
    assert (run.curve.metric.name, run.curve.over) == ("train loss", "round")
    assert (run.curve.positions, run.curve.values) == ((1, 3), (2.0, 1.0))
    for number, value in ((2, None), (3, 1.5), (4, 2.5)):
        folder.add_epoch(epoch(number, accuracy=None, metric=value))
    run.update()
    assert (run.curve.metric, run.curve.over) == (Metric("rmse", "min"), "epoch")
    assert (run.curve.positions, run.curve.values) == ((1, 3, 4), (3.0, 1.5, 2.5))


def test_long_runs_have_the_mean_losses_of_parts(tmp_path: Path) -> None:
    run = live(run_folder(tmp_path / "run"))
    run._losses.extend([1.0, 3.0] * 1000)
    assert run.curve is not None
    assert run.curve.positions == tuple(range(2, 2001, 2))
    assert set(run.curve.values) == {2.0}


def test_late_result_replaces_its_line(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    first, second = epoch(1, accuracy=None), epoch(2, accuracy=None)
    folder.write_epochs([first, second])
    run = live(folder)
    assert (run.last_late, run.workers) == (None, [])
    late = dataclasses.replace(first, accuracy=0.75, result_rounds=5, result_seconds=3.5)
    folder.write_epochs([late, second])
    run.update()
    assert [row.get("accuracy") for row in run.epochs] == [0.75, None]
    assert run.last_late == (1, 0.5)
    assert run.workers == [LiveWorker("evaluating worker", "evaluate")]  # known by its results


def test_resumed_run_goes_on_with_its_new_settings(tmp_path: Path) -> None:
    folder, rounds = run_folder(tmp_path / "run"), two_rounds()
    for each in rounds:
        folder.add_round(each)
    folder.add_epoch(epoch(1))
    folder.write_summary({"interrupted": True})
    run = live(folder)
    assert run.summary == {"interrupted": True}
    folder.write_config(RunConfig(epochs=8).to_run_config())
    folder.cut_back(rounds[:1], [])  # as --resume does
    run.update()
    assert run.summary is None
    assert (run.last and run.last.round, run.epochs, run.failures) == (1, [], {})
    assert run.share_done == 0.5 / 8
    folder.add_round(rounds[1])
    run.update()
    assert run.share_done == 1 / 8


def test_folder_that_is_removed_is_refused(tmp_path: Path) -> None:
    run = live(folder := run_folder(tmp_path / "run"))
    shutil.rmtree(folder.path)
    assert run.idle_seconds == 0.0
    assert "is not a run" in refusal(run.update)


def test_line_is_read_when_it_is_complete(tmp_path: Path) -> None:
    lines = AppendedLines(file := tmp_path / "lines")
    assert (lines.began_again(), [*lines.read()]) == (False, [])  # there is no file yet
    file.write_text("one\ntw")
    assert (lines.began_again(), [*lines.read()]) == (False, ["one"])
    with file.open("a") as end:
        end.write("o\nthree\n")
    assert (lines.began_again(), [*lines.read()]) == (False, ["two", "three"])
    os.truncate(file, 4)
    assert (lines.began_again(), [*lines.read()]) == (True, ["one"])
    (tmp_path / "other").write_text("one\ntwo\nthree\nfour\n")
    (tmp_path / "other").replace(file)
    assert (lines.began_again(), [*lines.read()]) == (True, ["one", "two", "three", "four"])
    file.unlink()
    assert (lines.began_again(), [*lines.read()]) == (True, [])
    lines.close()


def test_lines_that_are_no_rounds_and_no_epochs_are_left_out(tmp_path: Path) -> None:
    folder, (first, second) = run_folder(tmp_path / "run"), two_rounds()
    folder.add_round(first)
    folder.add_epoch(epoch(1))
    for name in ("rounds.jsonl", "epochs.csv"):
        with (folder.path / name).open("a") as file:
            file.write('{"round": 2, "ep\n\0\0\n[]\n')
    folder.add_round(second)
    folder.add_round(second)
    folder.add_epoch(epoch(2))
    (folder.path / "summary.json").write_text("{")
    run = live(folder)
    assert [each.round for each in run.rounds] == [1, 2]
    assert [row["epoch"] for row in run.epochs] == [1, 2]
    assert run.summary is None
