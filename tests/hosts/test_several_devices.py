"""Nodes with several devices without processes: their replies, and rounds on them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp

from clients.blsgd_client import app as client_app
from flower_blsgd import BiasedLocalSGD
from flower_blsgd.algorithm.averaging import EqualWeighting, NormalizedWeighting, PerSampleWeighting
from flower_blsgd.algorithm.sampling import UniformSampler
from flower_blsgd.config import RunConfig
from flower_blsgd.devices.machine import Machine, usable_cores
from flower_blsgd.devices.worker_spec import WorkerSpec
from flower_blsgd.engines.stream.request import has_stream, serving_stream
from flower_blsgd.flower.app_call import REFUSED
from flower_blsgd.flower.internals import RAISED
from flower_blsgd.hosts.several_devices import node_grid, node_workers, several_devices
from flower_blsgd.protocol import (
    EvaluateReport,
    HostReply,
    ProfileQuery,
    TrainOrder,
    TrainReport,
    WorkerProfile,
)
from flower_blsgd.strategy.evaluation import WorkerEvaluation

from ..grids.processes import processes_below, wait_until
from ..in_process_grid import (
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
from ..refusal import refusal
from ..strategy.test_evaluation import Node, sums_of
from .host_nodes import HostNode, play

SETTINGS: dict[str, dict[str, Any]] = {
    "load": {},
    "equal": {"weights": EqualWeighting()},
    "per-sample": {"weights": PerSampleWeighting()},
    "nova": {"weights": NormalizedWeighting(0.9, nesterov=True), "momentum_buffers": "reset"},
    "momentum": {"momentum_buffers": "average"},
}


class Drawn(ToyWorker):
    """Moves every weight by numbers that depend on the order's seed alone, and has momentum."""

    def model(self, order: TrainOrder) -> ArrayRecord:
        rng = np.random.default_rng(order.seed)
        moved = ArrayRecord()
        for name, array in order.arrays.items():
            tensor = array.numpy()
            step = rng.normal(size=tensor.shape) if tensor.dtype.kind == "f" else order.local_steps
            moved[name] = Array(np.asarray(tensor + step, tensor.dtype))
        return moved

    def report(self, order: TrainOrder) -> TrainReport:
        report = super().report(order)
        if order.momentum_policy != "average":
            return report
        rng = np.random.default_rng(order.seed + 1)
        momentum = ArrayRecord()
        for name in ("weight", "bias"):
            array = order.arrays[name]
            momentum[name] = Array(rng.normal(size=array.shape).astype(array.dtype))
        return dataclasses.replace(report, momentum=momentum)


def fails(message: Message, node_id: int) -> Message:
    return Message(Error(RAISED, TRACEBACK), reply_to=message)


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


# --- the workers behind a node, from its node config

MACHINE = Machine(cores=tuple(range(8)), given_accelerators=("cuda:0", "cuda:1"))


def workers_of(devices: str, name: str = "", **node_config: str) -> list[WorkerSpec]:
    return node_workers({"devices": devices, "name": name, **node_config}, MACHINE)


def test_devices_are_read_as_everywhere() -> None:
    workers = workers_of("2x cuda:0 fast; 2x cpu:4-7 slow steps=2")
    assert [w.device_with_cores for w in workers] == ["cuda:0", "cuda:0", "cpu:4-5", "cpu:6-7"]
    assert [w.tier for w in workers] == ["fast", "fast", "slow", "slow"]
    assert [w.steps for w in workers] == [0, 0, 2, 2]
    assert [w.name for w in workers] == [""] * 4
    assert [w.device for w in workers_of("auto")] == ["cuda:0", "cuda:1"]  # the CPU evaluates


def test_names_begin_with_that_of_the_node_and_sort_as_the_ranks_do() -> None:
    workers = workers_of("2x cuda:0; 1x cpu name=attic", name="box-1")
    assert [w.name for w in workers] == ["box-1/0", "box-1/1", "box-1/attic"]
    names = [w.name for w in workers_of("12x cpu", name="box")]
    assert names[2] == "box/02"
    assert sorted(names) == names


@pytest.mark.parametrize(
    "key", ["device", "tier", "steps", "batch", "precision", "role", "slowdown", "seconds-per-step"]
)
def test_what_is_for_one_worker_does_not_go_with_devices(key: str) -> None:
    message = refusal(workers_of, "2x cpu", **{key: "x"})
    assert message.startswith(f"{key} = 'x' in the node config")
    assert "write it into a group of devices" in message


