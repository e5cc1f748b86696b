"""Train several algorithms with several seeds in one folder, one run after another."""

import contextlib
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import tomli_w
from filelock import FileLock, Timeout
from flwr.serverapp.exception import AggregationError

from ..algorithm.catalog import ALGORITHMS
from ..config import RunConfig, Value
from ..errors import UsageError, nearest
from ..results.folder import RunFolder
from ..results.progress import ProgressView
from ..run import make_local_grid, train_on
from .finished_run import FinishedRun, read_run

SETTINGS = "comparison.toml"
PROFILE = "profile.json"

_VARIED = ("algorithm", "seed", "out", "name", "profile")
"""Settings that differ between the runs of one comparison, or do not change what is trained."""

_ALGORITHM_PARTS = ("steps", "sampler", "weights", "train_on", "momentum_buffers")
_UNLIMITED_EPOCHS = 100_000
_BUDGET = re.compile(r"(\d+(?:\.\d+)?)\s*(epochs?|s|seconds?|min|minutes?|h|hours?)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}

Train = Callable[[RunConfig], object]


def with_budget(config: RunConfig, budget: str) -> RunConfig:
    """Return the settings with a budget such as ``"10epochs"``, ``"60s"`` or ``"5min"``.

    Raises
    ------
    UsageError
        If the text cannot be read.
    """
    found = _BUDGET.fullmatch(budget.strip())
    if found is None or float(found[1]) <= 0:
        raise UsageError(f"--budget {budget}: write it like 10epochs, 60s or 5min")
    if found[2].startswith("epoch"):
        if not float(found[1]).is_integer():
            raise UsageError(f"--budget {budget}: epochs are whole numbers")
        return replace(config, epochs=int(float(found[1])), seconds=0.0)
    seconds = float(found[1]) * _SECONDS[found[2][0]]
    return replace(config, epochs=_UNLIMITED_EPOCHS, seconds=seconds)


def read_algorithms(text: str) -> list[str]:
    """Read names with commas between them; ``"all"`` stands for the whole catalog.

    Raises
    ------
    UsageError
        If one is not known (the nearest names are offered), or comes twice.
    """
    if text.strip() == "all":
        return list(ALGORITHMS)
    names = _words("--algorithms", text)
    for name in names:
        if name not in ALGORITHMS:
            raise UsageError(f"--algorithms {name}: not known; {nearest(name, ALGORITHMS)}")
    return names


def read_seeds(text: str) -> list[int]:
    """Read whole numbers with commas between them.

    Raises
    ------
    UsageError
        If one is not such a number, or comes twice.
    """
    seeds = []
    for word in _words("--seeds", text):
        if not word.isdecimal():
            raise UsageError(f"--seeds {text}: {word!r} is not a whole number; write 0,1,2")
        seeds.append(int(word))
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"--seeds {text}: a seed comes twice")
    return seeds


