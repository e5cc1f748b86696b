"""Reading what a run left."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from flower_blsgd.algorithm.sampling_stats import SamplingStats
from flower_blsgd.config import RunConfig
from flower_blsgd.errors import UsageError
from flower_blsgd.experiments.finished_run import (
    FinishedEpoch,
    FinishedWorker,
    is_finished,
    read_run,
)
from flower_blsgd.results.folder import EpochRow, RunFolder

SUMMARY: dict[str, Any] = {
    "algorithm": "sync-sgd",
    "task": "digits",
    "accuracy": 0.875,
    "loss": 0.5,
    "training_seconds": 4.0,
    "device_seconds": None,
    "clock": "wall",
    "rounds": 4,
    "samples": 256,
    "samples_given_up": 3,
    "fast_waiting_share": 0.25,
    "slow_waiting_share": None,
    "workers": [
        {"device": "cpu:0", "tier": "fast", "local_steps": 1, "samples": 256},
        {"device": "cpu:1", "tier": "slow", "local_steps": 1, "samples": 0},
    ],
    "failures": [{"round": 2, "worker": "fast-0 (cpu:0)", "reason": "died"}],
    "versions": {"python": "3.11.7"},
    "seed": 2,
    "interrupted": False,
}


def epoch(number: int, **values: object) -> EpochRow:
    """Return an epoch of 2 s, of whose sampling nothing is known."""
    unknown = {field.name: math.nan for field in dataclasses.fields(SamplingStats)}
    defaults: dict[str, object] = {
        "wall_seconds": 3.0 * number,
        "training_seconds": 2.0 * number,
        "device_seconds": None,
        "learning_rate": 0.1,
        "train_loss": 1.5,
        "rounds": 2 * number,
        "samples": 128 * number,
        "mean_loss_age_rounds": math.nan,
        "sampling": SamplingStats(**unknown),  # type: ignore[arg-type]
    }
    return EpochRow(epoch=number, **{**defaults, **values})  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run as `RunFolder` writes it: evaluated after the second of two epochs."""
    written = RunFolder(tmp_path)
    written.write_config(RunConfig(algorithm="sync-sgd", seed=2, batch_size=8).to_run_config())
    written.add_epoch(epoch(1, accuracy=None, loss=None))
    written.add_epoch(epoch(2, accuracy=0.875, loss=0.5, device_seconds=1.5))
    written.write_summary(SUMMARY)
    return tmp_path


def change(folder: Path, **values: object) -> None:
    (folder / "summary.json").write_text(json.dumps({**SUMMARY, **values}))


def test_read_run(folder: Path) -> None:
    run = read_run(folder)
    assert (run.algorithm, run.seed, run.task, run.accuracy) == ("sync-sgd", 2, "digits", 0.875)
    assert (run.training_seconds, run.device_seconds) == (4.0, None)
    assert (run.fast_waiting_share, run.slow_waiting_share) == (0.25, None)
    assert (run.samples, run.samples_given_up, run.rounds, run.failures) == (256, 3, 4, 1)
    assert run.workers == (FinishedWorker("cpu:0", "fast", 1), FinishedWorker("cpu:1", "slow", 0))
    assert run.versions == {"python": "3.11.7"}
    assert run.settings["batch-size"] == 8
    assert run.epochs == (
        FinishedEpoch(1, 2.0, None, None, None),
        FinishedEpoch(2, 4.0, 1.5, 0.875, 0.5),
    )
    assert run.best_accuracy == 0.875


def test_run_that_was_never_evaluated(folder: Path) -> None:
    change(folder, accuracy=None, loss=None)
    run = read_run(folder)
    assert run.accuracy is None
    assert run.loss is None


def test_is_finished(folder: Path) -> None:
    assert is_finished(folder)
    change(folder, interrupted=True)
    assert not is_finished(folder)
    (folder / "summary.json").write_text(json.dumps(SUMMARY)[:-5])
    assert not is_finished(folder)
    (folder / "summary.json").write_text("[]")
    assert not is_finished(folder)
    (folder / "summary.json").unlink()
    assert not is_finished(folder)
    assert not is_finished(folder / "nowhere")


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("summary.json", None, "no finished run"),
        ("summary.json", "{", "cannot be read"),
        ("summary.json", "[1]", "cannot be read"),
        ("summary.json", '{"interrupted": false}', "'algorithm'"),
        ("summary.json", '{"interrupted": true}', "stopped early"),
        ("config.toml", None, "No such file"),
        ("config.toml", "= 1", "cannot be read"),
        ("epochs.csv", None, "No such file"),
        ("epochs.csv", "epoch,accuracy\n1,0.5\n", "training_seconds"),
        ("epochs.csv", "epoch,training_seconds\nx,1\n", "cannot be read"),
    ],
)
def test_folder_without_a_run_is_refused_in_one_line(
    folder: Path, file: str, text: str | None, words: str
) -> None:
    if text is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(text)
    with pytest.raises(UsageError, match=words) as refused:
        read_run(folder)
    assert "\n" not in str(refused.value)
    assert str(folder) in str(refused.value)
