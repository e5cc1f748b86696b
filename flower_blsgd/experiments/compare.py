"""Train several algorithms, or other arms, with several seeds in one folder."""

import re
import shutil
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w
from filelock import FileLock, Timeout
from flwr.serverapp.exception import AggregationError

from ..algorithm.catalog import ALGORITHMS
from ..config import RunConfig, Value
from ..errors import UsageError, nearest
from ..results.folder import RunFolder, written_whole
from ..results.recorder import ProgressView
from ..run import make_local_grid, train_on
from .comparison import Run, read_run, run_folder
from .comparison_report import accuracy_name

SETTINGS = "comparison.toml"
PROFILE = "profile.json"

_VARIED = ("algorithm", "seed", "out", "name", "profile")
"""Settings that differ between the runs of one comparison, or do not change what is trained."""

Arm = Mapping[str, Any]
"""The settings that an arm of a comparison has instead of those in common, in snake_case."""

_ALGORITHM_PARTS = ("steps", "sampler", "weights", "train-on", "momentum-buffers")
_UNLIMITED_EPOCHS = 100_000
_BUDGET = re.compile(r"(\d+(?:\.\d+)?)\s*(epochs?|s|min|h)")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


# --- what is typed


def with_budget(config: RunConfig, budget: str) -> RunConfig:
    """Return the settings with a budget such as ``"10epochs"``, ``"60s"`` or ``"5min"``.

    UsageError if the text cannot be read.
    """
    found = _BUDGET.fullmatch(budget.strip())
    amount = float(found[1]) if found else 0.0
    if found and found[2] in _SECONDS and amount > 0:
        return replace(config, epochs=_UNLIMITED_EPOCHS, seconds=amount * _SECONDS[found[2]])
    if not amount or not amount.is_integer():
        raise UsageError(f"--budget {budget}: write it like 10epochs, 60s or 5min")
    return replace(config, epochs=int(amount), seconds=0.0)


def read_algorithms(text: str) -> list[str]:
    """Read names with commas between them; ``"all"`` stands for those with epochs of N samples.

    UsageError if one is not known (the nearest names are offered), or comes twice.
    """
    if text.strip() == "all":
        return [name for name, row in ALGORITHMS.items() if row.epoch == "samples"]
    names = _words("--algorithms", text)
    for name in names:
        if name not in ALGORITHMS:
            raise UsageError(f"--algorithms {name}: not known; {nearest(name, ALGORITHMS)}")
        if names.count(name) > 1:
            raise UsageError(f"--algorithms: {name} comes twice")
    return names


def read_seeds(text: str) -> list[int]:
    """Read whole numbers with commas between them; UsageError if one is none, or comes twice."""
    words = _words("--seeds", text)
    for word in words:
        if not word.isdecimal():
            raise UsageError(f"--seeds {text}: {word!r} is not a whole number; write 0,1,2")
    seeds = [int(word) for word in words]
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"--seeds {text}: a seed comes twice")
    return seeds


