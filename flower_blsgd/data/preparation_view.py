"""Tell how far a preparation is: a bar in a terminal, one line elsewhere."""

import contextlib
import logging
from collections.abc import Iterator

_log = logging.getLogger(__name__)


class Told:
    """Tells of one preparation; see `preparation_told`."""

    def __init__(self, noun: str, source: str, where: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        self._noun, self._source, self._where = noun, source, where
        self._console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
        columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._bar = self._progress.add_task("", total=None)

    def begin(self, total: int, done: int = 0) -> None:
        """Say what is prepared, and how far it is already."""
        from rich.markup import escape

        title = f"preparing {total:,} {self._noun} of {self._source}, once, in {self._where}"
        self._console.print(escape(title))
        if done:
            _log.warning(
                "going on with the %s of %s at %s of %s",
                self._noun,
                self._source,
                f"{done:,}",
                f"{total:,}",
            )
        if self._console.is_terminal:
            self._progress.reset(self._bar, total=total, completed=done)
            self._progress.start()

    def __call__(self, number: int) -> None:
        """Say that so many more are done."""
        self._progress.advance(self._bar, number)

    def end(self) -> None:
        """Remove the bar."""
        if self._console.is_terminal:  # elsewhere it would write an empty line
            self._progress.stop()


@contextlib.contextmanager
def preparation_told(noun: str, source: str, where: str) -> Iterator[Told]:
    """Yield what is to be told how far a preparation is; it writes on standard error.

    Parameters
    ----------
    noun, source, where : str
        What is prepared, of what, into which folder.
    """
    told = Told(noun, source, where)
    try:
        yield told
    finally:
        told.end()
