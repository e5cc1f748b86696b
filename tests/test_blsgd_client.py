"""Our ClientApp under strategies that are not ours, and what it keeps from message to message."""

import dataclasses
import functools
import pkgutil
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp.strategy import FedAvg

from clients import blsgd_client
from clients.blsgd_client import app as client_app
from flower_blsgd import BiasedLocalSGD
from flower_blsgd.config import RunConfig
from flower_blsgd.protocol import EvaluateOrder, EvaluateReport, ProfileQuery, WorkerProfile
from flower_blsgd.runtime.devices import WorkerSpec
from flower_blsgd.runtime.machine import usable_cores
from flower_blsgd.tasks import load_task
from flower_blsgd.worker.evaluation import evaluate
from flower_blsgd.worker.gate import Gate

from .in_process_grid import Handler, InProcessGrid, over_the_wire, tensors_of

CORE = usable_cores()[0]
CONFIG = RunConfig(batch_size=32, local_steps_fast=4, local_steps_slow=2, threads=1)


def node_of(config: RunConfig = CONFIG, **node_config: Any) -> Handler:
    state = RecordDict()

    def handle(message: Message, node_id: int) -> Message:
        node = {"device": f"cpu:{CORE}", **node_config}
        return client_app(message, Context(1, node_id, node, state, config.to_run_config()))

    return handle


def model_of(seed: int = 0) -> torch.nn.Module:
    return load_task("digits").initial_model(seed)


def whole_test_set(model: torch.nn.Module) -> tuple[float, float]:
    task = load_task("digits")
    return evaluate(model, task.test, task.loss, task.metric)


def answer(message: Message, handler: Handler | None = None) -> Message:
    return over_the_wire((handler or node_of())(over_the_wire(message), 7))


def test_evaluate_a_slice_is_answered_with_its_sums() -> None:
    model, task = model_of(), load_task("digits")
    order = EvaluateOrder(3, 100, 250, ArrayRecord(model.state_dict()))
    report = EvaluateReport.from_reply(answer(Message(order.to_records(), 7, "evaluate")), order)
    part = tuple(tensor[100:250] for tensor in task.test)
    loss, accuracy = evaluate(model, part, task.loss, task.metric)
    assert (report.loss, report.accuracy) == pytest.approx((loss, accuracy), abs=1e-6)
    assert report.num_examples == 150


def test_evaluate_a_plain_message_is_answered_with_the_means_of_the_whole_test_set() -> None:
    model = model_of()
    records = RecordDict(
        {
            "arrays": ArrayRecord(model.state_dict()),
            "config": ConfigRecord({"server-round": 1}),
        }
    )
    metrics = answer(Message(records, 7, "evaluate")).content.metric_records["metrics"]
    loss, accuracy = whole_test_set(model)
    assert set(metrics) == {"accuracy", "loss", "num-examples"}
    assert metrics["num-examples"] == 360
    assert (metrics["loss"], metrics["accuracy"]) == pytest.approx((loss, accuracy), abs=1e-6)


@pytest.mark.parametrize("kind", ["FedAvg", "BiasedLocalSGD"])
def test_evaluate_under_flowers_own_loop(kind: str) -> None:
    handlers = {
        50: node_of(tier="fast", **{"partition-id": 0}),
        51: node_of(tier="slow", **{"partition-id": 1}),
    }
    arrays = ArrayRecord(model_of().state_dict())
    if kind == "FedAvg":  # it cannot train with our orders, but evaluate it can
        replies = InProcessGrid(handlers)
        strategy = FedAvg()
        messages = strategy.configure_evaluate(1, arrays, ConfigRecord(), replies)
        metrics = strategy.aggregate_evaluate(1, replies.send_and_receive(messages))
        expected = whole_test_set(model_of())
    else:
        ours = BiasedLocalSGD(1437, 32, 4, local_steps_slow=2)
        rounds = 1437 // (6 * 32)
        result = ours.start(InProcessGrid(handlers), arrays, num_rounds=rounds)
        metrics = result.evaluate_metrics_clientapp[rounds]
        trained = model_of()
        trained.load_state_dict(result.arrays.to_torch_state_dict())
        expected = whole_test_set(trained)
    assert metrics is not None
    assert (metrics["loss"], metrics["accuracy"]) == pytest.approx(expected, abs=1e-6)


