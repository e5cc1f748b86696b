"""Rows, the table of them, and the JSON file."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.rows import conditions, main, missing, not_run, row, with_goal, write
from benchmarks.table import cells, shown


def test_row_has_the_median_its_range_and_the_ratio_of_medians() -> None:
    made = row("ours", [3.0, 1.0, 2.0, 10.0], "s", [5.0, 1.0, 3.0], "theirs")
    assert made["value"] == 2.5
    assert (made["minimum"], made["maximum"], made["mean"]) == (1.0, 10.0, 4.0)
    assert made["count"] == 4
    assert made["standard_deviation"] == pytest.approx((50 / 3) ** 0.5)
    assert made["ratio"] == pytest.approx(2.5 / 3.0)
    assert made["against"] == "theirs"


def test_row_of_one_value_has_no_deviation_and_no_ratio() -> None:
    made = row("ours", [3.0], "s")
    assert made["standard_deviation"] is None
    assert made["ratio"] is None
    assert made["against"] is None


@pytest.mark.parametrize(
    ("limits", "of", "text", "met"),
    [
        ({"at_most": 2.0}, "value", "<= 2 s", True),
        ({"at_most": 1.9}, "value", "<= 1.9 s", False),
        ({"at_least": 0.5}, "ratio", ">= 0.5 x", True),
        ({"at_least": 0.51}, "ratio", ">= 0.51 x", False),
        ({"at_most": 0.5}, "ratio", "<= 0.5 x", True),
    ],
)
def test_goal_is_judged(limits: dict[str, float], of: str, text: str, met: bool) -> None:
    made = with_goal(row("ours", [2.0], "s", [4.0], "theirs"), of=of, **limits)
    assert (made["goal"], made["goal_met"]) == (text, met)


def test_goal_of_what_was_not_measured_is_neither_met_nor_missed() -> None:
    assert with_goal(not_run("ours", "no memory", "s"), at_most=1)["goal_met"] is None
    without_ratio = row("ours", [2.0], "s")
    assert with_goal(without_ratio, at_least=60, of="ratio")["goal_met"] is None


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


def test_cells_of_what_was_not_run_say_why() -> None:
    assert cells(not_run("a", "needs 12 GB", "s"), goals=True) == [
        "a",
        "not run",
        "s",
        "needs 12 GB",
        "",
        "",
    ]


@pytest.mark.parametrize(
    ("figure", "text"),
    [(0.0, "0"), (0.00012344, "0.0001234"), (1234.56, "1,235"), (-0.5, "-0.5"), (1e12, "1e+12")],
)
def test_shown_has_four_digits(figure: float, text: str) -> None:
    assert shown(figure) == text


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


@pytest.mark.parametrize("quick", [True, False])
def test_main_hands_quick_on(quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    words = ["somewhere/step.py", "--json", str(path), *(["--quick"] if quick else [])]
    monkeypatch.setattr("sys.argv", words)
    main(lambda asked: ([row("asked", [float(asked)], "")], {}), "What it measures.")
    assert json.loads(path.read_text())["rows"][0]["value"] == float(quick)


def test_missing_names_the_extra() -> None:
    assert missing("json", "text") is None
    assert missing("no_such_package", "text") == (
        "no_such_package is not installed: pip install 'flower-blsgd[text]'"
    )


def test_conditions_say_what_a_number_depends_on() -> None:
    found = conditions(seed=3)
    for key in (
        "date",
        "cores",
        "processor",
        "memory_gb",
        "accelerators",
        "flower_blsgd",
        "flwr",
        "torch",
        "torch_threads",
        "load_average_at_start",
    ):
        assert found[key] is not None, key
    assert found["seed"] == 3
    assert found["cores"] >= 1
    json.dumps(found)
