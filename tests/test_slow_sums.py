"""Slow workers add up the models of the fast ones: the same bits, whatever goes wrong."""

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Error, Message
from safetensors.numpy import load_file
from torch import nn

from flower_blsgd import LocalSGD
from flower_blsgd.algorithm.averaging import weighted_average
from flower_blsgd.algorithm.train_on import TrainOnAll, TrainOnFast
from flower_blsgd.array_view import view_record
from flower_blsgd.config import RunConfig
from flower_blsgd.errors import UsageError
from flower_blsgd.protocol import TRAIN_SUM, SumOrder, SumReport, WorkerProfile
from flower_blsgd.roster import Roster
from flower_blsgd.round_log import RoundRecord
from flower_blsgd.run import make_strategy, train_on
from flower_blsgd.runtime.flower_internals import CRASHED
from flower_blsgd.runtime.machine import usable_cores
from flower_blsgd.slow_sums import SlowSums, slow_sums
from flower_blsgd.worker.summing import answer_sum

from .in_process_grid import (
    Handler,
    InProcessGrid,
    TorchWorker,
    fast_profile,
    same_bits,
    slow_profile,
)
from .log_capture import captured_log
from .test_run import node_of

ROOT = Path(__file__).parents[1]
NUM_SAMPLES = 48


class Summer:
    """A slow worker: answers who it is, and adds up; refuses to train.

    Parameters
    ----------
    profile : WorkerProfile
        Its answer.
    instead : callable, optional
        (message, its honest reply) -> what it sends.
    """

    def __init__(
        self,
        profile: WorkerProfile,
        instead: Callable[[Message, Message], Message] = lambda _, reply: reply,
    ) -> None:
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


def numbers(seed: int, size: int = 1000) -> dict[str, np.ndarray]:
    """Return a model of several dtypes, with an empty and a scalar tensor, out of dtype order."""
    rng = np.random.default_rng(seed)
    return {
        "a": rng.normal(size=(size, 3)).astype(np.float32),
        "b": rng.normal(size=7),
        "counter": np.array(rng.integers(100), np.int64),
        "c": rng.normal(size=(2, 5)).astype(np.float32),
        "half": rng.normal(size=11).astype(np.float16),
        "scalar": np.array(rng.normal(), np.float32),
        "none": np.empty((0, 3), np.float32),
        "mask": rng.integers(0, 2, 4).astype(np.bool_),
    }


def sums_of(num_slow: int, *handlers: Handler) -> tuple[SlowSums, InProcessGrid]:
    profiles = [slow_profile(place) for place in range(num_slow)]
    workers = Roster.of_profiles(profiles).workers
    given: list[Handler] = list(handlers) or [Summer(profile) for profile in profiles]
    grid = InProcessGrid(dict(enumerate(given)))
    return SlowSums(grid, workers), grid


def bits(model: dict[str, np.ndarray]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (str(t.dtype), t.shape, t.tobytes()) for name, t in model.items()}


# --- one sum


@pytest.mark.parametrize("num_slow", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [1, 1000])
def test_sums_are_those_of_the_server_to_the_bit(num_slow: int, size: int) -> None:
    models = [numbers(seed, size) for seed in range(3)]
    weights = [0.5, 0.3, 0.2]
    sums, grid = sums_of(num_slow)
    with captured_log() as log:
        found = sums(models, weights)
    assert list(found) == list(models[0])
    assert bits(found) == bits(weighted_average(models, weights))
    assert log.warnings == []
    assert [message.metadata.message_type for message in grid.sent] == [TRAIN_SUM] * num_slow
    assert [worker.index for worker, _ in sums.summing] == list(range(num_slow))
    assert all(start <= end for _, (start, end) in sums.summing)


def test_sums_leave_out_what_counts_0() -> None:
    models = [numbers(0), {}, numbers(1)]
    sums, grid = sums_of(2)
    found = sums(models, [0.25, 0.0, 0.75])
    assert bits(found) == bits(weighted_average(models, [0.25, 0.0, 0.75]))
    assert all(len(SumOrder.from_message(message).slices) == 2 for message in grid.sent)


def test_each_slow_worker_gets_an_equal_slice_of_the_flat_buffer() -> None:
    models = [{"x": np.arange(7, dtype=np.float32).reshape(7, 1), "y": np.arange(3.0)}] * 2
    sums, grid = sums_of(2)
    sums(models, [0.5, 0.5])
    slices = [SumOrder.from_message(message).slices[0] for message in grid.sent]
    found = [{name: a.numpy().tolist() for name, a in record.items()} for record in slices]
    # 7 floats as 3 and 4, 3 doubles as 1 and 2
    assert found == [
        {"float32": [0, 1, 2], "float64": [0]},
        {"float32": [3, 4, 5, 6], "float64": [1, 2]},
    ]


