"""Rows, the table of them, and the JSON file."""

import pytest

from benchmarks.rows import row, with_goal


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
