"""What a node with several devices answers, and what the server makes of it."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.exception import AggregationError

from flower_blsgd import BiasedLocalSGD
from flower_blsgd.algorithm.averaging import EqualWeighting, NormalizedWeighting
from flower_blsgd.algorithm.sampling import UniformSampler
from flower_blsgd.host.answers import NobodyAnsweredError
from flower_blsgd.protocol import EvaluateReport, TrainOrder, TrainReport, WorkerProfile
from flower_blsgd.round_log import RoundRecord
from flower_blsgd.runtime.flower_internals import CRASHED, NODE_GONE, RAISED
from flower_blsgd.worker_evaluation import WorkerEvaluation

from ..in_process_grid import (
    BROKEN_REPLIES,
    TRACEBACK,
    FailureKind,
    Handler,
    InProcessGrid,
    ToyWorker,
    fast_profile,
    over_the_wire,
    slow_profile,
    tensors_of,
    toy_arrays,
)
from ..log_capture import captured_log
from ..test_worker_evaluation import Node, dies, raises, sums_of
from .host_nodes import HostNode


class Drawn(ToyWorker):
    """Moves every weight by numbers that depend on the order's seed alone, and has momentum."""

    def model(self, order: TrainOrder) -> ArrayRecord:
        rng = np.random.default_rng(order.seed)
        moved = ArrayRecord()
        for name, array in order.arrays.items():
            tensor = array.numpy()
            if tensor.dtype.kind == "f":
                tensor = np.asarray(tensor + rng.normal(size=tensor.shape), tensor.dtype)
            else:
                tensor = np.asarray(tensor + order.local_steps)
            moved[name] = Array(tensor)
        return moved

    def report(self, order: TrainOrder) -> TrainReport:
        report = super().report(order)
        if order.momentum_policy != "average":
            return report
        rng = np.random.default_rng(order.seed + 1)
        names = ["weight", "bias"] if order.local_steps > 1 else ["weight"]
        drawn = {n: rng.normal(size=order.arrays[n].shape) for n in names}
        momentum = ArrayRecord(
            {n: Array(t.astype(order.arrays[n].dtype)) for n, t in drawn.items()}
        )
        return dataclasses.replace(report, momentum=momentum)


def profiles() -> list[WorkerProfile]:
    return [fast_profile(0), fast_profile(1), slow_profile(2)]


def hosts_of(*groups: list[Handler]) -> InProcessGrid:
    return InProcessGrid(
        {10 * (i + 1): HostNode(*group, partition_id=i) for i, group in enumerate(groups)}
    )


def strategy_of(nodes: int = 1, **changes: Any) -> BiasedLocalSGD:
    arguments: dict[str, Any] = {
        "batch_size": 2,
        "local_steps": 4,
        "local_steps_slow": 1,
        "fraction_evaluate": 0.0,
        "min_available_nodes": nodes,
        "sampler": UniformSampler(),
        "seed": 5,
    }
    return BiasedLocalSGD(200, **(arguments | changes))


def play(strategy: BiasedLocalSGD, grid: InProcessGrid, rounds: int = 1) -> ArrayRecord:
    arrays = toy_arrays(0.5)
    for server_round in range(1, rounds + 1):
        orders = strategy.configure_train(server_round, arrays, ConfigRecord({"own": 7}), grid)
        found, metrics = strategy.aggregate_train(server_round, grid.send_and_receive(orders))
        assert found is not None
        assert metrics is not None
        arrays = found
    return arrays


# --- who is behind a node


def test_profiles_are_ranked_as_those_of_single_nodes_and_do_not_collide() -> None:
    """Two hosts: by the node's partition id, then by place; slow ones last."""
    grid = hosts_of(
        [ToyWorker(p) for p in profiles()], [ToyWorker(fast_profile(0)), ToyWorker(slow_profile(1))]
    )
    strategy = strategy_of(2)
    with captured_log() as log:
        strategy.roster.update(grid)
    assert [w.address for w in strategy.roster.workers] == [
        (10, 0),
        (10, 1),
        (20, 0),
        (10, 2),
        (20, 1),
    ]
    assert [w.fast for w in strategy.roster.workers] == [True, True, True, False, False]
    assert [w.profile.partition_id for w in strategy.roster.workers] == [0, 0, 1, 0, 1]
    assert log.warnings == []
    assert log.errors == []