# --- a slow worker that fails or lies


def _with_arrays(message: Message, reply: Message, arrays: ArrayRecord) -> Message:
    honest = SumReport.from_reply(reply, SumOrder.from_message(message).slices)
    return SumReport(arrays, honest.started_at, honest.ended_at).to_reply(message)


def _changed(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Message, Message], Message]:
    def instead(message: Message, reply: Message) -> Message:
        arrays = reply.content.array_records["arrays"]
        changed = {name: change(array.numpy().copy()) for name, array in arrays.items()}
        return _with_arrays(message, reply, view_record(changed))

    return instead


def _nan(tensor: np.ndarray) -> np.ndarray:
    if len(tensor):
        tensor[-1] = np.nan
    return tensor


def _pretending(tensor_of: Callable[[np.ndarray], bytes]) -> Callable[[Message, Message], Message]:
    """Say the right shape and dtype, and hold something else."""

    def instead(message: Message, reply: Message) -> Message:
        record = ArrayRecord()
        for name, array in reply.content.array_records["arrays"].items():
            data = tensor_of(array.numpy())
            record[name] = Array(array.dtype, tuple(array.shape), "numpy.ndarray", data)
        return _with_arrays(message, reply, record)

    return instead


def _raises(message: Message, reply: Message) -> Message:
    raise RuntimeError("no memory left")


def _without_times(message: Message, reply: Message) -> Message:
    del reply.content["metrics"]
    return reply


LIES: dict[str, tuple[Callable[[Message, Message], Message], str]] = {
    "dies": (lambda m, _: Message(Error(CRASHED, "it was killed"), reply_to=m), "it was killed"),
    "raises": (_raises, "no memory left"),
    "shape": (_changed(lambda t: t[:-1]), "other shapes"),
    "more dimensions": (_changed(lambda t: t[None]), "other shapes"),
    "dtype": (_changed(lambda t: t.astype(np.float16)), "other shapes"),
    "nan": (_changed(_nan), "not finite"),
    "infinite": (_changed(lambda t: t * np.inf), "not finite"),
    "no arrays": (lambda m, r: _with_arrays(m, r, ArrayRecord()), "other shapes"),
    "hidden shape": (_pretending(lambda t: Array(t[:1]).data), "other shapes"),
    "hidden dtype": (_pretending(lambda t: Array(t.astype(np.int8)).data), "other shapes"),
    "rubbish": (_pretending(lambda t: b"rubbish"), ""),
    "no times": (_without_times, "how long"),
}


@pytest.mark.parametrize("lie", LIES)
def test_server_sums_the_slice_of_a_worker_that_fails_or_lies(lie: str) -> None:
    instead, told = LIES[lie]
    sums, _ = sums_of(2, Summer(slow_profile(0), instead), Summer(slow_profile(1)))
    models = [numbers(seed) for seed in range(3)]
    with captured_log() as log:
        found = sums(models, [0.5, 0.25, 0.25])
    assert bits(found) == bits(weighted_average(models, [0.5, 0.25, 0.25]))
    (warning,) = log.warnings
    assert warning.startswith("slow-0 (cpu:0) did not add up its slice, so the server does")
    assert told in warning
    assert [worker.index for worker, _ in sums.summing] == [1]


def test_server_sums_the_slice_of_a_worker_that_does_not_answer() -> None:
    sums, grid = sums_of(2)
    grid.disconnect(1)
    models = [numbers(seed) for seed in range(2)]
    with captured_log() as log:
        found = sums(models, [0.5, 0.5])
    assert bits(found) == bits(weighted_average(models, [0.5, 0.5]))
    assert "did not answer in time" in log.warnings[0]
    assert all(timeout is not None for timeout in grid.timeouts)


def test_slow_sums_only_where_slow_workers_are_to_sum() -> None:
    grid = InProcessGrid({})
    team = Roster.of_profiles([fast_profile(0), slow_profile(1), slow_profile(2)]).workers
    summing = slow_sums(grid, team, TrainOnFast(slow_sums=True))
    assert summing is not None
    assert slow_sums(grid, team, TrainOnFast()) is None
    assert slow_sums(grid, team, TrainOnAll()) is None
    assert slow_sums(grid, team[:1], TrainOnFast(slow_sums=True)) is None  # the last one is gone


# --- whole runs


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))


