"""Workers that compute together: as each would alone, and alone where they cannot."""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor, nn

from flower_blsgd import LocalSGD, TrainOrder, TrainReport
from flower_blsgd.worker import replica
from flower_blsgd.worker.calibration import seconds_per_step
from flower_blsgd.worker.replica import Replica, ReplicaTeam
from flower_blsgd.worker.replica_sgd import ReplicaSGD

from .interrupting import interrupt
from .replica_orders import (
    SAMPLES,
    SIZE,
    STEPS,
    copied,
    furthest,
    made,
    one_by_one,
    order_of,
    perceptron,
    points,
)

LONG = 30.0


class Counting(ReplicaSGD):
    """Notes how many orders came at once."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.sizes: list[int] = []

    def run(self, works: Sequence[Any]) -> list[TrainReport]:
        self.sizes.append(len(works))
        return super().run(works)


def team_of(
    count: int, model: Any = perceptron, wait_seconds: float = LONG, **settings: Any
) -> tuple[Counting, list[Replica]]:
    sgd = Counting(made(model), points())
    team = ReplicaTeam(sgd, wait_seconds)
    return sgd, [Replica(team, m, made(model), points(), **settings) for m in range(count)]


def at_once(
    members: Sequence[LocalSGD], orders: Sequence[TrainOrder], states: Sequence[Any]
) -> list[Any]:
    """Run each order in a thread of its own; return reports or errors."""
    found: list[Any] = [None] * len(members)

    def go(place: int) -> None:
        try:
            found[place] = members[place].run(orders[place], states[place])
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=go, args=(i,), daemon=True) for i in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive(), "somebody waits for ever"
    return found


def test_orders_of_a_round_are_computed_together() -> None:
    sgd, members = team_of(3)
    arrays = copied(ArrayRecord(made(perceptron).state_dict()))
    local = LocalSGD(made(perceptron), points())
    states: list[list[RecordDict]] = [[RecordDict() for _ in members] for _ in range(2)]
    for server_round in (1, 2, 3):
        orders = [order_of(worker, arrays, server_round) for worker in range(3)]
        expected = one_by_one(local, orders, states[0])
        found = at_once(members, orders, states[1])
        for one, other in zip(expected, found, strict=True):
            assert furthest(one.arrays, other.arrays) < 1e-10
    assert sgd.sizes == [3, 3, 3]


def test_what_does_not_fit_is_computed_alone() -> None:
    sgd, members = team_of(5)
    arrays = copied(ArrayRecord(made(perceptron).state_dict()))
    orders = [
        order_of(0, arrays),
        order_of(1, arrays),
        order_of(2, arrays, deadline_seconds=LONG),
        order_of(3, arrays, local_steps=4, batch_size=3),
        order_of(4, arrays),
    ]
    states = [RecordDict(), RecordDict(), RecordDict(), RecordDict(), None]  # the last is its own
    found = at_once(members, orders, states)
    expected = [LocalSGD(made(perceptron), points()).run(order) for order in orders]
    for one, other in zip(expected, found, strict=True):
        assert furthest(one.arrays, other.arrays) < 1e-10
    assert sgd.sizes == [2]


def test_one_slowed_on_purpose_computes_alone() -> None:
    sgd, members = team_of(2, wait_seconds=0.01)
    slow = Replica(members[0]._team, 2, made(perceptron), points(), slowdown=2.0)
    arrays = copied(ArrayRecord(made(perceptron).state_dict()))
    orders = [order_of(worker, arrays) for worker in range(3)]
    reports = at_once([*members, slow], orders, [RecordDict() for _ in orders])
    assert all(isinstance(report, TrainReport) for report in reports)
    assert 3 not in sgd.sizes


def test_a_wrong_order_fails_alone_with_its_own_words() -> None:
    sgd, members = team_of(3)
    arrays = copied(ArrayRecord(made(perceptron).state_dict()))
    orders = [order_of(worker, arrays) for worker in range(3)]
    orders[1].indices[0] = SAMPLES
    found = at_once(members, orders, [RecordDict() for _ in orders])
    assert isinstance(found[1], IndexError)
    assert "sample 40" in str(found[1])
    assert isinstance(found[0], TrainReport)
    assert isinstance(found[2], TrainReport)
    assert sgd.sizes == [2]


class ReadsANumber(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 4)
        self.handled: list[object] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.handled.append(sys.exception())
        outputs = super().forward(inputs)
        return outputs * 2 if float(outputs.detach().sum()) > 0 else outputs


def test_model_that_cannot_be_batched_is_computed_by_each_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sgd, members = team_of(3, ReadsANumber)
    arrays = copied(ArrayRecord(made(ReadsANumber).state_dict()))
    local = LocalSGD(made(ReadsANumber), points())
    states: list[list[RecordDict]] = [[RecordDict() for _ in members] for _ in range(2)]
    with caplog.at_level(logging.INFO, "flower_blsgd"):
        for server_round in (1, 2):
            orders = [order_of(worker, arrays, server_round) for worker in range(3)]
            expected = one_by_one(local, orders, states[0])
            found = at_once(members, orders, states[1])
            for one, other in zip(expected, found, strict=True):
                assert furthest(one.arrays, other.arrays) < 1e-10
    # An error that is still handled keeps the memory of the step that it ended.
    assert [member.model.handled for member in members] == [[None] * STEPS * 2] * 3
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith('replicas = "batched": this model cannot be computed')
    assert "\n" not in line
    assert sgd.sizes == [3]


class Burns(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        raise ArithmeticError("the fan stands still")


def test_model_that_is_wrong_fails_every_order_with_its_own_error() -> None:
    _, members = team_of(2, Burns)
    arrays = copied(ArrayRecord(made(Burns).state_dict()))
    orders = [order_of(worker, arrays) for worker in range(2)]
    found = at_once(members, orders, [RecordDict(), RecordDict()])
    assert [str(error) for error in found] == ["the fan stands still"] * 2


def test_who_waits_for_others_of_the_team_can_be_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica, "LOOK_SECONDS", 0.01)
    _, members = team_of(2)
    team, ended, begun = members[0]._team, list[str](), threading.Event()

    def wait() -> None:
        try:
            begun.set()
            with team._one_at_a_time():
                ended.append("passed")
        except InterruptedError:
            ended.append("interrupted")

    thread = threading.Thread(target=wait, daemon=True)
    with team._one_at_a_time():
        thread.start()
        assert begun.wait(LONG)
        time.sleep(0.05)
        interrupt(thread)
        thread.join(LONG)
        assert ended == ["interrupted"]
    with team._one_at_a_time():  # it was given back
        pass


def test_calibration_measures_all_together_and_leaves_nothing() -> None:
    sgd, members = team_of(2)
    seconds = [0.0, 0.0]

    def measure(place: int) -> None:
        seconds[place] = seconds_per_step(members[place], SIZE, SAMPLES, 0.05)

    threads = [threading.Thread(target=measure, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
    assert seconds[0] == seconds[1] > 0  # times are those of all
    assert set(sgd.sizes) == {2}
    assert len(sgd.sizes) >= 2
    fresh = LocalSGD(made(perceptron), points())
    arrays = copied(ArrayRecord(made(perceptron).state_dict()))
    orders = [order_of(worker, arrays) for worker in range(2)]
    found = at_once(members, orders, [RecordDict(), RecordDict()])
    expected = one_by_one(fresh, orders, [RecordDict(), RecordDict()])
    for one, other in zip(expected, found, strict=True):
        assert furthest(one.arrays, other.arrays) < 1e-10


def test_all_rounds_are_computed_on_one_stream_of_the_team(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever thread computes: the allocator keeps memory for the stream that it was used on."""
    entered: list[Any] = []

    @contextlib.contextmanager
    def on(stream: Any) -> Iterator[None]:
        entered.append(stream)
        yield

    monkeypatch.setattr(replica, "_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(replica, "_on", on)
    _, members = team_of(2)
    arrays = copied(ArrayRecord(made(perceptron).state_dict()))
    for server_round in (1, 2):
        orders = [order_of(worker, arrays, server_round) for worker in range(2)]
        at_once(members, orders, [RecordDict(), RecordDict()])
    assert entered == ["stream of cpu"] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_same_as_local_sgd_on_a_gpu() -> None:
    sgd = Counting(made(perceptron), points(), device="cuda")
    team = ReplicaTeam(sgd, LONG)
    members = [Replica(team, m, made(perceptron), points(), device="cuda") for m in range(3)]
    local = LocalSGD(made(perceptron), points(), device="cuda")
    arrays = copied(ArrayRecord(made(perceptron).state_dict()))
    states: list[list[RecordDict]] = [[RecordDict() for _ in members] for _ in range(2)]
    for server_round in (1, 2):
        orders = [order_of(worker, arrays, server_round) for worker in range(3)]
        expected = one_by_one(local, orders, states[0])
        found = at_once(members, orders, states[1])
        for one, other in zip(expected, found, strict=True):
            assert furthest(one.arrays, other.arrays) < 1e-8
    assert sgd.sizes == [3, 3]
