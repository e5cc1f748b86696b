"""Strategies, planners, workers and orders that the tests of the strategy share."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord

from flower_blsgd import BiasedLocalSGD
from flower_blsgd.algorithm.local_steps import Clock, SystemAwareSteps
from flower_blsgd.algorithm.sampling import SeparatedSampler
from flower_blsgd.algorithm.schedules import LearningRate
from flower_blsgd.protocol import Keys, ProfileQuery, TrainOrder, TrainReport, WorkerProfile
from flower_blsgd.strategy.connector import Connector
from flower_blsgd.strategy.plan_state import PlannerSettings
from flower_blsgd.strategy.planner import Planner
from flower_blsgd.strategy.replies import CheckedReply
from flower_blsgd.strategy.round import Outcome, Round
from flower_blsgd.strategy.workers import Worker, WorkerRegistry

from ..in_process_grid import InProcessGrid, ToyWorker, fast_profile, slow_profile, toy_arrays

Orders = list[tuple[Worker, TrainOrder]]
Workers = dict[int, ToyWorker]


def strategy_of(num_samples: int = 24, **changes: Any) -> BiasedLocalSGD:
    """Return a strategy; with `two()` weights are 2/3 and 1/3, an epoch of 24 has 4 rounds."""
    arguments: dict[str, Any] = {
        "batch_size": 2,
        "local_steps": 2,
        "local_steps_slow": 1,
        "fraction_evaluate": 0.0,
        "seed": 5,
    }
    return BiasedLocalSGD(num_samples, **(arguments | changes))


def two(**changes: Any) -> Workers:
    """Return a fast worker with weights 1.0 and a slow one with weights 4.0."""
    return {
        10: ToyWorker(fast_profile(0), 1.0, **changes),
        20: ToyWorker(slow_profile(1), 4.0, **changes),
    }


def three() -> Workers:
    """Loads 2, 2, 1: weights 0.4, 0.4, 0.2 of the values 1, 2, 6: 2.4."""
    return {
        10: ToyWorker(fast_profile(0), 1.0),
        20: ToyWorker(fast_profile(1), 2.0),
        30: ToyWorker(slow_profile(2), 6.0),
    }


def planner_of(
    num_samples: int = 24, batch_size: int = 2, kind: type[Planner] = Planner, **changes: object
) -> Planner:
    """Return a planner; a fast and a slow worker do 2 and 1 steps, an epoch has 4 rounds."""
    arguments: dict[str, object] = {
        "step_policy": SystemAwareSteps(2, 1),
        "local_steps_fast": 2,
        "sampler": SeparatedSampler(0.5),
        "mode": "samples",
        "learning_rate": LearningRate(0.1),
        "momentum_buffers": "keep",
        "deadline_seconds": 0.0,
        "seed": 3,
    }
    settings: Any = arguments | changes
    return kind(PlannerSettings(num_samples, batch_size, **settings))


def orders_of_two() -> Orders:
    """Return the orders of round 5: 2 and 1 steps of 2 samples, for nodes 0 and 1."""
    workers = WorkerRegistry.of_profiles([fast_profile(0), slow_profile(1)]).workers
    return list(planner_of().next_round(5, workers, toy_arrays()).orders)


def connected(
    grid: InProcessGrid, min_workers: int | None = None, clock: Clock = "wall", **changes: object
) -> Connector:
    """Return a connector that has connected all workers of a grid; `changes` of `planner_of`."""
    planner = planner_of(**changes)  # type: ignore[arg-type]
    registry = WorkerRegistry(batch_size=planner.settings.batch_size)
    nodes = len(list(grid.get_node_ids()))
    connector = Connector(registry, planner, min_workers or nodes, clock)
    connector.refresh(grid)
    planner.progress = dataclasses.replace(planner.progress, began=len(registry.active))
    return connector


def sent(orders: Orders, node_id: int) -> Message:
    return Message(orders[node_id][1].to_records(), node_id, "train")


def good_reply(orders: Orders, node_id: int, value: float = 1.0) -> Message:
    return ToyWorker(value=value)(sent(orders, node_id), node_id)


def outcomes_of(orders: Orders, *replies: Message) -> list[Outcome]:
    return Round(orders, toy_arrays(), Keys(), 2).read(replies)


def play_round(
    strategy: BiasedLocalSGD, grid: InProcessGrid, server_round: int = 1
) -> tuple[list[TrainOrder], MetricRecord]:
    """Train a round from a model of zeros, and return its orders by worker, and its metrics."""
    messages = list(strategy.configure_train(server_round, toy_arrays(), ConfigRecord(), grid))
    arrays, metrics = strategy.aggregate_train(server_round, grid.send_and_receive(messages))
    assert arrays is not None
    assert metrics is not None
    return [TrainOrder.from_message(message) for message in messages], metrics


class Clocked(ToyWorker):
    """Measures made-up seconds per step when it is queried to."""

    def __init__(self, profile: WorkerProfile, seconds: float | None = None) -> None:
        super().__init__(profile)
        self.seconds = seconds
        self.queries: list[ProfileQuery] = []

    def __call__(self, message: Message, node_id: int) -> Message:
        if message.metadata.message_type == "query.profile":
            query = ProfileQuery.from_message(message)
            self.queries.append(query)
            assert self.profile is not None
            if query.calibrate:
                if self.seconds is None:
                    raise RuntimeError("out of memory\nwhile measuring")
                if not self.profile.seconds_per_step:
                    measured = dataclasses.replace(self.profile, seconds_per_step=self.seconds)
                    return measured.to_reply(message)
        return super().__call__(message, node_id)

    @property
    def measured(self) -> int:
        return sum(query.calibrate for query in self.queries)


def finish(planner: Planner, orders: Iterable[tuple[Worker, TrainOrder]]) -> None:
    """Record a round in which all orders succeeded; nothing is known of losses and times."""
    outcomes = []
    for worker, order in orders:
        none = np.empty(0, np.float32)
        report = TrainReport(order.local_steps, order.batch_size, 0.0, 0.0, 0.0, none, order.arrays)
        outcomes.append(Outcome(worker, order, CheckedReply(report, MetricRecord(), {}, {})))
    planner.record(outcomes)
