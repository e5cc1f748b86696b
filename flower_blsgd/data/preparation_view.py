"""Tell how far a preparation is: a bar in a terminal, one line elsewhere."""

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def preparation_told(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Write `title` on standard error, and yield what is to be called after every few.

    Parameters
    ----------
    title : str
        What is being prepared.
    total : int
        How many there are.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    console.print(escape(title))
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=total)
        yield lambda number: progress.advance(bar, number)
