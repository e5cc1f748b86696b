"""The paper's tables as it printed them, and what to train to repeat them and its figures.

A reproduction has *cells*, a data set with a gap of local steps each: (32, 16), (32, 4) or (32, 1).
A cell is a comparison of *arms*, of which one is the paper's method.
"""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from ..config import RunConfig, Value
from ..errors import UsageError, nearest
from ..grids.flower_app import built_in_app, run_config
from .compare import Arm

MEASURED = "paper, measured"
"""A figure that the paper gives as measured, and that follows from no others of its figures."""

COMPUTED = "paper, computed"
"""A figure that follows from others of the paper's figures, or is a count."""

REFERENCE = "biased-local-sgd"
"""The paper's method, with which the other arms are compared."""

_SLOWER = {16: 2, 4: 8, 1: 22}
"""How many times slower a simulated device is that does so many steps; 22 as in the paper."""

_MODELS = {
    "resnet8": (75_290, 50_000, 0.002),
    "resnet20": (269_722, 50_000, 0.0105),
    "wrn-16-8": (11_010_486, 7_169, 0.36),
    "wrn-28-10": (36_536_884, 50_000, 0.74),
    "vit-b-16": (85_952_456, 100_000, 2.3),
    "encoder": (800_000, 120_000, 0.0006),
    "distilbert": (66_956_548, 120_000, 1.06),
}
"""Parameters, samples of the data set, and about how many seconds a CPU core trains on one."""

_PROCESS_BYTES, _COPIES = 0.31e9, 8
"""Memory of a process, and copies of the model in a worker; all of ``paper_rounds.json``, B = 2."""

Row = Mapping[str, str]
_THREE = ("cifar10", "flowers102", "cifar100")


def printed(name: str) -> list[dict[str, str]]:
    """Return the rows of a file in ``paper_tables``, in the paper's order: texts by column.

    Accuracies and their spreads are in percent, times in seconds.
    """
    text = (files(__package__) / "paper_tables" / f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def label(row: Mapping[str, str], column: str) -> str:
    """Return `MEASURED` or `COMPUTED`: what a figure is, by its row of `printed` and its column.

    In ``comparison_2c8g`` the seconds of biased local SGD are those of synchronous SGD over 32, the
    tau of its fast workers, and those of 200 and 300 % of the epochs twice and three times as
    many; those of ``dlb`` are 0.8 times those of synchronous SGD on the fast workers alone: its 128
    rounds for 160, or 64 for 80. ``fast_only_vs_mixed`` repeats the former for all workers.
    """
    what = row.get("algorithm") or row.get("workers")
    seconds = column == "wall_clock_s" and what in ("biased-local-sgd", "dlb", "2cpu+8gpu")
    return COMPUTED if seconds or column == "comm_per_epoch" else MEASURED


@dataclass(frozen=True)
class RepeatedArm:
    """An arm: its settings, and in which column and row of its table the paper printed it.

    ``epochs`` are a multiple of the cell's. The row is the first, or another by `number`, of those
    with these values; an arm without a column is not in the table.
    """

    changes: Arm
    column: str = ""
    row: Row = field(default_factory=dict)
    number: int = 0


@dataclass(frozen=True)
class Reproduction:
    """A table or a figure of the paper: its setting, its table as of `printed`, its arms and cells.

    `table_arms` are compared as well where ``epoch = "table"``.
    """

    setting: str
    table: str
    arms: Mapping[str, RepeatedArm]
    datasets: tuple[str, ...] = _THREE
    slow_steps: tuple[int, ...] = (1,)
    table_arms: Mapping[str, RepeatedArm] = field(default_factory=dict)

    def arms_of(self, config: RunConfig) -> dict[str, Arm]:
        """Return the arms of a cell with these settings, for `compare.train_all`."""
        arms = {**self.arms, **(self.table_arms if config.epoch == "table" else {})}
        return {
            name: {**arm.changes, "epochs": config.epochs * arm.changes.get("epochs", 1)}
            for name, arm in arms.items()
        }

    def printed(self, cell: "Cell", arm: str) -> dict[str, str]:
        """Return what the paper printed of an arm, by column of a reproduction; or nothing."""
        own = {**self.arms, **self.table_arms}[arm]
        steps = str(cell.values["local-steps-slow"])
        wanted = {"dataset": cell.dataset, "tau_slow": steps, **own.row}
        rows = [r for r in printed(self.table) if all(r.get(k, v) == v for k, v in wanted.items())]
        if not own.column or not rows:
            return {}
        row, seconds = rows[own.number], "wall_clock_s"
        return {
            "paper_percent": row[own.column],
            "paper_spread": row["spread" if "spread" in row else f"{own.column}_spread"],
            "paper_label": label(row, own.column),
            "paper_seconds": row.get(seconds, ""),
            "paper_seconds_label": label(row, seconds) if seconds in row else "",
        }


def _arm(
    algorithm: str, column: str = "", number: int = 0, row: Row | None = None, **changes: Any
) -> RepeatedArm:
    return RepeatedArm({"algorithm": algorithm, **changes}, column, row or {}, number)


_RIVALS = {name: _arm(name) for name in ("weighted-local-sgd", "fast-only-local-sgd")}
_UNBIASED = {"unbiased-local-sgd": _arm("unbiased-local-sgd", "unbiased")}
_BIAS = {REFERENCE: _arm(REFERENCE, "biased"), **_UNBIASED, **_RIVALS}
_FEATURES = {**_UNBIASED, "sampled-local-sgd": _arm("sampled-local-sgd"), **_RIVALS, **_BIAS}
_RELEASED = {
    name: _arm(name) for name in ("biased-local-sgd-released", "unbiased-local-sgd-released")
}
_COMPARED = {
    name: _arm(name, "accuracy", row={"algorithm": name})
    for name in ("sync-sgd", "sync-sgd-fast-only", "balanced-local-sgd", "byteps", "dlb", REFERENCE)
}
_LONGER = {
    f"{REFERENCE}-{n}00": _arm(REFERENCE, "accuracy", n - 1, {"algorithm": REFERENCE}, epochs=n)
    for n in (2, 3)
}
_DRAWN = {name: _COMPARED[name] for name in ("sync-sgd", "balanced-local-sgd", REFERENCE)}
_MIXED, _ALONE = {"workers": "2cpu+8gpu"}, {"workers": "8gpu"}
_FAST_ONLY = {
    REFERENCE: _arm(REFERENCE, "accuracy", row=_MIXED),
    f"{REFERENCE}-fast-only": _arm(REFERENCE, "accuracy", row=_ALONE, train_on="fast"),
}
_SCHEMES = {
    f"{sampler}-high-to-{tier}": _arm(
        REFERENCE, sampler, row={"high_loss_to": tier}, sampler=sampler, high_loss_to=tier
    )
    for sampler, tier in (("separated", "slow"), ("unified", "fast"), ("unified", "slow"))
}
_SCHEMES[REFERENCE] = _arm(REFERENCE, "separated", row={"high_loss_to": "fast"})
_CELLS = (*_THREE, "tiny-imagenet", "ag-news"), tuple(_SLOWER)
_FIGURE = Reproduction("2c8g", "comparison_2c8g", {**_DRAWN, **_RIVALS})

REPRODUCTIONS: Mapping[str, Reproduction] = {
    "comparison": Reproduction("2c8g", "comparison_2c8g", {**_COMPARED, **_LONGER, **_RIVALS}),
    "fast-only-vs-mixed": Reproduction("2c8g", "fast_only_vs_mixed", {**_FAST_ONLY, **_RIVALS}),
    "bias-2c8g": Reproduction("2c8g", "bias_2c8g", _BIAS, *_CELLS),
    "bias-1c1g": Reproduction("1c1g", "bias_1c1g", _BIAS, *_CELLS, _RELEASED),
    "sampling-schemes": Reproduction(
        "2c8g", "sampling_schemes_2c8g", {**_SCHEMES, **_UNBIASED, **_RIVALS}, table_arms=_RELEASED
    ),
    # Bars without numbers, of which the table of `bias-2c8g` has two.
    "features": Reproduction("2c8g", "bias_2c8g", _FEATURES, *_CELLS),
    **dict.fromkeys(("figure-timing", "figure-schedule", "figure-learning-curves"), _FIGURE),
}
"""What can be repeated, by name."""


@dataclass(frozen=True)
class Cell:
    """A data set, a gap such as ``"32-16"``, and all settings by key."""

    dataset: str
    gap: str
    values: Mapping[str, Value]

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.dataset}-{self.gap}"


