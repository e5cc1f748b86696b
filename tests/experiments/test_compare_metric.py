"""A real comparison of a regression task, whose metric is to be minimized."""

import csv
import json
from pathlib import Path

import pytest

from flower_blsgd.config import RunConfig
from flower_blsgd.devices.machine import usable_cores
from flower_blsgd.experiments.compare import compare
from flower_blsgd.experiments.html_report import write_report

from ..refusal import refusal

CORE = usable_cores()[0]
CONFIG = RunConfig(
    task="tests.experiments.regression:task",
    workers=f"1x cpu:{CORE} fast seconds-per-step=0.001; 1x cpu:{CORE} slow seconds-per-step=0.002",
    epochs=3,
    batch_size=20,
    learning_rate=0.05,
    threads=1,
)
ARMS = ("fast-only-local-sgd", "weighted-local-sgd")


@pytest.mark.processes
def test_comparison_of_a_regression_task(tmp_path: Path) -> None:
    folder, lines = tmp_path / "compared", list[str]()
    # A target above 1 is no accuracy, and the first epoch reaches it.
    comparison = compare(CONFIG, ARMS, [0], folder, 50.0, lines.append)
    assert comparison.failed == ()
    assert (comparison.reference, comparison.target) == (ARMS[0], 50.0)
    summaries = {
        run["arm"]: json.loads((run["folder"] / "summary.json").read_text())
        for run in comparison.runs
    }
    best, worst = sorted(ARMS, key=lambda arm: summaries[arm]["metric"])
    assert [(one.algorithm, one.value) for one in comparison.algorithms] == [
        *((best, summaries[best]["metric"]), (worst, summaries[worst]["metric"])),
    ]
    assert [row["epoch"] for one in comparison.algorithms for row in one.reached] == [1, 1]
    assert f": done, rmse {summaries[best]['metric']:.4g} after " in "".join(lines)
    table = (folder / "comparison.md").read_text(encoding="utf-8")
    assert "| rmse (lower is better) | difference |" in table
    assert "not measured" not in table
    with (folder / "comparison.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        summary = summaries[row["algorithm"]]
        assert float(row["rmse"]) == pytest.approx(summary["metric"], rel=1e-5)
        assert float(row["best_rmse"]) == pytest.approx(summary["best_metric"], rel=1e-5)
    title = write_report(folder, tmp_path / "page.html")
    assert title.startswith(f"{best}: test rmse {summaries[best]['metric']:.4g}, the best of 2; ")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert f"Reference: {ARMS[0]}, the first algorithm." in page
    # Without a target it is the worse of the best values, or a little above.
    again = compare(CONFIG, ARMS, [0], folder, None, lines.append)
    largest = max(summary["best_metric"] for summary in summaries.values())
    assert again.target is not None
    assert largest <= again.target <= 1.01 * largest
    assert all(len(one.reached) == 1 for one in again.algorithms)


def test_target_that_is_no_number_is_refused(tmp_path: Path) -> None:
    for target in (float("nan"), float("-inf")):
        line = refusal(compare, CONFIG, ARMS, [0], tmp_path / "x", target, print)
        assert line.endswith("must be an accuracy in (0, 1], or a finite value of another metric")
