"""The command in this process: a process of its own would first import for seconds."""

import contextlib
import logging
import signal
import sys
from collections.abc import Iterator

import pytest

from flower_blsgd.cli.main import main


@contextlib.contextmanager
def changes_undone() -> Iterator[None]:
    """Put back what the command changes in its process."""
    at_sigterm, path = signal.getsignal(signal.SIGTERM), list(sys.path)
    loggers = [logging.getLogger(name) for name in ("flower_blsgd", "flwr")]
    before = [(log, log.handlers, log.propagate, log.level) for log in loggers]
    try:
        yield
    finally:
        for log, handlers, propagate, level in before:
            log.handlers, log.propagate = handlers, propagate
            log.setLevel(level)
        signal.signal(signal.SIGTERM, at_sigterm)
        sys.path[:] = path


class Command:
    """Runs ``blsgd`` in this process and the current folder."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str, warns: bool = False) -> str:
        """Return the output of a command that must succeed, without a warning unless `warns`."""
        self._capsys.readouterr()
        with changes_undone():
            code = main(arguments)
        printed = self._capsys.readouterr()
        assert code == 0, printed.out + printed.err
        assert warns or printed.err == ""
        return printed.out
