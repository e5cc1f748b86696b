"""The loops `rounds` and `fit`: budgets, evaluation, callbacks."""

import contextlib
import dataclasses
import gc
import itertools
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import Result

import flower_blsgd.strategy.biased_local_sgd as strategy_module
from flower_blsgd import BiasedLocalSGD
from flower_blsgd.algorithm.averaging import NormalizedWeighting
from flower_blsgd.algorithm.outer_optimizer import OuterSGD
from flower_blsgd.algorithm.schedules import LearningRate
from flower_blsgd.errors import UsageError
from flower_blsgd.strategy.budget import Budget
from flower_blsgd.strategy.round_metrics import RoundRecord, round_record
from flower_blsgd.strategy.rounds import EpochEnd
from flower_blsgd.strategy.run_clock import RunClock

from ..in_process_grid import (
    InProcessGrid,
    MailGrid,
    ToyWorker,
    fast_profile,
    same_bits,
    slow_profile,
    tensors_of,
    toy_arrays,
    train_rounds,
)
from .orders import strategy_of, two


def orders_of(grid: InProcessGrid) -> list[Any]:
    return grid.handlers[10].orders  # type: ignore[attr-defined]


class Recorder:
    """Keeps what the callbacks are given."""

    def __init__(self) -> None:
        self.evaluated: list[int] = []
        self.epochs: list[EpochEnd] = []

    def evaluate(self, server_round: int, arrays: ArrayRecord) -> MetricRecord:
        self.evaluated.append(server_round)
        return MetricRecord({"accuracy": server_round / 10})

    def on_epoch(self, end: EpochEnd) -> None:
        self.epochs.append(end)


def test_arguments_reach_the_orders_and_nothing_of_the_callers_is_changed() -> None:
    grid = InProcessGrid(two())
    arrays, config = toy_arrays(0.5), ConfigRecord({"augment": "flip", "lr": 9.0})
    result = strategy_of(15).fit(grid, arrays, epochs=4, timeout=12.5, train_config=config)
    # 15 / 6 = 2.5, 5, 7.5, 10 rounds
    assert [order.epoch for order in orders_of(grid)] == [1, 1, 2, 2, 2, 3, 3, 4, 4, 4]
    assert list(result.train_metrics_clientapp) == list(range(1, 11))
    assert [order.round for order in orders_of(grid)] == list(range(1, 11))
    sent = [float(order.arrays["bias"].numpy()[0]) for order in orders_of(grid)]
    assert sent == [0.5] + [2.0] * 9  # the model of one round is sent in the next
    assert grid.timeouts[1:] == [12.5] * 10  # the first is that of the profile query
    for message in grid.sent_of_type("train"):
        assert message.content.config_records["config"]["augment"] == "flip"
    assert {order.learning_rate for order in orders_of(grid)} == {0.1}  # its own keys win
    assert dict(config) == {"augment": "flip", "lr": 9.0}
    assert arrays["bias"].numpy().tolist() == [0.5]


def fitted(seen: Recorder, **arguments: Any) -> Result:
    """Train two workers with the callbacks of a recorder."""
    callbacks = {"evaluate_fn": seen.evaluate, "on_epoch": seen.on_epoch}
    return strategy_of(12).fit(InProcessGrid(two()), toy_arrays(), **(callbacks | arguments))


def test_evaluation_every_so_many_epochs_and_at_the_end() -> None:
    seen = Recorder()
    result = fitted(seen, epochs=5, evaluate_every_epochs=2)
    assert seen.evaluated == [4, 8, 10]
    assert list(result.evaluate_metrics_serverapp) == [4, 8, 10]
    assert [end.metrics is None for end in seen.epochs] == [True, False, True, False, False]


def test_on_epoch_that_returns_true_ends_the_run() -> None:
    result = fitted(Recorder(), epochs=9, on_epoch=lambda end: end.epoch == 2)
    assert list(result.train_metrics_clientapp) == [1, 2, 3, 4]


