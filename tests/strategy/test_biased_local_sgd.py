"""BiasedLocalSGD on a grid: own orders, checked replies, loud failure, nodes that come and go."""

import re
from collections.abc import Iterable, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.exception import AggregationError
from flwr.serverapp.strategy import Result
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd import BiasedLocalSGD
from flower_blsgd.algorithm.averaging import NormalizedWeighting, Weighting
from flower_blsgd.algorithm.catalog import TrainOn
from flower_blsgd.algorithm.local_steps import (
    BalancedBatches,
    SameSteps,
)
from flower_blsgd.algorithm.sampling import (
    SeparatedSampler,
    UnifiedSampler,
    UniformSampler,
)
from flower_blsgd.algorithm.schedules import LearningRate
from flower_blsgd.algorithm.selection import InfoBatch
from flower_blsgd.protocol import HostOrders, TrainOrder
from flower_blsgd.strategy.round_metrics import RoundRecord

from ..hosts.host_nodes import HostNode
from ..in_process_grid import (
    InProcessGrid,
    ToyWorker,
    fast_profile,
    over_the_wire,
    slow_profile,
    toy_arrays,
    train_rounds,
)
from ..log_capture import captured_log
from ..refusal import refusal
from .orders import play_round, strategy_of, three, two


def weight_of(arrays: ArrayRecord) -> float:
    return float(arrays["weight"].numpy()[0, 0])


# --- orders


def test_table_epochs_of_an_own_step_policy_need_the_steps_of_fast_workers() -> None:
    own = {"local_steps": SameSteps(1), "local_steps_slow": None, "local_steps_fast": 4}
    strategy = strategy_of(40, **own, epoch="table")
    play_round(strategy, InProcessGrid(two()))
    assert strategy.planner.plan.rounds == 8  # floor(40 / (2 x 2 x 4)) x 4


# --- losses


@pytest.mark.parametrize("order", ["sent", "reversed"])
def test_losses_lowest_worker_index_wins_on_the_same_sample(order: Any) -> None:
    # 6 samples, one round of 4 (fast) and 2 (slow): the two draws are independent and overlap
    # for this seed.
    nodes = two()
    nodes[10].losses = lambda indices: np.full(len(indices), 1.0, np.float32)
    nodes[20].losses = lambda indices: np.full(len(indices), 2.0, np.float32)
    strategy = strategy_of(6)
    play_round(strategy, InProcessGrid(nodes, order), server_round=7)
    fast, slow = (set(nodes[n].orders[0].indices.tolist()) for n in (10, 20))
    assert fast & slow
    table = strategy.planner.table
    for index in range(6):
        known = 1.0 if index in fast else 2.0
        assert table.losses[index] == (known if index in fast | slow else np.inf)
        assert table.rounds[index] == (7 if index in fast | slow else 0)


_EVENTS = st.sampled_from(["trains", "trains", "is cut off", "fails", "is gone"])


@given(st.lists(st.tuples(_EVENTS, _EVENTS, _EVENTS, _EVENTS), min_size=4, max_size=16))
def test_planned_samples_are_trained_given_up_or_cut_off(rounds: list[tuple[str, ...]]) -> None:
    """After every round, also where an epoch ends early because all of its workers are gone."""
    everybody = {**three(), 40: ToyWorker(fast_profile(3), 1.0)}
    grid = InProcessGrid(everybody)
    strategy = strategy_of(64, sampler=UniformSampler(), local_steps=3, min_available_nodes=1)
    planner, records = strategy.planner, list[RoundRecord]()
    cut_off = 0
    for server_round, events in enumerate([("trains",) * 3 + ("is gone",), *rounds], start=1):
        of_node = dict(zip(everybody, events, strict=True))
        grid.handlers = {n: everybody[n] for n, event in of_node.items() if event != "is gone"}
        for place, (node_id, event) in enumerate(of_node.items()):
            everybody[node_id].steps = 0 if event == "is cut off" else None
            if event == "fails":
                grid.fail_at(place, server_round, "missing")
        try:
            with patch("flower_blsgd.strategy.connector._RETURN_SECONDS", 0.0):
                play_round(strategy, grid, server_round)
        except AggregationError:
            break  # nobody was there, or succeeded
        assert strategy.record is not None
        records.append(strategy.record)
        for node_id, event in of_node.items():
            orders = everybody[node_id].orders
            if event == "is cut off" and orders and orders[-1].round == server_round:
                cut_off += len(orders[-1].indices)
        trained = sum(row.num_examples for record in records for row in record.workers)
        given_up = planner.samples_given_up
        assert planner.progress.samples_cut_off == cut_off
        assert planner.samples_planned_so_far == trained + given_up + cut_off
        assert given_up >= 0
        if planner.epoch_ended:
            assert planner.samples_planned_so_far == planner.progress.samples_planned


