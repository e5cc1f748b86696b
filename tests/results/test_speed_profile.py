"""Speeds on disk: written whole or not at all, refused when damaged, valid for one machine only."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flower_blsgd.config import RunConfig
from flower_blsgd.errors import UsageError
from flower_blsgd.grids.worker_spec import WorkerSpec
from flower_blsgd.results.speed_profile import (
    SpeedProfile,
    Spread,
    profile_key,
    refuse_unwritable,
    with_profile,
)

from ..refusal import refusal
from ..test_run import config_of, run
from .profiles import MACHINE, WORKERS, made_profile

HERE = profile_key(RunConfig(), MACHINE)


# --- on disk


def test_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    profile = made_profile(RunConfig(model="cnn", batch_size=32, threads=2))
    path = tmp_path / "deep" / "down" / "mine.json"
    refuse_unwritable(path)
    assert not path.parent.exists()
    profile.write(path)
    refuse_unwritable(path)
    assert SpeedProfile.read(path) == profile
    assert [entry.name for entry in path.parent.iterdir()] == ["mine.json"]
    assert json.loads(path.read_text())["format"] == 2


@pytest.mark.parametrize("path", ["folder", "file/below.json"])
def test_path_that_takes_no_file_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    for attempt in (refuse_unwritable, made_profile().write):
        with pytest.raises(UsageError, match=f"profile = '.*{path}' cannot be written: ") as error:
            attempt(tmp_path / path)
        assert "\n" not in str(error.value)
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == ["file", "folder"]


# --- files that are no profile


def test_missing_file_says_which_command_writes_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file or directory; blsgd calibrate writes one"):
        SpeedProfile.read(tmp_path / "none.json")
    with pytest.raises(UsageError, match="Is a directory"):
        SpeedProfile.read(tmp_path)


DAMAGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "another tool's": lambda read: (read.clear(), read.update(format="v2", key=[], workers={})),
    "no format": lambda read: read.pop("format"),
    "format of the future": lambda read: read.update(format=3),
    "key without a field": lambda read: read["key"].pop("cores"),
    "alone 0": lambda read: read["workers"][0]["alone"].update(low=0, median=0),
    "negative overhead": lambda read: read["overhead_seconds"].update(median=-1, low=-1),
    "median nan": lambda read: read["workers"][1]["loaded"].update(median=float("nan")),
    "median a text": lambda read: read["workers"][1]["loaded"].update(median="0.01"),
    "no worker": lambda read: read["workers"][0].update(worker=None),
    "median above the highest": lambda read: read["workers"][1]["loaded"].update(median=1e9),
}


@pytest.mark.parametrize("damage", [None, *DAMAGED.values()], ids=["empty", *DAMAGED])
def test_damaged_profile_is_refused_in_one_line(
    tmp_path: Path, damage: Callable[[dict[str, Any]], object] | None
) -> None:
    path, profile = tmp_path / "x.json", made_profile()
    profile = replace(profile, overhead_seconds=Spread(0.0, 0.0, 0.002, 5))  # may be 0
    profile.write(path)
    assert SpeedProfile.read(path) == profile
    values = json.loads(path.read_text())
    if damage is not None:
        damage(values)
    path.write_text("" if damage is None else json.dumps(values))
    assert refusal(SpeedProfile.read, path) == (
        f"profile = {str(path)!r} is not a speed profile; blsgd calibrate writes one"
    )


# --- what it holds for


def test_holds_for_what_it_was_measured_with() -> None:
    assert made_profile().mismatch(HERE, WORKERS) == ""
    # Tier, steps, name and seed do not change how long a step takes.
    others = [replace(worker, tier="", steps=3, name=f"w{worker.cores[0]}") for worker in WORKERS]
    assert made_profile().mismatch(profile_key(RunConfig(seed=9), MACHINE), others) == ""
    for field, value in HERE.items():
        other = [*value, "x"] if isinstance(value, list) else f"{value}x"
        name = field.replace("_", "-")
        assert made_profile(**{field: other}).mismatch(HERE, WORKERS) == (
            f"it was measured with {name} = {other!r}, not {value!r}"
        )


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        (WORKERS[:1], "not of cpu:0-1"),
        ([WORKERS[0], replace(WORKERS[1], slowdown=2.0)], "cpu:2 slowdown=2"),
        ([WORKERS[0], WorkerSpec("cuda:0")], "cpu:0-1, cuda:0"),
        ([replace(WORKERS[0], batch_size=16), WORKERS[1]], "cpu:0-1 batch=16, cpu:2 slowdown=4"),
        ([WORKERS[0], WorkerSpec("cuda:0", precision="tf32")], "cuda:0 precision=tf32"),
    ],
)
def test_other_workers_are_named(workers: list[WorkerSpec], words: str) -> None:
    reason = made_profile().mismatch(HERE, workers)
    assert reason.startswith("it has the speeds of cpu:0-1, cpu:2 slowdown=4, not of ")
    assert reason.endswith(words)


# --- which workers get its speeds


def test_wall_clock_takes_speeds_under_load_and_device_those_alone() -> None:
    profile = made_profile(alone=(0.01, 0.04), loaded=(0.02, 0.05))
    given = replace(WORKERS[1], seconds_per_step=0.7)
    for clock, fast, slow in (("wall", 0.02, 0.05), ("device", 0.01, 0.04)):
        found = profile.given_to(WORKERS, clock)  # type: ignore[arg-type]
        assert [worker.seconds_per_step for worker in found] == [fast, slow]
        assert [worker.seconds_per_step_alone for worker in found] == [0.01, 0.04]
        # One that was given wins, also alone: it may stand for other hardware.
        assert profile.given_to([WORKERS[0], given], clock) == [found[0], given]  # type: ignore[arg-type]


def test_profile_of_the_settings_is_used_or_refused(tmp_path: Path) -> None:
    assert with_profile(WORKERS, RunConfig()) == (WORKERS, None)
    path = tmp_path / "mine.json"
    config = RunConfig(profile=str(path), clock="device")
    made = made_profile(config, machine=None)
    made.write(path)
    workers, profile = with_profile(WORKERS, config)
    assert profile == made
    assert [worker.seconds_per_step for worker in workers] == [0.01, 0.04]
    with pytest.raises(UsageError) as error:
        with_profile(WORKERS, replace(config, batch_size=64))
    assert str(error.value) == (
        f"profile = {str(path)!r} does not apply: it was measured with batch-size = 16, "
        "not 64; measure with blsgd calibrate, or leave profile empty"
    )


def test_profile_is_not_read_on_other_grids_than_the_local_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.json"
    path.write_text("no profile")
    report = run(config_of(epochs=1, clock="device", profile=str(path)))
    assert f'profile = "{path}" is ignored' in capsys.readouterr().out
    assert report.summary["interrupted"] is False
    assert report.summary["predicted"]["round_seconds"] > 0