def test_loop_can_be_left_and_continued_after_any_round() -> None:
    """By a break, or by an exception in its body: the workers and the plan stay as they are."""
    whole = train_rounds(strategy_of(12), InProcessGrid(two()), epochs=3)
    strategy, grid = strategy_of(12), InProcessGrid(two())
    arrays, start_round, ends = toy_arrays(), 0, []
    for leave_after in (1, 3, 99):
        loop = strategy.rounds(grid, arrays, Budget(epochs=3), start_round=start_round)
        with contextlib.suppress(ValueError):
            for end in loop:
                ends.append(end)
                arrays, start_round = end.arrays, end.round
                if end.round == leave_after:
                    raise ValueError
    fields = [(e.round, e.epoch, e.epoch_ended, e.over, e.metrics) for e in ends]
    assert fields == [(e.round, e.epoch, e.epoch_ended, e.over, e.metrics) for e in whole]
    assert [bool(over) for *_, over, _ in fields] == [False] * 5 + [True]
    assert same_bits(ends[-1].arrays, whole[-1].arrays)


def test_seconds_budget_counts_planning_and_rounds_but_no_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each round is made to take 2 s of planning and rounds, whatever this machine does."""

    def two_seconds(*arguments: Any, **more: Any) -> RoundRecord:
        record = round_record(*arguments, **more)
        return dataclasses.replace(record, planning_seconds=0.5, round_seconds=1.5)

    monkeypatch.setattr(strategy_module, "round_record", two_seconds)
    seen = Recorder()
    result = fitted(seen, seconds=5.0)
    assert list(result.train_metrics_clientapp) == [1, 2, 3]  # 2, 4, 6 seconds
    assert seen.evaluated == [2, 3]


class OneSecondEach(RunClock):
    def add(self, record: RoundRecord, seconds_per_step: Mapping[int, float]) -> RoundRecord:
        self.budget_seconds += 1.0
        return record


@pytest.mark.parametrize(
    ("schedule", "budget", "rates"),
    [
        ({"decay_shares": (0.6, 0.8)}, {"epochs": 5}, [1.0] * 6 + [0.1] * 2 + [0.01] * 2),
        ({"decay_shares": (0.5,)}, {"seconds": 8.0}, [1.0] * 4 + [0.1] * 4),
        ({"decay_shares": (0.5,)}, {"epochs": 100, "seconds": 8.0}, [1.0] * 4 + [0.1] * 4),
        # Within an epoch of two rounds: after 1.2 and 1.6 of 2 epochs; after 2.8 and 5 of 7 seconds
        ({"decay_shares": (0.6, 0.8)}, {"epochs": 2}, [1.0, 1.0, 1.0, 0.1]),
        ({"decay_shares": (0.4, 0.71)}, {"seconds": 7.0}, [1.0] * 3 + [0.1] * 2 + [0.01] * 2),
        ({"decay_epochs": (1, 2)}, {"epochs": 3}, [1.0, 1.0, 0.1, 0.1, 0.01, 0.01]),
        ({"warmup_epochs": 2}, {"epochs": 3}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
    ],
    ids=str,
)
def test_learning_rate_follows_the_budget_the_epochs_and_the_rounds(
    schedule: dict[str, Any], budget: dict[str, Any], rates: list[float]
) -> None:
    grid = InProcessGrid(two())
    strategy = strategy_of(12, learning_rate=LearningRate(1.0, **schedule))
    strategy.planner.clock = OneSecondEach()
    strategy.fit(grid, toy_arrays(), **budget)
    assert [order.learning_rate for order in orders_of(grid)] == pytest.approx(rates)


def test_replies_of_a_round_are_gone_before_the_next_is_sent() -> None:
    """Their arrays may be views on memory that the next round's replies need."""
    alive: list[list[bool]] = []

    class Watched(InProcessGrid):
        replies: list[weakref.ref[Message]]

        def __init__(self) -> None:
            super().__init__(two())
            self.replies = []

        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            alive.append([reply() is not None for reply in self.replies])
            received = list(super().send_and_receive(messages, timeout=timeout))
            self.replies = [weakref.ref(reply) for reply in received]
            return received

    gc.collect()
    gc.disable()  # the memory must be free at once, not some time later
    try:
        strategy_of(12, momentum_buffers="average").fit(Watched(), toy_arrays(), epochs=2)
    finally:
        gc.enable()
    assert alive[1:] == [[False, False]] * 4