def test_profiles_of_more_than_ten_devices_keep_their_places() -> None:
    grid = hosts_of([ToyWorker(WorkerProfile(f"cpu:{place}", "fast")) for place in range(12)])
    strategy = strategy_of()
    strategy.roster.update(grid)
    assert [w.profile.device for w in strategy.roster.workers] == [f"cpu:{i}" for i in range(12)]
    assert [w.place for w in strategy.roster.workers] == list(range(12))


def test_profile_of_a_device_that_fails_is_missing_and_the_others_take_part() -> None:
    def broken(message: Message, node_id: int) -> Message:
        return Message(Error(RAISED, TRACEBACK), reply_to=message)

    grid = hosts_of([ToyWorker(fast_profile(0)), broken, ToyWorker(slow_profile(2))])
    strategy = strategy_of()
    with captured_log() as log:
        strategy.roster.update(grid)
    assert [w.place for w in strategy.roster.workers] == [0, 2]
    (error,) = log.errors
    assert "device 1 of node 10 does not take part" in error
    assert "the fan stands still" in error


def test_profile_of_a_device_whose_process_died_is_asked_once_more() -> None:
    class DiesOnce(ToyWorker):
        def __call__(self, message: Message, node_id: int) -> Message:
            if not self.messages:
                self.messages.append(message)
                return Message(Error(CRASHED, "killed"), reply_to=message)
            return super().__call__(message, node_id)

    first = ToyWorker(fast_profile(0))
    strategy = strategy_of()
    strategy.roster.update(hosts_of([first, DiesOnce(slow_profile(1))]))
    assert [w.place for w in strategy.roster.workers] == [0, 1]
    assert len(first.messages) == 1


def test_profiles_that_all_fail_are_one_line() -> None:
    def broken(message: Message, node_id: int) -> Message:
        return Message(Error(RAISED, TRACEBACK), reply_to=message)

    host = HostNode(broken, broken)
    message = over_the_wire(Message(RecordDict(), 10, "query.profile"))
    with pytest.raises(NobodyAnsweredError) as failure:
        host(message, 10)
    reason = "RuntimeError: the fan stands still"
    assert str(failure.value) == (
        f"no device of this node answered (device 0: {reason}; device 1: {reason})"
    )
    assert failure.value.code == RAISED


class Clocked(ToyWorker):
    """Measures made-up seconds per step, or fails."""

    def __init__(self, profile: WorkerProfile, seconds: float | None) -> None:
        super().__init__(profile)
        self.seconds = seconds

    def __call__(self, message: Message, node_id: int) -> Message:
        config = message.content.config_records["config"]
        if message.metadata.message_type == "query.profile" and config["calibrate"]:
            assert "places" not in config
            if self.seconds is None:
                raise RuntimeError("out of memory\nwhile measuring")
            assert self.profile is not None
            self.messages.append(message)
            measured = dataclasses.replace(self.profile, seconds_per_step=self.seconds)
            return measured.to_reply(message)
        return super().__call__(message, node_id)


def test_speeds_behind_a_node_are_measured_in_one_message() -> None:
    grid = hosts_of([Clocked(fast_profile(0), 1.0), Clocked(slow_profile(1), 4.0)])
    strategy = strategy_of(local_steps_slow=None)
    strategy.roster.update(grid)
    assert [w.speed_ratio for w in strategy.roster.workers] == [1.0, 0.25]
    first, second = grid.sent_of_type("query.profile")
    assert second.content.config_records["config"]["places"] == [0, 1]
    assert "places" not in first.content.config_records["config"]


