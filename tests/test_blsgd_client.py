"""Our ClientApp under strategies that are not ours, and what it keeps from message to message."""

import dataclasses
import os
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp.strategy import FedAvg

from flower_blsgd import BiasedLocalSGD, task_executor
from flower_blsgd.config import RunConfig
from flower_blsgd.devices.machine import usable_cores
from flower_blsgd.devices.worker_spec import WorkerSpec
from flower_blsgd.protocol import (
    EvaluateOrder,
    EvaluateReport,
    ProfileQuery,
    TrainOrder,
    TrainReport,
    WorkerProfile,
)
from flower_blsgd.tasks import load_task
from flower_blsgd.worker.evaluation import evaluate_sums

from . import test_run
from .in_process_grid import Handler, InProcessGrid, over_the_wire, tensors_of

CORE = usable_cores()[0]
CONFIG = RunConfig(batch_size=32, local_steps_fast=4, local_steps_slow=2, threads=1)


def node_of(config: RunConfig = CONFIG, **node_config: Any) -> Handler:
    return test_run.node_of(config, node_config)


def model_of(seed: int = 0) -> torch.nn.Module:
    return load_task("digits").initial_model(seed)


def sums(model: torch.nn.Module, first: int = 0, last: int = 360) -> EvaluateReport:
    task = load_task("digits")
    return evaluate_sums(model, task.test, task.loss, task.metric, "cpu", range(first, last))


def answer(message: Message, handler: Handler | None = None) -> Message:
    return over_the_wire((handler or node_of())(over_the_wire(message), 7))


def test_evaluate_a_slice_is_answered_with_its_sums_and_leaves_the_training_model_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    precisions: list[object] = []
    monkeypatch.setattr(
        "flower_blsgd.worker.step.use_precision", lambda *given: precisions.append(given)
    )
    used: list[dict[str, object]] = []

    def noted(*arguments: Any, **settings: Any) -> EvaluateReport:
        used.append(settings)
        return evaluate_sums(*arguments, **settings)

    monkeypatch.setattr("flower_blsgd.tasks.task.evaluate_sums", noted)
    settings = {"precision": "bfloat16", "channels_last": True, "loader_workers": 1}
    config = dataclasses.replace(CONFIG, **settings)
    handler, model = node_of(config, precision="tf32", slowdown=3.0), model_of(5)
    answer(Message(ProfileQuery().to_records(), 7, "query.profile"), handler)
    worker = WorkerSpec("cpu", (CORE,), precision="tf32", slowdown=3.0)
    sgd = task_executor._local_sgd(config, worker, 1)
    sgd.model.train()
    before = tensors_of(ArrayRecord(sgd.model.state_dict()))
    order = EvaluateOrder(3, 100, 250, ArrayRecord(model.state_dict()))
    naps: list[float] = []
    monkeypatch.setattr("flower_blsgd.client_app.time.sleep", naps.append)
    reply = answer(Message(order.to_records(), 7, "evaluate"), handler)
    report = EvaluateReport.from_content(reply.content, order)
    assert naps == pytest.approx([2 * report.seconds], rel=0.1)
    assert (report.first, report.last) == (100, 250)
    expected = sums(model, 100, 250)
    assert report.loss == pytest.approx(expected.loss)
    assert report.totals == pytest.approx(expected.totals)
    assert precisions == [("tf32", "cpu")]  # as precisely as this worker trains
    assert used == [{**settings, "precision": "tf32"}]
    assert sgd.model.training
    for name, tensor in tensors_of(ArrayRecord(sgd.model.state_dict())).items():
        assert (tensor == before[name]).all(), name


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
        answers = list(replies.send_and_receive(messages))
        for answer in answers:
            assert answer.content["metrics"]["num-examples"] == 360  # the whole test set
        metrics = strategy.aggregate_evaluate(1, answers)
        expected = sums(model_of())
    else:
        ours = BiasedLocalSGD(1437, 32, 4, local_steps_slow=2)
        rounds = 1437 // (6 * 32)
        result = ours.start(InProcessGrid(handlers), arrays, num_rounds=rounds)
        metrics = result.evaluate_metrics_clientapp[rounds]
        trained = model_of()
        trained.load_state_dict(result.arrays.to_torch_state_dict())
        expected = sums(trained)
    assert metrics is not None
    assert dict(metrics) == pytest.approx(dict(expected.metrics()), abs=1e-6)


# --- train


def order(seed: int, last: int = 9) -> TrainOrder:
    indices = np.array([*range(seed, seed + 9), last], np.int32)
    arrays = ArrayRecord(model_of().state_dict())
    return TrainOrder(1, 1, 2, 5, 0.1, seed, 0.0, "keep", indices, arrays)


def run(handler: Handler, given: TrainOrder) -> dict[str, Any]:
    report = answer(Message(given.to_records(), 7, "train"), handler)
    return tensors_of(TrainReport.from_content(report.content, given).arrays)


def test_nodes_take_turns_in_a_process_and_a_refused_order_leaves_no_half_state() -> None:
    alone, one, two = node_of(), node_of(), node_of()
    expected = [run(alone, order(seed)) for seed in (1, 2)]
    before = torch.get_num_threads(), os.sched_getaffinity(0)
    first = run(one, order(1))
    run(two, order(3))
    with pytest.raises(Exception, match="names sample 1437"):
        run(one, order(2, last=1437))
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == before
    for found, wanted in zip((first, run(one, order(2))), expected, strict=True):
        assert all((found[name] == tensor).all() for name, tensor in wanted.items())
    assert any((run(two, order(2))[name] != tensor).any() for name, tensor in expected[1].items())


def test_worker_computes_with_its_own_precision() -> None:
    """Models in bfloat16 differ from those in float32, and nothing else does."""
    of_run, same, other = (
        run(node_of(**precision), order(1))
        for precision in ({}, {"precision": "float32"}, {"precision": "bfloat16"})
    )
    assert all((of_run[name] == same[name]).all() for name in of_run)
    assert any((of_run[name] != other[name]).any() for name in of_run)
    assert all(np.abs(of_run[name] - other[name]).max() < 0.05 for name in of_run)


def test_workers_of_a_card_divide_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sharing: list[object] = []
    samples = task_executor._samples
    monkeypatch.setattr(
        task_executor, "_samples", lambda *given: (sharing.append(given[-1]), samples(*given))[1]
    )
    for number in (3, 4):
        run(node_of(**{"workers-on-device": number}), order(1))
    assert sharing == [3, 4]


# --- profile


def profile_of(calibrate: bool, **node_config: Any) -> WorkerProfile:
    query = ProfileQuery(calibrate, 16 if calibrate else 0)
    reply = answer(Message(query.to_records(), 7, "query.profile"), node_of(**node_config))
    return WorkerProfile.from_content(reply.content)


def test_profile_tells_a_speed_only_when_it_is_asked_for_and_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert profile_of(False).seconds_per_step == 0.0
    assert 0 < profile_of(True).seconds_per_step < 1
    monkeypatch.setattr("flower_blsgd.worker.profile.seconds_per_step", None)
    assert profile_of(True, **{"seconds-per-step": 0.5}).seconds_per_step == 0.5