def torch_worker(profile: WorkerProfile) -> TorchWorker:
    inputs = torch.randn(NUM_SAMPLES, 5, generator=torch.Generator().manual_seed(11))
    targets = (inputs.sum(dim=1) > 0).long() + (inputs[:, 0] > 1).long()
    return TorchWorker(profile, LocalSGD(make_model(), (inputs, targets), momentum=0.9))


def play(
    algorithm: str,
    *slow: Handler,
    on_round: Callable[[RoundRecord], None] | None = None,
    **changes: Any,
) -> tuple[ArrayRecord, InProcessGrid]:
    """Two fast workers and these; two epochs of six rounds."""
    fast = [torch_worker(fast_profile(0)), torch_worker(fast_profile(1))]
    config = RunConfig(
        algorithm=algorithm, batch_size=4, learning_rate=0.05, local_steps_fast=3, **changes
    )
    strategy = make_strategy(config, NUM_SAMPLES, 2 + len(slow))
    grid = InProcessGrid({10 + i: worker for i, worker in enumerate([*fast, *slow])})
    initial = ArrayRecord(make_model().state_dict())
    result = strategy.fit(grid, initial, epochs=2, on_round=on_round)
    assert len(result.train_metrics_clientapp) == len(fast[0].orders)
    return result.arrays, grid


def two_summers() -> list[Summer]:
    return [Summer(slow_profile(2)), Summer(slow_profile(3))]


def test_byteps_is_fast_only_sync_sgd_to_the_bit() -> None:
    records: list[RoundRecord] = []
    slow = two_summers()
    summed, grid = play("byteps", *slow, on_round=records.append)
    alone, other = play("sync-sgd-fast-only", *two_summers())
    assert same_bits(summed, alone)
    assert not same_bits(summed, ArrayRecord(make_model().state_dict()))
    assert len(records) == 12
    assert [worker.types for worker in slow] == [["query.profile"] + [TRAIN_SUM] * 12] * 2
    assert len(grid.sent_of_type("train")) == len(other.sent_of_type("train")) == 24
    assert other.sent_of_type(TRAIN_SUM) == []


def test_byteps_records_tell_who_summed_and_how_long() -> None:
    records: list[RoundRecord] = []

    def wait(message: Message, reply: Message) -> Message:
        honest = SumReport.from_reply(reply, SumOrder.from_message(message).slices)
        now = time.time()
        return SumReport(honest.arrays, now, now + 1000.0).to_reply(message)

    play("byteps", Summer(slow_profile(2), wait), two_summers()[1], on_round=records.append)
    for record in records:
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


@pytest.mark.parametrize("lie", LIES)
def test_byteps_goes_on_to_the_same_bits_though_a_slow_worker_fails_or_lies(lie: str) -> None:
    records: list[RoundRecord] = []
    with captured_log() as log:
        summed, _ = play(
            "byteps",
            Summer(slow_profile(2), LIES[lie][0]),
            two_summers()[1],
            on_round=records.append,
        )
    alone, _ = play("sync-sgd-fast-only", *two_summers())
    assert same_bits(summed, alone)
    assert len([line for line in log.warnings if "slow-2 (cpu:2) did not add up" in line]) == 12
    assert all([row.worker for row in record.workers] == [0, 1, 3] for record in records)


def test_byteps_with_an_outer_optimizer_and_average_momentum_to_the_same_bits() -> None:
    settings = {"outer_optimizer": "nesterov", "momentum_buffers": "average"}
    summed, _ = play("byteps", *two_summers(), **settings)
    alone, _ = play("sync-sgd-fast-only", *two_summers(), **settings)
    assert same_bits(summed, alone)


@pytest.mark.parametrize("algorithm", ["fast-only-local-sgd", "sync-sgd-fast-only"])
def test_fast_only_sends_a_slow_worker_nothing_but_who_are_you(algorithm: str) -> None:
    slow = two_summers()
    _, grid = play(algorithm, *slow)
    assert [worker.types for worker in slow] == [["query.profile"]] * 2
    rounds = 12 if algorithm == "sync-sgd-fast-only" else 4
    assert len(grid.sent_of_type("train")) == 2 * rounds
    assert {m.metadata.dst_node_id for m in grid.sent_of_type("train")} == {10, 11}


@pytest.mark.parametrize("algorithm", ["fast-only-local-sgd", "sync-sgd-fast-only"])
def test_fast_only_has_the_same_bits_with_and_without_slow_workers(algorithm: str) -> None:
    with_slow, _ = play(algorithm, *two_summers())
    without, _ = play(algorithm)
    assert same_bits(with_slow, without)


