"""The folder that a run leaves."""

import errno
import fcntl
import json
import math
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from safetensors.numpy import load_file

from flower_blsgd.checkpoint.store import Checkpoint, CheckpointStore
from flower_blsgd.files import written_whole
from flower_blsgd.results.folder import RunFolder, alone_in

from ..log_capture import captured_log
from ..refusal import refusal
from .records import epoch


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run each test in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def folder() -> RunFolder:
    return RunFolder.new("", "digits")


def strict_json(text: str) -> Any:
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


def test_runs_that_start_at_once_get_a_folder_each(here: Path) -> None:
    count, each = 8, 25
    barrier = threading.Barrier(count)

    def make(_: int) -> list[Path]:
        barrier.wait()
        return [RunFolder.new("", "race").path for _ in range(each)]

    with ThreadPoolExecutor(count) as pool:
        paths = [path for made in pool.map(make, range(count)) for path in made]
    assert sorted(path.name for path in paths) == sorted(f"race-{n + 1}" for n in range(200))
    assert (here / "runs" / "latest").resolve() in paths


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
        assert "out = 'mine' exists" in refusal(refuse)
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize("out", ["", "new/deeper", "there/deeper"])
def test_refuse_unusable_accepts_what_can_be_made_and_makes_nothing(here: Path, out: str) -> None:
    (here / "runs").mkdir()
    (here / "there").mkdir()
    before = sorted(here.rglob("*"))
    RunFolder.refuse_unusable(out)
    assert sorted(here.rglob("*")) == before
    assert RunFolder.new(out, "x").path.is_dir()


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("file/new", "file is not a folder"),
        ("file/new/deeper", "file is not a folder"),
        pytest.param(
            *("locked/new", "locked may not be written to"),
            marks=pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere"),
        ),
    ],
)
def test_out_that_cannot_be_made_is_refused(here: Path, out: str, reason: str) -> None:
    (here / "file").write_text("")
    (here / "locked").mkdir(mode=0o500)
    for refuse in (lambda: RunFolder.new(out, "x"), lambda: RunFolder.refuse_unusable(out)):
        line = refusal(refuse)
        assert line.startswith(f"out = '{out}' cannot be made: ")
        assert reason in line


# --- what is in it --------------------------------------------------------------------------


def test_epochs_csv(folder: RunFolder) -> None:
    folder.add_epoch(epoch(1))
    folder.add_epoch(epoch(2, accuracy=None, loss=None))
    RunFolder(folder.path).add_epoch(epoch(3, loss=math.nan))  # a run that is taken up again
    header, *rows = (folder.path / "epochs.csv").read_text().splitlines()
    assert header == (
        "epoch,wall_seconds,training_seconds,device_seconds,accuracy,loss,learning_rate,train_loss,"
        "rounds,samples,mean_loss_age_rounds,metric,result_rounds,result_seconds,all_loss_mean,"
        "all_loss_p10,all_loss_p90,fast_picked_loss_mean,slow_picked_loss_mean,picked_over_all_loss,distinct_samples,"
        "share_never_seen,share_left_out,loss_age_epochs_mean,loss_age_epochs_p90,"
        "loss_age_epochs_max,left_out_age_epochs_mean,left_out_age_epochs_p90,"
        "metric_name,metric_mode"
    )
    assert rows[0] == (
        "1,3.0,2.0,,0.5,1.25,0.1,1.5,2,128,0.75,,,,1.0,0.25,2.0,1.5,1.125,1.375,96,0.125,0.25,"
        "0.5,1.0,2.0,1.75,3.0,accuracy,max"
    )
    assert [row.split(",")[:6] for row in rows[1:]] == [
        ["2", "6.0", "4.0", "", "", ""],
        ["3", "9.0", "6.0", "", "0.5", ""],
    ]


def test_summary(folder: RunFolder) -> None:
    folder.write_summary({"accuracy": 0.5, "loss": math.nan, "workers": [{"weight": math.inf}]})
    folder.write_summary({"accuracy": 0.75, "loss": math.nan, "workers": [{"weight": math.inf}]})
    text = (folder.path / "summary.json").read_text()
    assert strict_json(text) == {"accuracy": 0.75, "loss": None, "workers": [{"weight": None}]}
    assert [path.name for path in folder.path.iterdir()] == ["summary.json"]


