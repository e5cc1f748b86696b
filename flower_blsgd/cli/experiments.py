"""The commands ``blsgd calibrate``, ``plan``, ``compare`` and ``report``."""

import argparse
from pathlib import Path

from .options import (
    add_settings,
    add_workers,
    console,
    fail_if,
    find_modules_here,
    own_settings,
    read_algorithms,
    read_seeds,
    say,
    terminated_like_interrupted,
    with_budget,
)


def add_calibrate(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``blsgd calibrate``."""
    command.set_defaults(command=_calibrate)
    command.add_argument("--again", action="store_true", help="also if measured before")
    add_settings(command)
    add_workers(command)


def add_plan(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``blsgd plan``."""
    command.set_defaults(command=_plan)
    command.add_argument("--algorithms", metavar="A,B", default="all", help="names (default: all)")
    command.add_argument(
        "--num-samples", metavar="N", type=int, help="instead of the size of the task's data"
    )
    add_settings(command)
    add_workers(command)


def add_compare(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``blsgd compare``."""
    command.set_defaults(command=_compare)
    command.add_argument(
        "--algorithms", metavar="A,B", default="all", help="names, the reference first"
    )
    command.add_argument("--seeds", metavar="0,1,2", default="0,1,2", help="one run with each")
    command.add_argument("--budget", metavar="10epochs|60s", help="instead of the settings' epochs")
    command.add_argument("--target", metavar="0.9", type=float, help="accuracy to time")
    command.add_argument("--out", metavar="DIR", help="folder (default: runs/compare-<name>)")
    add_settings(command)
    add_workers(command)


def add_report(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``blsgd report``."""
    command.set_defaults(command=_report)
    command.add_argument("folder", help="folder of a run, such as runs/latest, or of a comparison")
    command.add_argument("--out", metavar="FILE", help="default: report.html in that folder")


def _calibrate(options: argparse.Namespace) -> None:
    from ..experiments.calibration import calibrate, profile_path
    from ..experiments.plan import plan_with, speed_table

    config = own_settings(options)
    find_modules_here()
    with terminated_like_interrupted():
        profile = calibrate(config, options.again, say)
    console().print(speed_table(profile, plan_with(profile, config), config.clock))
    path = profile_path(config)
    say(f"in {path}: blsgd plan finds it; for blsgd run add -s profile={path}")


def _plan(options: argparse.Namespace) -> None:
    from ..experiments.compare import overridden
    from ..experiments.plan import plan, plan_table

    config = own_settings(options)
    find_modules_here()
    algorithms = read_algorithms(options.algorithms)
    console().print(plan_table(plan(config, algorithms, options.num_samples)))
    if note := overridden(config):
        say(f"note: {note}")


def _compare(options: argparse.Namespace) -> None:
    from ..experiments.compare import compare
    from ..experiments.comparison_report import terminal_table

    config = own_settings(options)
    find_modules_here()
    if options.budget is not None:
        config = with_budget(config, options.budget)
    algorithms, seeds = read_algorithms(options.algorithms), read_seeds(options.seeds)
    folder = Path(options.out or f"runs/compare-{config.name}")
    with terminated_like_interrupted():
        comparison = compare(config, algorithms, seeds, folder, options.target, say)
    console().print(terminal_table(comparison))
    say(f"in {folder}: comparison.md, comparison.csv, comparison.png")
    fail_if(comparison.failed)


def _report(options: argparse.Namespace) -> None:
    from ..experiments.html_report import write_report

    out = Path(options.out or f"{options.folder}/report.html")
    say(f"{write_report(Path(options.folder), out)}\nin {out}: open it in a browser")
