"""The meeting of workers: who waits for whom, what reaches whom, and that nobody waits for ever."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from flower_blsgd.worker.replica_group import InterruptedElsewhereError, ReplicaGroup

LONG = 60.0


class Interrupted(BaseException):
    """What a signal raises in a thread."""


class Calls:
    """Doubles numbers, and notes what was computed together."""

    def __init__(self) -> None:
        self.together: list[list[int]] = []
        self.alone: list[int] = []
        self.hold = threading.Event()
        self.hold.set()
        self.error: BaseException | None = None

    def batch(self, works: Sequence[int]) -> list[int]:
        self.together.append(list(works))
        assert self.hold.wait(LONG)
        if self.error is not None:
            raise self.error
        return [2 * work for work in works]

    def single(self, work: int) -> Callable[[], int]:
        def compute() -> int:
            self.alone.append(work)
            assert self.hold.wait(LONG)
            if self.error is not None:
                raise self.error
            return 2 * work

        return compute


class Round:
    """Members that hand in at once, each in a thread."""

    def __init__(self, group: "ReplicaGroup[int, int]", calls: Calls) -> None:
        self._group, self._calls = group, calls
        self.found: dict[int, Any] = {}
        self._threads: list[threading.Thread] = []

    def hand_in(
        self, member: int, shape: str = "", work: int | None = None, phase: str = ""
    ) -> None:
        work = member if work is None else work

        def go() -> None:
            try:
                alone = self._calls.single(work)
                self.found[member] = self._group.run(member, shape, work, alone, phase)
            except BaseException as error:
                self.found[member] = error

        thread = threading.Thread(target=go, name=f"member {member}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def end(self) -> dict[int, Any]:
        for thread in self._threads:
            thread.join(LONG)
            assert not thread.is_alive(), "somebody waits for ever"
        return self.found


def group_of(
    calls: Calls, members: Sequence[int], wait_seconds: float = LONG
) -> "ReplicaGroup[int, int]":
    """Return a group whose members joined in the thread that calls this."""
    group: ReplicaGroup[int, int] = ReplicaGroup(calls.batch, wait_seconds)
    for member in members:
        group.join(member)
    return group


def round_of(group: Any, calls: Calls, members: Sequence[int], shape: str = "") -> dict[int, Any]:
    """Hand in one after another, and return what each got."""
    gathering = Round(group, calls)
    for member in members:
        gathering.hand_in(member, shape)
    return gathering.end()


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.001)


# --- who computes with whom


def test_all_that_are_expected_are_computed_together_in_the_order_of_their_numbers() -> None:
    calls = Calls()
    group = group_of(calls, [1, 2, 3])
    for members in ([3, 1, 2], [2, 3, 1]):
        assert round_of(group, calls, members) == {1: 2, 2: 4, 3: 6}
    assert calls.together == [[1, 2, 3]] * 2
    assert calls.alone == []


def test_one_member_alone_does_not_wait() -> None:
    calls = Calls()
    group = group_of(calls, [5])
    began = time.monotonic()
    assert round_of(group, calls, [5]) == {5: 10}
    assert time.monotonic() - began < LONG / 2
    assert (calls.alone, calls.together) == ([5], [])


def test_work_of_other_shapes_is_computed_apart() -> None:
    calls = Calls()
    group = group_of(calls, [1, 2, 3, 4, 5])
    gathering = Round(group, calls)
    for member, shape in ((1, "32"), (2, "8"), (3, "32"), (4, "8"), (5, "1")):
        gathering.hand_in(member, shape)
    assert gathering.end() == {1: 2, 2: 4, 3: 6, 4: 8, 5: 10}
    assert sorted(calls.together) == [[1, 3], [2, 4]]
    assert calls.alone == [5]


def test_a_member_that_does_not_come_is_waited_for_twice_and_expected_again_when_it_comes() -> None:
    calls = Calls()
    group = group_of(calls, [1, 2, 3], wait_seconds=0.2)
    waited = []
    for members in ([1, 2], [1, 2], [1, 2]):
        began = time.monotonic()
        round_of(group, calls, members)
        waited.append(time.monotonic() - began)
    assert min(waited[:2]) >= 0.19
    group._wait_seconds = LONG
    round_of(group, calls, [1, 2])  # would not end in time if 3 were still expected
    calls.together.clear()
    gathering = Round(group, calls)
    gathering.hand_in(3)
    time.sleep(0.05)
    gathering.hand_in(1)
    gathering.hand_in(2)
    gathering.end()
    assert calls.together == [[1, 2, 3]]


def test_a_new_phase_expects_all_again() -> None:
    calls = Calls()
    group = group_of(calls, [1, 2], wait_seconds=0.01)
    for _ in range(2):
        assert group.run(1, "", 1, calls.single(1), True) == 2
    group._wait_seconds = LONG
    found: list[int] = []
    thread = threading.Thread(
        target=lambda: found.append(group.run(1, "", 1, calls.single(1), False)), daemon=True
    )
    thread.start()
    time.sleep(0.05)
    assert group.run(2, "", 2, calls.single(2), False) == 4
    thread.join(LONG)
    assert found == [2]
    assert calls.together == [[1, 2]]


def test_one_that_comes_while_the_others_compute_does_not_wait_for_them() -> None:
    calls = Calls()
    group = group_of(calls, [1, 2])
    calls.hold.clear()
    first = Round(group, calls)
    first.hand_in(1)
    first.hand_in(2)
    until(lambda: calls.together == [[1, 2]])
    late = Round(group, calls)
    late.hand_in(3)
    until(lambda: calls.alone == [3])
    calls.hold.set()
    assert first.end() | late.end() == {1: 2, 2: 4, 3: 6}


def test_one_that_leaves_lets_the_others_begin() -> None:
    calls = Calls()
    group = group_of(calls, [1, 2, 3])
    gathering = Round(group, calls)
    gathering.hand_in(1)
    gathering.hand_in(2)
    until(lambda: len(group._gathered) == 2)
    group.leave(3)
    assert gathering.end() == {1: 2, 2: 4}
    gathering = Round(group, calls)
    for member in (1, 2):
        gathering.hand_in(member, phase="other")
    assert gathering.end() == {1: 2, 2: 4}


def test_one_that_left_is_expected_again_when_it_comes() -> None:
    calls = Calls()
    group = group_of(calls, [1, 2])
    group.leave(2)
    assert round_of(group, calls, [1]) == {1: 2}
    gathering = Round(group, calls)
    gathering.hand_in(2)
    until(lambda: len(group._gathered) == 1)  # it waits for 1
    gathering.hand_in(1)
    assert gathering.end() == {1: 2, 2: 4}
    assert calls.together == [[1, 2]]


def test_members_may_come_back_at_once() -> None:
    """Without a server between them, as when they measure their speed."""
    calls = Calls()
    group = group_of(calls, [1, 2, 3, 4])
    found: dict[int, list[int]] = {}

    def many(member: int) -> None:
        found[member] = [group.run(member, "", i, calls.single(i)) for i in range(200)]

    threads = [threading.Thread(target=many, args=(m,), daemon=True) for m in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert found == {member: [2 * i for i in range(200)] for member in (1, 2, 3, 4)}
    assert calls.together == [[i] * 4 for i in range(200)]


def test_nodes_that_take_turns_in_one_thread_do_not_wait_for_one_another() -> None:
    """As in Flower's simulation: who is in this thread next cannot come while it waits."""
    calls = Calls()
    group = group_of(calls, [1, 2, 3])
    for _ in range(3):
        for member in (1, 2, 3):
            assert group.run(member, "", member, calls.single(member)) == 2 * member
    assert calls.alone == [1, 2, 3] * 3