def test_file_that_cannot_be_written_whole_leaves_the_old_one(here: Path) -> None:
    (here / "x.json").write_text("old")
    with suppress(KeyboardInterrupt), written_whole(here / "x.json") as part:
        part.write_text("ne")
        raise KeyboardInterrupt
    assert [path.read_text() for path in here.iterdir()] == ["old"]


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
        (folder.path / ".part").mkdir()
        (folder.path / ".part" / ".tmpA1b2C3").write_bytes(b"half")  # of a process that was killed
        folder.write_model(ArrayRecord({name: Array(value) for name, value in tensors.items()}))
    read = load_file(folder.path / "model.safetensors")
    assert read.keys() == tensors.keys()
    for name, value in tensors.items():
        assert read[name].dtype == value.dtype
        assert read[name].shape == value.shape
        np.testing.assert_array_equal(read[name], value)
    assert [path.name for path in folder.path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_models_have_the_mode_of_the_other_files(folder: RunFolder, mask: int) -> None:
    arrays = ArrayRecord({"weight": Array(np.zeros(3, np.float32))})
    before = os.umask(mask)
    try:
        folder.write_summary({})
        folder.write_model(arrays)
        store = CheckpointStore(folder.path, 1)
        store.save_best(arrays, 1, 0.5)
        store.close()
    finally:
        os.umask(before)
    files = [path for path in folder.path.iterdir() if path.is_file()]
    assert len(files) == 3
    assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~mask}


OPERATIONS = ((os, "chmod"), (os, "fsync"), (fcntl, "flock"))


@pytest.mark.parametrize(
    ("number", "serious"),
    [
        *((number, False) for number in (errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)),
        *((number, True) for number in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO)),
    ],
    ids=errno.errorcode.get,
)
def test_what_a_file_system_does_not_have_loses_no_byte(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, number: int, serious: bool
) -> None:
    """As on CIFS, FUSE and WSL; a full disk and missing permission stay errors."""
    arrays = [ArrayRecord({"w": Array(np.full(3, i, np.float32))}) for i in range(4)]
    states = [Checkpoint({"round": i}, {"w": np.zeros(3)}) for i in range(4)]
    folder.write_model(arrays[0])
    before = CheckpointStore(folder.path, 1)
    before.save(states[1], 1)
    before.close()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    for module, name in OPERATIONS:
        with captured_log() as log, monkeypatch.context() as patch:
            patch.setattr(module, name, refuse)
            for i in (2, 3):
                store = CheckpointStore(folder.path, 1)
                store.save(states[i], i)
                store.save_best(arrays[i], i, 0.5)
                store.close()
            needed = serious and name in ("chmod", "fsync")
            assert (store.saved_round, len(log.warnings)) == ((0, 2) if needed else (3, 0)), name
            with (
                pytest.raises(OSError, match=os.strerror(number))
                if serious and name == "chmod"
                else nullcontext()
            ):
                folder.write_model(arrays[3])
            with (
                pytest.raises(OSError, match=os.strerror(number))
                if serious and name == "fsync"
                else nullcontext()
            ):
                folder.write_summary({"round": 3})
            with alone_in(folder.path, "busy"):
                pass
        names = sorted(path.name for path in (folder.path / "checkpoint").iterdir())
        assert len(names) == 1
        assert int(names[0][6:15]) == (1 if needed else 3)
    assert load_file(folder.path / "model.safetensors")["w"][0] == 3
    left = {path.name for path in folder.path.iterdir()}
    assert left == {".lock", "checkpoint", "best_model.safetensors", "model.safetensors"} | {
        "summary.json"
    }


# --- what the model needs ---------------------------------------------------------------------


def test_assets_are_copied_or_refused(folder: RunFolder, here: Path) -> None:
    (here / "made.json").write_bytes(b"{1}")
    folder.add_assets({"tokenizer.json": here / "made.json"})
    for name, source, words in (
        ("config.toml", "made.json", "task: assets names 'config.toml', which a run writes"),
        ("timeline.png", "made.json", "task: assets names 'timeline.png', which a run writes"),
        ("other.json", "gone.json", r"gone.json cannot be copied .*No such file"),
    ):
        assert re.search(words, refusal(folder.add_assets, {name: here / source}))
    assert [path.name for path in folder.path.iterdir()] == ["tokenizer.json"]
    assert (folder.path / "tokenizer.json").read_bytes() == b"{1}"