def _words(option: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise UsageError(f"{option} names nothing")
    for word in words:
        if words.count(word) > 1:
            raise UsageError(f"{option}: {word} comes twice")
    return words


def check_folder(folder: Path, config: RunConfig) -> None:
    """Refuse a folder in which this comparison can neither begin nor go on; writes nothing.

    Raises
    ------
    UsageError
        If it holds something else, or a comparison with other settings.
    """
    settings = folder / SETTINGS
    if not folder.exists():
        RunFolder.refuse_unusable(str(folder))
        return
    if not settings.is_file():
        if not folder.is_dir() or any(folder.iterdir()):
            raise UsageError(f"{folder} exists and holds no comparison; name another with --out")
        return
    ours = _shared_settings(config)
    try:
        values = tomllib.loads(settings.read_text())
        # An older version may have written settings that are retired, and lack newer ones.
        known = {key: value for key, value in values.items() if key in ours}
        theirs = _shared_settings(RunConfig.from_run_config(known))
    except (OSError, ValueError, RecursionError, UsageError) as error:
        raise UsageError(f"{settings} cannot be read: {error}") from None
    for key in sorted(ours):
        if ours[key] != theirs[key]:
            raise UsageError(
                f"{folder} holds a comparison with {key} = {theirs[key]!r}, not {ours[key]!r}; "
                "name another folder with --out"
            )


def open_folder(folder: Path, config: RunConfig) -> None:
    """Make a comparison's folder, if it is not there.

    Raises
    ------
    UsageError
        If it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / SETTINGS).exists():
            (folder / SETTINGS).write_text(tomli_w.dumps(_shared_settings(config)))
    except OSError as error:
        raise UsageError(f"{folder} cannot be made: {error.strerror}") from None


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lock a comparison's folder: two commands would remove each other's unfinished runs.

    Raises
    ------
    UsageError
        If another command has locked it.
    """
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UsageError(
            f"another blsgd compare is at work in {folder}; wait for it, or name another with --out"
        ) from None
    except (OSError, NotImplementedError):  # a disk without locks
        pass
    try:
        yield
    finally:
        lock.release()


def overridden(config: RunConfig) -> str:
    """Return which setting would make the algorithms alike, in words; empty if none does."""
    for part in _ALGORITHM_PARTS:
        if value := getattr(config, part):
            return f"{part.replace('_', '-')} = {value!r} overrides that of every algorithm"
    return ""


def train_all(
    config: RunConfig,
    algorithms: Sequence[str],
    seeds: Sequence[int],
    folder: Path,
    train: Train,
    log: Callable[[str], object],
) -> tuple[list[FinishedRun], list[str]]:
    """Train every algorithm with every seed; what is finished is not repeated.

    All algorithms are trained with one seed before the next seed, so that the runs which an
    interruption leaves are paired.

    Parameters
    ----------
    config : RunConfig
        What all have in common.
    algorithms, seeds : sequences
        What differs.
    folder : Path
        From `open_folder`.
    train : callable
        Trains with the settings it is given. A run of which it raises AggregationError counts as
        failed and the next one begins; any other error ends the comparison.
    log : callable
        Takes a line before and after each run.

    Returns
    -------
    list of FinishedRun
        What the runs left that finished.
    list of str
        Why each of the others failed, a line each.
    """
    finished, failures = [], []
    runs = [(algorithm, seed) for seed in seeds for algorithm in algorithms]
    for number, (algorithm, seed) in enumerate(runs, 1):
        head = f"[{number}/{len(runs)}] {algorithm}, seed {seed}: "
        out = folder / f"{algorithm}-seed{seed}"
        run, state = read_run(out), "finished before"
        if run is None:
            shutil.rmtree(out, ignore_errors=True)  # what an interruption left
            log(f"{head}training")
            try:
                train(replace(config, algorithm=algorithm, seed=seed, out=str(out)))
            except AggregationError as error:
                failures.append(f"{algorithm}, seed {seed} failed: {error}")
                log(f"{head}failed: {error}")
                continue
            run, state = read_run(out), "done"
        assert run is not None, "a run that raised nothing went to its end"
        reached = "" if run.accuracy is None else f", accuracy {run.accuracy:.2%}"
        log(f"{head}{state}{reached} after {run.training_seconds:.1f} s of training")
        finished.append(run)
    return finished, failures


def train_quietly(config: RunConfig) -> None:
    """Train on this machine as the settings say; show nothing but the live line.

    Raises
    ------
    UsageError
        If the settings do not fit.
    AggregationError
        If a round had no usable reply.
    """
    with make_local_grid(config) as grid:
        train_on(grid, config, _LiveLine(config.epochs, seconds=config.seconds))


class _LiveLine(ProgressView):
    """Shows the line that is rewritten after every round, and no line that stays."""

    def say(self, line: str) -> None:
        """Print nothing."""


def _shared_settings(config: RunConfig) -> dict[str, Value]:
    values = config.to_run_config().items()
    return {key: value for key, value in values if key.replace("-", "_") not in _VARIED}
