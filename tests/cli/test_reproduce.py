"""``blsgd reproduce``: what it prints, writes and refuses."""

import csv
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flower_blsgd.cli import main as cli
from flower_blsgd.config import RunConfig
from flower_blsgd.experiments import compare
from flower_blsgd.paper.figures import FIGURES

from ..experiments.fake_training import FakeTrain
from .conftest import Printed, Refused

SMOKE = ("reproduce", "bias-2c8g")
BELOW = Path("runs/reproduce-bias-2c8g-smoke")
ARMS = ["biased-local-sgd", "unbiased-local-sgd", "weighted-local-sgd", "fast-only-local-sgd"]

pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> FakeTrain:
    """Replace training, and the picture of a comparison, which is tested where it is drawn."""

    def draw(_: object, path: Path) -> None:
        path.write_bytes(b"")

    train = FakeTrain()
    monkeypatch.setattr(compare, "train_quietly", train)
    monkeypatch.setattr("flower_blsgd.experiments.comparison_plot.draw_comparison", draw)
    return train


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["bias"], "bias is unknown; known: comparison, fast-only-vs-mixed, bias-2c8g"),
        (["bias-2c8g", "--scale", "huge"], "invalid choice: 'huge'"),
        (["bias-2c8g", "--only", "32-16"], "no such cell at scale smoke"),
        (["bias-2c8g", "--seeds", "a"], "'a' is not a whole number"),
        (["bias-2c8g", "-s", "sampler=uniform"], "sampler = 'uniform' overrides that of every"),
        (
            ["bias-2c8g", "--scale", "quick", "-s", "data=some"],
            "data = 'some' has no folder cifar10: name a folder with one for each",
        ),
        (["bias-1c1g", "--scale", "full"], "device cuda:0 is not available"),
    ],
)
def test_argument_is_refused(refused: Refused, arguments: list[str], expected: str) -> None:
    assert expected in refused("reproduce", *arguments)


def test_smoke_trains_every_arm_and_writes_the_tables(trained: FakeTrain, printed: Printed) -> None:
    lines = printed(*SMOKE)
    assert trained.trained == [(arm, 0) for arm in ARMS]
    assert lines[0] == "4 runs, 0 of them finished"
    assert lines[1] == "digits-32-1 [1/4] biased-local-sgd, seed 0: training"
    assert lines[-1] == (
        f"in {BELOW}: reproduction.md, reproduction.csv, and a comparison for each cell"
    )
    assert (BELOW / "digits-32-1" / "comparison.md").exists()
    with (BELOW / "reproduction.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["arm"] for row in rows] == ARMS
    assert {row["cell"] for row in rows} == {"digits-32-1"}
    again = printed(*SMOKE, "--seeds", "0,1")  # goes on with another seed
    assert again[0] == "8 runs, 4 of them finished"
    assert trained.trained[4:] == [(arm, 1) for arm in ARMS]


def test_table_mode_has_a_folder_and_settings_of_its_own(
    trained: FakeTrain, printed: Printed
) -> None:
    printed("reproduce", "fast-only-vs-mixed", "--mode", "table")
    assert {config.epoch for config in trained.configs} == {"table"}
    folder = Path("runs/reproduce-fast-only-vs-mixed-smoke-table")
    assert (folder / "digits-32-1" / "biased-local-sgd-fast-only-seed0").is_dir()
    assert [config.train_on for config in trained.configs] == ["", "fast", "", ""]


def test_data_of_each_data_set_lies_in_its_own_folder(
    refused: Refused, trained: FakeTrain, printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = SimpleNamespace(num_train=25_000)
    monkeypatch.setattr(compare, "load_own_task", lambda _: task)
    Path("mine/ag_news").mkdir(parents=True)
    quick = ("reproduce", "bias-2c8g", "--scale", "quick", "-s", "data=mine", "--seeds", "7")
    assert "has no folder cifar10" in refused(*quick)
    printed(*quick, "--only", "cifar10,32-1", "--out", "one")  # then it is that data set's own
    Path("mine/cifar10").mkdir()
    printed(*quick, "--only", "32-1")
    assert [config.data for config in trained.configs[::4]] == [
        *("mine", "mine/cifar10", "mine/ag_news"),
    ]


def test_local_steps_are_those_of_the_cell(refused: Refused) -> None:
    line = refused(*SMOKE, "-s", "local-steps-fast=8")
    assert line == "local-steps-fast = 8: digits-32-1 has 32; choose cells with --only"
    line = refused(*SMOKE, "-s", "workers=1x cpu fast; 1x cpu slow steps=2")
    assert line == "workers: steps=2: digits-32-1 decides the local steps; leave it out"


def test_cell_of_other_settings_is_named_and_the_rest_reported(
    trained: FakeTrain,
    printed: Printed,
    refused: Refused,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed(*SMOKE)
    line = refused(*SMOKE, "-s", "epochs=3")
    assert "holds a comparison with epochs = 2, not 3; choose another folder" in line
    from flower_blsgd.paper import reproduce, reproductions

    (cell,) = reproductions.cells_of("bias-2c8g", "smoke")
    longer = reproductions.Cell("digits", "32-2", {**cell.values, "epochs": 5})
    monkeypatch.setattr(reproduce, "cells_of", lambda *_: [longer, cell])
    compare.open_folder(BELOW / "digits-32-2", RunConfig())
    assert cli.main(SMOKE) == 1
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert output.err.startswith("blsgd: 1 failure: digits-32-2 ")
    assert lines[1].startswith(f"digits-32-2 left out: {BELOW / 'digits-32-2'} holds a comparison")
    text = (BELOW / "reproduction.md").read_text()
    assert f"Not included: {BELOW / 'digits-32-2'} holds a comparison with " in text
    assert "| biased-local-sgd | 1 | 90.00 |" in text


@pytest.mark.parametrize(
    "name", ["features", "figure-timing", "figure-schedule", "figure-learning-curves"]
)
def test_figure_is_drawn_of_each_cell(
    trained: FakeTrain, printed: Printed, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    drawn: list[Mapping[str, Any]] = []

    def draw(runs: Mapping[str, Any], path: Path) -> None:
        drawn.append(runs)
        path.write_bytes(b"")

    monkeypatch.setitem(FIGURES, name, draw)  # type: ignore[arg-type]  # it is a dict
    printed("reproduce", name)
    (runs,) = drawn
    assert list(runs) == [config.algorithm for config in trained.configs]
    assert all(len(its) == 1 for its in runs.values())
    folder = Path(f"runs/reproduce-{name}-smoke")
    assert (
        f"![digits-32-1/{name}.png](digits-32-1/{name}.png)"
        in (folder / "reproduction.md").read_text()
    )
