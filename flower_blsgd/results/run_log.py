"""``run.log``: what a run printed, its warnings, and the error that ended it."""

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from flwr.app.exception import AppExitException

from ..errors import UsageError
from ..files import append
from .folder import RunFolder

_RUN: ContextVar[object] = ContextVar("run", default=None)
_LOGGERS = "flower_blsgd", "flwr"


@contextlib.contextmanager
def own_warnings() -> Iterator[None]:
    """Keep warnings out of the ``run.log`` of runs in other threads."""
    token = _RUN.set(object())
    try:
        yield
    finally:
        _RUN.reset(token)


class RunLog:
    """Lines of a run: printed, and written to ``run.log`` as soon as there is a `folder`."""

    def __init__(self, show: Callable[[str], object]) -> None:
        self.folder: RunFolder | None = None
        self._show = show
        self._early_lines = ""
        self._said: set[str] = set()

    def say(self, line: str) -> None:
        """Print a line, and write it to ``run.log``."""
        self.write(line)
        self._show(line)

    def warn_once(self, key: str, line: str) -> None:
        """Say a warning, unless there was one with this key."""
        if key not in self._said:
            self._said.add(key)
            self.say(f"warning: {line}")

    def write(self, line: str) -> None:
        """Write a line to ``run.log`` only."""
        line = f"{datetime.now().astimezone().isoformat(timespec='seconds')} {line}\n"
        if self.folder is None:
            self._early_lines += line
        else:
            self.attempt("run.log", append, self.folder.path / "run.log", line)

    def open(self, folder: RunFolder) -> None:
        """Write to this folder from now on, first what was said before."""
        self.folder = folder
        self.attempt("run.log", append, folder.path / "run.log", self._early_lines)

    def end(self, error: BaseException) -> None:
        """Write the error that ends the command."""
        expected = (UsageError, AppExitException, KeyboardInterrupt, SystemExit)
        alone = isinstance(error, expected)
        lines = (traceback.format_exception_only if alone else traceback.format_exception)(error)
        self.write("".join(lines).rstrip())

    def attempt(self, what: str, write: Callable[..., None], *arguments: Any) -> None:
        """Write a result; if that fails, warn once and continue."""
        try:
            write(*arguments)
        except OSError as error:
            assert self.folder is not None
            where = f"{what} cannot be written to {self.folder.path} ({reason_of(error)})"
            self.warn_once(what, f"{where}; training continues")

    @contextlib.contextmanager
    def warnings(self) -> Iterator[None]:
        """Write what is logged as a warning, or worse, within this context."""
        handler = _Handler(self, _RUN.get())
        for name in _LOGGERS:
            logging.getLogger(name).addHandler(handler)
        try:
            yield
        finally:
            for name in _LOGGERS:
                logging.getLogger(name).removeHandler(handler)


class _Handler(logging.Handler):
    """Writes the warnings of one run to its log."""

    def __init__(self, log: RunLog, run: object) -> None:
        super().__init__(logging.WARNING)
        self._log, self._run = log, run

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless a run in another thread logged it."""
        if _RUN.get() in (self._run, None):
            self._log.write(record.getMessage())
        handlers = _handlers_of(record.name)
        is_shown = any(not isinstance(handler, _Handler) for handler in handlers)
        if not is_shown and handlers[:1] == [self] and logging.lastResort:
            logging.lastResort.handle(record)  # as Python does if there is no handler


def _handlers_of(name: str) -> list[logging.Handler]:
    """Return the handlers of a logger and those above it that get its records."""
    handlers: list[logging.Handler] = []
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        handlers += logger.handlers
        logger = logger.parent if logger.propagate else None
    return handlers


def reason_of(error: Exception) -> str:
    """Return why a file cannot be written."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
