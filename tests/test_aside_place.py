"""Which device is idle enough to evaluate on while training goes on."""

import pytest

from flower_blsgd.aside_place import evaluation_share, idle_place, shared_place
from flower_blsgd.runtime.devices import auto_workers, parse_workers
from flower_blsgd.runtime.machine import Machine

TWO_CORES = Machine((0, 1), ())
EIGHT_CORES = Machine(tuple(range(8)), ())
TWO_CARDS = Machine(tuple(range(8)), ("cuda:0", "cuda:1"))
DIGITS = evaluation_share(1437, 360, 1)


def place_of(workers: str, machine: Machine, share: float = 0.0) -> str:
    place = idle_place(parse_workers(workers, machine), machine, share)
    return "" if place is None else place.worker.device_with_cores


@pytest.mark.parametrize("share", [0.0, DIGITS])
@pytest.mark.parametrize("workers", ["1x cpu:0 fast; 1x cpu:1 slow", "1x cpu fast; 1x cpu slow"])
def test_two_cores_with_a_worker_each_have_no_place(workers: str, share: float) -> None:
    assert place_of(workers, TWO_CORES, share) == ""


@pytest.mark.parametrize("machine", [TWO_CORES, EIGHT_CORES, TWO_CARDS], ids=str)
def test_workers_auto_leave_no_place(machine: Machine) -> None:
    place = idle_place(auto_workers(machine), machine, DIGITS)
    assert place is None


def test_idle_cores_the_last_ones_and_no_more_than_the_fast_workers_have() -> None:
    assert place_of("1x cpu:0 fast; 1x cpu:1 slow", EIGHT_CORES, DIGITS) == "cpu:7"
    assert place_of("1x cpu:0-1 fast; 1x cpu:2 slow", EIGHT_CORES, DIGITS) == "cpu:6-7"
    assert place_of("1x cpu:0-6 fast", EIGHT_CORES) == "cpu:7"
    assert place_of("1x cpu:3 slow", EIGHT_CORES) == "cpu:7"


def test_idle_accelerator_comes_first() -> None:
    assert place_of("1x cuda:0 fast; 1x cpu:0 slow", TWO_CARDS, DIGITS) == "cuda:1"
    assert place_of("1x cuda:1 fast", TWO_CARDS, DIGITS) == "cuda:0"
    assert place_of("1x cuda fast", TWO_CARDS, DIGITS) == "cuda:1"
    assert place_of("1x cpu:0-7 fast", TWO_CARDS, DIGITS) == "cuda:0"


def test_cores_do_not_keep_up_with_accelerators_unless_they_are_asked_for() -> None:
    both = "2x cuda:0-1 fast; 1x cpu:3 slow"
    assert place_of(both, TWO_CARDS, DIGITS) == ""
    # Cores 0 and 1 are for the accelerators' processes; the fast workers have none of their own.
    assert place_of(both, TWO_CARDS) == "cpu:7"
    assert place_of("2x cuda:0-1 fast; 1x cpu:0-5 slow", TWO_CARDS) == ""


def test_cores_must_keep_up_with_the_fast_workers() -> None:
    """One idle core for seven fast ones: an evaluation lasts seven times as long as on them."""
    assert evaluation_share(30, 10, 1) == pytest.approx(1 / 9)
    assert place_of("1x cpu:0-6 fast", EIGHT_CORES, evaluation_share(30, 10, 1)) == ""  # 7/9
    assert place_of("1x cpu:0-6 fast", EIGHT_CORES, evaluation_share(30, 10, 2)) == "cpu:7"  # 7/18


def test_notes_warn_of_shared_devices_only() -> None:
    idle = idle_place(parse_workers("1x cpu:0 fast", TWO_CORES), TWO_CORES)
    assert idle is not None
    assert idle.note == "evaluation aside on cpu:1, which no worker uses"
    shared = shared_place(TWO_CORES)
    assert shared.worker.cores == (0, 1)
    assert "warning" in shared.note
    assert "cpu:0-1" in shared.note
    assert "lowest priority" in shared.note
    card = shared_place(TWO_CARDS, accelerator=True)
    assert card.worker.device == "cuda:0"
    assert "lowest priority" not in card.note
