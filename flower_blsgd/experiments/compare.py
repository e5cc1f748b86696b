"""Train several algorithms, or other arms, with several seeds in one folder, and compare them."""

import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w
from flwr.serverapp.exception import AggregationError

from ..algorithm.catalog import ALGORITHMS
from ..config import RunConfig, Value
from ..devices.worker_spec import WorkerSpec, parse_workers, workers_text
from ..errors import UsageError, nearest
from ..files import locked, write_text
from ..parts import check_workers, make_local_grid
from ..results.folder import RunFolder, read_settings, refused
from ..results.metric import value_in
from ..results.progress import ProgressView
from ..run import train_on
from ..strategy.budget import Budget
from ..workload import load_own_task
from .calibration import measure_speeds, without_speeds
from .comparison import (
    SETTINGS,
    VARIED,
    Comparison,
    Run,
    compare_runs,
    metric_of,
    read_run,
    run_folder,
)
from .comparison_report import write_comparison

SPEEDS = "workers.toml"
REPEATED = tuple(name for name, row in ALGORITHMS.items() if row.epoch == "samples")
"""The algorithms that ``--algorithms all`` compares: an epoch of each has N samples."""

Arm = Mapping[str, Any]
"""Settings of an arm of a comparison, in snake_case; they replace the common ones."""

_OF_SPEED = (
    *("workers", "threads", "task", "data", "model", "dropout", "lora_rank", "image_size"),
    *("max_tokens", "batch_size", "micro_batch_size", "optimizer", "loader_workers", "precision"),
    *("channels_last", "compile"),
)
"""Settings on which the speed of a step depends."""

_ALGORITHM_PARTS = ("steps", "sampler", "weights", "train-on", "momentum-buffers", "average")


def compare(
    config: RunConfig,
    algorithms: Sequence[str],
    seeds: Sequence[int],
    folder: Path,
    target: float | None,
    log: Callable[[str], object],
    vary: Mapping[str, Sequence[Value]] | None = None,
) -> Comparison:
    """Train several algorithms with several seeds on this machine, and compare them.

    With `vary`, values of one setting by its key, each algorithm is trained with each value. The
    same call continues a comparison that was interrupted, and one with more algorithms or seeds
    extends it; see `train_all`. The first algorithm with a finished run is the reference; `target`
    is that of `compare_runs`.

    UsageError if an argument or a setting cannot be used, or the folder holds something else.
    AggregationError if no run finished.
    """
    refuse_unknown(algorithms)
    for key, values in (("algorithms", algorithms), ("seeds", seeds)):
        if not values or len({*values}) < len(values):
            raise UsageError(f"{key} = {[*values]}: name at least one, and each only once")
    if target is not None and not 0 < target <= 1:
        allowed = "an accuracy in (0, 1], or a finite value of another metric"
        if not math.isfinite(target) or load_own_task(config).metric_name == "accuracy":
            raise UsageError(f"target = {target} must be {allowed}")
    if len(algorithms) > 1:
        refuse_overrides(config)
    arms = arms_of(algorithms, vary or {})
    config = prepare(replace(config, algorithm=algorithms[0]), arms, folder, log)
    runs, failed = train_all(config, arms, seeds, folder, log)
    if not runs:
        raise AggregationError("no run finished, so there is nothing to compare")
    trained = {run["arm"] for run in runs}
    reference = next(name for name in arms if name in trained)
    comparison = compare_runs(runs, reference, target, failed)
    write_comparison(comparison, folder)
    return comparison