# --- what goes wrong


def test_an_error_reaches_each_member_and_the_next_round_goes_on() -> None:
    calls = Calls()
    group = group_of(calls, [1, 2, 3])
    calls.error = ArithmeticError("the sum is wrong")
    found = round_of(group, calls, [1, 2, 3])
    assert [found[m] for m in (1, 2, 3)] == [calls.error] * 3
    calls.error = None
    assert round_of(group, calls, [1, 2, 3]) == {1: 2, 2: 4, 3: 6}


def test_an_error_that_is_a_timeout_is_an_error_as_well() -> None:
    calls = Calls()
    calls.error = TimeoutError("the disk sleeps")
    found = round_of(group_of(calls, [1, 2]), calls, [1, 2])
    assert [found[m] for m in (1, 2)] == [calls.error] * 2


def test_the_error_of_one_alone_reaches_nobody_else() -> None:
    calls = Calls()
    group = group_of(calls, [1, 2, 3])
    gathering = Round(group, calls)
    gathering.hand_in(1, "a")
    gathering.hand_in(2, "a")
    until(lambda: len(group._gathered) == 2)
    with pytest.raises(ArithmeticError, match="only mine"):
        group.run(3, "b", 3, lambda: (_ for _ in ()).throw(ArithmeticError("only mine")))
    assert gathering.end() == {1: 2, 2: 4}


