"""Options that several commands of ``blsgd`` share."""

import argparse
import contextlib
import dataclasses
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from ..config import RunConfig, Value
    from ..flower.app_folder import FlowerApp

TERMINATED, HUNG_UP = 143, 129


def add_settings(command: argparse.ArgumentParser, workers: bool = True) -> None:
    """Add ``-c`` and ``-s``, and ``--workers`` for a command that uses workers."""
    command.add_argument(
        "-c",
        "--run-config",
        metavar="FILE|NAME|KEY=VALUE",
        action="append",
        default=[],
        help="settings: a TOML file, the name of one in configs/, or key=value pairs",
    )
    command.add_argument(
        "-s",
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="one setting, such as epochs=5",
    )
    if workers:
        add_workers(command)


def add_workers(command: argparse.ArgumentParser) -> None:
    """Add ``--workers``."""
    command.add_argument(
        "--workers",
        metavar="SPEC",
        help='devices, such as "1x cuda:0 fast; 2x cpu:0-7 slow steps=1", or "auto" for all',
    )


def add_resume(command: argparse.ArgumentParser) -> None:
    """Add ``--resume``."""
    command.add_argument(
        "--resume",
        metavar="RUN",
        type=os.path.expanduser,
        nargs="?",
        const="runs/latest",
        help="continue a run in its folder (default: runs/latest)",
    )


def values_of(
    options: argparse.Namespace, app: "FlowerApp", resume: str = ""
) -> "dict[str, Value]":
    """Return the settings of an app, or of the run to resume, with those of the command line.

    The name is that of the config file, unless it is given.
    """
    from ..flower.app_folder import run_config

    if resume:
        from ..results.folder import read_config

        app = dataclasses.replace(app, config=read_config(Path(resume)).to_run_config())
    values, file_name = run_config(app, options.run_config, options.set)
    values["resume"] = resume or values["resume"]
    values["workers"] = getattr(options, "workers", None) or values["workers"]
    values["name"] = values["name"] or folder_name(file_name)
    return values


def own_settings(options: argparse.Namespace) -> "RunConfig":
    """Return the settings of the built-in app, named after the config file or the task."""
    from ..config import RunConfig
    from ..flower.app_folder import built_in_app

    config = RunConfig.from_run_config(values_of(options, built_in_app()))
    name = config.name or folder_name(config.task.rpartition(":")[2])
    return dataclasses.replace(config, name=name)


def folder_name(text: str) -> str:
    """Replace the characters that the name of a folder may not have."""
    return re.sub(r"[^\w.-]", "-", text)


def find_modules_here() -> None:
    """Put the current folder last on ``sys.path``, for ``task = "my_module:task"``."""
    sys.path.append(str(Path.cwd()))


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a command as Ctrl-C does, so that results so far are written.

    SIGHUP stays ignored if it is, as after ``nohup``.
    """

    def end(number: int, _: object) -> NoReturn:
        if number == signal.SIGHUP:  # a shell repeats that of the kernel
            signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    heard = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    numbers = (signal.SIGTERM, signal.SIGHUP) if heard else (signal.SIGTERM,)
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
