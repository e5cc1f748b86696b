"""What is told while a run goes on."""

import re
from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console

from flower_blsgd.results import progress
from flower_blsgd.results.accounts import Accounts
from flower_blsgd.results.progress import ProgressView
from flower_blsgd.round_log import RoundRecord

from .records import epoch, record, row, two_rounds


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
        accounts = Accounts()
        accounts.add(one)
        self.view.round(one, accounts)

    @property
    def text(self) -> str:
        return self.file.getvalue()


class Clock:
    """Stands still until it is told."""

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
    screen.view.epoch(epoch(2))
    screen.view.end()
    screen.view.end()
    assert len(screen.text.splitlines()) == 2
    assert "\x1b" not in screen.text


def test_epoch_without_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    screen = Screen(terminal=False)
    screen.round(record(row(0, num_examples=20)))
    screen.view.epoch(epoch(1, accuracy=None))
    assert "accuracy" not in screen.text
    assert "train loss 1.5000" in screen.text


def test_epoch_numbers_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    screen = Screen(terminal=False, epochs=120)
    screen.round(record(row(0, num_examples=20)))
    for number in (9, 10, 120):
        screen.view.epoch(epoch(number))
    assert [line[:13] for line in screen.text.splitlines()] == [
        "epoch   9/120",
        "epoch  10/120",
        "epoch 120/120",
    ]


def test_samples_per_second_has_a_thousands_separator() -> None:
    screen = Screen(terminal=False)
    screen.round(record(row(0, num_examples=60_000), row(1, num_examples=64_000)))
    screen.view.epoch(epoch(1))
    assert "12,400 samples/s" in screen.text


@pytest.mark.parametrize(
    ("spent", "epoch_number", "round_in_epoch", "left"),
    [
        # 4 epochs of 2 rounds
        (60.0, 1, 1, "7:00"),  # 1/8 done
        (60.0, 1, 2, "3:00"),  # 1/4 done
        (5.0, 3, 2, "0:02"),  # 3/4 done: 1.67 s
        (7_200.0, 2, 2, "2:00:00"),
        (600.0, 4, 2, "0:00"),
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
    # and the line is taken away: erased, the cursor back
    assert "\x1b[2K" in screen.text[screen.text.rindex(live) :]
    assert "\x1b[?25h" in screen.text[screen.text.rindex(live) :]
    written = screen.text
    screen.view.end()
    assert screen.text == written


def test_terminal_keeps_the_lines_of_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    screen = Screen(terminal=True)
    screen.view.begin()
    for one in two_rounds():
        screen.round(one)
    screen.view.epoch(epoch(1, accuracy=0.9375))
    screen.round(record(row(0, num_examples=10), epoch=2))
    screen.view.say("a line that stays")
    screen.view.end()
    lines = [re.sub(r"\x1b\[[0-9?]*[A-Za-z]|\r", "", line) for line in screen.text.splitlines()]
    assert any(line.startswith("epoch 1/2  accuracy 93.75%  train loss") for line in lines)
    assert "a line that stays" in lines
    # From the first evaluation on the live line tells the accuracy.
    assert any("epoch 2/2  round 1/2  accuracy 93.75%" in line for line in lines)


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(
    "line",
    [
        "worker [bold]cpu[/bold] [0-3]",
        "results in C:\\runs\\[x]",
        "see /data/:fire:/runs/:100:/",
        "x" * 500,
    ],
)
def test_say_writes_the_line_as_it_is(terminal: bool, line: str) -> None:
    """Names, paths and labels come from the user, and mean nothing to the terminal."""
    screen = Screen(terminal)
    screen.view.say(line)
    assert screen.text == line + "\n"
