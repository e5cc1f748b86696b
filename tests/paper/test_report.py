"""A reproduction as a table to read and as one to compute with, worked by hand."""

import csv
from pathlib import Path

import pytest

from flower_blsgd.config import RunConfig
from flower_blsgd.experiments.comparison import Run, compare_runs
from flower_blsgd.paper.report import (
    RepeatedCell,
    rows_of,
    write_reproduction,
)
from flower_blsgd.paper.reproductions import REFERENCE, REPRODUCTIONS, cells_of

from ..experiments.made_runs import made_run

BIAS = REPRODUCTIONS["bias-2c8g"]
UNBIASED, FAST = "unbiased-local-sgd", "fast-only-local-sgd"


def cell_of(runs: list[Run], problems: tuple[str, ...] = ()) -> RepeatedCell:
    (cell,) = cells_of("bias-2c8g", "quick", "cifar10,32-4")
    config = RunConfig.from_run_config(cell.values)
    compared = compare_runs(runs, REFERENCE) if runs else None
    return RepeatedCell(cell, config, BIAS.arms_of(config), compared, list(problems))


@pytest.fixture
def cell() -> RepeatedCell:
    """Biased ends at 2 s and 1,000 samples, unbiased at 4 s, evaluated every second."""
    runs = [
        *(made_run(REFERENCE, seed, (0.5, 0.90 + x), 5.0, 1.0) for seed, x in enumerate((0, 0.02))),
        *(made_run(UNBIASED, seed, (0.4, 0.6, None, 0.8 + x), 5.0, 1.0, samples=1200)
          for seed, x in enumerate((0, 0.01))),
    ]  # fmt: skip
    return cell_of(runs, ("fast-only-local-sgd, seed 0 failed: nobody",))


def test_rows(cell: RepeatedCell) -> None:
    rows = {row["arm"]: row for row in rows_of(BIAS, cell)}
    assert list(rows) == [REFERENCE, UNBIASED, "weighted-local-sgd", FAST]
    shared = {"cell": "cifar10-32-4", "mode": "samples", "tau_fast": 32, "tau_slow": 4}
    assert all(row.items() >= shared.items() for row in rows.values())
    biased, unbiased, missing = rows[REFERENCE], rows[UNBIASED], rows[FAST]
    assert (biased["n"], biased["verdict"], biased["difference_points"]) == (2, "reference", None)
    assert biased["accuracy_percent"] == pytest.approx(91)
    assert biased["deviation"] == pytest.approx(2**0.5)
    # By seed: -10 and -11 points, so -10.5 -+ 12.706 x 0.5: worse.
    assert unbiased["difference_points"] == pytest.approx(-10.5)
    assert unbiased["half_width_points"] == pytest.approx(6.353, abs=1e-3)
    assert unbiased["verdict"] == "worse"
    assert (unbiased["training_seconds"], unbiased["device_seconds"]) == (20, 4)
    # At 2 s its second evaluation; its 1,200 samples are more than 1.1 x 1,000: the one at 500.
    assert unbiased["accuracy_at_equal_time_percent"] == pytest.approx(60)
    assert biased["accuracy_at_equal_time_percent"] == pytest.approx(91)
    paper = ("88.09", "0.1", "paper, measured")
    assert tuple(unbiased[f"paper_{key}"] for key in ("percent", "spread", "label")) == paper
    assert (missing["n"], missing["accuracy_percent"], missing["verdict"]) == (0, None, None)
    assert missing["accuracy_at_equal_samples_percent"] is None


def test_equal_samples_are_equal_to_within_a_tenth() -> None:
    """A run of 1,090 samples has 1.09 times those of the other: both count to their ends."""
    longer = made_run(UNBIASED, 0, (0.4, 0.6), samples=1090)
    for row in longer["rows"]:
        row["samples"] *= 1.09
    for factor, expected in ((1.0, 60), (1.02, 40)):
        for row in longer["rows"]:
            row["samples"] *= factor
        rows = rows_of(BIAS, cell_of([made_run(REFERENCE), longer]))
        assert rows[1]["accuracy_at_equal_samples_percent"] == pytest.approx(expected)


def test_files(tmp_path: Path, cell: RepeatedCell) -> None:
    (tmp_path / cell.cell.name).mkdir()
    (tmp_path / cell.cell.name / "features.png").touch()
    write_reproduction("bias-2c8g, quick scale", BIAS, [cell, cell_of([])], tmp_path)
    text = (tmp_path / "reproduction.md").read_text(encoding="utf-8")
    assert text.startswith("# bias-2c8g, quick scale\n\n## cifar10-32-4\n")
    lines = [line for line in text.splitlines() if line.startswith(f"| {UNBIASED} | 2 |")]
    assert lines[0].startswith(f"| {UNBIASED} | 2 | 80.50 ± 0.71 | -10.50 ± 6.35 | worse | 60.00 |")
    assert lines[0].endswith("| 88.09 ± 0.1 | paper, measured |")
    assert "Compared with biased-local-sgd, worse: unbiased-local-sgd." in text
    assert "Test accuracy; conditions and pictures: [table](cifar10-32-4/comparison.md)" in text
    assert "![cifar10-32-4/features.png](cifar10-32-4/features.png)" in text
    assert "Not included: fast-only-local-sgd, seed 0 failed: nobody." in text
    with (tmp_path / "reproduction.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    assert rows[1]["difference_points"] == "-10.5"
    assert (rows[5]["n"], rows[5]["accuracy_percent"], rows[5]["paper_percent"]) == (
        "0",
        "",
        "88.09",
    )
