"""``replicas = "batched"``: what is refused, what is told, and what our ClientApp makes of it."""

import threading
from collections.abc import Iterator
from itertools import chain
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict

from clients import blsgd_client
from flower_blsgd import TrainOrder, TrainReport
from flower_blsgd.config import RunConfig
from flower_blsgd.errors import UsageError
from flower_blsgd.experiments.speed_profile import ProfileKey
from flower_blsgd.protocol import MOMENTUM, ProfileQuery
from flower_blsgd.results.report import RunReport
from flower_blsgd.run_notes import tell_replicas
from flower_blsgd.runtime.devices import WorkerSpec
from flower_blsgd.tasks import load_task
from flower_blsgd.worker.batches import IndexedSamples
from flower_blsgd.worker.device_samples import samples_on
from flower_blsgd.worker.local_sgd import LocalSGD
from flower_blsgd.worker.replica import Replica, ReplicaTeam

from .replica_orders import copied, furthest

LONG = 60.0
BATCHED = RunConfig(batch_size=8, threads=1, replicas="batched", processes_per_device=1)
THREADS = RunConfig(batch_size=8, threads=1)
ACCELERATOR = WorkerSpec("cpu:0")
"""Torch takes it as the CPU, and our code as an accelerator, since a CPU has no number."""


# --- what is refused


def test_refused_without_workers_that_share_a_process() -> None:
    with pytest.raises(UsageError, match="set processes-per-device = 1"):
        RunConfig(replicas="batched")


def test_refused_with_bfloat16() -> None:
    with pytest.raises(UsageError, match='use "tf32"'):
        RunConfig(replicas="batched", processes_per_device=1, precision="bfloat16")


def test_refused_another_word_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="batched"):
        RunConfig(replicas="batch", processes_per_device=1)


def test_speeds_of_one_way_are_not_those_of_the_other() -> None:
    batched, threads = (
        ProfileKey.here(RunConfig(processes_per_device=1, replicas=way))
        for way in ("batched", "threads")
    )
    assert "replicas = 'threads'" in threads.difference(batched)
    assert batched.difference(batched) == ""


# --- what is told


class Told:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


@pytest.mark.parametrize(
    ("workers", "told"),
    [
        ([WorkerSpec("cuda:0")] * 2, ""),
        ([WorkerSpec("cuda:0"), WorkerSpec("cuda:1"), WorkerSpec("cpu")], "no effect"),
        ([WorkerSpec("cpu")] * 4, "no effect"),
        ([WorkerSpec("cuda:0"), WorkerSpec("cuda:0", slowdown=2.0)], "no effect"),
        ([], "devices in their node config"),
    ],
)
def test_tells_where_it_has_no_effect(workers: list[WorkerSpec], told: str) -> None:
    report = Told()
    tell_replicas(BATCHED, workers, cast(RunReport, report))
    assert [told in line for line in report.lines] == ([True] if told else [])


def test_tells_nothing_where_nobody_asked_for_it() -> None:
    report = Told()
    tell_replicas(THREADS, [WorkerSpec("cpu")], cast(RunReport, report))
    assert report.lines == []


# --- our ClientApp


@pytest.fixture
def as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(blsgd_client, "worker_of", lambda context: ACCELERATOR)
    yield
    for cached in (blsgd_client._local_sgd, blsgd_client._team, blsgd_client._samples):
        cached.cache_clear()


@pytest.mark.usefixtures("as_on_an_accelerator")
def test_workers_of_an_accelerator_are_a_team_of_models_of_their_own() -> None:
    one, two = (blsgd_client._local_sgd(BATCHED, ACCELERATOR, owner) for owner in (7, 8))
    assert isinstance(one, Replica)
    assert isinstance(two, Replica)
    assert one._team is two._team
    assert one.model is not two.model


@pytest.mark.usefixtures("as_on_an_accelerator")
@pytest.mark.parametrize(("config", "device"), [(BATCHED, "cpu"), (THREADS, "cpu:0")])
def test_others_are_plain(config: RunConfig, device: str) -> None:
    assert type(blsgd_client._local_sgd(config, WorkerSpec(device), 7)) is LocalSGD