def _words(option: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise UsageError(f"{option} names nothing")
    return words


def overridden(config: RunConfig) -> str:
    """Return which setting would make the algorithms alike, in words; empty if none does."""
    values = config.to_run_config()
    for part in _ALGORITHM_PARTS:
        if value := values[part]:
            return f"{part} = {value!r} overrides that of every algorithm"
    return ""


# --- the folder


def check_folder(folder: Path, config: RunConfig) -> None:
    """Raise UsageError if this comparison can neither begin nor go on in a folder; writes nothing.

    Because it holds something else, or a comparison with other settings, or cannot be made.
    """
    settings = folder / SETTINGS
    if not folder.exists():
        RunFolder.refuse_unusable(str(folder))
        return
    if not settings.is_file():
        if not folder.is_dir() or any(folder.iterdir()):
            raise UsageError(f"{folder} exists and holds no comparison; name another with --out")
        return
    try:
        theirs = _shared(RunConfig.from_run_config(tomllib.loads(settings.read_text())))
    except (OSError, ValueError, RecursionError, UsageError) as error:
        raise UsageError(f"{settings} cannot be read: {error}") from None
    for key, ours in sorted(_shared(config).items()):
        if ours != theirs[key]:
            raise UsageError(
                f"{folder} holds a comparison with {key} = {theirs[key]!r}, not {ours!r}; "
                "name another folder with --out"
            )


def open_folder(folder: Path, config: RunConfig) -> None:
    """Make a comparison's folder, if it is not there; UsageError if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / SETTINGS).exists():
            with written_whole(folder / SETTINGS) as part:
                part.write_text(tomli_w.dumps(_shared(config)))
    except OSError as error:
        raise UsageError(f"{folder} cannot be made: {error.strerror}") from None


def _shared(config: RunConfig) -> dict[str, Value]:
    return {key: value for key, value in config.to_run_config().items() if key not in _VARIED}


# --- the runs


def train_all(
    config: RunConfig,
    arms: Mapping[str, Arm],
    seeds: Sequence[int],
    folder: Path,
    train: Callable[[RunConfig], object],
    log: Callable[[str], object],
    shared: bool = False,
) -> tuple[list[Run], list[str]]:
    """Train every arm with every seed; what is finished is not repeated.

    All arms are trained with one seed before the next seed, so that the runs which an
    interruption leaves are paired.

    Parameters
    ----------
    config : RunConfig
        What all have in common.
    arms, seeds : mapping of str to Arm, sequence of int
        What differs.
    folder : Path
        From `open_folder`.
    train : callable
        Trains with the settings it is given. A run of which it raises AggregationError counts as
        failed and the next one begins; any other error ends the comparison.
    log : callable
        Takes a line before and after each run.
    shared : bool (default: False)
        Whether other processes may do the same in this folder at the same time: each trains what
        no other does, and waits for them at the end.

    Returns
    -------
    list of Run
        What the runs left that finished.
    list of str
        Why each of the others failed, or is of no use, a line each.
    """
    runs = [(arm, seed) for seed in seeds for arm in arms]

    def one(number: int, arm: str, seed: int) -> Run | str:
        """Return what a run left, or why it failed."""
        head = f"[{number}/{len(runs)}] {arm}, seed {seed}: "
        out = run_folder(folder, arm, seed)
        try:
            run, state = read_run(out), "finished before"
            settings = run["settings"] if run else {}
            for name, value in arms[arm].items():
                if (theirs := settings.get(key := name.replace("_", "-"), value)) != value:
                    raise UsageError(f"{out} has {key} = {theirs!r}, not {value!r}; move it away")
        except UsageError as error:
            log(f"{head}left out: {error}")
            return f"{arm}, seed {seed}: {error}"
        if run is None:
            shutil.rmtree(out, ignore_errors=True)  # what an interruption left
            log(f"{head}training")
            try:
                train(replace(config, **arms[arm], seed=seed, out=str(out)))
            except AggregationError as error:
                log(f"{head}failed: {error}")
                return f"{arm}, seed {seed} failed: {error}"
            run, state = read_run(out), "done"
        assert run is not None, "a run that raised nothing went to its end"
        name = accuracy_name(run).removeprefix("test ")
        reached = "" if run["accuracy"] is None else f", {name} {run['accuracy']:.2%}"
        log(f"{head}{state}{reached} after {run['training_seconds']:.1f} s of training")
        return run

    results: dict[tuple[int, str, int], Run | str] = {}
    waiting = [(number, *run) for number, run in enumerate(runs, 1)]
    for timeout in (0, -1):  # at first those that no other process has
        for each in [run for run in waiting if run not in results]:
            lock = FileLock(folder / ".{1}-seed{2}.lock".format(*each), timeout=timeout)
            with suppress(Timeout), lock if shared else nullcontext():
                results[each] = one(*each)
    found = [result for _, result in sorted(results.items())]
    failures = [result for result in found if isinstance(result, str)]
    return [result for result in found if not isinstance(result, str)], failures


def train_quietly(config: RunConfig) -> None:
    """Train on this machine as the settings say; show nothing but the live line.

    UsageError if the settings do not fit, AggregationError if a round had no usable reply.
    """
    config = replace(config, keep_checkpoints=0)  # a run that is not finished is repeated
    with make_local_grid(config) as grid:
        try:
            train_on(grid, config, _LiveLine(config.epochs, seconds=config.seconds))
        except (KeyboardInterrupt, SystemExit) as error:
            error.__notes__ = ["the same command goes on with the comparison"]  # not with the run
            raise


class _LiveLine(ProgressView):
    """Shows the line that is rewritten after every round, and no line that stays."""

    def say(self, line: str) -> None:
        """Print nothing."""
        self.log(line)
