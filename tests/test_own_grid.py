"""The local grid of our own settings: which workers, with which speeds."""

from pathlib import Path

import pytest

from flower_blsgd.config import RunConfig
from flower_blsgd.errors import UsageError
from flower_blsgd.own_grid import own_grid
from flower_blsgd.runtime.devices import WorkerSpec, parse_workers
from flower_blsgd.runtime.machine import usable_cores

from .experiments.profiles import made_profile

CORE = usable_cores()[0]
TEAM = f"1x cpu:{CORE} fast; 1x cpu:{CORE} slow slowdown=4"


def profile_at(path: Path, config: RunConfig) -> str:
    made_profile(config, parse_workers(config.workers), machine=None).write(path)
    return str(path)


def test_grid_has_the_workers_of_the_settings_and_no_process_yet() -> None:
    with own_grid(RunConfig(workers=TEAM)) as grid:
        assert list(grid.workers) == parse_workers(TEAM)
        assert grid.process_ids == {}


def test_grid_has_the_speeds_of_the_profile(tmp_path: Path) -> None:
    path = profile_at(tmp_path / "mine.json", RunConfig(workers=TEAM))
    with own_grid(RunConfig(workers=TEAM, profile=path)) as grid:
        assert [worker.seconds_per_step for worker in grid.workers] == [0.02, 0.05]
    with own_grid(RunConfig(workers=TEAM, profile=path, clock="device")) as grid:
        assert [worker.seconds_per_step for worker in grid.workers] == [0.01, 0.04]


def test_given_workers_come_instead_and_are_left_as_they_are(tmp_path: Path) -> None:
    path = profile_at(tmp_path / "mine.json", RunConfig(workers=TEAM))
    others = [WorkerSpec("cpu", (CORE,))]
    with own_grid(RunConfig(workers=TEAM, profile=path), workers=others) as grid:
        assert list(grid.workers) == others


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"workers": "1x cuda:99 fast"}, "device cuda:99 is not there"),
        ({"profile": "none.json"}, "profile = 'none.json' cannot be read"),
    ],
)
def test_grid_that_cannot_be_made_is_refused(changes: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        own_grid(RunConfig(**{"workers": TEAM, **changes}))


def test_profile_for_other_workers_is_refused(tmp_path: Path) -> None:
    path = profile_at(tmp_path / "mine.json", RunConfig(workers=TEAM))
    other = RunConfig(workers=f"2x cpu:{CORE} fast", profile=path)
    with pytest.raises(UsageError, match="does not hold here"):
        own_grid(other)