# --- parts of one's own


class Unbounded(NormalizedWeighting):
    def update_scales(
        self, weights: Sequence[float], completed_steps: Sequence[int]
    ) -> list[float]:
        return [np.inf] * len(weights)


def test_own_weighting_that_returns_nonsense_ends_the_run_with_its_name() -> None:
    strategy = strategy_of(weights=Unbounded(), momentum_buffers="reset")
    line = refusal(play_round, strategy, InProcessGrid(two()))
    assert line.startswith("Unbounded.update_scales")


# --- nodes with several devices


class ByRoot(Weighting):
    def weights(self, completed_loads: Sequence[float]) -> list[float]:
        roots = [load**0.5 for load in completed_loads]
        return [root / sum(roots) for root in roots]


def host() -> HostNode:
    return HostNode(ToyWorker(fast_profile(0), 1.0), ToyWorker(slow_profile(1), 5.0))


def orders_to_host(**changes: Any) -> HostOrders:
    strategy = strategy_of(local_steps=3, min_available_nodes=1, **changes)
    config = ConfigRecord({"own": 1})
    (message,) = strategy.configure_train(1, toy_arrays(), config, InProcessGrid({10: host()}))
    return HostOrders.from_message(over_the_wire(message))


def test_message_to_a_host_holds_the_orders_of_all_workers_and_how_to_average() -> None:
    found = orders_to_host(
        weights=NormalizedWeighting(0.5),
        momentum_buffers="reset",
        arrayrecord_key="model",
        configrecord_key="settings",
        weighted_by_key="mine",
    )
    assert (found.weighted_by, found.worker_weight) == ("mine", "equal")
    assert found.update_norms == [0.0, 1.0, 2.5, 4.25]  # 1; 1.5 + 1; 1.75 + 1.5 + 1
    assert found.moving == ["weight", "bias"]
    contents = found.contents.values()
    orders = [TrainOrder.from_content(content, "model", "settings") for content in contents]
    assert [order.local_steps for order in orders] == [3, 1]
    assert all(content.config_records["settings"]["own"] == 1 for content in contents)
    plain = orders_to_host()
    assert (plain.worker_weight, plain.update_norms, plain.moving) == ("load", [], [])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weights": ByRoot()}, "ByRoot cannot be computed on a node"),
        (
            {"sampler": UniformSampler(), "train_on": TrainOn(True, slow_reduce=True)},
            "shared memory only",
        ),
    ],
)
def test_host_that_cannot_average_is_refused_at_the_start(
    changes: dict[str, Any], reason: str
) -> None:
    grid = InProcessGrid({10: host()})
    line = refusal(play_round, strategy_of(min_available_nodes=1, **changes), grid)
    assert re.search(rf"{reason}.*one SuperNode for each device", line)
    assert grid.sent_of_type("train") == []


# --- Flower's own loop


