"""The tables that the paper printed, and the runs that reproduce its tables and figures.

A reproduction has *cells*: each is a data set with a gap of local steps, (32, 16), (32, 4) or
(32, 1). A cell is a comparison of *arms*, one of which is the paper's method.
"""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from ..config import RunConfig, Value
from ..errors import UsageError, nearest
from ..experiments.compare import Arm
from ..flower.app_folder import built_in_app, run_config

REFERENCE = "biased-local-sgd"
"""The paper's method, the reference of the other arms."""

_SLOWER = {16: 2, 4: 8, 1: 22}
"""Slow device's time per step over the fast device's, by its local steps; 22 is the paper's."""

MEASURED = "paper, measured"
"""Label of a figure that the paper gives as measured and that follows from no other figure."""

COMPUTED = "paper, computed"
"""Label of a figure that follows from other figures of the paper, or is a count."""

Row = Mapping[str, str]
_THREE = ("cifar10", "flowers102", "cifar100")


def printed(name: str) -> list[dict[str, str]]:
    """Return the rows of a file in ``tables``, in the paper's order: texts by column.

    Accuracies and their spreads are in percent, times in seconds.
    """
    text = (files(__package__) / "tables" / f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def label(row: Row, column: str) -> str:
    """Return whether a figure is `MEASURED` or `COMPUTED`, by its row of `printed` and its column.

    In ``comparison_2c8g`` two kinds of seconds are computed. Those of biased local SGD are the
    seconds of synchronous SGD divided by 32, the tau of its fast workers; for 200 and 300 % of the
    epochs they are twice and three times as many. Those of ``dlb`` are 0.8 times the seconds of
    synchronous SGD on the fast workers alone: its 128 rounds for 160, or 64 for 80.
    ``fast_only_vs_mixed`` repeats the seconds of biased local SGD for all workers.
    """
    what = row.get("algorithm") or row.get("workers")
    seconds = column == "wall_clock_s" and what in ("biased-local-sgd", "dlb", "2cpu+8gpu")
    return COMPUTED if seconds or column == "comm_per_epoch" else MEASURED


@dataclass(frozen=True)
class RepeatedArm:
    """An arm: its settings, and the cell of the paper's table that shows it.

    In `changes`, ``epochs`` is a multiple of the cell's. `column` is empty if the arm is not in the
    table. `row` has values of the row by column; `number` is its place among the rows with these
    values, from 0.
    """

    changes: Arm
    column: str = ""
    row: Row = field(default_factory=dict)
    number: int = 0


@dataclass(frozen=True)
class Reproduction:
    """A table or a figure of the paper: its setting, its name for `printed`, its arms and cells.

    `table_arms` are compared as well if ``epoch = "table"``.
    """

    setting: str
    table: str
    arms: Mapping[str, RepeatedArm]
    datasets: tuple[str, ...] = _THREE
    slow_steps: tuple[int, ...] = (1,)
    table_arms: Mapping[str, RepeatedArm] = field(default_factory=dict)

    def arms_of(self, config: RunConfig) -> dict[str, Arm]:
        """Return the arms of a cell with these settings, for `train_all`."""
        arms = {**self.arms, **(self.table_arms if config.epoch == "table" else {})}
        return {
            name: {**arm.changes, "epochs": config.epochs * arm.changes.get("epochs", 1)}
            for name, arm in arms.items()
        }

    def printed(self, cell: "Cell", arm: str) -> dict[str, str]:
        """Return the figures that the paper printed of an arm, by column of a reproduction."""
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
    # Bars without numbers; the table of `bias-2c8g` has two of them.
    "features": Reproduction("2c8g", "bias_2c8g", _FEATURES, *_CELLS),
    **dict.fromkeys(("figure-timing", "figure-schedule", "figure-learning-curves"), _FIGURE),
}
"""The reproductions by name."""


@dataclass(frozen=True)
class Cell:
    """A data set, a gap such as ``"32-16"``, and all settings by key."""

    dataset: str
    gap: str
    values: Mapping[str, Value]

    @property
    def name(self) -> str:
        """Name of the folder of the cell."""
        return f"{self.dataset}-{self.gap}"


def cells_of(name: str, scale: str, only: str = "") -> list[Cell]:
    """Return the cells of a reproduction; at the scale ``"smoke"`` a single one, of digits.

    `only` names data sets and gaps, such as ``"cifar10,32-16"``, and restricts the cells to these.
    UsageError if a name is unknown.
    """
    if name not in REPRODUCTIONS:
        raise UsageError(f"{name} is unknown; known: {', '.join(REPRODUCTIONS)}")
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
        raise UsageError(f"only = {word!r}: {name} has no such cell at scale {scale}; {near}")
    datasets, gaps = datasets & words or datasets, gaps & words or gaps
    return [cell for cell in cells if cell.dataset in datasets and cell.gap in gaps]
