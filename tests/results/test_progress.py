"""What a run shows while it goes on."""

from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from flower_blsgd.results import progress
from flower_blsgd.results.metrics import RunMetrics
from flower_blsgd.results.progress import ProgressView, waiting_text
from flower_blsgd.strategy.round_metrics import RoundRecord

from .records import SPEEDS, epoch, record, row, two_rounds


class Screen:
    """A view, and what it has written."""

    def __init__(self, terminal: bool, epochs: int = 2) -> None:
        self.file = StringIO()
        console = Console(
            file=self.file,
            force_terminal=terminal,
            width=160,
            highlight=False,
            soft_wrap=True,
            color_system=None,
            legacy_windows=False,
        )
        self.view = ProgressView(epochs, console)

    def round(self, one: RoundRecord) -> None:
        metrics = RunMetrics()
        metrics.add(one)
        self.view.round(one, metrics)

    @property
    def text(self) -> str:
        return self.file.getvalue()


class Clock:
    """A clock that only the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: self.now))


def test_elsewhere_one_line_per_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    screen = Screen(terminal=False)
    screen.view.begin()
    first, second = two_rounds()
    clock.now += 10
    screen.round(first)
    assert screen.text == ""
    clock.now += 6
    screen.round(second)
    screen.view.epoch(epoch(1, accuracy=0.9375, train_loss=0.25))
    # Half is done after 16 s; the second round had 96 samples in 6 s.
    assert screen.text == (
        "epoch 1/2  accuracy 93.75%  train loss 0.2500  16 samples/s  "
        "fast waits 0%, slow waits 17%  0:16 left\n"
    )
    screen.view.epoch(epoch(2, accuracy=None))
    screen.view.end()
    screen.view.end()
    assert len(screen.text.splitlines()) == 2
    assert "epoch 2/2  train loss 1.5000" in screen.text
    assert "\x1b" not in screen.text


@pytest.mark.parametrize(
    ("spent", "epoch_number", "round_in_epoch", "left"),
    [
        # 4 epochs of 2 rounds
        (60.0, 1, 1, "7:00"),  # 1/8 done
        (5.0, 3, 2, "0:02"),  # 3/4 done: 1.67 s
        (7_200.0, 2, 2, "2:00:00"),
    ],
)
def test_time_left(
    monkeypatch: pytest.MonkeyPatch,
    spent: float,
    epoch_number: int,
    round_in_epoch: int,
    left: str,
) -> None:
    clock = Clock(monkeypatch)
    screen = Screen(terminal=False, epochs=4)
    screen.view.begin()
    clock.now += 500  # starting the workers does not count
    screen.round(
        record(row(0), epoch=epoch_number, round_in_epoch=round_in_epoch, round_seconds=spent)
    )
    screen.view.epoch(epoch(epoch_number))
    assert screen.text.endswith(f"  {left} left\n")


def test_terminal_has_a_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    screen = Screen(terminal=True)
    screen.view.begin()
    clock.now += 10
    screen.round(two_rounds()[0])
    screen.view.end()
    # 144 samples in 10 s; a quarter is done
    live = "epoch 1/2  round 1/2  14 samples/s  fast waits 40%, slow waits 0%  0:30 left"
    assert live in screen.text
    assert screen.text.index("\x1b[?25l") < screen.text.index(live)  # the cursor is hidden
    assert "\x1b[?25h" in screen.text[screen.text.rindex(live) :]  # and is back
    written = screen.text
    screen.view.end()
    assert screen.text == written


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(
    "line", ["worker [bold]cpu[/bold] [0-3]", "see /data/:fire:/runs/:100:/", "x" * 500]
)
def test_say_writes_the_line_as_it_is(terminal: bool, line: str) -> None:
    """Names, paths and labels come from the user, and mean nothing to the terminal."""
    screen = Screen(terminal)
    screen.view.say(line)
    assert screen.text == line + "\n"


def shares_of(one: RoundRecord, clock: Any = "wall", speeds: Any = None) -> str:
    metrics = RunMetrics(clock)
    metrics.seconds_per_step = speeds or {}
    metrics.add(one)
    return waiting_text(one, metrics.last_times)


@pytest.mark.parametrize(
    ("clock", "speeds", "texts"),
    [
        ("wall", {}, ["fast waits 40%, slow waits 0%", "fast waits 0%, slow waits 17%"]),
        # 1 / (2 x 6) and 1 / 6; then 4 / (2 x 9)
        ("device", SPEEDS, ["fast waits 8%, slow waits 17%", "fast waits 22%, slow waits 0%"]),
        ("device", {}, ["", ""]),
    ],
)
def test_waiting_shares_of_a_round(clock: Any, speeds: dict[int, float], texts: list[str]) -> None:
    assert [shares_of(one, clock, speeds) for one in two_rounds()] == texts


def test_waiting_names_only_tiers_that_train() -> None:
    one = record(row(0, waiting_seconds=1.0), row(1, fast=False, local_steps=0))
    assert shares_of(one) == "fast waits 10%"
