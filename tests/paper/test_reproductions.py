"""What is trained to repeat the paper, and what it printed of that."""

from pathlib import Path

import pytest

from flower_blsgd.config import RunConfig
from flower_blsgd.devices.machine import Machine
from flower_blsgd.devices.worker_spec import parse_workers
from flower_blsgd.paper.reproductions import (
    COMPUTED,
    MEASURED,
    REFERENCE,
    REPRODUCTIONS,
    Cell,
    cells_of,
)

from ..refusal import refusal

ALL = ("cifar10", "flowers102", "cifar100", "tiny-imagenet", "ag-news")
RIVALS = {"weighted-local-sgd", "fast-only-local-sgd"}
RELEASED = {"biased-local-sgd-released", "unbiased-local-sgd-released"}


def names(cells: list[Cell]) -> list[str]:
    return [cell.name for cell in cells]


def config_of(cell: Cell, **changes: str) -> RunConfig:
    return RunConfig.from_run_config({**cell.values, **changes})


# --- cells


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_full_scale_is_the_printed_configs_with_every_gap(name: str) -> None:
    cells = cells_of(name, "full")
    many = name in ("bias-1c1g", "bias-2c8g", "features")
    gaps = ("32-16", "32-4", "32-1") if many else ("32-1",)
    assert names(cells) == [f"{d}-{gap}" for d in (ALL if many else ALL[:3]) for gap in gaps]
    cell = cells[-1]
    setting = "1c1g" if name == "bias-1c1g" else "2c8g"
    file = Path(__file__).parents[2] / "configs" / f"{cell.dataset}-{setting}.toml"
    assert f"batch-size = {cell.values['batch-size']}\n" in file.read_text()
    assert config_of(cell).local_steps_slow == 1
    assert config_of(cells[0]).local_steps_slow == (16 if many else 1)


@pytest.mark.parametrize("name", REPRODUCTIONS)
@pytest.mark.parametrize("scale", ["smoke", "quick"])
def test_small_scales_need_no_measurement_and_one_core(name: str, scale: str) -> None:
    cells = cells_of(name, scale)
    gaps = REPRODUCTIONS[name].slow_steps
    datasets = {cell.dataset for cell in cells}
    assert datasets == {"digits"} if scale == "smoke" else datasets <= {"cifar10", "ag-news"}
    assert len(cells) == 1 if scale == "smoke" else len(cells) == len(gaps) * len(datasets)
    for cell in cells:
        config = config_of(cell)
        workers = parse_workers(config.workers, Machine((0,), ()))
        assert {worker.cores for worker in workers} == {(0,)}
        fast, *_, slow = (worker.seconds_per_step or 0 for worker in workers)
        assert slow / fast == pytest.approx({"16": 2, "4": 8, "1": 22}[cell.gap[3:]])
        assert (config.clock, config.validation_share) == ("device", 0.0)


def test_quick_table_of_the_paper_fits_as_often_as_there() -> None:
    """50,000 samples and 32 x 32 x 10 a round are 4 rounds; so are 25,000 and half of that."""
    (cell,) = cells_of("comparison", "quick")
    config = config_of(cell)
    assert config.max_samples // (config.batch_size * 32 * 10) == 50_000 // (32 * 32 * 10) == 4


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ("cifar10", ["cifar10-32-16", "cifar10-32-4", "cifar10-32-1"]),
        ("32-1, 32-16,ag-news", ["ag-news-32-16", "ag-news-32-1"]),
        (" 32-4,", ["cifar10-32-4", "ag-news-32-4"]),
    ],
)
def test_only(only: str, expected: list[str]) -> None:
    assert names(cells_of("bias-2c8g", "quick", only)) == expected


def test_what_there_is_not_is_refused_with_what_there_is() -> None:
    line = refusal(cells_of, "bias", "smoke")
    assert line == f"bias is unknown; known: {', '.join(REPRODUCTIONS)}"
    line = refusal(cells_of, "bias-2c8g", "quick", "cifar100")
    assert line.startswith("only = 'cifar100': bias-2c8g has no such cell at scale quick; ")
    assert "cifar10" in line


# --- arms


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_arms_have_the_paper_s_method_and_its_fair_rivals(name: str) -> None:
    config = config_of(cells_of(name, "quick")[0])
    arms = REPRODUCTIONS[name].arms_of(config)
    assert {REFERENCE, *RIVALS} <= arms.keys()
    assert not RELEASED & arms.keys()
    for arm in arms.values():
        RunConfig(**{**vars(config), **arm})
    table = REPRODUCTIONS[name].arms_of(config_of(cells_of(name, "quick")[0], epoch="table"))
    released = RELEASED if name in ("bias-1c1g", "sampling-schemes") else set()
    assert table.keys() - arms.keys() == released


def test_longer_arms_have_twice_and_three_times_the_epochs() -> None:
    (cell,) = cells_of("comparison", "full", "cifar100")
    arms = REPRODUCTIONS["comparison"].arms_of(config_of(cell))
    epochs = [arms[f"{REFERENCE}{longer}"]["epochs"] for longer in ("", "-200", "-300")]
    assert epochs == [200, 400, 600]


# --- what the paper printed


@pytest.mark.parametrize(
    ("name", "only", "arm", "accuracy", "spread", "seconds", "seconds_label"),
    [
        ("bias-1c1g", "cifar10,32-1", REFERENCE, "91.08", "0.1", "", ""),
        ("bias-1c1g", "ag-news,32-16", "unbiased-local-sgd", "93.71", "0.1", "", ""),
        ("comparison", "cifar10", REFERENCE, "89.16", "0.1", "40.57", COMPUTED),
        ("comparison", "cifar10", f"{REFERENCE}-200", "91.26", "0.1", "81.15", COMPUTED),
        ("comparison", "cifar100", "byteps", "80.07", "0.1", "130155.6", MEASURED),
        ("fast-only-vs-mixed", "cifar10", REFERENCE, "89.16", "0.1", "40.57", COMPUTED),
        ("fast-only-vs-mixed", "cifar100", f"{REFERENCE}-fast-only", "77.19", "0.5", "2470.26", ""),
        ("sampling-schemes", "cifar10", REFERENCE, "89.16", "0.1", "", ""),
        ("sampling-schemes", "cifar10", "unified-high-to-slow", "88.79", "0.3", "", ""),
        ("sampling-schemes", "flowers102", "unbiased-local-sgd", "66.08", "1.0", "", ""),
        ("features", "cifar10,32-4", "unbiased-local-sgd", "88.09", "0.1", "", ""),
    ],
)
def test_printed_figures(
    name: str, only: str, arm: str, accuracy: str, spread: str, seconds: str, seconds_label: str
) -> None:
    (cell,) = cells_of(name, "full", only)
    found = REPRODUCTIONS[name].printed(cell, arm)
    assert (found["paper_percent"], found["paper_spread"]) == (accuracy, spread)
    assert found["paper_label"] == MEASURED
    assert found["paper_seconds"] == seconds
    assert found["paper_seconds_label"] == (seconds_label or (MEASURED if seconds else ""))


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_every_arm_of_the_tables_is_found_in_them_and_no_other(name: str) -> None:
    repeated = REPRODUCTIONS[name]
    for cell in cells_of(name, "full"):
        for arm in (*repeated.arms, *repeated.table_arms):
            ours = arm in RIVALS | RELEASED | {"sampled-local-sgd"}
            assert bool(repeated.printed(cell, arm)) != ours
    (digits,) = cells_of(name, "smoke")
    assert not any(repeated.printed(digits, arm) for arm in repeated.arms)
