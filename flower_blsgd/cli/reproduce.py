"""The command ``blsgd reproduce``."""

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.serverapp.exception import AggregationError

from ..config import RunConfig
from ..errors import UsageError
from ..grids.flower_app import built_in_app, run_config
from ..grids.machine import format_bytes, free_bytes, this_machine
from ..grids.worker_spec import parse_workers
from ..results.folder import counted, written_whole
from .experiments import console, speeds_for
from .options import add_settings, terminated_like_interrupted

if TYPE_CHECKING:
    from ..experiments.reproduction import Cell
    from ..experiments.reproduction_report import RepeatedCell

_say = partial(print, flush=True)


def add_reproduce(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``blsgd reproduce``."""
    command.set_defaults(command=_reproduce)
    command.add_argument("name", help="such as bias-2c8g; another name lists all")
    command.add_argument("--scale", choices=("smoke", "quick", "full"), default="smoke")
    command.add_argument("--mode", choices=("samples", "table"), default="samples")
    command.add_argument("--seeds", metavar="0,1,2", help="a run with each (default: 0 in smoke)")
    command.add_argument("--only", metavar="DATA,GAP", default="", help="such as cifar10,32-16")
    command.add_argument("--out", metavar="DIR", help="default: runs/reproduce-<name>-<scale>")
    add_settings(command)


def _reproduce(options: argparse.Namespace) -> None:
    from ..experiments import compare
    from ..experiments.comparison_report import terminal_table, write_comparison
    from ..experiments.figures import FIGURES
    from ..experiments.reproduction import REFERENCE, REPRODUCTIONS, cells_of
    from ..experiments.reproduction_report import RepeatedCell, write_reproduction

    cells = cells_of(options.name, options.scale, options.only)
    repeated = REPRODUCTIONS[options.name]
    seeds = compare.read_seeds(options.seeds or ("0" if options.scale == "smoke" else "0,1,2"))
    suffix = "-table" if options.mode == "table" else ""
    folder = Path(options.out or f"runs/reproduce-{options.name}-{options.scale}{suffix}")
    every = []
    for cell in cells:
        config = _config_of(cell, options, {each.dataset for each in cells} == {cell.dataset})
        every.append(RepeatedCell(cell, config, repeated.arms_of(config)))
    _say_cost(every, seeds, folder, options.scale == "full")
    for each in every:
        try:
            compare.check_folder(below := folder / each.cell.name, each.config)
            given, each.config = each.config.profile, replace(each.config, profile="")
            own = below / compare.PROFILE
            if profile := speeds_for(each.config, each.arms, own, given):
                compare.open_folder(below, each.config)
                profile.write(own)
                each.config = replace(each.config, profile=str(own))
        except UsageError as error:
            each.problems.append(str(error))
            _say(f"{each.cell.name} left out: {error}")
    ready = [each for each in every if not each.problems]
    if not ready:
        raise UsageError(every[0].problems[0])
    for each in ready:
        name, below = each.cell.name, folder / each.cell.name
        compare.open_folder(below, each.config)
        with terminated_like_interrupted():
            try:
                train, log = compare.train_quietly, partial(_say, name)
                runs, each.problems = compare.train_all(
                    each.config, each.arms, seeds, below, train, log, shared=True
                )
            except (KeyboardInterrupt, SystemExit):
                _say("interrupted; the same command goes on with what is not finished")
                raise
        if runs:
            each.comparison = write_comparison(runs, below, REFERENCE, None, each.problems)
            by_arm = {one.algorithm: one.runs for one in each.comparison.algorithms}
            if draw := FIGURES.get(options.name):
                with written_whole(below / f"{options.name}.png") as part:
                    draw({arm: by_arm[arm] for arm in each.arms if arm in by_arm}, part)
            console().print(terminal_table(each.comparison))
            write_reproduction(
                f"{options.name}, {options.scale} scale, {options.mode} mode",
                *(repeated, every, folder),
            )
    if any(each.comparison for each in ready):
        _say(f"in {folder}: reproduction.md, reproduction.csv, and a comparison for each cell")
    if failed := [f"{each.cell.name} {problem}" for each in ready for problem in each.problems]:
        raise AggregationError(f"{counted(len(failed), 'run')} failed: {'; '.join(failed)}")


def _config_of(cell: "Cell", options: argparse.Namespace, one_dataset: bool) -> RunConfig:
    """Return a cell's settings with those of the user; UsageError if one is refused."""
    from ..experiments.compare import overridden
    from ..experiments.reproduction import REFERENCE

    app = replace(built_in_app(), config=cell.values)
    values, _ = run_config(app, options.run_config, options.set)
    if data := str(values["data"]):
        names = (cell.dataset, cell.dataset.replace("-", "_"))
        own = next((path for name in names if (path := Path(data, name)).is_dir()), None)
        if own is None and not one_dataset:
            raise UsageError(
                f"data = {data!r} holds no folder {cell.dataset}: name a folder with one for each "
                f"data set, or choose one data set, such as --only {cell.dataset}"
            )
        values["data"] = str(own or data)
    fixed = {"epoch": options.mode, "algorithm": REFERENCE, "name": ""}
    config = RunConfig.from_run_config({**values, **fixed})
    if note := overridden(config):
        raise UsageError(f"{note}; leave it empty to compare them")
    return config


def _say_cost(
    cells: "Sequence[RepeatedCell]", seeds: Sequence[int], folder: Path, refuse: bool
) -> None:
    """Say what the runs need; UsageError, if asked for, where that is more memory than is free."""
    from ..experiments.comparison import run_folder
    from ..experiments.reproduction import cost

    number, done, seconds, needed = 0, 0, 0.0, 0.0
    for each in cells:
        num_workers = len(parse_workers(each.config.workers, None, anywhere=True))
        for arm, changes in each.arms.items():
            its_bytes, its_seconds = cost(replace(each.config, **changes), num_workers)
            runs = [run_folder(folder / each.cell.name, arm, seed) for seed in seeds]
            left = sum(not _is_finished(run) for run in runs)
            number, done = number + len(runs), done + len(runs) - left
            seconds, needed = seconds + left * its_seconds, max(needed, bool(left) * its_bytes)
    machine, free = this_machine(), free_bytes()
    length, unit = (3600, "h") if seconds >= 7200 else (60, "min") if seconds >= 120 else (1, "s")
    text = (
        f"{number} runs, {done} of them finished; the others take about "
        f"{seconds / length:,.0f} {unit} of a CPU core, and {format_bytes(needed)} of "
        f"memory; here are {len(machine.cores)} core(s), "
        f"{', '.join(machine.accelerators) or 'no accelerator'} and "
        f"{'an unknown part' if free is None else format_bytes(free)} free"
    )
    if refuse and free is not None and needed > free:
        raise UsageError(f"{text}: take --scale quick, or fewer by --only")
    _say(text)


def _is_finished(folder: Path) -> bool:
    from ..experiments.comparison import read_run

    with contextlib.suppress(UsageError):  # one that cannot be read is said later
        return read_run(folder) is not None
    return False