def test_speeds_behind_a_node_are_measured_one_by_one_on_the_device_clock() -> None:
    grid = hosts_of([Clocked(fast_profile(0), 1.0), Clocked(slow_profile(1), 4.0)])
    strategy = strategy_of(local_steps_slow=None, clock="device")
    strategy.roster.update(grid)
    asked = [m.content.config_records["config"].get("places") for m in grid.sent]
    assert asked == [None, [0], [1]]
    assert [w.speed_ratio for w in strategy.roster.workers] == [1.0, 0.25]


def test_speed_of_one_device_that_cannot_be_measured_is_told() -> None:
    grid = hosts_of([Clocked(fast_profile(0), 1.0), Clocked(slow_profile(1), None)])
    strategy = strategy_of(local_steps_slow=None)
    with captured_log() as log:
        strategy.roster.update(grid)
    assert [w.speed_ratio for w in strategy.roster.workers] == [1.0, None]
    (warning,) = [line for line in log.warnings if "speed of" in line]
    assert "slow-1 (cpu:1)" in warning
    assert "while measuring" in warning


def test_host_that_comes_back_takes_up_its_workers() -> None:
    grid = hosts_of([ToyWorker(p) for p in profiles()])
    strategy = strategy_of()
    strategy.roster.update(grid)
    strategy.roster.workers[1].excluded = "RuntimeError"
    grid.connect(77, grid.disconnect(10))
    strategy.roster.update(grid)
    assert [w.address for w in strategy.roster.active] == [(77, 0), (77, 1), (77, 2)]


# --- a round


def root(indices: np.ndarray) -> np.ndarray:
    return np.sqrt(indices).astype(np.float32)


def flat_and_nested(rounds: int = 1, groups: int = 1, **changes: Any) -> list[Any]:
    """Return models, losses and round records of three single nodes, and of hosts of them."""
    results = []
    for host in (False, True):
        workers: list[Handler] = [Drawn(p, losses=root) for p in profiles()]
        if not host:
            grid = InProcessGrid({10 + i: worker for i, worker in enumerate(workers)})
            strategy = strategy_of(3, **changes)
        else:
            parts = [workers] if groups == 1 else [workers[:1], workers[1:]]
            grid = hosts_of(*parts)
            strategy = strategy_of(groups, **changes)
        records: list[RoundRecord] = []
        strategy.on_round = records.append
        arrays = play(strategy, grid, rounds)
        results.append((tensors_of(arrays), strategy, records, grid))
    return results


SETTINGS: list[dict[str, Any]] = [
    {},
    {"weights": EqualWeighting()},
    {"weights": NormalizedWeighting(0.9), "momentum_buffers": "reset"},
    {"weights": NormalizedWeighting(0.9, nesterov=True), "momentum_buffers": "reset"},
    {"momentum_buffers": "average"},
]


@pytest.mark.parametrize(
    "settings", SETTINGS, ids=["load", "equal", "nova", "nesterov", "momentum"]
)
@pytest.mark.parametrize("groups", [1, 2])
def test_round_on_hosts_is_that_on_single_nodes(settings: dict[str, Any], groups: int) -> None:
    """Same orders: the same model up to rounding, the same losses, weights and figures."""
    flat, nested = flat_and_nested(1, groups, **settings)
    for name, tensor in flat[0].items():
        assert nested[0][name] == pytest.approx(tensor, rel=1e-6, abs=1e-6), name
        assert nested[0][name].dtype == tensor.dtype
    assert (flat[1].planner.table.losses == nested[1].planner.table.losses).all()
    ((one,), (other,)) = flat[2], nested[2]
    for row, same in zip(one.workers, other.workers, strict=True):
        assert (same.worker, same.completed_steps, same.num_examples, same.loss, same.weight) == (
            row.worker,
            row.completed_steps,
            row.num_examples,
            row.loss,
            row.weight,
        )
        assert same.label == row.label
    assert other.train_loss == one.train_loss
    momentum, same_momentum = flat[1]._momentum, nested[1]._momentum
    assert (momentum is None) is (settings.get("momentum_buffers") != "average")
    if momentum is not None:
        for name, array in momentum.items():
            assert same_momentum[name].numpy() == pytest.approx(array.numpy(), rel=1e-6)


