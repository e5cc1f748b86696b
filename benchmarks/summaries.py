"""Rows from the results folders of finished runs, such as seeds of one training.

``python -m benchmarks.summaries RUN... --at-once N --json FILE``. A run's time counts against its
goal only if it had the device for itself.
"""

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flower_blsgd.config import RunConfig

from .rows import Measured, Row, conditions, parser, row, with_goal, write

EPOCHS, IMAGES, LONGEST_TRAINING_SECONDS = 100, 50_000, 120.0


def measure(folders: Sequence[Path], at_once: int) -> Measured:
    """Return the figures of runs that differ in their seed only."""
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    settings = tomllib.loads((folders[0] / "config.toml").read_text())
    return rows_of(summaries, at_once), conditions(
        runs_at_once=at_once,
        seeds=[summary["seed"] for summary in summaries],
        settings=_changed(settings),
        versions=summaries[0]["versions"],
        interrupted=[bool(summary.get("interrupted")) for summary in summaries],
    )


def rows_of(summaries: Sequence[dict[str, Any]], at_once: int) -> list[Row]:
    """Return training seconds, accuracy and the rest of the runs, a value for each."""
    alone = "alone on its device" if at_once == 1 else f"{at_once} at once"
    rows = []
    for key, unit in (
        ("training_seconds", "s"),
        ("device_seconds", "s"),
        ("evaluation_seconds", "s"),
        ("accuracy", "of 1"),
        ("epochs", "epochs"),
        ("fast_waiting_share", "of 1"),
    ):
        values = [summary[key] for summary in summaries if summary.get(key) is not None]
        if values:
            rows.append(row(f"{key.replace('_', ' ')} ({alone})", values, unit))
    if at_once == 1 and all(_is_that_of_the_goal(summary) for summary in summaries):
        rows[0] = with_goal(rows[0], at_most=LONGEST_TRAINING_SECONDS)
    return rows


def _is_that_of_the_goal(summary: dict[str, Any]) -> bool:
    """Return whether it is a whole training of 100 epochs of 50,000 images on one GPU."""
    devices = {worker["device"] for worker in summary["workers"] if worker["tier"] == "fast"}
    whole = summary["epochs"] == EPOCHS and not summary.get("interrupted")
    on_one = len(devices) == 1 and next(iter(devices)).startswith("cuda")
    return whole and on_one and summary["samples"] >= 0.99 * EPOCHS * IMAGES


def _changed(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that are not the default, without paths of this machine."""
    usual = RunConfig().to_run_config()
    return {
        key: value
        for key, value in settings.items()
        if key not in ("out", "data", "profile") and value != usual.get(key)
    }


if __name__ == "__main__":
    line = parser(__doc__)
    line.add_argument("runs", nargs="+", type=Path, help="results folders")
    line.add_argument("--at-once", type=int, default=1, help="runs that shared the device")
    given = line.parse_args()
    write(*measure(given.runs, given.at_once), given.json)
