"""Train several algorithms on the same data, seeds and devices, one run after another."""

import contextlib
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tomli_w
from filelock import FileLock, Timeout
from flwr.serverapp.exception import AggregationError

from ..algorithm.catalog import ALGORITHMS
from ..config import RunConfig, Value
from ..errors import UsageError, nearest
from ..results.folder import RunFolder
from .comparison import Comparison
from .comparison_folder import write_comparison
from .finished_run import is_finished, read_run

SETTINGS = "comparison.toml"
PROFILE = "profile.json"

_VARIED = ("algorithm", "seed", "out", "name", "profile")
"""Settings that differ between the runs of one comparison, or say nothing about them."""

_PARTS = ("steps", "sampler", "weights", "train_on", "momentum_buffers")
_UNLIMITED_EPOCHS = 100_000
_BUDGET = re.compile(r"(\d+(?:\.\d+)?)\s*(epochs?|s|seconds?|min|minutes?|h|hours?)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}

Train = Callable[[RunConfig], object]


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison.

    Parameters
    ----------
    algorithm : str
        Its name.
    seed : int
        Its seed.
    folder : Path
        Where its results are, or will be.
    """

    algorithm: str
    seed: int
    folder: Path


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
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == ["all"]:
        return list(ALGORITHMS)
    for name in names:
        if name not in ALGORITHMS:
            raise UsageError(f"--algorithms {name}: not known; {nearest(name, ALGORITHMS)}")
    return _different("--algorithms", names)


def read_seeds(text: str) -> list[int]:
    """Read whole numbers with commas between them.

    Raises
    ------
    UsageError
        If one is not such a number, or comes twice.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if not word.isdecimal():
            raise UsageError(f"--seeds {text}: {word!r} is not a whole number; write 0,1,2")
    return [int(word) for word in _different("--seeds", [str(int(word)) for word in words])]


def check_folder(folder: Path, config: RunConfig) -> None:
    """Refuse a folder in which this comparison can neither begin nor go on; writes nothing.

    Raises
    ------
    UsageError
        If it holds something else, or a comparison with other settings.
    """
    settings, mine = folder / SETTINGS, _shared_settings(config)
    if not folder.exists():
        RunFolder.refuse_unusable(str(folder))
    if settings.is_file():
        try:
            there = tomllib.loads(settings.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"{settings} cannot be read: {error}") from None
        for key in sorted(mine.keys() | there.keys()):
            if mine.get(key) != there.get(key):
                raise UsageError(
                    f"{folder} holds a comparison with {key} = {there.get(key)!r}, not "
                    f"{mine.get(key)!r}; name another folder with --out"
                )
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and holds no comparison; name another with --out")


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
    """Hold a comparison's folder: two commands would remove each other's unfinished runs.

    Raises
    ------
    UsageError
        If another one holds it.
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
    """Return which part is set that makes the algorithms alike, in words; empty if none is."""
    for part in _PARTS:
        if value := getattr(config, part):
            return f"{part.replace('_', '-')} = {value!r} overrides that of every algorithm"
    return ""


def train_all(
    config: RunConfig,
    algorithms: Sequence[str],
    seeds: Sequence[int],
    folder: Path,
    train: Train,
    tell: Callable[[str], object],
) -> tuple[list[ComparedRun], list[str]]:
    """Train every algorithm with every seed; what is finished is not repeated.

    All algorithms have their turn with one seed before the next seed comes, so that what is there
    after an interruption is paired.

    Parameters
    ----------
    config : RunConfig
        What all have in common.
    algorithms, seeds : sequences
        What differs.
    folder : Path
        From `open_folder`.
    train : callable
        Trains with the settings it is given.
    tell : callable
        Is told a line per run.

    Returns
    -------
    list of ComparedRun
        Those that finished.
    list of str
        What became of those that failed, a line each.
    """
    runs = list(_runs(algorithms, seeds, folder))
    finished, failures = [], []
    for number, run in enumerate(runs, 1):
        head = f"[{number}/{len(runs)}] {run.algorithm}, seed {run.seed}: "
        if is_finished(run.folder):
            tell(f"{head}finished before{_figures(run)}")
            finished.append(run)
            continue
        shutil.rmtree(run.folder, ignore_errors=True)  # what an interruption left
        tell(f"{head}training")
        own = replace(config, algorithm=run.algorithm, seed=run.seed, out=str(run.folder))
        try:
            train(own)
        except AggregationError as error:
            failures.append(f"{run.algorithm}, seed {run.seed} failed: {error}")
            tell(f"{head}failed: {error}")
            continue
        tell(f"{head}done{_figures(run)}")
        finished.append(run)
    return finished, failures


def summarise(
    runs: Sequence[ComparedRun],
    folder: Path,
    reference: str,
    target: float | None,
    failed: Sequence[str] = (),
) -> Comparison:
    """Write table and picture of what is finished, and return the figures."""
    finished = [read_run(run.folder) for run in runs]
    return write_comparison(finished, folder, reference, target, failed)


def _shared_settings(config: RunConfig) -> dict[str, Value]:
    values = config.to_run_config().items()
    return {key: value for key, value in values if key.replace("-", "_") not in _VARIED}


def _runs(algorithms: Sequence[str], seeds: Sequence[int], folder: Path) -> Iterator[ComparedRun]:
    for seed in seeds:
        for algorithm in algorithms:
            yield ComparedRun(algorithm, seed, folder / f"{algorithm}-seed{seed}")


def _figures(run: ComparedRun) -> str:
    found = read_run(run.folder)
    reached = "" if found.accuracy is None else f", accuracy {found.accuracy:.2%}"
    return f"{reached} after {found.training_seconds:.1f} s of training"


def _different(option: str, words: list[str]) -> list[str]:
    if not words:
        raise UsageError(f"{option} names nothing")
    for word in words:
        if words.count(word) > 1:
            raise UsageError(f"{option}: {word} comes twice")
    return words
