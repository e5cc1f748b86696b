"""Checkpoints on disk: whole or not at all, however the writing ends; nothing damaged is read."""

import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save

from flower_blsgd.checkpoint import store as store_module
from flower_blsgd.checkpoint.store import Checkpoint, CheckpointStore
from flower_blsgd.errors import UsageError

from ..in_process_grid import toy_arrays
from ..log_capture import captured_log
from ..refusal import refusal

TENSORS = {
    "a/weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a/counter": np.array(7, np.int64),
    "b/strided": np.arange(8, dtype=np.int32)[::2],
    "b/none": np.empty((0, 3), np.float64),
}
TENSORS_IN_ORDER = {name: np.array(tensor, order="C") for name, tensor in TENSORS.items()}


def made(server_round: int, **values: Any) -> Checkpoint:
    return Checkpoint({"round": server_round, "rate": 0.1 + 0.2, **values}, dict(TENSORS))


def filled(folder: Path, *rounds: int, keep: int = 2) -> CheckpointStore:
    """Return a store that has written the last of these, after others wrote those before."""
    for server_round in rounds:
        store = CheckpointStore(folder, keep)
        store.save(made(server_round), server_round)
        store.close()
        assert store.saved_round == server_round
    return store


def names(folder: Path) -> list[str]:
    """Return what is in the checkpoint folder, without checksums."""
    return sorted(path.name.partition(".")[0] for path in (folder / "checkpoint").iterdir())


def write_signed(
    folder: Path,
    server_round: int,
    tensors: Mapping[str, np.ndarray],
    values: str,
    version: str = "1",
    of_round: str = "",
) -> Path:
    """Write the only checkpoint of a round, with a right checksum, and return its path."""
    about = {"format_version": version, "round": of_round or str(server_round), "values": values}
    data = save(dict(tensors), about)
    digest = hashlib.sha256(data).hexdigest()
    path = folder / "checkpoint" / f"round-{server_round:09d}.{digest}.safetensors"
    path.write_bytes(data)
    return path


def newest_round(folder: Path) -> int:
    checkpoint = CheckpointStore(folder, 2).newest()
    assert checkpoint is not None
    return int(checkpoint.values["round"])


def file_of(folder: Path, server_round: int) -> Path:
    (path,) = (folder / "checkpoint").glob(f"round-{server_round:09d}.*.safetensors")
    return path


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path, 2).newest() is None
    read = filled(tmp_path, 12).newest()
    assert read is not None
    assert read.values == made(12).values
    assert read.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        np.testing.assert_array_equal(read.tensors[name], tensor)
        assert (read.tensors[name].dtype, read.tensors[name].shape) == (tensor.dtype, tensor.shape)
    assert read.source == str(file_of(tmp_path, 12))


def test_last_ones_stay_and_those_of_a_future_that_was_damaged_go(tmp_path: Path) -> None:
    filled(tmp_path, 3, 5, 7)
    assert names(tmp_path) == ["round-000000005", "round-000000007"]
    store = CheckpointStore(tmp_path, 2)
    store.save(made(7, evaluated=True), 7)  # once more, as at the end of an epoch
    store.close()
    assert names(tmp_path) == ["round-000000005", "round-000000007"]
    file_of(tmp_path, 7).write_text("{}")
    filled(tmp_path, 6)
    assert names(tmp_path) == ["round-000000005", "round-000000006"]
    filled(tmp_path, 8, keep=1)
    assert names(tmp_path) == ["round-000000008"]
    CheckpointStore(tmp_path, 0).save(made(9), 9)
    assert newest_round(tmp_path) == 8


