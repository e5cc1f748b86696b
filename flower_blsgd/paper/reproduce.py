"""Repeat a table or a figure of the paper."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from ..config import RunConfig, Value
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
    setting cannot be used, or no cell can be trained.
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
    runs = [
        run_folder(folder / each.cell.name, arm, seed)
        for each in every
        for arm in each.arms
        for seed in seeds
    ]
    log(f"{len(runs)} runs, {sum(map(_is_finished, runs))} of them finished")

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

        trained, each.failed = train_all(each.config, each.arms, seeds, below, log_cell)
        if not trained:
            continue
        each.comparison = compare_runs(trained, REFERENCE, failed=each.failed)
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


def _is_finished(folder: Path) -> bool:
    with suppress(UsageError):  # an unreadable run is reported later
        return read_run(folder) is not None
    return False