def cells_of(name: str, scale: str, only: str = "") -> list[Cell]:
    """Return the cells of a reproduction, one of digits at the scale ``"smoke"``.

    `only` names data sets and gaps, such as ``"cifar10,32-16"``: a cell must have one of the data
    sets, if some are named, and one of the gaps, if some are named. UsageError if there is no such
    reproduction, or `only` names something that it does not have.
    """
    if name not in REPRODUCTIONS:
        raise UsageError(f"{name} is not known; there are {', '.join(REPRODUCTIONS)}")
    repeated, app, cells = REPRODUCTIONS[name], built_in_app(), []
    smoke = scale == "smoke"
    for dataset in ("digits",) if smoke else repeated.datasets:
        base = f"{dataset}-{repeated.setting}{'' if scale == 'full' else f'-{scale}'}"
        if not (app.path / "configs" / f"{base}.toml").is_file():
            continue  # not every data set has a small one
        values, _ = run_config(app, [base], [])
        for steps in repeated.slow_steps[-1:] if smoke else repeated.slow_steps:
            workers = str(values["workers"])
            if given := re.search(r"fast seconds-per-step=(\S+?);", workers):
                slow = f"slow seconds-per-step={_SLOWER[steps] * float(given[1]):g}"
                workers = re.sub(r"slow seconds-per-step=\S+", slow, workers)
            values |= {"workers": workers, "local-steps-slow": steps}
            cells.append(Cell(dataset, f"{values['local-steps-fast']}-{steps}", dict(values)))
    datasets, gaps = {cell.dataset for cell in cells}, {cell.gap for cell in cells}
    words = {word.strip() for word in only.split(",") if word.strip()}
    for word in sorted(words - datasets - gaps):
        near = nearest(word, [*datasets, *gaps])
        raise UsageError(f"--only {word}: {name} has no such cell at --scale {scale}; {near}")
    datasets, gaps = datasets & words or datasets, gaps & words or gaps
    return [cell for cell in cells if cell.dataset in datasets and cell.gap in gaps]


def cost(config: RunConfig, num_workers: int) -> tuple[float, float]:
    """Return about how many bytes of memory, and seconds of a CPU core, a run needs."""
    parameters, samples, seconds = _MODELS.get(config.model, (0, 1_437, 0.0003))
    num_bytes = (num_workers + 1) * _PROCESS_BYTES + num_workers * _COPIES * 4 * parameters
    trained = config.epochs * min(samples, config.max_samples or samples)
    return num_bytes, num_workers * 0.7 + trained * seconds  # 0.7 s of a core for one to start