def arms_of(
    algorithms: Sequence[str], vary: Mapping[str, Sequence[Value]]
) -> dict[str, dict[str, Any]]:
    """Return the arms of a comparison: each algorithm, with each value of the settings that vary.

    UsageError if two values have the same name, or a setting cannot vary.
    """
    arms: dict[str, dict[str, Any]] = {name: {"algorithm": name} for name in algorithms}
    for key, values in vary.items():
        if key in VARIED:
            raise UsageError(f"--vary {key}: this setting cannot vary; name another one")
        named = {re.sub(r"[^\w.-]", "-", f"{key}-{value}"): value for value in values}
        if len(named) < len(values):
            raise UsageError(f"--vary {key}: name each value only once")
        arms = {
            f"{arm}-{name}": {**changes, key.replace("-", "_"): value}
            for arm, changes in arms.items()
            for name, value in named.items()
        }
    return arms


def refuse_unknown(algorithms: Sequence[str]) -> None:
    """Raise UsageError if a name is not in the catalog."""
    for name in algorithms:
        if name not in ALGORITHMS:
            raise UsageError(f"algorithms: {name!r} is unknown; {nearest(name, ALGORITHMS)}")


def overridden(config: RunConfig) -> str:
    """Return which setting overrides that part of every algorithm; empty if none does."""
    values = config.to_run_config()
    given = (f"{part} = {values[part]!r}" for part in _ALGORITHM_PARTS if values[part])
    return next((f"{one} overrides that of every algorithm" for one in given), "")


def refuse_overrides(config: RunConfig) -> None:
    """Raise UsageError if a setting would make the algorithms alike."""
    if note := overridden(config):
        raise UsageError(f"{note}; leave it empty to compare them")


# --- the folder and the speeds that all runs share


def prepare(
    config: RunConfig, arms: Mapping[str, Arm], folder: Path, log: Callable[[str], object]
) -> RunConfig:
    """Make the folder of a comparison, or check an existing one; return the settings of its runs.

    Unknown speeds are read from the folder, else measured. All runs share them, unless a setting
    varies that changes them; then each run measures its own. UsageError if an arm cannot run, the
    speeds are those of other workers, or the folder cannot be used.
    """
    check_folder(folder, config)
    own = folder / SPEEDS
    workers, num_samples = parse_workers(config.workers), load_own_task(config).num_train
    _refuse_unable(config, arms, workers, num_samples)  # before anything is measured
    varied = {name for changes in arms.values() for name in changes}
    if varied.intersection(_OF_SPEED) or all(worker.seconds_per_step for worker in workers):
        open_folder(folder, config)
        return config
    if not own.exists():
        known = measure_speeds(config, log).given_to(workers, config.clock)
        _refuse_unable(config, arms, known, num_samples)
        open_folder(folder, config)
        with refused(f"{own} cannot be written"):
            write_text(own, tomli_w.dumps({"workers": workers_text(known)}))
    config = replace(config, workers=read_settings(own).workers)
    if without_speeds(parse_workers(config.workers)) != without_speeds(workers):
        raise UsageError(f"the speeds in {own} are of other workers; choose another folder")
    return config


def _refuse_unable(
    config: RunConfig, arms: Mapping[str, Arm], workers: Sequence[WorkerSpec], num_samples: int
) -> None:
    for name, changes in arms.items():
        try:
            own = parse_workers(changes["workers"]) if "workers" in changes else workers
            check_workers(replace(config, **changes), own, num_samples)
        except UsageError as error:
            raise UsageError(
                f"{name} cannot run with these settings: {error}; change them, or leave it out"
            ) from None


def check_folder(folder: Path, config: RunConfig) -> None:
    """Raise UsageError if a comparison can neither start nor continue in a folder; write nothing.

    The folder may hold something else, or a comparison with other settings, or be read-only.
    """
    settings = folder / SETTINGS
    if not os.path.exists(folder):  # pathlib raises if a folder above it may not be entered
        RunFolder.refuse_unusable(str(folder))
        return
    if not settings.is_file():
        if not folder.is_dir() or any(folder.iterdir()):
            raise UsageError(f"{folder} exists and holds no comparison; choose another folder")
        return
    theirs = _shared(read_settings(settings))
    for key, ours in sorted(_shared(config).items()):
        if ours != theirs[key]:
            raise UsageError(
                f"{folder} holds a comparison with {key} = {theirs[key]!r}, not {ours!r}; "
                "choose another folder"
            )


