"""Speeds on disk: whole or not at all, for one machine and one team, and never half believed."""

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flower_blsgd.config import RunConfig
from flower_blsgd.errors import UsageError
from flower_blsgd.experiments.speed_profile import (
    ProfileKey,
    SpeedProfile,
    Spread,
    refuse_unwritable,
    with_profile,
)
from flower_blsgd.runtime.devices import WorkerSpec
from flower_blsgd.runtime.machine import Machine, accelerator_names

from .profiles import MACHINE, WORKERS, made_profile

HERE = ProfileKey.here(RunConfig(), MACHINE)
Changed = Callable[[Callable[[dict[str, Any]], object]], Path]


def one_line(error: "pytest.ExceptionInfo[UsageError]") -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


# --- on disk


def test_what_is_written_is_read(tmp_path: Path) -> None:
    profile = made_profile(RunConfig(model="cnn", batch_size=32, threads=2))
    path = tmp_path / "deep" / "down" / "mine.json"
    profile.write(path)
    assert SpeedProfile.read(path) == profile
    assert [entry.name for entry in path.parent.iterdir()] == ["mine.json"]


def test_written_file_says_what_it_is(tmp_path: Path) -> None:
    made_profile().write(tmp_path / "mine.json")
    read = json.loads((tmp_path / "mine.json").read_text())
    assert read["format"] == 1
    assert read["key"]["batch_size"] == 16
    assert read["workers"][1] == {
        "device": "cpu:2",
        "slowdown": 4.0,
        "alone": {"median": 0.04, "low": 0.02, "high": 0.08, "count": 5},
        "loaded": {"median": 0.05, "low": 0.025, "high": 0.1, "count": 5},
    }


@pytest.mark.parametrize("failing", ["write_text", "replace"])
def test_write_that_fails_leaves_the_old_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "mine.json"
    made_profile().write(path)
    before = path.read_bytes()
    whole = Path.write_text

    def fails(self: Path, *given: Any) -> None:
        if failing == "write_text":
            whole(self, str(given[0])[:20])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, failing, fails)
    with pytest.raises(UsageError) as error:
        made_profile(batch_size=64).write(path)
    monkeypatch.undo()
    assert "cannot be written: No space left on device" in one_line(error)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made_profile().write(tmp_path / "mine.json")
    assert list(tmp_path.iterdir()) == []


def test_two_that_write_at_once_leave_a_whole_one(tmp_path: Path) -> None:
    path, failures = tmp_path / "mine.json", []
    profiles = [made_profile(batch_size=size) for size in (2, 3)]

    def write(profile: SpeedProfile) -> None:
        try:
            for _ in range(50):
                profile.write(path)
        except UsageError as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=[profile]) for profile in profiles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert SpeedProfile.read(path) in profiles
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("path", ["folder", "file/below.json"])
def test_place_that_takes_no_file_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    for attempt in (refuse_unwritable, made_profile().write):
        with pytest.raises(UsageError) as error:
            attempt(tmp_path / path)
        line = one_line(error)
        assert line.startswith(f"profile = {str(tmp_path / path)!r}")
        assert "cannot be written" in line
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "folder"]
    assert list((tmp_path / "folder").iterdir()) == []


def test_place_that_can_be_made_is_accepted_and_not_made(tmp_path: Path) -> None:
    refuse_unwritable(tmp_path / "new" / "mine.json")
    made_profile().write(tmp_path / "there.json")
    refuse_unwritable(tmp_path / "there.json")
    assert not (tmp_path / "new").exists()


# --- what cannot be read as one


def test_missing_file_says_who_writes_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file or directory; blsgd calibrate writes one"):
        SpeedProfile.read(tmp_path / "none.json")
    with pytest.raises(UsageError, match="Is a directory"):
        SpeedProfile.read(tmp_path)