def rounds_of(config: RunConfig, workers: int, rounds: int) -> list[list[tuple[Any, Any]]]:
    """Return reports and momenta of nodes that are served by a thread each, after a profile."""
    contexts = [
        Context(
            1, node, {"partition-id": node, "device": "cpu"}, RecordDict(), config.to_run_config()
        )
        for node in range(workers)
    ]
    arrays = copied(ArrayRecord(load_task("digits").initial_model(0).state_dict()))

    def all_at_once(messages: list[Message]) -> list[Any]:
        found: list[Any] = [None] * workers

        def serve(node: int) -> None:
            try:
                found[node] = blsgd_client.app(messages[node], contexts[node])
            except Exception as error:
                found[node] = error

        lanes = [threading.Thread(target=serve, args=(n,), daemon=True) for n in range(workers)]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join(LONG)
            assert not lane.is_alive(), "somebody waits for ever"
        for reply in found:
            assert isinstance(reply, Message), reply
        return found

    query = ProfileQuery().to_records()
    all_at_once([Message(query, node, "query.profile") for node in range(workers)])
    results = []
    for server_round in range(1, rounds + 1):
        orders = [
            TrainOrder(
                round=server_round,
                epoch=1,
                local_steps=2,
                batch_size=8,
                learning_rate=0.05,
                seed=node,
                deadline_seconds=0.0,
                momentum_policy="keep",
                indices=np.random.default_rng([server_round, node]).integers(
                    0, 1437, 16, dtype=np.int32
                ),
                arrays=arrays,
            )
            for node in range(workers)
        ]
        replies = all_at_once(
            [Message(order.to_records(), node, "train") for node, order in enumerate(orders)]
        )
        results.append(
            [
                (
                    TrainReport.from_reply(reply, order),
                    copied(context.state.array_records[MOMENTUM]),
                )
                for reply, order, context in zip(replies, orders, contexts, strict=True)
            ]
        )
    return results


@pytest.mark.usefixtures("as_on_an_accelerator")
def test_nodes_of_a_process_compute_together_and_get_what_they_get_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    together = ReplicaTeam._together

    def counted(team: ReplicaTeam, works: Any) -> Any:
        sizes.append(len(works))
        return together(team, works)

    monkeypatch.setattr(ReplicaTeam, "_together", counted)
    alone = rounds_of(THREADS, 3, 2)
    assert sizes == []
    batched = rounds_of(BATCHED, 3, 2)
    assert sizes == [3, 3]
    for expected, found in zip(chain(*alone), chain(*batched), strict=True):
        assert furthest(expected[0].arrays, found[0].arrays) < 1e-4  # float32
        assert furthest(expected[1], found[1]) < 1e-4
        assert found[0].losses == pytest.approx(expected[0].losses, rel=1e-4, abs=1e-5)


# --- data on the device


def test_samples_on_a_cpu_are_left_where_they_are() -> None:
    samples = (np.zeros((3, 2), np.float32), torch.zeros(3))
    assert samples_on(samples, "cpu") is samples


def test_samples_on_a_device_are_there_once_and_keep_their_indices() -> None:
    """The meta device stands for an accelerator: tensors move there, and hold nothing."""
    indices = np.array([2, 0])
    samples = IndexedSamples((np.zeros((3, 2), np.float32), torch.zeros(3)), indices)
    moved = samples_on(samples, "meta")
    assert isinstance(moved, IndexedSamples)
    assert moved.indices is indices
    assert [part.device.type for part in moved.samples] == ["meta", "meta"]
    again = samples_on(moved, "meta")
    assert all(a is b for a, b in zip(again.samples, moved.samples, strict=True))


def test_samples_of_another_kind_are_left_to_the_host() -> None:
    class Pairs:
        def __len__(self) -> int:
            return 1

    pairs = Pairs()
    assert samples_on(pairs, "meta") is pairs
