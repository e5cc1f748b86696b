"""Reading what a run left."""

import json
from pathlib import Path
from typing import Any

import pytest

from flower_blsgd.config import RunConfig
from flower_blsgd.errors import UsageError
from flower_blsgd.experiments.finished_run import FinishedEpoch, read_run
from flower_blsgd.results.folder import RunFolder

from ..results.records import epoch

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
    change(folder, loss=None)
    run = read_run(folder)
    assert run is not None
    assert (run.algorithm, run.seed, run.task, run.accuracy) == ("sync-sgd", 2, "digits", 0.875)
    assert (run.loss, run.training_seconds, run.device_seconds) == (None, 4.0, None)
    assert (run.fast_waiting_share, run.slow_waiting_share) == (0.25, None)
    assert (run.samples, run.samples_given_up, run.rounds) == (256, 3, 4)
    assert (run.failures, run.workers) == (SUMMARY["failures"], SUMMARY["workers"])
    assert run.versions == {"python": "3.11.7"}
    assert run.settings["batch-size"] == 8
    assert run.epochs == (
        FinishedEpoch(1, 2.0, None, None),
        FinishedEpoch(2, 4.0, 1.5, 0.875),
    )
    assert run.best_accuracy == 0.875


@pytest.mark.parametrize("text", [None, "{", "[1]", "{}", '{"interrupted": true}'])
def test_run_that_did_not_go_to_its_end_is_none(folder: Path, text: str | None) -> None:
    (folder / "summary.json").unlink()
    if text is not None:
        (folder / "summary.json").write_text(text)
    assert read_run(folder) is None
    assert read_run(folder / "nowhere") is None


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("summary.json", '{"interrupted": false}', "'algorithm'"),
        ("config.toml", None, "No such file"),
        ("config.toml", "= 1", "cannot be read"),
        ("epochs.csv", "epoch,accuracy\n1,0.5\n", "training_seconds"),
        ("epochs.csv", "epoch,training_seconds\nx,1\n", "cannot be read"),
    ],
)
def test_finished_run_that_is_damaged_is_refused_in_one_line(
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