def test_too_few_reports_fail_everybody() -> None:
    group: ReplicaGroup[int, int] = ReplicaGroup(lambda works: [1], LONG)
    group.join(1)
    group.join(2)
    found = round_of(group, Calls(), [1, 2])
    assert all(isinstance(found[member], ValueError) for member in (1, 2))


def test_interrupted_while_it_computes_fails_the_others_as_an_ordinary_error() -> None:
    calls = Calls()
    group = group_of(calls, [1, 2, 3])
    calls.error = Interrupted()
    found = list(round_of(group, calls, [1, 2, 3]).values())
    kinds = sorted(type(error).__name__ for error in found)
    assert kinds == ["Interrupted", *["InterruptedElsewhereError"] * 2]
    told = next(error for error in found if isinstance(error, InterruptedElsewhereError))
    assert str(told).endswith("Interrupted")
    calls.error = None
    assert round_of(group, calls, [1, 2, 3]) == {1: 2, 2: 4, 3: 6}


def test_interrupted_while_it_waits_for_others_takes_its_work_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = Calls()
    group = group_of(calls, [1, 2, 3])
    wait = group._changed.wait
    victim = ["member 2"]

    def interrupted_wait(timeout: float | None = None) -> bool:
        if threading.current_thread().name in victim:
            raise Interrupted
        return wait(timeout)

    monkeypatch.setattr(group._changed, "wait", interrupted_wait)
    gathering = Round(group, calls)
    gathering.hand_in(1)
    until(lambda: len(group._gathered) == 1)
    broken = Round(group, calls)
    broken.hand_in(2)
    assert isinstance(broken.end()[2], Interrupted)
    victim.clear()
    assert [entry.member for entry in group._gathered] == [1]
    broken.hand_in(2, work=20)  # it comes again
    gathering.hand_in(3)
    assert gathering.end() | broken.end() == {1: 2, 2: 40, 3: 6}
    assert calls.together == [[1, 20, 3]]


def test_interrupted_while_another_computes_leaves_the_rest_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = Calls()
    group = group_of(calls, [1, 2, 3])
    calls.hold.clear()
    refuse: set[int] = set()
    result_of = group._result_of

    def interrupted_result(entry: Any) -> int:
        until(lambda: bool(refuse))
        if entry.member in refuse:
            raise Interrupted
        return result_of(entry)

    monkeypatch.setattr(group, "_result_of", interrupted_result)
    gathering = Round(group, calls)
    for member in (1, 2, 3):
        gathering.hand_in(member)
    until(lambda: calls.together == [[1, 2, 3]])
    refuse.update({1, 2, 3})
    calls.hold.set()
    found = list(gathering.end().values())
    assert sorted(type(each).__name__ for each in found) == ["Interrupted", "Interrupted", "int"]
    monkeypatch.setattr(group, "_result_of", result_of)
    assert round_of(group, calls, [1, 2, 3]) == {1: 2, 2: 4, 3: 6}


def test_interrupted_before_anybody_computes_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told that the round begins, and never got to it."""
    calls = Calls()
    group = group_of(calls, [1, 2, 3])
    wait, gone = group._changed.wait, threading.Event()

    def interrupted_wait(timeout: float | None = None) -> bool:
        if threading.current_thread().name == "member 1":
            wait(timeout)
            if not group._gathered:
                gone.set()
                raise Interrupted
        else:
            while not gone.is_set():
                wait(0.01)
        return True

    monkeypatch.setattr(group._changed, "wait", interrupted_wait)
    gathering = Round(group, calls)
    gathering.hand_in(1, "a")
    until(lambda: len(group._gathered) == 1)
    gathering.hand_in(3, "a")
    until(lambda: len(group._gathered) == 2)
    gathering.hand_in(2, "b")
    found = gathering.end()
    assert isinstance(found.pop(1), Interrupted)
    assert found == {2: 4, 3: 6}
    assert sorted(calls.alone) == [2, 3]
    assert calls.together == []