@pytest.mark.parametrize(
    "settings", SETTINGS, ids=["load", "equal", "nova", "nesterov", "momentum"]
)
def test_rounds_on_a_host_and_a_single_node_are_those_on_single_nodes(
    settings: dict[str, Any],
) -> None:
    workers: list[Handler] = [Drawn(p) for p in profiles()]
    mixed = InProcessGrid({40: Drawn(fast_profile(0)), 50: HostNode(*workers[1:], partition_id=1)})
    flat = InProcessGrid({10 + i: worker for i, worker in enumerate(workers)})
    expected = tensors_of(play(strategy_of(3, **settings), flat, 3))
    found = tensors_of(play(strategy_of(2, **settings), mixed, 3))
    for name, tensor in expected.items():
        assert found[name] == pytest.approx(tensor, rel=1e-5, abs=1e-5), name
    plain, of_host = mixed.sent_of_type("train")[:2]
    assert set(plain.content) == {"arrays", "config"}
    assert {"arrays", "host", "order-0", "order-1"} <= set(of_host.content)


def test_round_sends_one_model_each_way_for_each_host() -> None:
    flat, nested = flat_and_nested(1, groups=2)
    size = sum(tensor.nbytes for tensor in flat[0].values())
    assert flat[2][0].bytes_moved == 6 * size
    assert nested[2][0].bytes_moved == 4 * size
    grid = nested[3]
    assert len(grid.sent_of_type("train")) == 2
    for node in grid.handlers.values():
        (message,), reply = node.sent_of_type("train"), node.replies[-1]
        assert len(message.content.array_records) == 1
        assert len(reply.content.array_records) == 1


def test_round_settings_of_the_user_reach_every_worker() -> None:
    grid = hosts_of([ToyWorker(p) for p in profiles()])
    play(strategy_of(), grid)
    (host,) = grid.handlers.values()
    for message in host.grid.functions.sent_of_type("train"):  # type: ignore[attr-defined]
        assert message.content.config_records["config"]["own"] == 7


def test_round_total_load_of_the_host_is_in_its_figures() -> None:
    """4 + 4 + 1 steps of 2 samples."""
    grid = hosts_of([ToyWorker(p) for p in profiles()])
    play(strategy_of(), grid)
    (host,) = grid.handlers.values()
    assert host.replies[-1].content.metric_records["metrics"] == MetricRecord(  # type: ignore[attr-defined]
        {"num-examples": 18}
    )


# --- what goes wrong


def round_with(
    kind: FailureKind, place: int = 1, weights: Any = None
) -> tuple[ArrayRecord, BiasedLocalSGD, list[RoundRecord], list[str]]:
    """Play a round in which one of three workers, with the weights 1, 2 and 6, fails."""
    values = (1.0, 2.0, 6.0)
    workers = [ToyWorker(p, value) for p, value in zip(profiles(), values, strict=True)]
    grid = hosts_of(list(workers))
    (host,) = grid.handlers.values()
    host.grid.functions.fail_at(place, 1, kind)  # type: ignore[attr-defined]
    strategy = strategy_of(weights=weights)
    records: list[RoundRecord] = []
    strategy.on_round = records.append
    with captured_log() as log:
        arrays = play(strategy, grid)
    return arrays, strategy, records, log.lines(30)


@pytest.mark.parametrize("kind", [*BROKEN_REPLIES, "raises", "dies"])
def test_worker_that_fails_counts_0_and_the_round_goes_on(kind: FailureKind) -> None:
    """Loads 8 and 2 of values 1 and 6: (8 + 12) / 10 = 2."""
    arrays, strategy, (record,), lines = round_with(kind)
    assert arrays["weight"].numpy().tolist() == [[2.0], [2.0]]
    assert [row.weight for row in record.workers] == [0.8, 0.0, 0.2]
    assert [bool(row.failure) for row in record.workers] == [False, True, False]
    assert any("fast-1 (cpu:1)" in line for line in lines)
    assert bool(strategy.roster.workers[1].excluded) is (kind == "raises")
    assert strategy.planner.samples_given_up == 8


