"""``blsgd watch``: what it shows, and when it ends."""

import io
import os
import pty
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flower_blsgd import files
from flower_blsgd.cli import watch
from flower_blsgd.cli.main import main
from flower_blsgd.cli.watch import curve_columns, curve_lines
from flower_blsgd.config import RunConfig
from flower_blsgd.results.folder import RunFolder
from flower_blsgd.results.live import Curve, LiveRun
from flower_blsgd.results.metric import ACCURACY

from ..results.records import epoch, two_rounds
from .conftest import Printed, Refused

SUMMARY = {
    **{"interrupted": False, "device_seconds": None, "accuracy": 0.75, "metric": None},
    **ACCURACY.description,
    **{"wall_seconds": 20.0, "training_seconds": 16.75},
}
DONE = "done: test accuracy 75.00% after 16.8 s of training (20.0 s with evaluation)"


@pytest.fixture
def digits(folder: Path) -> RunFolder:
    """Return a run that has just begun."""
    run = RunFolder.new("", "digits")
    run.write_config(RunConfig(epochs=4, workers="cpu:0; cpu:1 role=evaluate").to_run_config())
    return run


def test_snapshot_of_rounds_made_by_hand(digits: RunFolder, printed: Printed) -> None:
    for each in two_rounds():
        digits.add_round(each)
    digits.add_epoch(epoch(1, accuracy=0.5))
    digits.add_epoch(epoch(2, accuracy=0.75, wall_seconds=4.0, result_rounds=6, result_seconds=6.5))
    lines = printed("watch")  # runs/latest
    assert max(map(len, lines)) <= 80
    assert lines[0] == "digits-1: recommended on digits"
    assert lines[1].endswith("  epoch 1/4  round 2/2  0:00:50 left")
    assert "accuracy 75.00%, best 75.00% in epoch 2; train loss 1.5" in lines
    assert [line.split() for line in lines if re.match(r"\S+-\d \(|cpu:", line)] == [
        [*["fast-0", "(cpu:0)", "train", "4", "8"], "█" * 15, "░░░░", "69%", "19%"],
        [*["fast-1", "(cpu:1)", "train", "4", "4"], "██████", "░" * 7, "25%", "31%"],
        [*["slow-2", "(cpu:2)", "train", "2", "3"], "█" * 18, "░", "81%", "6%"],
        [*["cpu:1", "evaluate", "epoch", "2,", "2.50", "s", "late"]],
    ]
    assert "last 2 rounds, 17 s" in "\n".join(lines)
    assert lines[2] == "failures: fast-1 (cpu:1) died 1; last in round 2: the process died"


