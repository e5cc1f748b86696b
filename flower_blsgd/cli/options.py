"""Options that several commands of ``blsgd`` share."""

import argparse
import contextlib
import dataclasses
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ..errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from ..config import RunConfig

TERMINATED = 143

_WIDTH = 100
_UNLIMITED_EPOCHS = 100_000
_BUDGET = re.compile(r"(\d+(?:\.\d+)?)\s*(epochs?|s|min|h)")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}

say = partial(print, flush=True)


def console() -> "Console":
    """Return the console that prints tables."""
    from rich.console import Console

    screen = Console(highlight=False, emoji=False, markup=False)
    if not screen.is_terminal:
        screen.width = _WIDTH
    return screen


def fail_if(failed: Sequence[str]) -> None:
    """End the command with exit code 1 and one line if runs failed."""
    from flwr.serverapp.exception import AggregationError

    from ..results.tables import counted

    if failed:
        raise AggregationError(f"{counted(len(failed), 'failure')}: {'; '.join(failed)}")


def add_settings(command: argparse.ArgumentParser) -> None:
    """Add ``-c`` and ``-s``."""
    command.add_argument(
        "-c",
        "--run-config",
        metavar="FILE|NAME|KEY=VALUE",
        action="append",
        default=[],
        help="settings: a TOML file, one in the app's configs/ by name, or key=value pairs",
    )
    command.add_argument(
        "-s", "--set", metavar="KEY=VALUE", action="append", default=[], help="one setting"
    )


def add_workers(command: argparse.ArgumentParser) -> None:
    """Add ``--workers``."""
    command.add_argument(
        "--workers",
        metavar="SPEC",
        help='such as "1x cuda:0 fast; 2x cpu:0-7 slow steps=1", or "auto"',
    )


def own_settings(options: argparse.Namespace) -> "RunConfig":
    """Return the settings of the built-in app, named after the config file or the task.

    UsageError if one is refused.
    """
    from ..config import RunConfig
    from ..grids.flower_app import built_in_app, run_config

    values, file_name = run_config(built_in_app(), options.run_config, options.set)
    if getattr(options, "workers", None) is not None:
        values["workers"] = options.workers
    config = RunConfig.from_run_config(values)
    name = config.name or file_name or config.task.rpartition(":")[2]
    return dataclasses.replace(config, name=config_name(name))


def read_algorithms(text: str) -> list[str]:
    """Return names separated by commas; ``"all"`` stands for those whose epochs have N samples."""
    from ..experiments.compare import REPEATED

    return [*REPEATED] if text.strip() == "all" else _words("--algorithms", text)


def read_seeds(text: str) -> list[int]:
    """Return whole numbers separated by commas; UsageError for anything else."""
    for word in (words := _words("--seeds", text)):
        if not word.isdecimal():
            raise UsageError(f"--seeds {text}: {word!r} is not a whole number; write 0,1,2")
    return [int(word) for word in words]


def _words(option: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise UsageError(f"{option} is empty")
    return words


def with_budget(config: "RunConfig", budget: str) -> "RunConfig":
    """Return the settings with a budget such as ``"10epochs"``, ``"60s"`` or ``"5min"``.

    UsageError if the text cannot be read.
    """
    found = _BUDGET.fullmatch(budget.strip())
    amount = float(found[1]) if found else 0.0
    if found and found[2] in _SECONDS and amount > 0:
        seconds = amount * _SECONDS[found[2]]
        return dataclasses.replace(config, epochs=_UNLIMITED_EPOCHS, seconds=seconds)
    if not amount or not amount.is_integer():
        raise UsageError(f"--budget {budget}: write it like 10epochs, 60s or 5min")
    return dataclasses.replace(config, epochs=int(amount), seconds=0.0)


def config_name(text: str) -> str:
    """Replace the characters that the name of a folder may not have."""
    return re.sub(r"[^\w.-]", "-", text)


def find_modules_here() -> None:
    """Put the current folder last on ``sys.path``, for ``task = "my_module:task"``."""
    sys.path.append(str(Path.cwd()))


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM end a command as Ctrl-C does, so that results so far are written."""

    def end(*_: object) -> NoReturn:
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