@pytest.mark.parametrize("algorithm", ["fast-only-local-sgd", "sync-sgd-fast-only", "byteps"])
def test_team_without_a_fast_worker_is_refused(algorithm: str) -> None:
    config = RunConfig(algorithm=algorithm)
    strategy = make_strategy(config, NUM_SAMPLES, 1)
    with pytest.raises(UsageError, match=r"no fast worker among slow-0.*name one fast") as told:
        strategy.fit(
            InProcessGrid({1: Summer(slow_profile(0))}),
            ArrayRecord(make_model().state_dict()),
            epochs=1,
        )
    assert "\n" not in str(told.value)


def test_byteps_without_a_slow_worker_is_refused_with_the_way_out() -> None:
    with pytest.raises(UsageError, match=r'no slow worker .*train-on = "fast"'):
        play("byteps")


def test_byteps_goes_on_when_the_last_slow_worker_is_gone() -> None:
    slow = two_summers()
    grids: list[InProcessGrid] = []

    def leave(record: RoundRecord) -> None:
        if record.round == 3:
            grids[0].disconnect(12)
            grids[0].disconnect(13)

    fast = [torch_worker(fast_profile(0)), torch_worker(fast_profile(1))]
    config = RunConfig(algorithm="byteps", batch_size=4, learning_rate=0.05)
    strategy = make_strategy(config, NUM_SAMPLES, 4)
    grids.append(InProcessGrid({10 + i: w for i, w in enumerate([*fast, *slow])}))
    with captured_log() as log:
        result = strategy.fit(
            grids[0], ArrayRecord(make_model().state_dict()), epochs=2, on_round=leave
        )
    assert [worker.types.count(TRAIN_SUM) for worker in slow] == [3, 3]
    assert any("the last slow worker is gone" in line for line in log.warnings)
    alone, _ = play("sync-sgd-fast-only", *two_summers())
    assert same_bits(result.arrays, alone)


def test_byteps_is_refused_on_other_grids_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    grid = InProcessGrid({10: torch_worker(fast_profile(0)), 20: Summer(slow_profile(1))})
    with pytest.raises(UsageError, match="on the local grid only") as told:
        train_on(grid, RunConfig(algorithm="byteps"))
    line = str(told.value)
    assert "\n" not in line
    assert "byteps" in line
    assert 'train-on = "fast"' in line
    assert grid.sent == []
    assert list(tmp_path.iterdir()) == []


# --- real processes


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_byteps_on_the_local_grid_has_the_bits_of_fast_only_sync_sgd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last = usable_cores()[0], usable_cores()[-1]
    workers = f"1x cpu:{first} fast; 1x cpu:{last} fast; 1x cpu:{last} slow"
    config = RunConfig(epochs=1, batch_size=64, threads=1, seed=3, workers=workers)
    command = [sys.executable, "-m", "flower_blsgd", "run", "."]
    for key, value in config.to_run_config().items():
        if value != "":
            command += ["-s", f"{key}={str(value).lower() if isinstance(value, bool) else value}"]
    command += ["-s", "algorithm=byteps", "-s", f"out={tmp_path / 'byteps'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "slow-2 (cpu:" in done.stdout
    assert "adds up its slice" in done.stdout

    # The same two apps in this process: what the engine is changes no bit.
    monkeypatch.chdir(tmp_path)
    config = dataclasses.replace(config, algorithm="sync-sgd-fast-only", out="alone")
    nodes = [{"tier": tier, "partition-id": i} for i, tier in enumerate(("fast", "fast", "slow"))]
    train_on(InProcessGrid({50 + i: node_of(config, n) for i, n in enumerate(nodes)}), config)

    summed = load_file(tmp_path / "byteps" / "model.safetensors")
    alone = load_file(tmp_path / "alone" / "model.safetensors")
    assert summed.keys() == alone.keys()
    for name, tensor in summed.items():
        assert tensor.tobytes() == alone[name].tobytes(), name

    summaries = [
        json.loads((tmp_path / run / "summary.json").read_text()) for run in ("byteps", "alone")
    ]
    for summary in summaries:
        assert summary["rounds"] == 1437 // 128
        assert summary["slow_waiting_share"] is None
        assert summary["failures"] == []
        assert [worker["tier"] for worker in summary["workers"]] == ["fast", "fast"]
    assert summaries[0]["summing_seconds"] > 0
    assert summaries[1]["summing_seconds"] == 0
    lines = (tmp_path / "byteps" / "rounds.jsonl").read_text().splitlines()
    for record in map(json.loads, lines):
        summing = [row["summing_seconds"] > 0 for row in record["workers"]]
        assert summing == [False, False, True]