def test_run_that_begins_or_pauses(digits: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def state(idle: float) -> list[str]:
        with monkeypatch.context() as patch:
            patch.setattr(LiveRun, "idle_seconds", idle)
            live = LiveRun(digits.path)
            live.update()
            return watch._state(live)

    assert state(5.0) == ["no round yet, for 0:00:05"]
    digits.add_round(two_rounds()[0])
    assert state(5.0) == ["no failures"]
    assert state(20.4) == ["no failures", "no new round for 0:00:20"]
    line = state(200.0)[1]
    assert line.startswith("no new round for 0:03:20; if the run was killed: ")
    assert line.endswith(f"blsgd run --resume {digits.path}")
    digits.write_config(RunConfig(clock="device", task="train.py").to_run_config())
    lines = state(200.0)
    assert "not those of the simulated devices" in lines[1]
    assert lines[2].endswith(f"blsgd launch --resume {digits.path} train.py ...")


def test_run_that_ended_earlier_is_not_taken_for_a_new_one(
    digits: RunFolder, printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits.write_summary(SUMMARY)
    ended = "this run ended 0:03:10 ago"
    assert ended not in printed("watch")
    monkeypatch.setattr(LiveRun, "idle_seconds", 190.0)
    assert printed("watch")[-1] == ended


@pytest.fixture
def watched(
    digits: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Return a function that watches in a terminal, and calls a function in each pause."""

    def watch(*pauses: Callable[[], object]) -> str:
        left = iter(pauses)
        monkeypatch.setattr(time, "sleep", lambda _: next(left)())
        monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
        monkeypatch.setenv("TERM", "xterm")
        assert main(["watch", "runs/latest"]) == 0
        output = capsys.readouterr()
        assert output.err == ""
        assert "\x1b[?25h" in output.out.rpartition("\x1b[?25l")[2]  # the cursor is back
        return output.out

    return watch


def test_view_follows_a_run_to_its_end(digits: RunFolder, watched: Callable[..., str]) -> None:
    first, second = two_rounds()
    shown = watched(
        lambda: digits.add_round(first),
        lambda: digits.add_round(second),
        lambda: digits.write_summary(SUMMARY),
    )
    at = [shown.index(text) for text in ("no round yet", "round 1/2", "round 2/2", DONE)]
    assert at == sorted(at)


@pytest.mark.parametrize("forced", ["", "1"], ids=["", "rich takes anything for a terminal"])
def test_view_ends_when_its_terminal_is_closed(
    digits: RunFolder, monkeypatch: pytest.MonkeyPatch, forced: str
) -> None:
    master, terminal = pty.openpty()
    pauses = iter([lambda: os.close(master), lambda: None])
    monkeypatch.setattr(time, "sleep", lambda _: next(pauses)())
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    if forced:
        monkeypatch.setenv("FORCE_COLOR", forced)
    monkeypatch.setenv("TERM", "xterm")
    text = io.TextIOWrapper(io.BufferedWriter(io.FileIO(terminal, "wb")), "utf-8")
    for name in ("stdout", "__stdout__"):
        monkeypatch.setattr(sys, name, text)
    files.outlast_readers()
    try:
        assert main(["watch"]) == 0
        sys.stdout.flush()
    finally:
        files.lost_output.clear()


def test_ctrl_c_ends_the_view_alone(digits: RunFolder, watched: Callable[..., str]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    before = sorted(digits.path.iterdir())
    shown = watched(interrupt)
    assert "\x1b[2K" in shown.rpartition("no round yet")[2]  # the lines are removed
    assert sorted(digits.path.iterdir()) == before


def test_what_is_no_run_is_refused(refused: Refused, folder: Path) -> None:
    assert "nowhere is not a run: it has no config.toml" in refused("watch", "nowhere")
    run = folder / "compared" / "sync-sgd-seed0"
    run.mkdir(parents=True)
    (run.parent / "comparison.toml").touch()
    (run / "config.toml").touch()
    line = refused("watch", "compared")
    assert line == (
        "compared is a comparison; name the folder of one of its runs, such as "
        "compared/sync-sgd-seed0"
    )


# --- the curve


@pytest.mark.parametrize(
    ("values", "width", "rows"),
    [
        ([0.0, 1.0, 0.5], 3, [" █▁", "▁██"]),
        ([0.0, 1.0], 9, ["    ████", "▁▁▁▁████"]),
        ([0.0, 2.0, 1.0, 1.0], 2, ["  ", "▁▁"]),  # means of two
        ([3.0, 3.0], 2, ["  ", "▁▁"]),
        ([0.25], 80, ["    ", "▁▁▁▁"]),
        ([0.0, 1.0], 0, [" ", "▁"]),
    ],
)
def test_curve_in_columns(values: list[float], width: int, rows: list[str]) -> None:
    assert curve_columns(values, width, 2) == rows


def test_curve_has_its_ends_at_the_axes() -> None:
    lines = curve_lines(Curve(ACCURACY, "epoch", [1, 2, 12], [0.5, 0.75, 1.0]), 80)
    assert [line[:8] for line in lines] == [" 100.00%", *["        "] * 3, "  50.00%", "        "]
    assert lines[-1] == "         epoch 1   12"
    assert max(map(len, curve_lines(Curve(ACCURACY, "round", range(999), range(999)), 80))) <= 80
