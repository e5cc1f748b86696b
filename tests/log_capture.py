"""Catch log lines whatever handlers and levels a command line has set before."""

import contextlib
import logging
from collections.abc import Iterator


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class CapturedLog:
    """The lines of one logger and those below it."""

    def __init__(self, handler: _Lines) -> None:
        self._handler = handler

    def lines(self, level: int = logging.DEBUG) -> list[str]:
        """Return the messages of at least this level."""
        return [r.getMessage() for r in self._handler.records if r.levelno >= level]

    @property
    def warnings(self) -> list[str]:
        """Messages of level WARNING exactly."""
        return [r.getMessage() for r in self._handler.records if r.levelno == logging.WARNING]

    @property
    def errors(self) -> list[str]:
        return self.lines(logging.ERROR)


@contextlib.contextmanager
def captured_log(name: str = "flower_blsgd") -> Iterator[CapturedLog]:
    logger = logging.getLogger(name)
    level = logger.level
    handler = _Lines()
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield CapturedLog(handler)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
