"""The command ``blsgd watch``: show a run while it trains."""

import argparse
import contextlib
import time
from pathlib import Path

from ..files import lost_output
from .options import terminated_like_interrupted

_INTERVAL_SECONDS = 1.0


def add_watch(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``blsgd watch``."""
    command.add_argument(
        "run", nargs="?", default="runs/latest", help="folder of a run (default: runs/latest)"
    )


def _watch(options: argparse.Namespace) -> None:
    # At Ctrl-C, SIGTERM and SIGHUP the view removes itself; the run continues.
    with contextlib.suppress(KeyboardInterrupt, SystemExit), terminated_like_interrupted():
        _follow(Path(options.run))


def _follow(folder: Path) -> None:
    from rich.console import Console
    from rich.live import Live

    from ..results.live import LiveRun
    from .watch_view import view

    console = Console(highlight=False, emoji=False, markup=False)
    with contextlib.closing(LiveRun(folder)) as run:
        run.update()
        if console.is_terminal and run.summary is None:
            with Live(console=console, auto_refresh=False, transient=True) as live:
                # A closed terminal is no longer a terminal.
                while run.summary is None and console.is_terminal and not lost_output:
                    live.update(view(run), refresh=True)
                    time.sleep(_INTERVAL_SECONDS)
                    run.update()
        console.print(view(run))
