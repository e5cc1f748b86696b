"""The workers behind one node, from its node config."""

import pytest

from flower_blsgd.errors import UsageError
from flower_blsgd.hosts.node_grid import node_workers
from flower_blsgd.runtime.devices import Machine, WorkerSpec

MACHINE = Machine(cores=tuple(range(8)), given_accelerators=("cuda:0", "cuda:1"))


def workers_of(devices: str, name: str = "", **node_config: str) -> list[WorkerSpec]:
    return node_workers({"devices": devices, "name": name, **node_config}, MACHINE)


def test_devices_are_read_as_everywhere() -> None:
    workers = workers_of("2x cuda:0 fast; 2x cpu:4-7 slow steps=2")
    assert [w.device_with_cores for w in workers] == ["cuda:0", "cuda:0", "cpu:4-5", "cpu:6-7"]
    assert [w.tier for w in workers] == ["fast", "fast", "slow", "slow"]
    assert [w.steps for w in workers] == [None, None, 2, 2]
    assert [w.name for w in workers] == [""] * 4
    assert [w.device for w in workers_of("auto")] == ["cuda:0", "cuda:1", "cpu"]


def test_names_begin_with_that_of_the_node_and_sort_as_the_ranks_do() -> None:
    workers = workers_of("2x cuda:0; 1x cpu name=attic", name="box-1")
    assert [w.name for w in workers] == ["box-1/0", "box-1/1", "box-1/attic"]
    names = [w.name for w in workers_of("12x cpu", name="box")]
    assert names[2] == "box/02"
    assert sorted(names) == names


@pytest.mark.parametrize("key", ["device", "tier", "steps", "slowdown", "seconds-per-step"])
def test_what_is_for_one_worker_does_not_go_with_devices(key: str) -> None:
    with pytest.raises(UsageError, match=f"{key} = 'x' .* write it into the group") as refusal:
        workers_of("2x cpu", **{key: "x"})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("devices", ["2x cuda:7", "2x tpu:0", "", "2x cpu quick"])
def test_what_cannot_be_used_is_refused_in_one_line(devices: str) -> None:
    with pytest.raises(UsageError, match="devices in the node config: ") as refusal:
        workers_of(devices)
    assert "\n" not in str(refusal.value)