def open_folder(folder: Path, config: RunConfig) -> None:
    """Make the folder of a comparison if it is missing; UsageError if that is impossible."""
    with refused(f"{folder} cannot be made"):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / SETTINGS).exists():
            write_text(folder / SETTINGS, tomli_w.dumps(_shared(config)))


def _shared(config: RunConfig) -> dict[str, Value]:
    return {key: value for key, value in config.to_run_config().items() if key not in VARIED}


# --- the runs


def train_all(
    config: RunConfig,
    arms: Mapping[str, Arm],
    seeds: Sequence[int],
    folder: Path,
    log: Callable[[str], object],
) -> tuple[list[Run], list[str]]:
    """Train every arm with every seed; a finished run is not repeated.

    All arms are trained with one seed before the next seed, so that an interruption leaves runs
    that are paired. Other processes may do the same in this folder at the same time: each trains
    the runs that no other process is training, and waits for those at the end.

    Return the finished runs, and for each other run one line on why it failed or cannot be used.
    UsageError if the settings of a run cannot be used.
    """
    runs = [(arm, seed) for seed in seeds for arm in arms]

    def one(number: int, arm: str, seed: int) -> Run | str:
        """Return a finished run, or the reason for its absence."""
        head = f"[{number}/{len(runs)}] {arm}, seed {seed}: "
        out = run_folder(folder, arm, seed)
        try:
            run, state = read_run(out), "finished before"
            settings = run["settings"] if run else {}
            own = replace(config, **arms[arm]).with_absolute_paths().to_run_config()
            for key in (name.replace("_", "-") for name in arms[arm]):
                if (theirs := settings.get(key, own[key])) != own[key]:
                    raise UsageError(
                        f"{out} has {key} = {theirs!r}, not {own[key]!r}; move it away"
                    )
        except UsageError as error:
            log(f"{head}left out: {error}")
            return f"{arm}, seed {seed}: {error}"
        if run is None:
            shutil.rmtree(out, ignore_errors=True)  # left by an interruption
            log(f"{head}training")
            try:
                train_quietly(replace(config, **arms[arm], seed=seed, out=str(out)))
            except AggregationError as error:
                log(f"{head}failed: {error}")
                return f"{arm}, seed {seed} failed: {error}"
            except (KeyboardInterrupt, SystemExit) as error:
                # It replaces the note of the run, which cannot be resumed.
                error.__notes__ = ["repeat the command to continue; finished runs are kept"]
                raise
            run, state = read_run(out), "done"
        if run is None:
            reason = f"its results could not be written to {out}"
            log(f"{head}failed: {reason}")
            return f"{arm}, seed {seed} failed: {reason}"
        final = metric_of(run).measured(value_in(run))
        reached = final and f", {final}"
        log(f"{head}{state}{reached} after {run['training_seconds']:.1f} s of training")
        return run

    results: dict[tuple[int, str, int], Run | str] = {}
    waiting = [(number, *run) for number, run in enumerate(runs, 1)]
    for wait in (False, True):  # first the runs that no other process is training
        for each in [run for run in waiting if run not in results]:
            lock = folder / ".{1}-seed{2}.lock".format(*each)
            with suppress(BlockingIOError), locked(lock, wait):
                results[each] = one(*each)
    found = [result for _, result in sorted(results.items())]
    failures = [result for result in found if isinstance(result, str)]
    return [result for result in found if not isinstance(result, str)], failures


def train_quietly(config: RunConfig) -> None:
    """Train on this machine and show only the live line.

    UsageError if the settings cannot be used, AggregationError if a round had no usable reply.
    """
    config = replace(config, keep_checkpoints=0)  # an unfinished run is repeated
    with make_local_grid(config) as grid:
        train_on(grid, config, ProgressView(Budget.of_run(config), lines=False))