@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        ({}, "budget"),
        ({"epochs": 0}, "epochs = 0"),
        ({"epochs": -1}, "epochs = -1"),
        ({"seconds": 0.0}, "seconds = 0.0"),
        ({"seconds": float("nan")}, "seconds = nan"),
    ],
    ids=str,
)
def test_budget_that_means_nothing_is_refused_before_any_message(
    budget: dict[str, Any], reason: str
) -> None:
    grid = InProcessGrid(two())
    with pytest.raises(ValueError, match=reason):
        strategy_of(12).fit(grid, toy_arrays(), **budget)
    assert grid.sent == []


# --- grids that send without waiting: the next round is under way while the caller has the last one


def test_next_round_of_an_epoch_is_sent_before_the_caller_gets_the_last_one() -> None:
    """N = 24: four rounds an epoch. Models, metrics and orders are those of a grid that waits."""
    grid, waits = MailGrid(two()), InProcessGrid(two())
    strategy, ends, sent, states = strategy_of(24), [], [], []
    for end in strategy.rounds(grid, toy_arrays(), Budget(rounds=7)):
        ends.append(end)
        sent.append(len(grid.sent_of_type("train")) // 2)
        states.append(strategy.planner.progress.rounds_total)
        assert strategy.record is end.record
    assert [end.idle for end in ends] == [False] * 3 + [True] + [False] * 2 + [True]
    assert sent == [2, 3, 4, 4, 6, 7, 7]
    assert states == [1, 2, 3, 4, 5, 6, 7]
    expected = train_rounds(strategy_of(24), waits, rounds=7)
    assert all(end.idle for end in expected)
    assert [same_bits(a.arrays, b.arrays) for a, b in zip(ends, expected, strict=True)] == [
        True
    ] * 7
    assert [e.metrics for e in ends] == [e.metrics for e in expected]
    messages = [g.sent_of_type("train") for g in (grid, waits)]
    orders, others = ([m.content.config_records["config"] for m in each] for each in messages)
    assert orders == others
    assert grid.waiting == 0


def test_pause_lets_the_round_under_way_end_idle_and_only_that_one() -> None:
    strategy, idle = strategy_of(60), []
    for end in strategy.rounds(MailGrid(two()), toy_arrays(), Budget(rounds=8)):
        idle.append(end.idle)
        if end.round in (2, 5):  # while the next round is under way
            strategy.pause()
    assert idle == [False, False, True, False, False, True, False, True]


def test_replies_of_a_round_under_way_are_dropped_if_the_loop_is_left() -> None:
    grid = MailGrid(two())
    for end in strategy_of(60).rounds(grid, toy_arrays(), Budget(rounds=8)):
        if end.round == 2:
            assert grid.waiting == 2
            break
    assert grid.waiting == 0
    assert len(grid.sent_of_type("train")) == 6


def test_orders_that_cannot_be_sent_ahead_are_an_error_after_the_round() -> None:
    class Refuses(BiasedLocalSGD):
        def configure_train(self, server_round: int, *more: Any) -> Any:
            if server_round == 3:
                raise UsageError("no room")
            return super().configure_train(server_round, *more)

    strategy = Refuses(60, 2, 2, local_steps_slow=1, fraction_evaluate=0.0)
    loop = strategy.rounds(MailGrid(two()), toy_arrays(), Budget(rounds=8))
    assert [(end.round, end.idle) for end in itertools.islice(loop, 2)] == [(1, False), (2, True)]
    with pytest.raises(UsageError, match="no room"):
        next(loop)


def test_seconds_of_rounds_sent_ahead_have_no_gaps_and_nothing_of_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a clock that only these calls move: 1 s to plan, 4 s to average, 100 s in the caller."""
    now = [0.0]

    class Timed(BiasedLocalSGD):
        def configure_train(self, *arguments: Any) -> Any:
            now[0] += 1.0
            return super().configure_train(*arguments)

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            now[0] += 4.0
            found = super().aggregate_train(server_round, replies)
            now[0] += 0.5
            return found

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    strategy, records = Timed(60, 2, 2, local_steps_slow=1, fraction_evaluate=0.0), []
    for end in strategy.rounds(MailGrid(two()), toy_arrays(), Budget(rounds=4)):
        records.append(end.record)
        now[0] += 100.0
    assert [record.planning_seconds for record in records] == [0.0, 1.5, 1.5, 1.5]
    assert [record.round_seconds for record in records] == [4.0] * 4
    assert strategy.planner.clock.training_seconds == 4 * 4.0 + 3 * 1.5


# --- what user code gets is a copy, as from Flower


def scribble(arrays: ArrayRecord) -> None:
    """Change what each way of reading a record returns, in place."""
    for array in arrays.values():
        array.numpy()[...] = 99
    for tensor in arrays.to_torch_state_dict().values():
        torch.nn.init.constant_(tensor, 98)
    for ndarray in arrays.to_numpy_ndarrays():
        ndarray[...] = 97


class Scribbling(BiasedLocalSGD):
    """Changes what it reads of each model, and what it reads of each reply."""

    def configure_train(self, *arguments: Any) -> Any:
        messages = list(super().configure_train(*arguments))
        for message in messages if self.scribbles else ():
            scribble(message.content["arrays"])
        return messages

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        replies = list(replies)
        for reply in replies if self.scribbles else ():
            scribble(reply.content["arrays"])
        arrays, metrics = super().aggregate_train(server_round, replies)
        if self.scribbles:
            scribble(arrays)
        return arrays, metrics


class Moving(ToyWorker):
    """Moves the model that it got, so that a changed model is seen in all later ones."""

    def model(self, order: Any) -> ArrayRecord:
        tensors = tensors_of(order.arrays)
        floats = {n: t * 0.5 + self.value for n, t in tensors.items() if t.dtype.kind == "f"}
        return ArrayRecord({n: Array(floats.get(n, t)) for n, t in tensors.items()})


@pytest.mark.parametrize("kind", ["start", "rounds", "fit", "fednova", "momentum"])
def test_user_code_that_changes_what_it_reads_does_not_change_the_run(kind: str) -> None:
    def models(scribbles: bool) -> list[ArrayRecord]:
        def touch(server_round: int, arrays: ArrayRecord) -> MetricRecord:
            if scribbles:
                scribble(arrays)
            kept.append(arrays)
            return MetricRecord({"accuracy": 0.5})

        def on_epoch(end: EpochEnd) -> None:
            touch(end.round, end.arrays)

        kept: list[ArrayRecord] = []
        parts: dict[str, Any] = {}
        if kind == "fednova":
            parts = {"weights": NormalizedWeighting(), "momentum_buffers": "reset"}
        elif kind == "momentum":
            parts = {"outer_optimizer": OuterSGD(0.7, 0.9)}
        grid = InProcessGrid({10: Moving(fast_profile(0), 1.0), 20: Moving(slow_profile(1), 4.0)})
        strategy = Scribbling(24, 2, 2, local_steps_slow=1, fraction_evaluate=0.0, **parts)
        strategy.scribbles = scribbles
        if kind == "start":
            more = {"num_rounds": 6, "evaluate_fn": touch}
            kept.append(strategy.start(grid, toy_arrays(), **more).arrays)
        elif kind == "rounds":
            for end in strategy.rounds(grid, toy_arrays(), Budget(epochs=2)):
                touch(end.round, end.arrays)
        else:
            more = {"evaluate_fn": touch, "on_epoch": on_epoch}
            kept.append(strategy.fit(grid, toy_arrays(), epochs=2, **more).arrays)
        return kept

    undisturbed, disturbed = models(False), models(True)
    assert len(undisturbed) == len(disturbed) >= 5
    assert all(map(same_bits, undisturbed, disturbed))