def test_worker_that_fails_does_not_count_among_equals() -> None:
    arrays, _, _, _ = round_with("dies", 0, EqualWeighting())
    assert arrays["weight"].numpy().tolist() == [[4.0], [4.0]]


def test_worker_that_is_given_up_by_its_node_gets_no_more_orders() -> None:
    class Gone(ToyWorker):
        def __call__(self, message: Message, node_id: int) -> Message:
            if message.metadata.message_type == "train":
                return Message(Error(NODE_GONE, "it died 3 times"), reply_to=message)
            return super().__call__(message, node_id)

    grid = hosts_of([ToyWorker(fast_profile(0)), Gone(fast_profile(1))])
    strategy = strategy_of()
    play(strategy, grid, 2)
    assert [w.place for w in strategy.roster.active] == [0]
    first, second = grid.sent_of_type("train")
    assert "order-1" in first.content
    assert "order-1" not in second.content


def test_all_workers_of_the_only_host_fail_in_one_line() -> None:
    grid = hosts_of([ToyWorker(p) for p in profiles()])
    (host,) = grid.handlers.values()
    for place in range(3):
        host.grid.functions.fail_at(place, 1, "non-finite")  # type: ignore[attr-defined]
    with captured_log(), pytest.raises(AggregationError) as failure:
        play(strategy_of(), grid)
    told = str(failure.value)
    assert "\n" not in told
    assert "fast-0 (cpu:0)" in told
    assert "slow-2 (cpu:2)" in told
    assert told.count("not finite") == 3


def test_host_that_fails_as_a_whole_fails_all_its_workers_and_is_told_once() -> None:
    grid = hosts_of([ToyWorker(p) for p in profiles()], [ToyWorker(fast_profile(0), 4.0)])
    node = grid.handlers[10]

    def broken(message: Message, node_id: int) -> Message:
        if message.metadata.message_type == "train":
            return Message(Error(RAISED, TRACEBACK), reply_to=message)
        return node(message, node_id)

    grid.handlers[10] = broken
    strategy = strategy_of(2)
    with captured_log() as log:
        arrays = play(strategy, grid)
    assert arrays["weight"].numpy().tolist() == [[4.0], [4.0]]
    (error,) = log.errors
    assert error.count("RuntimeError: the fan stands still") == 1
    assert [w.address for w in strategy.roster.active] == [(20, 0)]


def test_host_that_does_not_answer_fails_all_its_workers() -> None:
    grid = hosts_of([ToyWorker(p) for p in profiles()], [ToyWorker(fast_profile(0), 4.0)])
    strategy = strategy_of(2)
    orders = list(strategy.configure_train(1, toy_arrays(), ConfigRecord(), grid))
    answered = [m for m in orders if m.metadata.dst_node_id == 20]
    arrays, _ = strategy.aggregate_train(1, grid.send_and_receive(answered))
    assert arrays is not None
    assert arrays["weight"].numpy().tolist() == [[4.0], [4.0]]
    assert len(strategy.roster.active) == 4


def lie(name: str, content: RecordDict) -> None:
    """Change what a host of three says."""
    if name == "total":
        content.metric_records["metrics"]["num-examples"] = 19
    elif name == "model":
        del content["arrays"]
    elif name == "infinite":
        content["arrays"]["weight"] = Array(np.full((2, 1), np.inf, np.float32))
    elif name == "shape":
        content["arrays"]["weight"] = Array(np.zeros((1, 2), np.float32))
    elif name == "steps":
        content["metrics-1"]["completed-steps"] = 99
    elif name == "losses":
        del content["losses-2"]
    elif name == "place":
        content["host"]["places"] = [0, 1]
    elif name == "stranger":
        content["metrics-7"] = MetricRecord({"num-examples": 1})
    elif name == "codes":
        content["host"]["codes"] = [1]
    elif name == "figure":
        del content["metrics-0"]["num-examples"]
    elif name == "nothing":
        for key in list(content):
            del content[key]
    else:
        raise ValueError(name)


