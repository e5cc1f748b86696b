"""What several commands of ``blsgd`` have in common."""

import argparse
import contextlib
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from .app_folder import built_in_app, run_config
from .config import RunConfig
from .errors import UsageError

TERMINATED = 143
TRACE_EPOCH = "trace-epoch"
ANY_EPOCH = 0
"""``--profile`` without a number."""


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


def add_profile(command: argparse.ArgumentParser) -> None:
    """Add ``--profile``, which is not the setting of that name."""
    command.add_argument(
        "--profile",
        metavar="EPOCH",
        nargs="?",
        type=_epoch,
        const=ANY_EPOCH,
        dest="trace_epoch",
        help="write a Chrome trace of one epoch, the second if none is named (trace-epoch)",
    )


def _epoch(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no epoch: write --profile=N with N from 1 on, or --profile at the end"
        )
    return int(text)


def traced_epoch(asked: int, values: Mapping[str, bool | int | float | str], app: str) -> int:
    """Return which epoch ``--profile`` traces in a run with these settings.

    Parameters
    ----------
    asked : int
        What was written behind it, or `ANY_EPOCH`.
    values : mapping
        The app's settings.
    app : str
        Its name.

    Raises
    ------
    UsageError
        If the app writes no traces.
    """
    if TRACE_EPOCH not in values:
        raise UsageError(
            f"--profile: {app} has no setting {TRACE_EPOCH}, so it writes no trace; leave it out"
        )
    named = values[TRACE_EPOCH]
    if asked != ANY_EPOCH:
        return asked
    if isinstance(named, int) and named > 0:
        return named
    return 1 if values.get("epochs") == 1 else 2


def own_settings(options: argparse.Namespace) -> RunConfig:
    """Return the settings of our own app; its name is that of the config file, else the task's.

    Raises
    ------
    UsageError
        If one is refused.
    """
    values, file_name = run_config(built_in_app(), options.run_config, options.set)
    if getattr(options, "workers", None) is not None:
        values["workers"] = options.workers
    config = RunConfig.from_run_config(values)
    name = config.name or file_name or config.task.rpartition(":")[2]
    return replace(config, name=config_name(name))


def config_name(text: str) -> str:
    """Return a text as a name for folders."""
    return re.sub(r"[^\w.-]", "-", text)


def find_modules_here() -> None:
    """Let ``task = "my_module:task"`` be in the current folder; a library's modules come first."""
    sys.path.append(str(Path.cwd()))


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM end a run as Ctrl-C does, so that what was reached is written."""

    def end(*_: object) -> NoReturn:
        raise SystemExit(TERMINATED)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
