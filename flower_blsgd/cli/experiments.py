"""The commands ``blsgd calibrate``, ``plan``, ``compare`` and ``report``."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.serverapp.exception import AggregationError
from rich.console import Console

from ..config import RunConfig
from ..errors import UsageError
from ..grids.worker_spec import WorkerSpec, cores_note, parse_workers
from .options import (
    add_settings,
    add_workers,
    find_modules_here,
    own_settings,
    terminated_like_interrupted,
)

if TYPE_CHECKING:
    from ..experiments.compare import Arm
    from ..results.speed_profile import SpeedProfile
    from ..tasks.task import Task

_PROFILES = Path("profiles")
_WIDTH = 100
_say = partial(print, flush=True)


def add_calibrate(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``blsgd calibrate``."""
    command.set_defaults(command=_calibrate)
    command.add_argument("--again", action="store_true", help="also if it is measured already")
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
    command.add_argument("--seeds", metavar="0,1,2", default="0,1,2", help="a run with each")
    command.add_argument("--budget", metavar="10epochs|60s", help="instead of the settings' epochs")
    command.add_argument("--target", metavar="0.9", type=float, help="accuracy to time")
    command.add_argument("--out", metavar="DIR", help="folder (default: runs/compare-<name>)")
    add_settings(command)
    add_workers(command)


