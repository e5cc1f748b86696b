"""Rows, the table of them, and the JSON file."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.rows import not_run, row, with_goal, write
from benchmarks.table import cells


def test_row_has_the_median_its_range_and_the_ratio_of_medians() -> None:
    made = row("ours", [3.0, 1.0, 2.0, 10.0], "s", [5.0, 1.0, 3.0], "theirs")
    assert made["value"] == 2.5
    assert (made["minimum"], made["maximum"], made["mean"]) == (1.0, 10.0, 4.0)
    assert made["count"] == 4
    assert made["standard_deviation"] == pytest.approx((50 / 3) ** 0.5)
    assert made["ratio"] == pytest.approx(2.5 / 3.0)
    assert made["against"] == "theirs"


@pytest.mark.parametrize(
    ("limits", "of", "text", "met"),
    [
        ({"at_most": 2.0}, "value", "<= 2 s", True),
        ({"at_least": 0.51}, "ratio", ">= 0.51 x", False),
        ({"at_most": 0.5}, "ratio", "<= 0.5 x", True),
    ],
)
def test_goal_is_judged(limits: dict[str, float], of: str, text: str, met: bool) -> None:
    made = with_goal(row("ours", [2.0], "s", [4.0], "theirs"), of=of, **limits)
    assert (made["goal"], made["goal_met"]) == (text, met)


def test_cells_show_a_row() -> None:
    made = with_goal(row("a [b]", [0.003, 0.001, 0.002], "s", [0.001], "copy"), at_most=0.003)
    assert cells(made, goals=True) == [
        "a [b]",
        "0.002",
        "s",
        "0.001 to 0.003, n = 3",
        "2 x copy",
        "<= 0.003 s: met",
    ]


def test_write_prints_every_row_and_writes_rows_and_conditions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row("measured one", [2.0], "s"), not_run("other one", "needs 12 GB", "s")]
    path = tmp_path / "new" / "rows.json"
    write(rows, {"seed": 7}, path)
    printed = capsys.readouterr().out
    assert re.search(r"measured one .* 2 .* n = 1", printed)
    assert re.search(r"other one .* not run .* needs 12 GB", printed)
    assert "seed = 7" in printed
    content = json.loads(path.read_text())
    assert content["conditions"] == {"seed": 7}
    for written in content["rows"]:
        assert {"name", "value", "unit", "ratio", "against"} <= written.keys()
    assert content["rows"][1]["value"] is None
    assert content["rows"][1]["reason"] == "needs 12 GB"