def test_start_works_unmodified_and_counts_epochs_itself() -> None:
    nodes = two()
    rate = LearningRate(1.0, decay_shares=(0.4,))
    strategy = strategy_of(12, learning_rate=rate)  # 2 rounds an epoch
    result = strategy.start(InProcessGrid(nodes), toy_arrays(), num_rounds=5)
    assert isinstance(result, Result)
    assert weight_of(result.arrays) == 2.0
    assert list(result.train_metrics_clientapp) == [1, 2, 3, 4, 5]
    assert [order.epoch for order in nodes[10].orders] == [1, 1, 2, 2, 3]
    assert [order.round for order in nodes[10].orders] == [1, 2, 3, 4, 5]
    rates = [order.learning_rate for order in nodes[10].orders]  # by the share of the rounds
    assert rates == pytest.approx([1.0, 1.0, 0.1, 0.1, 0.1])


def test_start_asks_nodes_to_evaluate_at_epoch_ends_only() -> None:
    grid = InProcessGrid(two())
    strategy = strategy_of(12, fraction_evaluate=1.0)
    train, evaluate = ConfigRecord({"a": 1}), ConfigRecord({"b": 2})
    result = strategy.start(
        grid, toy_arrays(), num_rounds=5, train_config=train, evaluate_config=evaluate
    )
    assert (dict(train), dict(evaluate)) == ({"a": 1}, {"b": 2})
    assert list(result.evaluate_metrics_clientapp) == [2, 4]
    assert result.evaluate_metrics_clientapp[2]["accuracy"] == 2.5
    assert len(grid.sent_of_type("evaluate")) == 4


def _nothing(contents: Any, weighted_by_key: str) -> None:
    """Return no metrics, as Flower allows."""


class EvaluatesNothing(ToyWorker):
    """Has no test samples."""

    def __call__(self, message: Message, node_id: int) -> Message:
        if message.metadata.message_type != "evaluate":
            return super().__call__(message, node_id)
        metrics = MetricRecord({"num-examples": 0, "accuracy": 0.25})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)