def test_leftovers_of_a_killed_process_are_removed_and_never_read(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    folder = tmp_path / "checkpoint"
    (folder / ".part").mkdir()
    (folder / ".part" / ".tmpA1b2C3").write_bytes(b"half")  # as safetensors names its own
    (folder / "notes.txt").write_text("of the user")
    assert newest_round(tmp_path) == 3
    filled(tmp_path, 4)
    assert names(tmp_path) == ["notes", "round-000000003", "round-000000004"]


# --- damage


def test_no_byte_changes_unnoticed(tmp_path: Path) -> None:
    filled(tmp_path, 3, 4)
    draw = random.Random(0)
    path = file_of(tmp_path, 4)
    whole = path.read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        with captured_log():
            assert newest_round(tmp_path) == 3, place
    path.write_bytes(whole)
    assert newest_round(tmp_path) == 4


def a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


def signed(values: str, of_round: str = "") -> Callable[[Path], object]:
    return replaced(
        lambda path: write_signed(path.parents[1], 4, TENSORS_IN_ORDER, values, of_round=of_round)
    )


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "larger than memory": lambda path: os.truncate(path, 1 << 43),
    "a link": a_link,
    "a link without end": replaced(lambda path: path.symlink_to("/dev/zero")),
    "a folder": replaced(Path.mkdir),
    "a pipe that nobody writes to": replaced(os.mkfifo),
    "nested without end": signed("[" * 100_000),
    "values are no mapping": signed("1"),
    "of another round": signed("{}", of_round="5"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_newest_checkpoint_gives_the_one_before_and_one_line(
    tmp_path: Path, kind: str
) -> None:
    store = filled(tmp_path, 3, 4)
    DAMAGES[kind](file_of(tmp_path, 4))
    with captured_log() as log:
        read = store.newest()
    assert read is not None
    assert read.values["round"] == 3
    (line,) = log.lines(30)
    assert f"{file_of(tmp_path, 4)} is damaged: " in line
    assert "the checkpoint before it is used" in line
    file_of(tmp_path, 3).write_bytes(b"")
    with captured_log(), pytest.raises(UsageError, match=r"no checkpoint can be read .*; start"):
        store.newest()


def test_another_format_version_is_refused_by_name_and_nothing_older_is_taken(
    tmp_path: Path,
) -> None:
    filled(tmp_path, 3)
    write_signed(tmp_path, 4, TENSORS_IN_ORDER, "{}", version="2")
    line = refusal(newest_round, tmp_path)
    assert re.search(r"round-000000004\..* has format version 2, .* reads 1", line)


# --- the writing thread


def test_writing_holds_nobody_up_and_a_newer_checkpoint_replaces_one_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, written = threading.Event(), threading.Event(), []
    write = store_module._write_tensors

    def slowly(path: Path, *arguments: Any) -> str:
        begun.set()
        assert go_on.wait(60)
        written.append(path)
        return write(path, *arguments)

    monkeypatch.setattr(store_module, "_write_tensors", slowly)
    store = CheckpointStore(tmp_path, 9)
    store.save(made(1), 1)
    assert begun.wait(60)
    waiting = []
    for server_round in (2, 3, 4):
        checkpoint = made(server_round)
        store.save(checkpoint, server_round)
        waiting.append(weakref.ref(checkpoint))
        del checkpoint
    assert [checkpoint() is None for checkpoint in waiting] == [True, True, False]
    store.save_best(toy_arrays(1.0), 1, 0.5)
    store.save_best(toy_arrays(2.0), 4, 0.75)
    assert store.saved_round == 0
    go_on.set()
    store.close()
    store.close()
    assert len(written) == 3
    assert store.saved_round == 4
    assert names(tmp_path) == ["round-000000001", "round-000000004"]
    with safe_open(tmp_path / "best_model.safetensors", "numpy") as best:
        assert best.metadata() == {"round": "4", "value": "0.75"}
        np.testing.assert_array_equal(best.get_tensor("bias"), [2.0])


def test_failure_to_write_is_one_line_and_leaves_the_last_checkpoint_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path, 3, 4)
    before, store = names(tmp_path), CheckpointStore(tmp_path, 2)
    write = store_module._write_tensors

    def full(path: Path, *arguments: Any) -> str:
        write(path, *arguments)
        raise OSError(28, "No space left on device")

    with captured_log() as log:
        with monkeypatch.context() as patch:
            patch.setattr(store_module, "_write_tensors", full)
            store.save_best(toy_arrays(), 5, 0.5)
            store.save(made(5), 5)
            store.close()
        store = CheckpointStore(tmp_path, 2)
        store.save(made(7, wrong=float("nan")), 7)  # JSON has none
        store.close()
    line, other = log.lines(30)  # one of each store
    assert line == (
        f"cannot write to {tmp_path}/checkpoint ([Errno 28] No space left on device); "
        "training continues"
    )
    assert "JSON" in other
    assert names(tmp_path) == before
    assert (newest_round(tmp_path), store.saved_round) == (4, 0)
    filled(tmp_path, 8)
    assert newest_round(tmp_path) == 8
    assert names(tmp_path) == ["round-000000004", "round-000000008"]


ENDLESS = """
import sys, time
from pathlib import Path
import numpy as np
from flower_blsgd.checkpoint.store import Checkpoint, CheckpointStore
store = CheckpointStore(Path(sys.argv[1]), 1)
for server_round in range(1, 10**6):
    tensor = np.full(100_000, server_round, np.float32)
    store.save(Checkpoint({"round": server_round}, {"x": tensor}), server_round)
    while store.saved_round < server_round:
        time.sleep(1e-3)
    print(server_round, flush=True)
"""


@pytest.mark.processes
def test_killed_at_any_moment_the_last_complete_checkpoint_is_whole(tmp_path: Path) -> None:
    draw = random.Random(1)
    process = [sys.executable, "-c", ENDLESS, str(tmp_path)]
    with subprocess.Popen(process, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(5)]
        threading.Event().wait(draw.uniform(0.0, 0.05))
        child.send_signal(signal.SIGKILL)
        done = int([*lines, *child.stdout.readlines()][-1])
    with captured_log() as log:
        read = CheckpointStore(tmp_path, 1).newest()
    assert log.lines(30) == []
    assert read is not None
    assert read.values["round"] in (done, done + 1)
    assert (read.tensors["x"] == read.values["round"]).all()
    filled(tmp_path, read.values["round"] + 1, keep=1)
    assert len(names(tmp_path)) == 1