@pytest.mark.parametrize(
    "name",
    [
        "total",
        "model",
        "infinite",
        "shape",
        "steps",
        "losses",
        "place",
        "stranger",
        "codes",
        "figure",
        "nothing",
    ],
)
def test_host_whose_reply_cannot_be_used_counts_0_with_all_its_workers(name: str) -> None:
    grid = hosts_of([ToyWorker(p) for p in profiles()], [ToyWorker(fast_profile(0), 4.0)])
    node = grid.handlers[10]

    def lying(message: Message, node_id: int) -> Message:
        reply = node(message, node_id)
        if message.metadata.message_type == "train":
            lie(name, reply.content)
        return reply

    grid.handlers[10] = lying
    strategy = strategy_of(2)
    records: list[RoundRecord] = []
    strategy.on_round = records.append
    with captured_log():
        arrays = play(strategy, grid)
    assert arrays["weight"].numpy().tolist() == [[4.0], [4.0]]
    assert [row.weight for row in records[0].workers] == [0.0, 0.0, 1.0, 0.0]
    assert len(strategy.roster.active) == 4


# --- evaluation


def evaluation_on(*handlers: Handler) -> tuple[WorkerEvaluation, InProcessGrid, list[Any]]:
    strategy = strategy_of(len(handlers))
    grid = InProcessGrid({10 * (i + 1): handler for i, handler in enumerate(handlers)})
    strategy.roster.update(grid)
    here: list[tuple[int, int]] = []

    def evaluate_here(arrays: ArrayRecord, first: int, last: int) -> EvaluateReport:
        here.append((first, last))
        return sums_of(arrays, first, last)

    return WorkerEvaluation(grid, strategy.roster, 10, evaluate_here), grid, here


RIGHT = MetricRecord({"accuracy": 0.5, "loss": 9.0})


def test_evaluation_is_shared_among_the_fast_workers_behind_nodes() -> None:
    nodes = [Node(p) for p in profiles()]
    alone = Node(fast_profile(1))
    evaluation, grid, here = evaluation_on(HostNode(*nodes, partition_id=0), alone)
    assert evaluation(3, toy_arrays(2.0)) == RIGHT
    assert [node.slices for node in nodes] == [[(0, 3)], [(3, 6)], []]
    assert alone.slices == [(6, 10)]
    assert here == []
    assert len(grid.sent_of_type("evaluate")) == 2


def test_evaluation_slice_of_a_worker_that_fails_is_done_here() -> None:
    nodes = [Node(fast_profile(0)), Node(fast_profile(1), raises), Node(fast_profile(2), dies)]
    evaluation, _, here = evaluation_on(HostNode(*nodes, partition_id=0))
    with captured_log() as log:
        assert evaluation(3, toy_arrays(2.0)) == RIGHT
        assert here == [(3, 6), (6, 10)]
        assert evaluation(4, toy_arrays(2.0)) == RIGHT
    # The one that raised is not asked again; the one whose process died is.
    assert [len(node.slices) for node in nodes] == [2, 1, 2]
    assert "fast-1 (cpu:1)" in log.warnings[0]


def test_evaluation_by_flowers_own_message_is_done_once_for_each_node() -> None:
    workers = [ToyWorker(p, value) for p, value in zip(profiles(), (0.1, 0.2, 0.3), strict=True)]
    grid = hosts_of(list(workers))
    strategy = strategy_of(fraction_evaluate=1.0)
    strategy.roster.update(grid)
    messages = list(strategy.configure_evaluate(1, toy_arrays(), ConfigRecord(), grid))
    assert len(messages) == 1
    (reply,) = grid.send_and_receive(messages)
    assert reply.content.metric_records["metrics"]["accuracy"] == 0.1
