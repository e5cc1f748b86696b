"""The first step of a round on the worker's own model, by hand-worked numbers."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, RecordDict
from torch import nn

from flower_blsgd import LocalSGD, TrainOrder, TrainReport
from flower_blsgd.worker.model_io import state_record

from .helpers import NUM_SAMPLES, data, drawn_order, order_of, same, small_model, warnings_in
from .test_local_sgd import DATA, PAIR, model_of, sgd_of, squares, weight_after
from .test_local_sgd import order_of as order_of_pairs
from .test_timing import Clock, TakesOneSecond, clock  # noqa: F401

NEXT = {"next_indices": np.array(PAIR, np.int32), "next_seed": 5}


def rounds(
    sgd: LocalSGD,
    steps: int,
    average: float,
    ahead: bool,
    first: dict[str, Any] | None = None,
    second: dict[str, Any] | None = None,
    momentum_policy: str = "keep",
) -> TrainReport:
    """Run a round of two steps from w = 1, and one from the average; return its report."""
    policy = {"momentum_policy": momentum_policy}
    sgd.run(order_of_pairs(PAIR * 2, **policy, **(first or {}), **(NEXT if ahead else {})))
    if ahead:
        sgd.work_ahead()
    arrays = ArrayRecord(model_of(average).state_dict())
    settings = {"round": 2, "seed": 5, "overlap": True, "last_learning_rate": 0.1, **policy}
    return sgd.run(order_of_pairs(PAIR * steps, arrays=arrays, **(settings | (second or {}))))


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(
    ("settings", "steps", "weight"),
    [
        # The own model is 0.25, and a step there - 0.1 x 1.25; the average is 0.6.
        ({"sgd": {"momentum": 0.0}}, 1, 0.475),
        ({"sgd": {"momentum": 0.0}}, 2, 0.475 / 2),
        # 0.2 is the rate of the steps after the average: - 0.2 x 5 x 0.475
        ({"sgd": {"momentum": 0.0}, "second": {"learning_rate": 0.2}}, 2, 0.0),
        # Momentum 0.9: 1 - 0.5 = 0.5, v = 5; v = 7, - 0.2; v = 6.3 - 1 = 5.3: 0.6 - 0.53 = 0.07
        ({"sgd": {"momentum": 0.9}}, 1, 0.07),
        # v = 4.77 + 0.35 = 5.12
        ({"sgd": {"momentum": 0.9}}, 2, 0.07 - 0.512),
        # v = - 1, then - 0.9 + 5 x 0.7 = 2.6
        ({"sgd": {"momentum": 0.9}, "momentum_policy": "reset"}, 2, 0.7 - 0.26),
    ],
    ids=["one step", "two", "rates", "momentum, one step", "momentum, two", "momentum reset"],
)
def test_first_step_is_on_the_own_model(
    settings: dict[str, Any], steps: int, weight: float, ahead: bool
) -> None:
    """Whether it is done before the average arrives or after that does not matter."""
    sgd = sgd_of(**settings["sgd"])
    others = {key: value for key, value in settings.items() if key != "sgd"}
    report = rounds(sgd, steps, 0.6, ahead, **others)
    assert weight_after(report) == pytest.approx(weight, abs=1e-6)
    assert report.completed_steps == steps
    own = -0.2 if settings["sgd"]["momentum"] else 0.25
    assert report.losses[:2].tolist() == pytest.approx([own**2, 4 * own**2])


@pytest.mark.parametrize("dropout", [False, True])
def test_timing_does_not_change_a_bit(dropout: bool) -> None:
    """Nor does a resume, which brings the own model; buffers are those of the average."""

    def run(ahead: bool, resumes: bool = False) -> list[TrainReport]:
        sgd, state = LocalSGD(small_model(dropout), data(), momentum=0.9), RecordDict()
        reports: list[TrainReport] = []
        for number in (1, 2, 3):
            order, after = (orders[number - 1], orders[number])
            if ahead:
                batch = after.indices[: after.batch_size]
                weights = after.sample_weights
                order = dataclasses.replace(
                    order,
                    next_indices=batch,
                    next_weights=None if weights is None else weights[: after.batch_size],
                    next_seed=after.seed,
                )
            if resumes and number > 1:
                momentum, own = state.array_records["momentum"], reports[-1].arrays
                order = dataclasses.replace(order, own_model=own, momentum=momentum)
                sgd, state = LocalSGD(small_model(dropout), data(), momentum=0.9), RecordDict()
            reports.append(sgd.run(order, state))
            if ahead:
                sgd.work_ahead(state)
        return reports

    weights = np.arange(12, dtype=np.float32)
    orders = [order_of(1), *(order_of(r, sample_weights=weights) for r in (2, 3, 4))]
    for i in (1, 2, 3):
        rate = orders[i - 1].learning_rate
        orders[i] = dataclasses.replace(orders[i], overlap=True, last_learning_rate=rate)
    plain = run(ahead=False)
    for others in (run(ahead=True), run(ahead=False, resumes=True)):
        assert all(same(one, other) for one, other in zip(plain, others, strict=True))
    assert not same(plain[1], LocalSGD(small_model(dropout), data(), momentum=0.9).run(orders[1]))


def test_buffers_are_those_of_the_average() -> None:
    """A layer of one value counts batches: 3 in the average, and 1 step after it."""
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1, bias=False))
    sgd = LocalSGD(model, DATA, squares, momentum=0.0)
    arrays = state_record(model)
    sgd.run(order_of_pairs(PAIR * 2, arrays=arrays, **NEXT))
    sgd.work_ahead()
    average = state_record(model)
    average["0.num_batches_tracked"].numpy()[...] = 7
    order = order_of_pairs(PAIR * 2, arrays=average, round=2, overlap=True)
    assert sgd.run(order).arrays["0.num_batches_tracked"].numpy() == 8


def test_worker_without_an_own_model_begins_from_the_average() -> None:
    order = drawn_order(3, state_record(small_model()), overlap=True, last_learning_rate=9.0)
    plain = LocalSGD(small_model(), data()).run(dataclasses.replace(order, overlap=False))
    new, late, failed = (LocalSGD(small_model(), data()) for _ in range(3))
    late.run(order_of(1))  # round 2 passed without it
    late.forget_momentum()
    failed.run(order_of(2, next_indices=np.array([NUM_SAMPLES], np.int32)))
    failed.work_ahead()
    for sgd in (new, late, failed):
        assert same(sgd.run(order), plain)


def test_first_step_that_fails_is_said(caplog: pytest.LogCaptureFixture) -> None:
    sgd = LocalSGD(small_model(), data(), name="attic")
    sgd.run(order_of(1, next_indices=np.array([NUM_SAMPLES], np.int32)))
    sgd.work_ahead()
    assert [line[:42] for line in warnings_in(caplog)] == [
        "worker attic: first step of round 2: index"
    ]


@pytest.mark.parametrize(
    ("deadline", "slowdown", "steps"), [(0.0, 1.0, 3), (0.0, 4.0, 3), (1.5, 1.0, 2), (3.9, 4.0, 1)]
)
def test_time_has_all_steps_and_no_wait(
    clock: Clock,  # noqa: F811
    deadline: float,
    slowdown: float,
    steps: int,
) -> None:
    sgd = LocalSGD(TakesOneSecond(clock), DATA, squares, slowdown=slowdown)
    sgd.run(order_of_pairs(PAIR, **NEXT))
    sgd.work_ahead()
    ended = clock.now
    clock.now += 100
    order = order_of_pairs(PAIR * 3, round=2, overlap=True, deadline_seconds=deadline)
    report = sgd.run(order)
    assert report.completed_steps == steps
    assert report.compute_seconds == pytest.approx(steps * slowdown, abs=1e-2)
    assert clock.now - ended == pytest.approx(100 + (steps - 1) * slowdown, abs=1e-2)
    assert report.ended_at == pytest.approx(1000 + clock.now, abs=1e-2)
    assert report.started_at == pytest.approx(report.ended_at - report.compute_seconds)


def test_orders_on_the_wire() -> None:
    weights = np.array([1, 2], np.float32)
    order = order_of_pairs(PAIR, overlap=True, own_model=state_record(model_of(3.0)), **NEXT)
    order = dataclasses.replace(order, next_weights=weights, last_progress=0.5)
    read = TrainOrder.from_content(order.to_records())
    assert read.next_indices is not None
    assert read.next_indices.tolist() == PAIR
    assert read.next_weights is not None
    assert read.next_weights.tolist() == [1, 2]
    assert (read.next_seed, read.overlap, read.last_progress) == (5, True, 0.5)
    assert read.own_model is not None
    assert float(read.own_model["weight"].numpy()[0, 0]) == 3.0
