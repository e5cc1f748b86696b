"""One run of many: only its progress is shown, while it goes on."""

from rich.console import Console

from ..config import RunConfig
from ..own_grid import own_grid
from ..results.folder import EpochRow
from ..results.progress import ProgressView
from ..run import train_on


class _LiveLine(ProgressView):
    """Shows the line that is rewritten, and nothing that stays."""

    def say(self, line: str) -> None:
        """Say nothing."""

    def epoch(self, row: EpochRow) -> None:
        """Say nothing."""


def train_quietly(config: RunConfig) -> None:
    """Train on this machine as the settings say.

    Raises
    ------
    UsageError
        If the settings do not fit.
    AggregationError
        If a round had no usable reply.
    """
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    view = _LiveLine(config.epochs, console, config.seconds)
    with own_grid(config) as grid:
        train_on(grid, config, view)
