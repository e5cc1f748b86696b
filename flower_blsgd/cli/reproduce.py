"""The command ``blsgd reproduce``."""

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.serverapp.exception import AggregationError

from ..config import RunConfig, without_retired
from ..errors import UsageError
from ..runtime.devices import format_bytes, free_bytes, parse_workers, this_machine
from ..runtime.flower_app import built_in_app, run_config
from .experiments import console, load_own, speeds_for
from .options import add_settings, terminated_like_interrupted

if TYPE_CHECKING:
    from ..experiments.comparison import Run
    from ..experiments.reproduction import Cell
    from ..experiments.reproduction_report import RepeatedCell

_FEATURES = tuple(f"{name}-local-sgd" for name in ("unbiased", "sampled", "weighted", "biased"))
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
    command.add_argument("--anyway", action="store_true", help="full, whatever the machine is")
    add_settings(command)


def _reproduce(options: argparse.Namespace) -> None:
    from ..experiments import compare
    from ..experiments.comparison_report import terminal_table, write_comparison
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
    if options.scale == "full" and not options.anyway:
        _refuse_full(every, len(seeds))
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
    _say_cost(ready, seeds, folder)
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
            each.pictures = _draw(options.name, runs, below)
            console().print(terminal_table(each.comparison))
    if not any(each.comparison for each in ready):
        raise AggregationError("no run finished, so there is nothing to compare")
    title = f"{options.name}, {options.scale} scale, {options.mode} mode"
    write_reproduction(title, repeated, every, folder)
    _say(f"in {folder}: reproduction.md, reproduction.csv, and a comparison for each cell")


def _config_of(cell: "Cell", options: argparse.Namespace, one_dataset: bool) -> RunConfig:
    """Return a cell's settings with those of the user; UsageError if one is refused."""
    from ..experiments.compare import overridden
    from ..experiments.reproduction import REFERENCE

    app = replace(built_in_app(), config=cell.values)
    values, _ = run_config(app, options.run_config, options.set, without_retired)
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


def _refuse_full(cells: "Sequence[RepeatedCell]", num_seeds: int) -> None:
    """Raise UsageError if this machine cannot hold the printed scale; says memory and time."""
    from ..experiments.reproduction import full_cost

    machine, free = this_machine(), free_bytes()
    costs = [
        full_cost(replace(each.config, **arm), len(parse_workers(each.config.workers, None, True)))
        for each in cells
        for arm in each.arms.values()
    ]
    needed, hours = max(cost[0] for cost in costs), num_seeds * sum(cost[1] for cost in costs)
    if machine.accelerators and (free is None or needed <= free):
        return
    raise UsageError(
        f"--scale full needs about {format_bytes(needed)} of memory, of which "
        f"{format_bytes(free or 0)} are free, and an accelerator, of which there is "
        f"{', '.join(machine.accelerators) or 'none'}; {len(machine.cores)} CPU cores take about "
        f"{hours / len(machine.cores):,.0f} h. Take --scale quick, fewer by --only, or --anyway"
    )


def _say_cost(cells: "Sequence[RepeatedCell]", seeds: Sequence[int], folder: Path) -> None:
    """Say how many runs there are, and about what they need, before they start."""
    from ..experiments.reproduction import full_cost
    from ..results.speed_profile import with_profile

    number, done, seconds, needed = 0, 0, 0.0, 0.0
    for each in cells:
        config = each.config
        workers, _ = with_profile(parse_workers(config.workers), config)
        num_samples = load_own(config).num_train
        work = {
            (arm, n): num_samples * its["epochs"] for arm, its in each.arms.items() for n in seeds
        }
        found = {key: _finished(folder / each.cell.name / "{}-seed{}".format(*key)) for key in work}
        trained = sum(work[key] for key, run in found.items() if run)
        took = sum(run["training_seconds"] for run in found.values() if run)
        fastest = min((w.seconds_per_step or 0.0) / (w.batch or config.batch_size) for w in workers)
        devices = {worker.device_with_cores: None for worker in workers}
        rate = took / trained if trained else fastest / len(devices)
        seconds += rate * (sum(work.values()) - trained)
        number, done = number + len(found), done + sum(run is not None for run in found.values())
        needed = max(needed, full_cost(config, len(workers))[0])
    _say(
        f"{number} runs, {done} of them finished; about {seconds / 3600:.2g} h of training for the "
        f"others on {', '.join(devices)}, with {format_bytes(needed)} of memory, of which "
        f"{format_bytes(free_bytes() or 0)} are free"
    )


def _finished(folder: Path) -> "Run | None":
    from ..experiments.comparison import read_run

    with contextlib.suppress(UsageError):  # one that cannot be read is said later
        return read_run(folder)
    return None


def _draw(name: str, runs: "Sequence[Run]", folder: Path) -> list[str]:
    """Draw a cell of a figure, and return the name of the picture; nothing for a table."""
    if not name.startswith(("figure-", "features")):
        return []
    from ..experiments import figures

    picture = folder / f"{name}.png"
    by_arm: dict[str, list[Any]] = {}
    for run in runs:
        by_arm.setdefault(run["arm"], []).append(run)
    if name == "features":
        bars = zip(_FEATURES, ("no bias", "sampling", "weights", "both"), strict=True)
        figures.draw_features({label: by_arm[arm] for arm, label in bars if arm in by_arm}, picture)
    elif name == "figure-schedule":
        folders = {arm: folder / f"{arm}-seed{its[0]['seed']}" for arm, its in by_arm.items()}
        figures.draw_schedule(folders, picture)
    elif name == "figure-timing":
        figures.draw_timing(by_arm, picture)
    else:
        figures.draw_learning_curves(by_arm, picture)
    return [picture.name]
