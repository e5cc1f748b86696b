"""Ctrl-C while the command is being imported, and output that nobody reads."""

import io
import logging
import os
import pty
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from rich.console import Console

from flower_blsgd import __main__ as entry
from flower_blsgd import files
from flower_blsgd.cli import main as cli
from flower_blsgd.errors import UsageError

Lost = Callable[..., None]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


def replace_command(monkeypatch: pytest.MonkeyPatch, command: Callable[[object], None]) -> None:
    parser = SimpleNamespace(parse_args=lambda _: SimpleNamespace(command=command, verbose=False))
    monkeypatch.setattr(cli, "_parser", lambda _: parser)
    monkeypatch.setattr(cli, "_set_up_logging", lambda _: None)


@pytest.mark.parametrize(
    ("module", "whole"), [("torch", True), ("torch.nn", True), ("mine", False)]
)
def test_import_of_a_library_is_not_interrupted_but_the_command_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], module: str, whole: bool
) -> None:
    imported = []
    code = "os.kill(os.getpid(), 2); os.kill(os.getpid(), 2); imported.append(__name__)"

    def command(_: object) -> None:
        exec(  # as an import does it
            compile(code, "module", "exec"), {"__name__": module, "os": os, "imported": imported}
        )
        while True:
            time.sleep(0.01)

    replace_command(monkeypatch, command)
    assert entry.main() == 130
    assert imported == ([module] if whole else [])
    assert capsys.readouterr().err.count("\n") == 1


def test_ignored_ctrl_c_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a job that a shell without job control puts into the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def refuse(_: object) -> None:
        raise UsageError("x")

    replace_command(monkeypatch, refuse)
    assert entry.main() == 2
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lost]:
    """Return a function that makes a file descriptor both standard streams of the process."""
    opened = []

    def lose(descriptor: int, encoding: str = "utf-8", buffered: bool = True) -> None:
        opened.append(descriptor)
        for name in ("stdout", "stderr"):
            raw = io.FileIO(descriptor, "wb", closefd=False)
            text = io.TextIOWrapper(io.BufferedWriter(raw) if buffered else raw, encoding)
            if not buffered:
                text.reconfigure(write_through=True)
            monkeypatch.setattr(sys, name, text)
            monkeypatch.setattr(sys, f"__{name}__", text)

    yield lose
    files.lost_output.clear()
    for descriptor in opened:
        os.close(descriptor)


def closed_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def closed_terminal() -> int:
    master, terminal = pty.openpty()
    os.close(master)
    return terminal


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize(
    ("make", "code"),
    [
        (closed_pipe, 0),
        (closed_terminal, 0),
        (lambda: os.open("/dev/full", os.O_WRONLY), 1),
    ],
    ids=["pipe", "terminal", "disk"],
)
def test_command_outlasts_its_reader(
    monkeypatch: pytest.MonkeyPatch, lost: Lost, make: Callable[[], int], code: int, buffered: bool
) -> None:
    """Prints, tables of rich, log lines; and at exit nothing is left to be written."""

    def command(_: object) -> None:
        print("x" * 20_000)
        Console().print("a table")
        log = logging.StreamHandler()
        log.handleError = lambda record: pytest.fail("a log line")  # type: ignore[method-assign]
        log.handle(logging.makeLogRecord({"msg": "a warning"}))
        print("the end")

    replace_command(monkeypatch, command)
    lost(make(), buffered=buffered)
    assert entry.main() == code
    for text in (sys.stdout, sys.stderr):
        text.flush()
        text.close()


def test_encoding_that_lacks_a_character_shows_another_one(lost: Lost) -> None:
    reader, writer = os.pipe()
    lost(writer, "ascii")
    files.outlast_readers()
    print("größe", file=sys.stdout, flush=True)
    Console().print("│ größe")
    print("größe", file=sys.stderr, flush=True)
    assert os.read(reader, 1000).decode() == "gr??e\n? gr??e\ngr\\xf6\\xdfe\n"
    os.close(reader)