NOTHING = b"\xff\xfe\x00"
TEXTS = {
    "empty": "",
    "half": '{"format": 1, "key": {',
    "list": "[]",
    "number": "1",
    "null": "null",
    "nothing in it": "{}",
    "another tool's": '{"format": "v2", "key": [], "workers": {}}',
    "deep list": "[" * 100_000,
    "deep dict": '{"key":' * 100_000,
    "digits": "1" * 5_000,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_foreign_file_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "foreign.json"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        SpeedProfile.read(path)
    assert one_line(error) == (
        f"profile = {str(path)!r} is not a speed profile; blsgd calibrate writes one"
    )


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_bytes(NOTHING)
    with pytest.raises(UsageError, match="is not a speed profile"):
        SpeedProfile.read(tmp_path / "b.json")


@pytest.fixture
def changed(tmp_path: Path) -> Changed:
    """Return a function that writes a good profile with one thing changed."""

    def change(edit: Callable[[dict[str, Any]], object]) -> Path:
        path = tmp_path / "changed.json"
        made_profile().write(path)
        values = json.loads(path.read_text())
        edit(values)
        path.write_text(json.dumps(values))
        return path

    return change


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


ALONE_MEDIANS = {
    "nan": float("nan"),
    "infinite": float("inf"),
    "negative": -0.01,
    "zero": 0,
    "text": "0.01",
    "true": True,
    "none": None,
    "list": [0.01],
    "too large for a float": 10**400,
    "below the lowest": 1e-9,
    "above the highest": 1e9,
}


@pytest.mark.parametrize("value", ALONE_MEDIANS.values(), ids=ALONE_MEDIANS)
@pytest.mark.parametrize("which", ["alone", "loaded"])
def test_speed_that_is_none_is_refused(changed: Changed, which: str, value: Any) -> None:
    path = changed(lambda read: read["workers"][1][which].update(median=value))
    with pytest.raises(UsageError, match="is not a speed profile"):
        SpeedProfile.read(path)


EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no format": lambda read: read.pop("format"),
    "format of the future": lambda read: read.update(format=2),
    "no key": lambda read: read.pop("key"),
    "key without a field": lambda read: read["key"].pop("cores"),
    "key with another field": lambda read: read["key"].update(colour="red"),
    "key of lists": lambda read: read["key"].update(cpu=nested(200)),
    "accelerators of lists": lambda read: read["key"].update(accelerators=[nested(200)]),
    "accelerators are a number": lambda read: read["key"].update(accelerators=0),
    "no workers": lambda read: read.pop("workers"),
    "workers are a text": lambda read: read.update(workers="cpu:0"),
    "worker is a number": lambda read: read["workers"].append(3),
    "no device": lambda read: read["workers"][0].pop("device"),
    "device is a number": lambda read: read["workers"][0].update(device=0),
    "device of two lines": lambda read: read["workers"][0].update(device="cpu:0\nrm -rf"),
    "device that colours a terminal": lambda read: read["workers"][0].update(device="\x1b[31m"),
    "slowdown is a text": lambda read: read["workers"][0].update(slowdown="4"),
    "slowdown is nan": lambda read: read["workers"][0].update(slowdown=float("nan")),
    "not measured alone": lambda read: read["workers"][0].pop("alone"),
    "no count": lambda read: read["workers"][0]["alone"].pop("count"),
    "infinite count": lambda read: read["workers"][0]["alone"].update(count=float("inf")),
    "count of none": lambda read: read["workers"][0]["alone"].update(count=0),
    "negative lowest": lambda read: read["workers"][0]["alone"].update(low=-1),
    "no overhead": lambda read: read.pop("overhead_seconds"),
    "negative overhead": lambda read: read["overhead_seconds"].update(median=-1, low=-1),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_damaged_profile_is_refused_in_one_line(
    changed: Changed, edit: Callable[[dict[str, Any]], object]
) -> None:
    path = changed(edit)
    with pytest.raises(UsageError) as error:
        SpeedProfile.read(path)
    assert "is not a speed profile" in one_line(error)


def test_overhead_may_be_zero(changed: Changed) -> None:
    path = changed(lambda read: read["overhead_seconds"].update(median=0.0, low=0.0))
    assert SpeedProfile.read(path).overhead_seconds == Spread(0.0, 0.0, 0.002, 5)


# --- what it holds for


def test_holds_for_what_it_was_measured_with() -> None:
    assert made_profile().mismatch(HERE, WORKERS) == ""
    # Tier, steps and name do not change how long a step takes.
    others = [replace(worker, tier="", steps=3, name=f"w{worker.cores[0]}") for worker in WORKERS]
    assert made_profile().mismatch(HERE, others) == ""
    assert made_profile().mismatch(ProfileKey.here(RunConfig(seed=9), MACHINE), WORKERS) == ""


@pytest.mark.parametrize(
    ("field", "measured", "told"),
    [
        ("cpu", "Z80", "cpu = 'Z80', and here it is "),
        ("cores", 96, "cores = 96, and here it is 4"),
        ("accelerators", ("H100",), "accelerators = ('H100',), and here it is ()"),
        ("task", "cifar10", "task = 'cifar10', and here it is 'digits'"),
        ("model", "cnn", "model = 'cnn', and here it is ''"),
        ("batch_size", 64, "batch-size = 64, and here it is 16"),
        ("threads", 3, "threads = 3, and here it is 0"),
        ("processes_per_device", 1, "processes-per-device = 1, and here it is 0"),
        ("optimizer", "adamw", "optimizer = 'adamw', and here it is 'sgd'"),
        ("precision", "bfloat16", "precision = 'bfloat16', and here it is 'float32'"),
    ],
)
def test_what_differs_is_named(field: str, measured: Any, told: str) -> None:
    reason = made_profile(**{field: measured}).mismatch(HERE, WORKERS)
    assert reason.startswith(f"it was measured with {told}")
    assert "\n" not in reason


def test_every_field_of_the_key_counts() -> None:
    for field, value in vars(HERE).items():
        other = (*value, "x") if isinstance(value, tuple) else f"{value}x"
        assert HERE.difference(replace(HERE, **{field: other})), field
    assert HERE.difference(HERE) == ""


@pytest.mark.parametrize(
    ("workers", "told"),
    [
        (WORKERS[:1], "and the workers are cpu:0-1"),
        (WORKERS[::-1], "and the workers are cpu:2 slowdown=4, cpu:0-1"),
        ([WORKERS[0], replace(WORKERS[1], slowdown=2.0)], "cpu:2 slowdown=2"),
        ([WORKERS[0], replace(WORKERS[1], cores=(3,))], "cpu:3 slowdown=4"),
        ([WORKERS[0], WorkerSpec("cuda:0")], "cpu:0-1, cuda:0"),
        ([*WORKERS, WorkerSpec("cpu", (3,))], "cpu:2 slowdown=4, cpu:3"),
        ([], "the workers are nobody"),
    ],
)
def test_other_workers_are_named(workers: list[WorkerSpec], told: str) -> None:
    reason = made_profile().mismatch(HERE, workers)
    assert reason.startswith("it holds the speeds of cpu:0-1, cpu:2 slowdown=4, and the workers")
    assert reason.endswith(told)


def test_key_says_what_this_machine_has() -> None:
    key = ProfileKey.here(RunConfig())
    assert key.cpu
    assert key.cores >= 1
    assert ProfileKey.here(RunConfig()) == key
    machine = Machine((0,), given_accelerators=("mps", "xpu:1"))
    assert accelerator_names(machine) == ("mps", "xpu:1")


# --- to whom it gives speeds


def test_wall_clock_takes_speeds_under_load_and_device_those_alone() -> None:
    profile = made_profile(alone=(0.01, 0.04), loaded=(0.02, 0.05))
    wall = profile.given_to(WORKERS, "wall")
    assert [worker.seconds_per_step for worker in wall] == [0.02, 0.05]
    assert [worker.seconds_per_step_alone for worker in wall] == [0.01, 0.04]
    device = profile.given_to(WORKERS, "device")
    assert [worker.seconds_per_step for worker in device] == [0.01, 0.04]
    assert [worker.seconds_per_step_alone for worker in device] == [0.01, 0.04]
    assert [worker.tier for worker in wall] == ["fast", "slow"]


def test_speed_that_was_given_wins() -> None:
    given = replace(WORKERS[1], seconds_per_step=0.7)
    found = made_profile().given_to([WORKERS[0], given], "wall")
    assert found[0].seconds_per_step == 0.02
    assert found[1] == given  # also alone: it may stand for other hardware
    with pytest.raises(ValueError, match="longer"):
        made_profile().given_to(WORKERS[:1], "wall")


def test_settings_without_a_profile_leave_the_workers_alone() -> None:
    assert with_profile(WORKERS, RunConfig()) == (WORKERS, None)


def test_settings_with_a_profile_take_its_speeds(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    config = RunConfig(profile=str(path), clock="device")
    made = made_profile(config, machine=None)
    made.write(path)
    workers, profile = with_profile(WORKERS, config)
    assert profile == made
    assert [worker.seconds_per_step for worker in workers] == [0.01, 0.04]


def test_settings_with_a_profile_of_another_batch_size_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    made_profile(machine=None).write(path)
    with pytest.raises(UsageError) as error:
        with_profile(WORKERS, RunConfig(profile=str(path), batch_size=64))
    assert one_line(error) == (
        f"profile = {str(path)!r} does not hold here: it was measured with batch-size = 16, and "
        "here it is 64; measure with blsgd calibrate, or leave profile empty"
    )