@pytest.mark.parametrize("devices", ["2x cuda:7", "", "1x cuda:0; 1x cpu:4 role=evaluate"])
def test_what_cannot_be_used_is_refused_in_one_line(devices: str) -> None:
    assert refusal(workers_of, devices).startswith("devices in the node config: ")


# --- profiles


def test_profiles_are_ranked_as_those_of_single_nodes_and_do_not_collide() -> None:
    """Two hosts: by the node's partition id, then by local rank; slow ones last."""
    grid = hosts_of(
        [ToyWorker(p) for p in profiles()], [ToyWorker(fast_profile(0)), ToyWorker(slow_profile(1))]
    )
    strategy = strategy_of(2)
    with captured_log() as log:
        strategy.connector.refresh(grid)
    workers = strategy.registry.workers
    assert [w.address for w in workers] == [(10, 0), (10, 1), (20, 0), (10, 2), (20, 1)]
    assert [w.fast for w in workers] == [True, True, True, False, False]
    assert [w.profile.partition_id for w in workers] == [0, 0, 1, 0, 1]
    assert log.lines(30) == []


def test_profile_of_a_device_that_fails_is_missing_and_the_others_take_part() -> None:
    grid = hosts_of([ToyWorker(fast_profile(0)), fails, ToyWorker(slow_profile(2))])
    strategy = strategy_of()
    with captured_log() as log:
        strategy.connector.refresh(grid)
    assert [w.local_rank for w in strategy.registry.active] == [0, 2]
    (error,) = log.errors
    assert error.startswith("device 1 of node 10 (unknown device) does not take part: ")
    assert "the fan stands still" in error
    host = grid.handlers[10]
    assert isinstance(host, HostNode)
    host.grid.handlers[101] = ToyWorker(fast_profile(1))  # it is repaired
    strategy.connector.prepare_epoch(grid)
    assert [w.local_rank for w in strategy.registry.active] == [0, 2, 1]


# --- a round


def root(indices: np.ndarray) -> np.ndarray:
    return np.sqrt(indices).astype(np.float32)


