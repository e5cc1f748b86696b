"""Ctrl-C while the command is being imported."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from flower_blsgd.cli import entry
from flower_blsgd.cli import main as cli
from flower_blsgd.errors import UsageError


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


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

    monkeypatch.setattr(cli, "_parser", lambda _: Parser(command))
    monkeypatch.setattr(cli, "_set_up_logging", lambda _: None)
    assert entry.main() == 130
    assert imported == ([module] if whole else [])
    assert capsys.readouterr().err.count("\n") == 1


def test_ignored_ctrl_c_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a job that a shell without job control puts into the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def refuse(_: object) -> None:
        raise UsageError("x")

    monkeypatch.setattr(cli, "_parser", lambda _: Parser(refuse))
    monkeypatch.setattr(cli, "_set_up_logging", lambda _: None)
    assert entry.main() == 2
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


class Parser:
    """Gives every arguments the same command."""

    def __init__(self, command: object) -> None:
        self.command, self.verbose = command, False

    def parse_args(self, _: object) -> "Parser":
        return self
