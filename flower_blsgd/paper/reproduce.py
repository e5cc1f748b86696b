"""Repeat a table or a figure of the paper."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from ..config import RunConfig, Value
from ..devices.machine import format_bytes, free_bytes, this_machine
from ..devices.worker_spec import parse_workers
from ..errors import UsageError
from ..experiments.compare import prepare, refuse_overrides, train_all
from ..experiments.comparison import Comparison, compare_runs, read_run, run_folder
from ..experiments.comparison_report import write_comparison
from ..results.folder import written_whole
from .figures import FIGURES
from .report import RepeatedCell, write_reproduction
from .reproductions import REFERENCE, REPRODUCTIONS, Cell, cells_of

Scale = Literal["smoke", "quick", "full"]
Mode = Literal["samples", "table"]

_MODELS = {
    "resnet8": (75_290, 50_000, 0.002),
    "resnet20": (269_722, 50_000, 0.0105),
    "wrn-16-8": (11_010_486, 7_169, 0.36),
    "wrn-28-10": (36_536_884, 50_000, 0.74),
    "vit_b_16": (85_952_456, 100_000, 2.3),
    "encoder": (800_000, 120_000, 0.0006),
    "distilbert": (66_956_548, 120_000, 1.06),
}
"""Parameters, samples of the data set, and approximate seconds of a CPU core per sample."""

_SMALL = (0, 1_437, 0.0003)
_PROCESS_BYTES, _COPIES = 0.31e9, 8
"""Memory of a process, and copies of the model in a worker; measured with batches of two."""

_START_SECONDS = 0.7
"""Seconds of a CPU core to start a worker."""


def reproduce(
    name: str,
    scale: Scale,
    mode: Mode,
    seeds: Sequence[int],
    only: str,
    settings: Callable[[Mapping[str, Value]], Mapping[str, Value]],
    folder: Path | None,
    log: Callable[[str], object],
    show: Callable[[Comparison], object],
) -> list[RepeatedCell]:
    """Train the runs of a reproduction on this machine, and write figures next to the paper's.

    `name`, `scale`, `mode`, `seeds`, `only` and `folder` are those of ``blsgd reproduce``.
    `settings` returns the settings of a cell, in kebab-case, with changes of the user. `log` takes
    lines of progress, `show` the comparison of each cell that is finished. Runs are trained as by
    `train_all`.

    Every cell is returned; its `failed` names runs without figures. UsageError if an argument or a
    setting cannot be used, no cell can be trained, or the full scale needs more than the free
    memory.
    """
    cells, repeated = cells_of(name, scale, only), REPRODUCTIONS[name]
    seeds = seeds or ((0,) if scale == "smoke" else (0, 1, 2))
    suffix = "-table" if mode == "table" else ""
    folder = folder or Path(f"runs/reproduce-{name}-{scale}{suffix}")
    several = len({cell.dataset for cell in cells}) > 1
    every = []
    for cell in cells:
        config = _config_of(cell, settings(cell.values), mode, several)
        every.append(RepeatedCell(cell, config, repeated.arms_of(config)))
    log(_needed(every, seeds, folder, refuse=scale == "full"))

    for each in every:
        try:
            each.config = prepare(each.config, each.arms, folder / each.cell.name, log)
        except UsageError as error:
            each.failed = [str(error)]
            log(f"{each.cell.name} left out: {error}")
    ready = [each for each in every if not each.failed]
    if not ready:
        raise UsageError(every[0].failed[0])
    for each in ready:
        below = folder / each.cell.name

        def log_cell(line: str, name: str = each.cell.name) -> None:
            log(f"{name} {line}")

        runs, each.failed = train_all(each.config, each.arms, seeds, below, log_cell)
        if not runs:
            continue
        each.comparison = compare_runs(runs, REFERENCE, failed=each.failed)
        write_comparison(each.comparison, below)
        by_arm = {one.algorithm: one.runs for one in each.comparison.algorithms}
        if draw := FIGURES.get(name):
            with written_whole(below / f"{name}.png") as part:
                draw({arm: by_arm[arm] for arm in each.arms if arm in by_arm}, part)
        show(each.comparison)
        write_reproduction(f"{name}, {scale} scale, {mode} mode", repeated, every, folder)
    if any(each.comparison for each in ready):
        log(f"in {folder}: reproduction.md, reproduction.csv, and a comparison for each cell")
    return every


def _config_of(cell: Cell, values: Mapping[str, Value], mode: Mode, several: bool) -> RunConfig:
    """Return the settings of a cell; UsageError if one is refused."""
    data = RunConfig.from_run_config({"data": values["data"]}).data
    if data:
        names = (cell.dataset, cell.dataset.replace("-", "_"))
        own = next((path for name in names if (path := Path(data, name)).is_dir()), None)
        if own is None and several:
            raise UsageError(
                f"data = {data!r} has no folder {cell.dataset}: name a folder with one for each "
                f"data set, or choose one data set, such as --only {cell.dataset}"
            )
        data = str(own or data)
    fixed = {"data": data, "epoch": mode, "algorithm": REFERENCE, "name": ""}
    config = RunConfig.from_run_config({**values, **fixed})
    refuse_overrides(config)
    return config


# --- what the runs need


def _needed(cells: Sequence[RepeatedCell], seeds: Sequence[int], folder: Path, refuse: bool) -> str:
    """Return what the runs need; UsageError, if asked for, if that is more than the free memory."""
    number, done, seconds, needed = 0, 0, 0.0, 0.0
    for each in cells:
        num_workers = len(parse_workers(each.config.workers, None, anywhere=True))
        for arm, changes in each.arms.items():
            run_bytes, run_seconds = cost(replace(each.config, **changes), num_workers)
            runs = [run_folder(folder / each.cell.name, arm, seed) for seed in seeds]
            left = sum(not _is_finished(run) for run in runs)
            number, done = number + len(runs), done + len(runs) - left
            seconds, needed = seconds + left * run_seconds, max(needed, bool(left) * run_bytes)
    machine, free = this_machine(), free_bytes()
    per, unit = (3600, "h") if seconds >= 7200 else (60, "min") if seconds >= 120 else (1, "s")
    text = (
        f"{number} runs, {done} of them finished; the others take about {seconds / per:,.0f} "
        f"{unit} of a CPU core and {format_bytes(needed)} of memory; this machine has "
        f"{len(machine.cores)} core(s), {', '.join(machine.accelerators) or 'no accelerator'} and "
        f"{'an unknown amount' if free is None else format_bytes(free)} of free memory"
    )
    if refuse and free is not None and needed > free:
        raise UsageError(f"{text}: use --scale quick, or fewer cells with --only")
    return text


def cost(config: RunConfig, num_workers: int) -> tuple[float, float]:
    """Return approximately the bytes of memory and the seconds of a CPU core that a run needs."""
    parameters, samples, seconds = _MODELS.get(config.model, _SMALL)
    num_bytes = (num_workers + 1) * _PROCESS_BYTES + num_workers * _COPIES * 4 * parameters
    trained = config.epochs * min(samples, config.max_samples or samples)
    return num_bytes, num_workers * _START_SECONDS + trained * seconds


def _is_finished(folder: Path) -> bool:
    with suppress(UsageError):  # an unreadable run is reported later
        return read_run(folder) is not None
    return False
