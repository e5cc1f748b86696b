"""The commands ``blsgd calibrate``, ``plan``, ``compare``, ``reproduce`` and ``report``."""

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .options import (
    add_settings,
    find_modules_here,
    own_settings,
    terminated_like_interrupted,
)

if TYPE_CHECKING:
    from rich.console import Console

    from ..config import RunConfig, Value

_FILE: Any = {"type": os.path.expanduser, "metavar": "FILE"}  # shells leave the ~ in --out=~/x
_DIR: Any = {**_FILE, "metavar": "DIR"}
_WIDTH = 100
_BUDGET = re.compile(r"(\d+(?:\.\d+)?)\s*(epochs?|s|min|h)")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}

say = partial(print, flush=True)


def _add_calibrate(command: argparse.ArgumentParser) -> None:
    add_settings(command)


def _add_plan(command: argparse.ArgumentParser) -> None:
    command.add_argument("--algorithms", metavar="A,B", default="all", help="names (default: all)")
    command.add_argument(
        "--num-samples", metavar="N", type=int, help="number of samples (default: that of the task)"
    )
    add_settings(command)


def _add_compare(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--algorithms",
        metavar="A,B",
        default="",
        help="names, the reference first (default: all; with --vary, that of the settings)",
    )
    command.add_argument(
        "--vary", metavar="KEY=A,B", default="", help="values of a setting to compare"
    )
    command.add_argument("--seeds", metavar="0,1,2", default="0,1,2", help="one run per seed")
    command.add_argument("--budget", metavar="10epochs|60s", help="default: epochs of the settings")
    command.add_argument(
        "--target",
        metavar="0.9",
        type=float,
        help="target accuracy or metric (default: the best that every run reached)",
    )
    command.add_argument("--out", **_DIR, help="folder (default: runs/compare-<name>)")
    add_settings(command)


def _add_reproduce(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", help="such as bias-2c8g; an unknown name lists all")
    command.add_argument(
        "--scale",
        choices=("smoke", "quick", "full"),
        default="smoke",
        help="digits (default), a small model, or the paper's model",
    )
    command.add_argument(
        "--mode",
        choices=("samples", "table"),
        default="samples",
        help="epochs of N samples (default), or of the rounds in the paper's table",
    )
    command.add_argument("--seeds", metavar="0,1,2", default="", help="(default: 0 with smoke)")
    command.add_argument("--only", metavar="DATA,GAP", default="", help="such as cifar10,32-16")
    command.add_argument("--out", **_DIR, help="default: runs/reproduce-<name>-<scale>")
    add_settings(command, workers=False)


def _add_report(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", help="folder of a run, such as runs/latest, or of a comparison")
    command.add_argument("--out", **_FILE, help="default: report.html in that folder")


def _calibrate(options: argparse.Namespace) -> None:
    import tomli_w

    from ..devices.worker_spec import parse_workers, workers_text
    from ..experiments.calibration import measure_speeds, without_speeds
    from ..experiments.plan import speed_table

    config = own_settings(options)
    find_modules_here()
    with terminated_like_interrupted():
        speeds = measure_speeds(config, say)
    workers = speeds.given_to(without_speeds(parse_workers(config.workers)), config.clock)
    console().print(speed_table(speeds, workers, config))
    say("for a config file; or the text in quotes after --workers:")
    say(tomli_w.dumps({"workers": workers_text(workers)}).strip())


def _plan(options: argparse.Namespace) -> None:
    from ..experiments.compare import overridden
    from ..experiments.plan import plan, plan_table

    config = own_settings(options)
    find_modules_here()
    algorithms = read_algorithms(options.algorithms)
    with terminated_like_interrupted():
        found = plan(config, algorithms, options.num_samples, say)
    console().print(plan_table(found))
    if note := overridden(config):
        say(f"note: {note}")


def _compare(options: argparse.Namespace) -> None:
    from ..experiments.compare import compare
    from ..experiments.comparison_report import terminal_table

    config = own_settings(options)
    find_modules_here()
    if options.budget is not None:
        config = with_budget(config, options.budget)
    vary, seeds = _varied(options), read_seeds(options.seeds)
    algorithms = read_algorithms(options.algorithms or (config.algorithm if vary else "all"))
    folder = Path(options.out or f"runs/compare-{'-'.join([config.name, *vary])}")
    with terminated_like_interrupted():
        comparison = compare(config, algorithms, seeds, folder, options.target, say, vary)
    console().print(terminal_table(comparison))
    say(f"in {folder}: comparison.md, comparison.csv, comparison.png")
    fail_if(comparison.failed)


def _varied(options: argparse.Namespace) -> "dict[str, list[Value]]":
    """Return the checked values of the setting in ``--vary``, by its key."""
    if not options.vary:
        return {}
    key, equals, text = options.vary.partition("=")
    if not equals or "" in (values := [word.strip() for word in text.split(",")]):
        raise UsageError(f"--vary {options.vary}: write KEY=A,B, such as learning-rate=0.05,0.1")
    given = vars(options)
    configs = [
        own_settings(argparse.Namespace(**given | {"set": [*options.set, f"{key}={value}"]}))
        for value in values
    ]
    return {key: [config.to_run_config()[key] for config in configs]}


def _reproduce(options: argparse.Namespace) -> None:
    from ..experiments.comparison_report import terminal_table
    from ..flower.app_folder import built_in_app, run_config
    from ..paper.reproduce import cells_to_train, reproduce

    def settings(values: "Mapping[str, Value]") -> "Mapping[str, Value]":
        app = replace(built_in_app(), config=values)
        return run_config(app, options.run_config, options.set)[0]

    find_modules_here()
    with terminated_like_interrupted():
        what = options.name, options.scale, options.mode
        cells = cells_to_train(*what, options.only, settings)
        seeds = read_seeds(options.seeds) if options.seeds else ()
        folder = Path(options.out) if options.out else None
        for comparison in reproduce(*what, cells, seeds, folder, say):
            console().print(terminal_table(comparison))
    fail_if([f"{each.cell.name} {problem}" for each in cells for problem in each.failed])


def _report(options: argparse.Namespace) -> None:
    from ..experiments.html_report import write_report
    from ..paper.report import FILE, page_of_reproduction

    out = Path(options.out or f"{options.folder}/report.html")
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder; name a file, such as page.html")
    title = write_report(Path(options.folder), out, {FILE: page_of_reproduction})
    say(f"{title}\nin {out}: open it in a browser")


# --- what the commands share


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


def read_algorithms(text: str) -> list[str]:
    """Return names separated by commas; ``"all"`` stands for those whose epochs have N samples."""
    from ..experiments.compare import REPEATED

    return [*REPEATED] if text.strip() == "all" else _words("--algorithms", text)


def read_seeds(text: str) -> list[int]:
    """Return whole numbers separated by commas."""
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
    """Return the settings with a budget such as ``"10epochs"``, ``"60s"`` or ``"5min"``."""
    from ..strategy.budget import NO_LIMIT

    found = _BUDGET.fullmatch(budget.strip())
    amount = float(found[1]) if found else 0.0
    if found and found[2] in _SECONDS and amount > 0:
        seconds = amount * _SECONDS[found[2]]
        return replace(config, epochs=NO_LIMIT, seconds=seconds)
    if not amount or not amount.is_integer():
        raise UsageError(f"--budget {budget}: write it like 10epochs, 60s or 5min")
    return replace(config, epochs=int(amount), seconds=0.0)