def test_evaluate_leaves_the_training_model_alone() -> None:
    handler = node_of()
    answer(Message(ProfileQuery().to_records(), 7, "query.profile"), handler)
    worker = WorkerSpec("cpu", (CORE,))
    sgd = blsgd_client._local_sgd(CONFIG, worker, 0)
    sgd.model.train()
    before = tensors_of(ArrayRecord(sgd.model.state_dict()))
    order = EvaluateOrder(3, 0, 10, ArrayRecord(model_of(5).state_dict()))
    answer(Message(order.to_records(), 7, "evaluate"), handler)
    assert sgd.model.training
    for name, tensor in tensors_of(ArrayRecord(sgd.model.state_dict())).items():
        assert (tensor == before[name]).all(), name


# --- profile


def profile_of(calibrate: bool, **node_config: Any) -> WorkerProfile:
    query = ProfileQuery(calibrate, 16 if calibrate else 0)
    reply = answer(Message(query.to_records(), 7, "query.profile"), node_of(**node_config))
    (profile,) = WorkerProfile.list_from_reply(reply)
    return profile


def test_profile_tells_a_speed_only_when_it_is_asked_for() -> None:
    assert profile_of(False).seconds_per_step == 0.0
    assert 0 < profile_of(True).seconds_per_step < 1


def test_profile_a_given_speed_is_told_and_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*arguments: Any) -> float:
        raise AssertionError("measured although the node knows its speed")

    monkeypatch.setattr("flower_blsgd.worker.calibration.seconds_per_step", refuse)
    assert profile_of(True, **{"seconds-per-step": 0.5}).seconds_per_step == 0.5


def test_equal_cpu_workers_of_a_process_take_turns_and_those_of_a_card_have_their_own() -> None:
    def owners(device: str) -> set[int]:
        contexts = [Context(1, n, {}, RecordDict(), {}) for n in (7, 8)]
        return {blsgd_client._owner(WorkerSpec(device), context) for context in contexts}

    assert len(owners("cpu")) == 1
    assert owners("cuda:0") == {7, 8}
    assert owners("mps") == {7, 8}


# --- what workers beside this one may disturb


class OutsideOnly:
    """In the place of the app's lock: whoever waits for it may hold up no recording."""

    def __init__(self, gate: Gate) -> None:
        self.gate, self.taken = gate, 0

    def __enter__(self) -> None:
        assert self.gate._computing == 0
        self.taken += 1

    def __exit__(self, *error: object) -> None:
        assert self.gate._computing == 0


def test_models_are_made_and_evaluated_while_nobody_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, seen = Gate(), list[tuple[str, int]]()
    monkeypatch.setattr("flower_blsgd.worker.gate.gate_of", lambda device: gate)
    lock = OutsideOnly(gate)
    monkeypatch.setattr(blsgd_client, "_ONCE", lock)

    def noting(what: str, call: Any) -> Any:
        def noted(*arguments: Any, **settings: Any) -> Any:
            seen.append((what, gate._computing))
            return call(*arguments, **settings)

        return noted

    task = load_task("digits")
    task = dataclasses.replace(task, model=noting("makes", task.model))
    monkeypatch.setattr(blsgd_client, "_task", lambda *settings: task)
    for holder, name in (
        ("device_samples", "samples_on"),
        ("model_state", "load_state"),
        ("evaluation", "evaluate_sums"),
    ):
        whole = f"flower_blsgd.worker.{holder}.{name}"
        monkeypatch.setattr(whole, noting(name, pkgutil.resolve_name(whole)))
    config = dataclasses.replace(CONFIG, seed=1, replicas="batched", processes_per_device=1)
    worker = WorkerSpec("cpu", (CORE,))
    for cached in ("_samples", "_local_sgd", "_evaluation_model", "_team"):  # of this test alone
        function = getattr(blsgd_client, cached).__wrapped__
        monkeypatch.setattr(blsgd_client, cached, functools.lru_cache(function))
    blsgd_client._local_sgd(config, worker, 0)
    assert seen == [("samples_on", 1), ("makes", 1)]
    blsgd_client._team_of(config, "cpu")
    assert seen[2:] == [("makes", 1)]
    order = EvaluateOrder(3, 0, 10, ArrayRecord(model_of().state_dict()))
    answer(Message(order.to_records(), 7, "evaluate"), node_of(config))
    assert seen[3:] == [("makes", 1), ("load_state", 1), ("evaluate_sums", 1)]
    assert gate._computing == 0
    assert lock.taken >= 4


def test_a_worker_evaluates_as_precisely_as_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(
        "flower_blsgd.worker.precision.use_precision", lambda *told: seen.append(told)
    )
    order = EvaluateOrder(3, 0, 10, ArrayRecord(model_of().state_dict()))
    config = dataclasses.replace(CONFIG, precision="tf32")
    answer(Message(order.to_records(), 7, "evaluate"), node_of(config))
    assert seen == [("tf32", "cpu")]