def add_report(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``blsgd report``."""
    command.set_defaults(command=_report)
    command.add_argument("folder", help="of a run, such as runs/latest, or of several: compare's")
    command.add_argument("--out", metavar="FILE", help="default: report.html in that folder")


def console() -> Console:
    """Return where tables are printed."""
    screen = Console(highlight=False, emoji=False, markup=False)
    if not screen.is_terminal:
        screen.width = _WIDTH
    return screen


def _calibrate(options: argparse.Namespace) -> None:
    from ..experiments.plan import plan_runs, speed_table
    from ..results.speed_profile import SpeedProfile, profile_key, refuse_unwritable

    config = own_settings(options)
    path = _profile_path(config)
    config = replace(config, profile="")
    refuse_unwritable(path)
    profile = None
    if path.exists() and not options.again:
        try:
            profile = SpeedProfile.read(path)
        except UsageError as error:
            reason = str(error).partition(";")[0]
            raise UsageError(f"{reason}; --again measures anew and replaces it") from None
        if reason := profile.mismatch(profile_key(config), parse_workers(config.workers)):
            _say(f"{path} does not hold here: {reason}; measuring anew")
            profile = None
        else:
            _say(f"measured before, in {path}; --again measures anew")
    if profile is None:
        profile = _measure(config)
        profile.write(path)
    workers = profile.given_to(parse_workers(config.workers), config.clock)
    task, overhead = load_own(config), profile.overhead_seconds.median
    algorithms = [config.algorithm]
    plan = plan_runs(config, workers, task.num_train, algorithms, overhead, task.num_test)
    console().print(speed_table(profile, plan, config.clock))
    _say(f"in {path}: blsgd plan finds it, blsgd run takes it with -s profile={path}")


def _measure(config: RunConfig) -> "SpeedProfile":
    from ..experiments.calibration import calibrate
    from ..results.speed_profile import profile_key
    from ..run import check_workers, make_local_grid
    from ..worker.model_io import state_record

    # A speed that was given wins over what a worker measures.
    workers = [replace(worker, seconds_per_step=0.0) for worker in parse_workers(config.workers)]
    task = load_own(config)
    check_workers(config, workers, task.num_train)
    if note := cores_note(workers):
        _say(note)
    arrays = state_record(task.fresh_model(0))
    with make_local_grid(config, workers=workers) as grid, terminated_like_interrupted():
        return calibrate(grid, profile_key(config), arrays, task.num_train, _say)


def _plan(options: argparse.Namespace) -> None:
    from ..experiments.compare import overridden, read_algorithms
    from ..experiments.plan import plan_runs, plan_table
    from ..results.speed_profile import with_profile

    config = own_settings(options)
    algorithms = read_algorithms(options.algorithms)
    if options.num_samples is not None and options.num_samples < 1:
        raise UsageError(f"--num-samples {options.num_samples} must be at least 1")
    # Speeds that are given hold for devices that are not here, too.
    workers = parse_workers(config.workers, anywhere=True)
    unknown = [worker for worker in workers if not worker.seconds_per_step]
    overhead, source = 0.0, "the seconds per step that were given"
    if unknown:
        path = _profile_path(config)
        if not path.exists():
            raise UsageError(
                f"the speed of {unknown[0].device_with_cores} is not known: {path} is not there; "
                "blsgd calibrate writes it, or write seconds-per-step= behind every worker"
            )
        workers, profile = with_profile(
            parse_workers(config.workers), replace(config, profile=str(path))
        )
        assert profile is not None
        overhead, source = profile.overhead_seconds.median, str(path)
    num_samples, num_test = options.num_samples, 0
    if num_samples is None:
        task = load_own(config)
        num_samples, num_test = task.num_train, task.num_test
    plan = plan_runs(config, workers, num_samples, algorithms, overhead, num_test)
    console().print(
        plan_table(plan, f"{source}; clock = {config.clock}, {num_samples:,} samples an epoch")
    )
    if note := overridden(config):
        _say(f"note: {note}")


def _compare(options: argparse.Namespace) -> None:
    from ..experiments import compare
    from ..experiments.comparison_report import terminal_table, write_comparison
    from ..results.folder import alone_in

    config = own_settings(options)
    algorithms = compare.read_algorithms(options.algorithms)
    arms = {name: {"algorithm": name} for name in algorithms}
    seeds = compare.read_seeds(options.seeds)
    if note := compare.overridden(config):
        raise UsageError(f"{note}; leave it empty to compare them")
    if options.target is not None and not 0 < options.target <= 1:
        raise UsageError(f"--target {options.target} must be an accuracy above 0, up to 1")
    if options.budget is not None:
        config = compare.with_budget(config, options.budget)
    folder = Path(options.out or f"runs/compare-{config.name}")
    own = folder / compare.PROFILE
    given = config.profile
    config = replace(config, profile="", algorithm=algorithms[0])
    compare.check_folder(folder, config)
    profile = speeds_for(config, arms, own, given)
    compare.open_folder(folder, config)
    busy = f"another blsgd compare is at work in {folder}; wait for it, or name another with --out"
    with alone_in(folder, busy):
        if profile is not None:
            profile.write(own)
            config = replace(config, profile=str(own))
        with terminated_like_interrupted():
            try:
                runs, failures = compare.train_all(
                    config, arms, seeds, folder, compare.train_quietly, _say
                )
            except (KeyboardInterrupt, SystemExit):
                _say("interrupted; the same command goes on with what is not finished")
                raise
        for failure in failures:
            _say(failure)
        if not runs:
            raise AggregationError("no run finished, so there is nothing to compare")
        named = [run["arm"] for run in runs]
        reference = next(name for name in algorithms if name in named)
        comparison = write_comparison(runs, folder, reference, options.target, failures)
        console().print(terminal_table(comparison))
        _say(f"in {folder}: comparison.md, comparison.csv, comparison.png")


def speeds_for(
    config: RunConfig, arms: "Mapping[str, Arm]", own: Path, given: str
) -> "SpeedProfile | None":
    """Return the speeds for all runs; None if given. UsageError if an arm could not begin."""
    workers, num_samples = parse_workers(config.workers), load_own(config).num_train
    _refuse_unable(config, arms, workers, num_samples)  # before it is measured
    if all(worker.seconds_per_step for worker in workers):
        return None
    profile = _profile_of(config, own, given)
    _refuse_unable(config, arms, profile.given_to(workers, config.clock), num_samples)
    return profile


def _refuse_unable(
    config: RunConfig, arms: "Mapping[str, Arm]", workers: Sequence[WorkerSpec], num_samples: int
) -> None:
    """Raise UsageError if one of these arms could not begin with these workers."""
    from ..run import check_workers

    for name, changes in arms.items():
        try:
            check_workers(replace(config, **changes), workers, num_samples)
        except UsageError as error:
            raise UsageError(
                f"{name} cannot run with these settings: {error}; change them, or leave it out"
            ) from None


def _profile_of(config: RunConfig, own: Path, given: str) -> "SpeedProfile":
    """Return the speeds for all runs: those a comparison began with, else given, else measured."""
    from ..results.speed_profile import SpeedProfile, profile_key

    if not own.exists() and not given:
        return _measure(config)
    path = own if own.exists() else Path(given)
    profile = SpeedProfile.read(path)
    if reason := profile.mismatch(profile_key(config), parse_workers(config.workers)):
        raise UsageError(
            f"the speeds in {path} do not hold here: {reason}; name another folder with --out, "
            "or measure with blsgd calibrate"
        )
    return profile


def _report(options: argparse.Namespace) -> None:
    from ..experiments.html_report import write_report

    out = Path(options.out or f"{options.folder}/report.html")
    _say(f"{write_report(Path(options.folder), out)}\nin {out}: open it in a browser")


def _profile_path(config: RunConfig) -> Path:
    return Path(config.profile) if config.profile else _PROFILES / f"{config.name}.json"


def load_own(config: RunConfig) -> "Task":
    """Return the task that the settings name, also one of a module in the current folder."""
    from ..run import load_own_task

    find_modules_here()
    return load_own_task(config)[0]
