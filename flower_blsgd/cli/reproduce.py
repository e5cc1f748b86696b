"""The command ``blsgd reproduce``."""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..grids.flower_app import built_in_app, run_config
from .options import (
    add_settings,
    console,
    fail_if,
    find_modules_here,
    read_seeds,
    say,
    terminated_like_interrupted,
)

if TYPE_CHECKING:
    from ..config import Value


def add_reproduce(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``blsgd reproduce``."""
    command.set_defaults(command=_reproduce)
    command.add_argument("name", help="such as bias-2c8g; an unknown name lists all")
    command.add_argument("--scale", choices=("smoke", "quick", "full"), default="smoke")
    command.add_argument("--mode", choices=("samples", "table"), default="samples")
    command.add_argument("--seeds", metavar="0,1,2", default="", help="(default: 0 with smoke)")
    command.add_argument("--only", metavar="DATA,GAP", default="", help="such as cifar10,32-16")
    command.add_argument("--out", metavar="DIR", help="default: runs/reproduce-<name>-<scale>")
    add_settings(command)


def _reproduce(options: argparse.Namespace) -> None:
    from ..experiments.comparison_report import terminal_table
    from ..paper.reproduce import reproduce

    def settings(values: "Mapping[str, Value]") -> "Mapping[str, Value]":
        app = replace(built_in_app(), config=values)
        return run_config(app, options.run_config, options.set)[0]

    find_modules_here()
    with terminated_like_interrupted():
        cells = reproduce(
            options.name,
            options.scale,
            options.mode,
            read_seeds(options.seeds) if options.seeds else (),
            options.only,
            settings,
            options.out and Path(options.out),
            say,
            lambda comparison: console().print(terminal_table(comparison)),
        )
    fail_if([f"{each.cell.name} {problem}" for each in cells for problem in each.failed])