SHAPES: dict[str, Callable[..., InProcessGrid]] = {
    "one host": lambda *workers: hosts_of(list(workers)),
    "two hosts": lambda first, *others: hosts_of([first], list(others)),
    "a node and a host": lambda first, *others: InProcessGrid(
        {40: first, 50: HostNode(*others, partition_id=1)}
    ),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rounds_on_hosts_are_those_on_single_nodes(settings: dict[str, Any], shape: str) -> None:
    """Same orders: the same models up to rounding, the same losses, weights and figures."""
    workers: list[Handler] = [Drawn(p, losses=root) for p in profiles()]
    nodes = InProcessGrid({10 + i: worker for i, worker in enumerate(workers)})
    hosts = SHAPES[shape](*workers)
    results = []
    for grid in (nodes, hosts):
        strategy = strategy_of(len(grid.handlers), **settings)
        arrays, records = play(strategy, grid, toy_arrays(0.5), 3)
        results.append((tensors_of(arrays), strategy, records[0]))
    (expected, flat, one), (found, hosted, other) = results
    for name, tensor in expected.items():
        assert found[name] == pytest.approx(tensor, rel=1e-5, abs=1e-5), name
        assert found[name].dtype == tensor.dtype
    assert (flat.planner.table.losses == hosted.planner.table.losses).all()
    for row, same in zip(one.workers, other.workers, strict=True):
        for key in ("worker", "label", "completed_steps", "num_examples", "loss", "weight"):
            assert getattr(same, key) == getattr(row, key), key
    assert other.train_loss == one.train_loss
    averaged = settings.get("momentum_buffers") == "average"
    momentum = [each.planner.averaged_momentum for each in (flat, hosted)]
    assert [each is not None for each in momentum] == [averaged] * 2
    for name, array in (momentum[0] or {}).items():
        assert momentum[1][name].numpy() == pytest.approx(array.numpy(), rel=1e-5, abs=1e-5)
    if not averaged:  # one model each way for each node
        size = sum(tensor.nbytes for tensor in expected.values())
        assert one.bytes_moved == 6 * size
        assert other.bytes_moved == 2 * len(hosts.handlers) * size


# --- what goes wrong


@pytest.mark.parametrize("kind", ["non-finite", "raises", "missing"])
def test_worker_that_fails_counts_0_and_the_round_goes_on(kind: FailureKind) -> None:
    """Loads 8 and 2 of values 1 and 6: (8 + 12) / 10 = 2.

    The node waits for less time than the server, which therefore gets the others' models.
    """
    grid = hosts_of([ToyWorker(p, v) for p, v in zip(profiles(), (1.0, 2.0, 6.0), strict=True)])
    (host,) = grid.handlers.values()
    host.grid.fail_at(1, 1, kind)  # type: ignore[attr-defined]
    strategy = strategy_of()
    with captured_log() as log:
        arrays, records = play(strategy, grid, toy_arrays(0.5))
    (record,) = records
    for message in host.grid.sent_of_type("train"):  # type: ignore[attr-defined]
        assert message.content.config_records["config"]["own"] == 7
    assert arrays["weight"].numpy().tolist() == [[2.0], [2.0]]
    assert [row.weight for row in record.workers] == [0.8, 0.0, 0.2]
    assert [bool(row.failure) for row in record.workers] == [False, True, False]
    assert any("fast-1 (cpu:1)" in line for line in log.lines(30))
    assert len(strategy.registry.workers[1].failures) == 1
    assert len(strategy.registry.active) == 3
    assert strategy.planner.samples_given_up == 8
    assert host.grid.timeouts[-1] == 0.8 * 3600  # type: ignore[attr-defined]


def test_state_that_one_worker_did_not_send_is_averaged_over_the_others() -> None:
    """Loads 8, 8 and 2. The state of "weight": (8 x 1 + 8 x 5 + 2 x 5) / 18 = 29 / 9.

    The state of "bias" from the last two workers, one of them behind the first node:
    (8 x 1 + 2 x 6) / 10 = 2.
    """

    class Sends(ToyWorker):
        def __init__(self, profile: WorkerProfile, **state: float) -> None:
            super().__init__(profile)
            self.state = state

        def report(self, order: TrainOrder) -> TrainReport:
            momentum = ArrayRecord()
            for name, value in self.state.items():
                momentum[name] = Array(np.full_like(order.arrays[name].numpy(), value))
            return dataclasses.replace(super().report(order), momentum=momentum)

    one, two, slow = profiles()
    workers: list[Handler] = [
        Sends(one, weight=1.0),
        Sends(two, weight=5.0, bias=1.0),
        Sends(slow, weight=5.0, bias=6.0),
    ]
    for grid in (hosts_of(workers[:2], workers[2:]), hosts_of(workers[:1], workers[1:])):
        strategy = strategy_of(2, momentum_buffers="average")
        play(strategy, grid, toy_arrays(0.5))
        momentum = strategy.planner.averaged_momentum
        assert momentum is not None
        assert momentum["weight"].numpy() == pytest.approx(29 / 9)
        assert momentum["bias"].numpy() == pytest.approx(2.0)


def test_message_of_another_strategy_waits_for_its_device_and_a_query_does_not() -> None:
    host = HostNode(ToyWorker(fast_profile(0)), ToyWorker(slow_profile(1)))
    message = Message(RecordDict({"arrays": toy_arrays()}), 10, "evaluate")
    assert not host(over_the_wire(message), 10).has_error()
    host(over_the_wire(Message(ProfileQuery().to_records(), 10, "query.profile")), 10)
    assert host.grid.timeouts == [None, 480.0]


LIES: dict[str, Callable[[RecordDict], object]] = {
    "total": lambda c: c["metrics"].update({"num-examples": 19}),
    "load": lambda c: c.update({"/momentum-loads": MetricRecord({"weight": 19.0})}),
    "model": lambda c: c.pop("/arrays"),
    "rank": lambda c: (c.pop("2/metrics"), c.pop("2/losses")),
    "stranger": lambda c: c.update({"7/metrics": MetricRecord({"num-examples": 1})}),
    "failure": lambda c: c.update({"1/failure": ConfigRecord({"kind": "205", "reason": ""})}),
    "nothing": lambda c: c.clear(),
}
"""Changes to the reply of a host of three."""


@pytest.mark.parametrize("name", [*LIES, "raises", "missing"])
def test_host_whose_reply_cannot_be_used_counts_0_with_all_its_workers(name: str) -> None:
    grid = hosts_of([ToyWorker(p) for p in profiles()], [ToyWorker(fast_profile(0), 4.0)])
    node = grid.handlers[10]

    def lying(message: Message, node_id: int) -> Message:
        if message.metadata.message_type != "train":
            return node(message, node_id)
        if name == "missing":
            return None  # type: ignore[return-value]
        if name == "raises":
            return fails(message, node_id)
        reply = node(message, node_id)
        LIES[name](reply.content)
        return reply

    grid.handlers[10] = lying
    strategy = strategy_of(2)
    with captured_log() as log:
        arrays, records = play(strategy, grid, toy_arrays(0.5))
    assert arrays["weight"].numpy().tolist() == [[4.0], [4.0]]
    assert [row.weight for row in records[0].workers] == [0.0, 0.0, 1.0, 0.0]
    assert len(strategy.registry.active) == 4
    if name == "raises":  # the reason is logged once
        (error,) = log.errors
        assert error.count("RuntimeError: the fan stands still") == 1


# --- evaluation


def evaluation_on(*handlers: Handler) -> tuple[WorkerEvaluation, InProcessGrid, list[Any]]:
    strategy = strategy_of(len(handlers))
    grid = InProcessGrid({10 * (i + 1): handler for i, handler in enumerate(handlers)})
    strategy.connector.refresh(grid)
    here: list[tuple[int, int]] = []

    def evaluate_here(arrays: ArrayRecord, first: int, last: int) -> EvaluateReport:
        here.append((first, last))
        return sums_of(arrays, first, last)

    return WorkerEvaluation(grid, strategy.registry, 10, 1, evaluate_here), grid, here


RIGHT = MetricRecord({"accuracy": 0.5, "loss": 9.0})


def test_evaluation_is_shared_among_the_fast_workers_behind_nodes() -> None:
    nodes = [Node(p) for p in profiles()]
    alone = Node(fast_profile(1))
    evaluation, grid, here = evaluation_on(HostNode(*nodes, partition_id=0), alone)
    assert evaluation(3, toy_arrays(2.0)) == RIGHT
    assert [node.slices for node in nodes] == [[(0, 4)], [(4, 7)], []]
    assert alone.slices == [(7, 10)]
    assert here == []
    assert len(grid.sent_of_type("evaluate")) == 2


# --- the mod in our ClientApp

DEVICES = f"1x cpu:{usable_cores()[0]} fast; 2x cpu:{usable_cores()[0]} slow"


def reply_of(kind: str, app: ClientApp = client_app, **node_config: Any) -> Message:
    message = over_the_wire(Message(RecordDict(), 7, kind))
    settings = RunConfig(threads=1).to_run_config()
    return app(message, Context(1, 7, node_config, RecordDict(), settings))


@pytest.mark.parametrize("kind", ["query.profile", "train", "evaluate", "train.sum"])
def test_devices_without_a_session_are_refused_in_one_line_with_the_way_out(kind: str) -> None:
    before = processes_below()
    error = reply_of(kind, devices=DEVICES).error
    assert error.code == REFUSED
    assert "\n" not in error.reason
    assert 'transport = "stream"' in error.reason
    assert processes_below() == before


def test_workers_have_the_keys_of_the_node_for_the_app() -> None:
    node_config: Any = {"devices": DEVICES, "site": "north", "partition-id": 3, "name": "box"}
    context = Context(1, 7, node_config, RecordDict(), {})
    with node_grid(context, "clients.blsgd_client:app", Path()) as grid:
        found = [node._job.context.node_config for node in grid._nodes.values()]
    assert [config["partition-id"] for config in found] == [0, 1, 2]
    assert [config["site"] for config in found] == ["north"] * 3


@pytest.mark.processes
def test_worker_processes_end_with_the_session() -> None:
    """Through the app, as a session calls it."""
    before = processes_below()
    with serving_stream():
        assert has_stream()
        reply = reply_of("query.profile", devices=DEVICES)
        assert sorted(HostReply.from_content(reply.content).parts) == [0, 1, 2]
        assert len(processes_below() - before) == 3
    assert not has_stream()
    assert wait_until(lambda: processes_below() <= before)


def test_app_of_a_node_with_several_devices_travels_by_value() -> None:
    """As Flower's simulation sends it to its actors."""
    app = ClientApp(mods=[several_devices("clients.blsgd_client:app", Path("somewhere"))])

    @app.query()
    def answer(message: Message, context: Context) -> Message:
        return Message(RecordDict(), reply_to=message)

    copied = cloudpickle.loads(cloudpickle.dumps(app))
    assert not reply_of("query", copied).has_error()
    assert 'use transport = "stream"' in reply_of("query", copied, devices="2x cpu").error.reason