@pytest.mark.parametrize("empty", [1, 2])
def test_metrics_that_are_none_and_evaluations_without_examples(
    empty: int, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = two()
    nodes |= {node: EvaluatesNothing(nodes[node].profile, 1.0) for node in [20, 10][:empty]}
    strategy = strategy_of(12, fraction_evaluate=1.0, train_metrics_aggr_fn=_nothing)
    result = strategy.start(InProcessGrid(nodes), toy_arrays(), num_rounds=2)
    assert result.train_metrics_clientapp[2] == {"num-examples": 6}
    if empty == 1:
        assert result.evaluate_metrics_clientapp == {2: {"accuracy": 1.0}}
        return
    assert result.evaluate_metrics_clientapp == {}
    assert "round 2: the evaluations of the nodes have no examples" in caplog.messages


class Choosing(BiasedLocalSGD):
    """Sends the messages of some workers only, as a FedAvg may sample nodes."""

    def configure_train(self, server_round: int, *arguments: Any) -> Any:
        messages = list(super().configure_train(server_round, *arguments))
        return [m for m in messages if m.metadata.dst_node_id != (20 if server_round < 6 else 30)]


def test_worker_without_a_message_of_a_subclass_has_no_part_in_the_round() -> None:
    strategy = Choosing(60, 2, 2, local_steps_slow=1, fraction_evaluate=0.0)
    with captured_log() as log:
        ends = train_rounds(strategy, InProcessGrid(three()), epochs=2)
    workers = [[row.worker for row in end.record.workers] for end in ends]
    assert workers == [[0, 2]] * 5 + [[0, 1]] * 7
    assert [worker.failures for worker in strategy.registry.workers] == [[], [], []]
    assert [row.weight for row in ends[0].record.workers] == pytest.approx([2 / 3, 1 / 3])
    planner = strategy.planner
    assert (planner.progress.samples_trained, planner.samples_given_up) == (
        5 * 6 + 7 * 8,
        5 * 4 + 7 * 2,
    )
    assert log.warnings == []


def test_start_goes_on_when_a_node_is_gone_at_the_end_of_an_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def would_wait(seconds: float) -> None:
        raise AssertionError("the strategy waits for a node that is gone")

    monkeypatch.setattr("flwr.serverapp.strategy.strategy_utils.sleep", would_wait)
    grid = InProcessGrid(two())
    strategy = strategy_of(12, fraction_evaluate=1.0, min_available_nodes=1)
    receive = grid.send_and_receive

    def leave(messages: Iterable[Message], **more: Any) -> Iterable[Message]:
        replies = receive(messages, **more)
        if strategy.planner.progress.epoch == 1 and 20 in grid.handlers:
            grid.disconnect(20)
        return replies

    monkeypatch.setattr(grid, "send_and_receive", leave)
    result = strategy.start(grid, toy_arrays(), num_rounds=4)
    assert list(result.train_metrics_clientapp) == [1, 2, 3, 4]
    assert [m.metadata.dst_node_id for m in grid.sent_of_type("evaluate")] == [10]


# --- settings


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fraction_train": 0.5}, "fraction_train = 0.5"),
        ({"batch_size": 1}, "batch_size = 1 must be at least 2"),
        ({"epoch": "tables"}, "epoch = 'tables' must be empty, or one of samples, table"),
        ({"epoch": ""}, "epoch = '' must be one of samples, table"),
        ({"average": ""}, "average = '' must be one of models, gradients"),
        ({"momentum_buffers": "kept"}, "momentum_buffers = 'kept'"),
        ({"clock": "walls"}, "clock = 'walls'"),
        ({"deadline_seconds": float("nan")}, "deadline_seconds = nan"),
        ({"high_loss_ratio": 1.5}, "1.5"),
        ({"local_steps": 0}, "0"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused_in_one_line(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match="=") as refused:
        strategy_of(**changes)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


FEDNOVA = NormalizedWeighting()
FROM_SPEEDS = {"local_steps": 16, "local_steps_slow": None, "rebalance": True}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"weights": FEDNOVA},
            'momentum-buffers = "keep" does not work with NormalizedWeighting, which needs "reset"',
        ),
        ({"weights": FEDNOVA, "momentum_buffers": "reset"}, ""),
        ({"rebalance": True}, "not SystemAwareSteps; use"),  # `strategy_of` gives a number
        (
            FROM_SPEEDS | {"local_steps": SameSteps(4)},
            'that follow from speeds, not SameSteps; use steps = "system-aware" and local-',
        ),
        (FROM_SPEEDS | {"local_steps": BalancedBatches()}, "in any case; leave rebalance out"),
        (FROM_SPEEDS | {"clock": "device"}, 'rebalance = true follows .*use clock = "wall"'),
        (FROM_SPEEDS, ""),
        ({"sampler": UnifiedSampler(), "selection": InfoBatch()}, r'InfoBatch.*use "separated"'),
        (
            {"sampler": SeparatedSampler(0.5, "slow"), "train_on": TrainOn(fast_only=True)},
            'high-loss-to = "slow" gives samples',
        ),
        ({"epoch": "table", "selection": InfoBatch()}, 'selection makes .*use epoch = "samples"'),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together_are_refused(changes: dict[str, Any], reason: str) -> None:
    if not reason:
        strategy_of(**changes)
        return
    assert re.search(reason, refusal(strategy_of, **changes))


def _losses_of_length(indices: np.ndarray) -> np.ndarray:
    return np.full(len(indices), len(indices), np.float32)


def test_round_is_reported_with_its_mean_loss() -> None:
    strategy = strategy_of(24)
    _, metrics = play_round(strategy, InProcessGrid(two(losses=_losses_of_length)), 3)
    assert metrics == {"train-loss": pytest.approx(20 / 6), "num-examples": 6}  # and no times
    record = strategy.record
    assert record is not None
    assert (record.round, record.epoch) == (3, 1)
    assert (record.rounds_in_epoch, record.round_in_epoch) == (4, 1)
    assert record.train_loss == pytest.approx(20 / 6)  # (4 x 4 + 2 x 2) / 6
    assert record.bytes_moved == 24 * 4  # two models sent, two received
    assert [row.label for row in record.workers] == ["fast-0 (cpu:0)", "slow-1 (cpu:1)"]
    assert record.round_seconds >= record.averaging_seconds >= 0
