"""Repeat a table or a figure of the paper."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from ..config import RunConfig, Value
from ..devices.worker_spec import parse_workers
from ..errors import UsageError
from ..experiments.compare import prepare, refuse_overrides, train_all
from ..experiments.comparison import Comparison, compare_runs, read_run, run_folder
from ..experiments.comparison_report import write_comparison
from ..files import written_whole
from .figures import FIGURES
from .report import RepeatedCell, write_reproduction
from .reproductions import REFERENCE, REPRODUCTIONS, Cell, cells_of

Scale = Literal["smoke", "quick", "full"]
Mode = Literal["samples", "table"]


def cells_to_train(
    name: str,
    scale: Scale,
    mode: Mode,
    only: str,
    settings: Callable[[Mapping[str, Value]], Mapping[str, Value]],
) -> list[RepeatedCell]:
    """Return the cells of a reproduction; the arguments are those of ``blsgd reproduce``.

    `settings` returns the settings of a cell, in kebab-case, with changes of the user. UsageError
    if an argument or a setting cannot be used.
    """
    cells, found = cells_of(name, scale, only), []
    several = len({cell.dataset for cell in cells}) > 1
    for cell in cells:
        config = _config_of(cell, settings(cell.values), mode, several)
        found.append(RepeatedCell(cell, config, REPRODUCTIONS[name].arms_of(config)))
    return found


def reproduce(
    name: str,
    scale: Scale,
    mode: Mode,
    cells: Sequence[RepeatedCell],
    seeds: Sequence[int],
    folder: Path | None,
    log: Callable[[str], object],
) -> Iterator[Comparison]:
    """Train cells on this machine, and write their figures next to the paper's.

    Yields the comparison of each cell when it is finished; `failed` of a cell then names runs
    without figures. `log` takes lines of progress. Runs are trained as by `train_all`. UsageError
    if no cell can be trained.
    """
    seeds = seeds or ((0,) if scale == "smoke" else (0, 1, 2))
    suffix = "-table" if mode == "table" else ""
    folder = folder or Path(f"runs/reproduce-{name}-{scale}{suffix}")
    runs = [
        run_folder(folder / each.cell.name, arm, seed)
        for each in cells
        for arm in each.arms
        for seed in seeds
    ]
    log(f"{len(runs)} runs, {sum(map(_is_finished, runs))} of them finished")

    for each in cells:
        try:
            each.config = prepare(each.config, each.arms, folder / each.cell.name, log)
        except UsageError as error:
            each.failed = [str(error)]
            log(f"{each.cell.name} left out: {error}")
    ready = [each for each in cells if not each.failed]
    if not ready:
        raise UsageError(cells[0].failed[0])
    for each in ready:
        below = folder / each.cell.name

        def log_cell(line: str, name: str = each.cell.name) -> None:
            log(f"{name} {line}")

        trained, each.failed = train_all(each.config, each.arms, seeds, below, log_cell)
        if not trained:
            continue
        each.comparison = compare_runs(trained, REFERENCE, failed=each.failed)
        write_comparison(each.comparison, below)
        by_arm = {one.algorithm: one.runs for one in each.comparison.algorithms}
        if draw := FIGURES.get(name):
            with written_whole(below / f"{name}.png") as part:
                draw({arm: by_arm[arm] for arm in each.arms if arm in by_arm}, part)
        title = f"{name}, {scale} scale, {mode} mode"
        write_reproduction(title, REPRODUCTIONS[name], cells, folder)
        yield each.comparison
    if any(each.comparison for each in ready):
        log(f"in {folder}: reproduction.md, reproduction.csv, and a comparison for each cell")


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
    for key in ("local-steps-fast", "local-steps-slow"):
        if (given := config.to_run_config()[key]) != cell.values[key]:
            raise UsageError(
                f"{key} = {given!r}: {cell.name} has {cell.values[key]}; choose cells with --only"
            )
    for worker in parse_workers(config.workers, anywhere=True):
        if worker.steps:
            raise UsageError(
                f"workers: steps={worker.steps}: {cell.name} decides the local steps; leave it out"
            )
    return config


def _is_finished(folder: Path) -> bool:
    with suppress(UsageError):  # an unreadable run is reported later
        return read_run(folder) is not None
    return False
