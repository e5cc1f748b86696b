"""Tables of speeds and plans: they fit, and they say plainly what slow devices are worth."""

import io
import re
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console, RenderableType

from flower_blsgd.algorithm.catalog import ALGORITHMS
from flower_blsgd.config import RunConfig
from flower_blsgd.experiments.plan import Plan, plan_runs
from flower_blsgd.experiments.speed_tables import in_words, plan_table, speed_table
from flower_blsgd.runtime.devices import WorkerSpec

from .profiles import WORKERS, made_profile

WIDTH = 100


def told(renderable: RenderableType, width: int = WIDTH) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(renderable)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in lines)
    return lines


def cells(lines: Sequence[str], first: str) -> list[str]:
    """Return the cells of the row that begins with a word."""
    (line,) = [line for line in lines if line.split()[:1] == [first]]
    return re.split(r"\s{2,}", line.strip())


def plan_cells(lines: Sequence[str], algorithm: str) -> list[str]:
    """Return the nine cells of an algorithm's row; that of the steps may hold spaces."""
    (line,) = [line for line in lines if line.split()[:1] == [algorithm]]
    name, rest = line.split(maxsplit=1)
    return [name, *rest.rsplit(maxsplit=7)]


def team(*seconds: float, fast: int = 1) -> list[WorkerSpec]:
    return [
        WorkerSpec("cpu", (place,), "fast" if place < fast else "slow", seconds_per_step=each)
        for place, each in enumerate(seconds)
    ]


def plan_of(workers: Sequence[WorkerSpec], *algorithms: str, **changes: Any) -> Plan:
    config = RunConfig(**{"local_steps_slow": "auto", **changes})
    return plan_runs(config, workers, 50_000, algorithms or tuple(ALGORITHMS))


EIGHT_AND_TWO = team(*[0.01] * 8, *[0.22] * 2, fast=8)


def test_plan_row_hand_worked() -> None:
    """1 x 32 + 1 x 8 steps of 16: 640 samples in 0.32 s; 78.125 rounds of them are an epoch."""
    lines = told(plan_table(plan_of(team(0.01, 0.04), "biased-local-sgd"), "thin air"))
    assert lines[0] == "expected, from thin air"
    assert plan_cells(lines, "biased-local-sgd") == [
        *("biased-local-sgd", "32, 8", "20.0%", "78.1", "0.32", "25", "0%", "0%", "2,000"),
    ]


def test_plan_of_every_algorithm_fits_and_keeps_every_name_and_number() -> None:
    lines = told(plan_table(plan_of(EIGHT_AND_TWO), "the seconds per step that were given"))
    for name in ALGORITHMS:
        assert len(plan_cells(lines, name)) == 9, name
    assert plan_cells(lines, "biased-local-sgd")[1:3] == ["8x 32, 2x 1", "0.8%"]
    assert plan_cells(lines, "fast-only-local-sgd")[1:3] == ["8x 32", "-"]
    assert plan_cells(lines, "balanced-local-sgd")[1] == "10x 32"
    assert not any("\N{HORIZONTAL ELLIPSIS}" in line for line in lines)


def test_plan_in_an_ordinary_terminal_keeps_every_name_and_number() -> None:
    lines = told(plan_table(plan_of(EIGHT_AND_TWO), "x"), 80)
    assert not any("\N{HORIZONTAL ELLIPSIS}" in line for line in lines)
    assert plan_cells(lines, "sync-sgd") == [
        *("sync-sgd", "10x 1", "20.0%", "312.5", "0.22", "68.8", "95%", "0%", "727"),
    ]


def test_plan_fits_for_many_speeds() -> None:
    workers = team(*[0.01 * 1.1**place for place in range(20)], fast=10)
    lines = told(plan_table(plan_of(workers, local_steps_fast=500, steps="by-speed"), "x"))
    for name in ALGORITHMS:
        assert [line for line in lines if line.split()[:1] == [name]], name


def test_plan_tells_steps_of_other_batches() -> None:
    lines = told(plan_table(plan_of(team(0.01, 1.0), "biased-local-sgd"), "x"))
    assert plan_cells(lines, "biased-local-sgd")[1] == "32 of 16, 1 of 5"


def test_plan_refused_row_stands_in_the_table_and_its_reason_below() -> None:
    plan = plan_of(team(0.01, 0.01, fast=2), "biased-local-sgd", "sync-sgd")
    lines = told(plan_table(plan, "x"))
    assert plan_cells(lines, "biased-local-sgd") == ["biased-local-sgd", "refused", *["-"] * 7]
    assert len(plan_cells(lines, "sync-sgd")) == 9
    assert any(line.startswith("biased-local-sgd: workers: no slow worker") for line in lines)


