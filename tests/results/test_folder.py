"""The folder that a run leaves."""

import csv
import json
import math
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from safetensors.numpy import load_file

from flower_blsgd.errors import UsageError
from flower_blsgd.results.folder import RunFolder

from .records import epoch, record, row, two_rounds


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run each test in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def folder() -> RunFolder:
    return RunFolder.new("", "digits")


def strict_json(text: str) -> object:
    """Read JSON as other programs do: without Python's NaN and Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


# --- which folder ---------------------------------------------------------------------------


def test_new_takes_the_next_free_number(here: Path) -> None:
    (here / "runs").mkdir()
    (here / "runs" / "digits-2").write_text("somebody's notes")
    (here / "runs" / "latest").symlink_to("deleted-7")
    assert [RunFolder.new("", "digits").path for _ in range(3)] == [
        here / "runs" / f"digits-{n}" for n in (1, 3, 4)
    ]
    assert (here / "runs" / "digits-2").read_text() == "somebody's notes"
    # Relative: the whole folder can be moved.
    assert os.readlink(here / "runs" / "latest") == "digits-4"
    assert RunFolder.new("", "other").path == here / "runs" / "other-1"


def test_new_threads_get_a_folder_each(here: Path) -> None:
    """Runs that start at once do not share a folder, and none of them fails."""
    count, each = 8, 25
    barrier = threading.Barrier(count)
    paths: list[Path] = []
    errors: list[Exception] = []

    def make() -> None:
        barrier.wait()
        for _ in range(each):
            try:
                paths.append(RunFolder.new("", "race").path)
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == len(paths)
    assert errors == []
    assert {path.name for path in paths} == {f"race-{n + 1}" for n in range(count * each)}
    assert (here / "runs" / "latest").resolve() in paths


def test_new_explicit_out(here: Path) -> None:
    folder = RunFolder.new("results/of today", "digits")
    assert folder.path == here / "results" / "of today"
    assert folder.path.is_dir()
    assert not (here / "runs").exists()


@pytest.mark.parametrize("what", ["folder", "file", "link that leads nowhere"])
def test_new_explicit_out_that_exists_is_refused(here: Path, what: str) -> None:
    out = here / "mine"
    if what == "file":
        out.write_text("kept")
    elif what.startswith("link"):
        out.symlink_to("nowhere")
    else:
        out.mkdir()
    before = sorted(here.rglob("*"))
    for refuse in (lambda: RunFolder.new("mine", "x"), lambda: RunFolder.refuse_unusable("mine")):
        with pytest.raises(UsageError, match="out = 'mine' exists"):
            refuse()
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize("out", ["", "new/deeper", "there/deeper"])
def test_refuse_unusable_accepts_what_can_be_made_and_makes_nothing(here: Path, out: str) -> None:
    (here / "runs").mkdir()
    (here / "there").mkdir()
    before = sorted(here.rglob("*"))
    RunFolder.refuse_unusable(out)
    assert sorted(here.rglob("*")) == before
    assert RunFolder.new(out, "x").path.is_dir()


@pytest.mark.parametrize("out", ["file/new", "file/new/deeper"])
def test_out_below_a_file_is_refused(here: Path, out: str) -> None:
    (here / "file").write_text("")
    with pytest.raises(UsageError, match=f"out = '{out}' cannot be made: .*file is not a folder"):
        RunFolder.refuse_unusable(out)
    with pytest.raises(UsageError, match=f"out = '{out}' cannot be made: Not a directory"):
        RunFolder.new(out, "x")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_that_may_not_be_written_to_is_refused(here: Path) -> None:
    (here / "locked").mkdir(mode=0o500)
    with pytest.raises(UsageError, match=r"out = 'locked/new' .*may not be written"):
        RunFolder.refuse_unusable("locked/new")


# --- what is in it --------------------------------------------------------------------------


def test_rounds_one_line_each(folder: RunFolder) -> None:
    for one in two_rounds():
        folder.add_round(one)
    first, second = (
        strict_json(line) for line in (folder.path / "rounds.jsonl").read_text().splitlines()
    )
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    assert second["workers"][1]["failure"] == "the process died"
    assert (first["round"], first["round_seconds"], first["planning_seconds"]) == (1, 10.0, 0.5)
    for name, values in {
        "compute_seconds": [6.0, 4.0, 9.0],
        "waiting_seconds": [3.0, 5.0, 0.0],
        "transfer_seconds": [1.0, 1.0, 1.0],
        "completed_steps": [4, 4, 1],
    }.items():
        assert [worker[name] for worker in first["workers"]] == values


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_rounds_not_a_number_becomes_null(folder: RunFolder, loss: float) -> None:
    folder.add_round(record(row(0, loss=loss), row(1, loss=0.5), train_loss=loss))
    line = strict_json((folder.path / "rounds.jsonl").read_text())
    assert isinstance(line, dict)
    assert line["train_loss"] is None
    assert [worker["loss"] for worker in line["workers"]] == [None, 0.5]


def test_epochs_csv(folder: RunFolder) -> None:
    folder.add_epoch(epoch(1))
    folder.add_epoch(epoch(2, accuracy=None, loss=None))
    RunFolder(folder.path).add_epoch(epoch(3, loss=math.nan))  # a run that is taken up again
    text = (folder.path / "epochs.csv").read_text()
    assert text.count("epoch,") == 1
    rows = list(csv.DictReader(text.splitlines()))
    assert [r["epoch"] for r in rows] == ["1", "2", "3"]
    assert rows[0] == {
        "epoch": "1",
        "wall_seconds": "3.0",
        "training_seconds": "2.0",
        "device_seconds": "",
        "accuracy": "0.5",
        "loss": "1.25",
        "learning_rate": "0.1",
        "train_loss": "1.5",
        "rounds": "2",
        "samples": "128",
        "mean_loss_age_rounds": "0.75",
        "all_loss_mean": "1.0",
        "all_loss_p10": "0.25",
        "all_loss_p90": "2.0",
        "fast_picked_loss_mean": "1.5",
        "slow_picked_loss_mean": "1.125",
        "picked_over_all_loss": "1.375",
        "distinct_samples": "96",
        "share_never_seen": "0.125",
        "share_left_out": "0.25",
        "loss_age_epochs_mean": "0.5",
        "loss_age_epochs_p90": "1.0",
        "loss_age_epochs_max": "2.0",
        "left_out_age_epochs_mean": "1.75",
        "left_out_age_epochs_p90": "3.0",
    }
    assert (rows[1]["accuracy"], rows[1]["loss"]) == ("", "")
    assert (rows[2]["accuracy"], rows[2]["loss"]) == ("0.5", "")


def test_summary(folder: RunFolder) -> None:
    folder.write_summary({"accuracy": 0.5, "loss": math.nan, "workers": [{"weight": math.inf}]})
    folder.write_summary({"accuracy": 0.75, "loss": math.nan, "workers": [{"weight": math.inf}]})
    text = (folder.path / "summary.json").read_text()
    assert strict_json(text) == {"accuracy": 0.75, "loss": None, "workers": [{"weight": None}]}
    assert [path.name for path in folder.path.iterdir()] == ["summary.json"]


def test_model(folder: RunFolder) -> None:
    tensors = {
        "weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "turned": np.arange(6, dtype=np.float64).reshape(2, 3).T,
        "half": np.array([0.5, -2], np.float16),
        "mask": np.array([True, False]),
        "empty": np.empty((0, 4), np.float32),
        "num_batches_tracked": np.array(7),  # as of every BatchNorm layer: its shape is ()
    }
    for _ in range(2):  # written anew at the end of every run
        folder.write_model(ArrayRecord({name: Array(value) for name, value in tensors.items()}))
    read = load_file(folder.path / "model.safetensors")
    assert read.keys() == tensors.keys()
    for name, value in tensors.items():
        assert read[name].dtype == value.dtype
        assert read[name].shape == value.shape
        np.testing.assert_array_equal(read[name], value)
    assert [path.name for path in folder.path.iterdir()] == ["model.safetensors"]


# --- what the model needs ---------------------------------------------------------------------


def test_assets_are_copied(folder: RunFolder, here: Path) -> None:
    (here / "made.json").write_bytes(b"{1}")
    folder.add_assets({"tokenizer.json": here / "made.json"})
    (here / "made.json").unlink()
    assert [path.name for path in folder.path.iterdir()] == ["tokenizer.json"]
    assert (folder.path / "tokenizer.json").read_bytes() == b"{1}"


@pytest.mark.parametrize("name", ["config.toml", "timeline.png"])
def test_an_asset_may_not_be_named_like_a_file_of_the_run(
    name: str, folder: RunFolder, here: Path
) -> None:
    (here / name).touch()
    with pytest.raises(UsageError, match=f"task: assets names '{name}', which a run writes"):
        folder.add_assets({name: here / name})


def test_an_asset_that_is_not_there(folder: RunFolder, here: Path) -> None:
    with pytest.raises(UsageError, match=r"gone.json cannot be copied .*No such file"):
        folder.add_assets({"tokenizer.json": here / "gone.json"})
