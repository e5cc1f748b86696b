"""The workers behind one node, from its node config."""

from typing import Any

import pytest

from flower_blsgd.errors import UsageError
from flower_blsgd.host.devices import host_workers
from flower_blsgd.runtime.machine import Machine

MACHINE = Machine(cores=tuple(range(8)), given_accelerators=("cuda:0", "cuda:1"))


def names(devices: str, **node_config: Any) -> list[str]:
    return [w.name for w in host_workers({"devices": devices, **node_config}, MACHINE)]


def test_devices_are_read_as_everywhere() -> None:
    workers = host_workers({"devices": "2x cuda:0 fast; 2x cpu:4-7 slow steps=2"}, MACHINE)
    assert [w.device_with_cores for w in workers] == ["cuda:0", "cuda:0", "cpu:4-5", "cpu:6-7"]
    assert [w.tier for w in workers] == ["fast", "fast", "slow", "slow"]
    assert [w.steps for w in workers] == [None, None, 2, 2]
    assert [w.name for w in workers] == [""] * 4


def test_names_begin_with_that_of_the_node() -> None:
    assert names("2x cuda:0; 1x cpu name=attic", name="box-1") == [
        "box-1/0",
        "box-1/1",
        "box-1/attic",
    ]


def test_names_sort_as_the_places_do() -> None:
    found = names("12x cpu", name="box")
    assert found[2] == "box/02"
    assert sorted(found) == found


def test_auto_stands_for_all_that_the_machine_has() -> None:
    assert [w.device for w in host_workers({"devices": "auto"}, MACHINE)] == [
        "cuda:0",
        "cuda:1",
        "cpu",
    ]


@pytest.mark.parametrize("key", ["device", "tier", "steps", "slowdown", "seconds-per-step"])
def test_what_is_for_one_worker_does_not_go_with_devices(key: str) -> None:
    with pytest.raises(UsageError, match=f"{key} = 'x' .* write it into the group") as refusal:
        host_workers({"devices": "2x cpu", key: "x"}, MACHINE)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("devices", ["2x cuda:7", "2x tpu:0", "", "2x cpu quick"])
def test_what_cannot_be_used_is_refused_in_one_line(devices: str) -> None:
    with pytest.raises(UsageError, match="devices in the node config: ") as refusal:
        host_workers({"devices": devices}, MACHINE)
    assert "\n" not in str(refusal.value)