def test_plan_that_refuses_everything_is_told_all_the_same() -> None:
    plan = plan_runs(RunConfig(batch_size=64), EIGHT_AND_TWO, 20)
    lines = told(plan_table(plan, "x"))
    assert plan_cells(lines, "sync-sgd")[1] == "refused"
    assert any(line.startswith("ceiling: ") for line in lines)


def test_slow_devices_that_hardly_help_are_told_plainly() -> None:
    plan = plan_of(EIGHT_AND_TWO, "biased-local-sgd")
    assert in_words(plan, plan.rows[0]) == [
        "ceiling: all devices together can do at most 1.01 times the samples per second of the "
        "fast ones alone, whatever the algorithm",
        "so the slow devices hardly help: less than 2 % more samples per second",
        "slow-8 (cpu:8) hardly takes part: its weight is 0.39% with biased-local-sgd",
        "slow-9 (cpu:9) hardly takes part: its weight is 0.39% with biased-local-sgd",
    ]


@pytest.mark.parametrize(("slow", "hardly"), [(0.5, False), (0.51, True)])
def test_two_percent_is_the_border(slow: float, hardly: bool) -> None:
    plan = plan_of(team(0.01, slow), "sync-sgd")  # 0.01 / 0.5 is 2 %
    assert any("hardly help" in line for line in in_words(plan, plan.rows[0])) is hardly


def test_slow_devices_that_help_are_not_talked_down() -> None:
    plan = plan_of(team(0.01, 0.02), "biased-local-sgd")
    (line,) = in_words(plan, plan.rows[0])
    assert "at most 1.50 times" in line


def test_nothing_is_said_of_slow_devices_where_there_are_none() -> None:
    plan = plan_of(team(0.01, 0.01, fast=2), "sync-sgd")
    assert in_words(plan, plan.rows[0]) == []


# --- calibrate's


def speed_lines(**changes: Any) -> list[str]:
    config = RunConfig(**changes)
    profile = made_profile(config, alone=(0.01, 0.04), loaded=(0.02, 0.05))
    workers = profile.given_to(WORKERS, config.clock)
    plan = plan_runs(config, workers, 1437, [config.algorithm], 0.001)
    return told(speed_table(profile, plan, plan.rows[0], config.clock))


def test_speeds_hand_worked() -> None:
    """On the wall clock: 32 steps of 20 ms beside 8 of 50 ms, and 1 ms for the round."""
    lines = speed_lines()
    assert cells(lines, "fast-0") == [
        *("fast-0 (cpu:0-1)", "10 (5 to 20)", "20 (10 to 40)", "1", "32", "80.0%", "0%"),
    ]
    assert cells(lines, "slow-1") == [  # waits 0.24 s of 0.641
        *("slow-1 (cpu:2)", "40 (20 to 80)", "50 (25 to 100)", "0.4", "8", "20.0%", "37%"),
    ]
    assert "biased-local-sgd, clock = wall: gamma, steps, weight and waiting come from all" in (
        " ".join(lines)
    )
    assert "beside computing a round takes 1 (0.5 to 2) ms" in lines


def test_speeds_on_the_device_clock_are_those_alone() -> None:
    lines = speed_lines(clock="device")
    assert cells(lines, "slow-1")[3:] == ["0.25", "8", "20.0%", "0%"]
    assert any("each worker alone" in line for line in lines)


def test_speeds_of_who_does_not_train_are_told_without_steps() -> None:
    lines = speed_lines(algorithm="fast-only-local-sgd")
    assert cells(lines, "fast-0")[4:] == ["32", "100.0%", "0%"]
    assert cells(lines, "slow-1")[3:] == ["0.4", "-", "-", "-"]


def test_speeds_go_with_their_workers_where_a_slow_one_is_named_first() -> None:
    config = RunConfig()
    workers = WORKERS[::-1]
    profile = made_profile(config, workers, alone=(0.04, 0.01), loaded=(0.05, 0.02))
    plan = plan_runs(config, profile.given_to(workers, "wall"), 1437, ["biased-local-sgd"])
    lines = told(speed_table(profile, plan, plan.rows[0], "wall"))
    assert cells(lines, "fast-0")[:3] == ["fast-0 (cpu:0-1)", "10 (5 to 20)", "20 (10 to 40)"]
    assert cells(lines, "slow-1")[2] == "50 (25 to 100)"


def test_speeds_are_told_also_where_the_algorithm_is_refused() -> None:
    lines = speed_lines(batch_size=719)
    assert cells(lines, "slow-1")[3:] == ["0.4", "-", "-", "-"]
    assert any("batch-size = 719" in line for line in lines)
