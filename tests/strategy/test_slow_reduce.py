"""Slow workers sum the models of the fast ones: the same bits, whatever goes wrong."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Error, Message

from flower_blsgd import RoundEnd
from flower_blsgd.algorithm.averaging import weighted_average
from flower_blsgd.config import RunConfig
from flower_blsgd.devices.machine import usable_cores
from flower_blsgd.devices.worker_spec import parse_workers
from flower_blsgd.engines.local.grid import LocalGrid
from flower_blsgd.flower.array_records import view_record
from flower_blsgd.flower.internals import CRASHED
from flower_blsgd.parts import make_strategy
from flower_blsgd.protocol import TRAIN_SUM, SumOrder, SumReport, WorkerProfile
from flower_blsgd.run import train_on
from flower_blsgd.strategy.slow_reduce import SlowWorkerReduce
from flower_blsgd.strategy.workers import WorkerRegistry
from flower_blsgd.worker.profile import answer_sum

from ..algorithm.workers import bits, mixed_model
from ..in_process_grid import (
    Handler,
    InProcessGrid,
    fast_profile,
    same_bits,
    slow_profile,
    train_rounds,
)
from ..log_capture import captured_log
from ..small_training import NUM_SAMPLES, make_model, worker_of
from ..test_run import node_of

ROOT = Path(__file__).parents[2]


Instead = Callable[[Message, Message], Message]
"""(message, its right reply) -> what it sends."""


class Summer:
    """A slow worker: answers the profile query, and sums; refuses to train."""

    def __init__(self, profile: WorkerProfile, instead: Instead = lambda _, reply: reply) -> None:
        self.profile = profile
        self.instead = instead
        self.types: list[str] = []

    def __call__(self, message: Message, node_id: int) -> Message:
        self.types.append(message.metadata.message_type)
        if message.metadata.message_type == "query.profile":
            return self.profile.to_reply(message)
        if message.metadata.message_type != TRAIN_SUM:
            raise AssertionError("a slow worker was given an order")
        return self.instead(message, answer_sum(message))


def sums_of(num_slow: int, *handlers: Handler) -> tuple[SlowWorkerReduce, InProcessGrid]:
    profiles = [slow_profile(place) for place in range(num_slow)]
    workers = WorkerRegistry.of_profiles(profiles).workers
    given: list[Handler] = list(handlers) or [Summer(profile) for profile in profiles]
    grid = InProcessGrid(dict(enumerate(given)))
    return SlowWorkerReduce(grid, workers), grid


# --- one sum


@pytest.mark.parametrize(("num_slow", "size"), [(1, 1000), (3, 1000), (7, 1)])
def test_sums_are_those_of_the_server_to_the_bit(num_slow: int, size: int) -> None:
    models = [mixed_model(seed, size) for seed in range(3)]
    models.insert(1, {})  # a failed one, which has no tensors
    weights = [0.5, 0.0, 0.3, 0.2]
    sums, grid = sums_of(num_slow)
    with captured_log() as log:
        found = sums(models, weights)
    assert list(found) == list(models[0])
    assert bits(found) == bits(weighted_average(models, weights))
    assert log.warnings == []
    assert [message.metadata.message_type for message in grid.sent] == [TRAIN_SUM] * num_slow
    assert [worker.index for worker, _ in sums.summing] == list(range(num_slow))
    assert all(start <= end for _, (start, end) in sums.summing)


def test_each_slow_worker_gets_an_equal_slice_of_every_tensor() -> None:
    models = [{"x": np.arange(7, dtype=np.float32).reshape(7, 1), "y": np.arange(3.0)}] * 2
    sums, grid = sums_of(2)
    sums(models, [0.5, 0.5])
    slices = [SumOrder.from_message(message).slices[0] for message in grid.sent]
    found = [{name: a.numpy().tolist() for name, a in record.items()} for record in slices]
    # 7 floats as 3 and 4, 3 doubles as 1 and 2
    assert found == [
        {"x": [0, 1, 2], "y": [0]},
        {"x": [3, 4, 5, 6], "y": [1, 2]},
    ]


# --- a slow worker that sends a wrong reply


def _not_finite(message: Message, reply: Message) -> Message:
    right = SumReport.from_content(reply.content)
    arrays = {name: array.numpy().copy() for name, array in right.arrays.items()}
    arrays["large"][-1] = np.nan
    return SumReport(view_record(arrays), right.started_at, right.ended_at).to_reply(message)


def _raises(message: Message, reply: Message) -> Message:
    raise RuntimeError("no memory left")


def _dies(message: Message, reply: Message) -> Message:
    return Message(Error(CRASHED, "it was killed"), reply_to=message)


WRONG_REPLIES = [(_dies, "it was killed"), (_raises, "no memory left"), (_not_finite, "not finite")]


@pytest.mark.parametrize(("instead", "reason"), WRONG_REPLIES)
def test_server_sums_the_slice_of_a_worker_that_sends_a_wrong_reply(
    instead: Instead, reason: str
) -> None:
    sums, _ = sums_of(2, Summer(slow_profile(0), instead), Summer(slow_profile(1)))
    models = [mixed_model(seed) for seed in range(3)]
    with captured_log() as log:
        found = sums(models, [0.5, 0.25, 0.25])
    assert bits(found) == bits(weighted_average(models, [0.5, 0.25, 0.25]))
    (warning,) = log.warnings
    assert warning.startswith("slow-0 (cpu:0) did not sum its slice, so the server does")
    assert reason in warning
    assert [worker.index for worker, _ in sums.summing] == [1]


# --- whole runs


def play(
    algorithm: str,
    *slow: Handler,
    **changes: Any,
) -> tuple[list[RoundEnd], InProcessGrid]:
    """Two fast workers and these; two epochs of six rounds."""
    fast = [worker_of(fast_profile(0), True), worker_of(fast_profile(1), True)]
    config = RunConfig(
        algorithm=algorithm, batch_size=4, learning_rate=0.05, local_steps_fast=3, **changes
    )
    strategy = make_strategy(config, NUM_SAMPLES, 2)
    grid = InProcessGrid({10 + i: worker for i, worker in enumerate([*fast, *slow])})
    initial = ArrayRecord(make_model(True).state_dict())
    ends = train_rounds(strategy, grid, initial, epochs=2)
    assert len(ends) == len(fast[0].orders)
    return ends, grid


def two_summers() -> list[Summer]:
    return [Summer(slow_profile(2)), Summer(slow_profile(3))]


def test_byteps_is_fast_only_sync_sgd_to_the_bit() -> None:
    """The local grid shows it below without these settings."""
    settings = {"outer_optimizer": "nesterov", "momentum_buffers": "average"}
    slow = two_summers()
    ends, grid = play("byteps", *slow, **settings)
    idle = two_summers()
    others, other = play("sync-sgd-fast-only", *idle, **settings)
    summed, alone = ends[-1].arrays, others[-1].arrays
    assert [worker.types for worker in idle] == [["query.profile"]] * 2
    assert same_bits(summed, alone)
    assert not same_bits(summed, ArrayRecord(make_model(True).state_dict()))
    assert len(ends) == 12
    assert [worker.types for worker in slow] == [["query.profile"] + [TRAIN_SUM] * 12] * 2
    assert len(grid.sent_of_type("train")) == len(other.sent_of_type("train")) == 24
    assert other.sent_of_type(TRAIN_SUM) == []


def test_byteps_records_tell_who_summed_and_how_long() -> None:
    def wait(message: Message, reply: Message) -> Message:
        right = SumReport.from_content(reply.content)
        now = time.time()
        return SumReport(right.arrays, now, now + 1000.0).to_reply(message)

    slow = Summer(slow_profile(2), wait), two_summers()[1]
    ends, _ = play("byteps", *slow)
    assert len(ends) == 12
    for record in (end.record for end in ends):
        assert [row.worker for row in record.workers] == [0, 1, 2, 3]
        assert [row.trained for row in record.workers] == [True, True, False, False]
        trained, (first, second) = record.workers[:2], record.workers[2:]
        assert all(row.summing_seconds == 0.0 and row.weight == 0.5 for row in trained)
        assert first.summing_seconds == pytest.approx(1000.0, abs=1e-6)
        assert first.start_seconds > 0
        assert 0 <= second.summing_seconds < 900.0
        for row in (first, second):
            assert not row.fast
            assert (row.local_steps, row.completed_steps, row.num_examples) == (0, 0, 0)
            assert (row.weight, row.compute_seconds, row.waiting_seconds) == (0.0, 0.0, 0.0)
            assert row.failure == ""


# --- real processes


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_byteps_on_the_local_grid_has_the_bits_of_fast_only_sync_sgd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two fast workers and a slow one, whose process never has the model as a whole."""
    monkeypatch.chdir(tmp_path)
    first, last = usable_cores()[0], usable_cores()[-1]
    workers = parse_workers(f"1x cpu:{first} fast; 1x cpu:{last} fast; 1x cpu:{last} slow")
    config = RunConfig(epochs=1, batch_size=64, threads=1, seed=3, algorithm="byteps")
    settings = config.to_run_config()
    grid = LocalGrid(workers, "clients.blsgd_client:app", ROOT, settings)
    with grid, captured_log() as log:
        byteps = train_on(grid, config)
    assert log.warnings == []  # each fast worker evaluated its half of the test set
    # The same two apps in this process: what the engine is changes no bit.
    config = dataclasses.replace(config, algorithm="sync-sgd-fast-only", evaluate_on="server")
    nodes = [{"tier": tier, "partition-id": i} for i, tier in enumerate(("fast", "fast", "slow"))]
    alone = train_on(
        InProcessGrid({50 + i: node_of(config, n) for i, n in enumerate(nodes)}), config
    )
    models = [(run.folder.path / "model.safetensors").read_bytes() for run in (byteps, alone)]
    assert models[0] == models[1]
    for summary in (byteps.summary, alone.summary):
        assert summary["rounds"] == 1437 // 128
        assert summary["slow_waiting_share"] is None
        assert summary["failures"] == []
        assert [worker["tier"] for worker in summary["workers"]] == ["fast", "fast"]
    for key in ("accuracy", "loss"):
        assert byteps.summary[key] == pytest.approx(alone.summary[key], abs=1e-6)
    assert byteps.summary["summing_seconds"] > 0
    assert alone.summary["summing_seconds"] == 0
