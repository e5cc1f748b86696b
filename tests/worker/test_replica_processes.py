"""Workers of one process of the local grid, a lane each, computed together."""

from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, RecordDict

from flower_blsgd import LocalSGD, TrainOrder, TrainReport
from flower_blsgd.config import RunConfig
from flower_blsgd.protocol import ProfileQuery
from flower_blsgd.runtime.devices import WorkerSpec
from flower_blsgd.runtime.local_grid import LocalGrid
from flower_blsgd.tasks import load_task
from flower_blsgd.worker.model_state import state_record

from .replica_orders import furthest

ROOT = Path(__file__).parents[2]
WORKERS, STEPS, SIZE = 3, 2, 8
ACCELERATOR = WorkerSpec("cpu:0")  # torch takes it as the CPU, and our code as an accelerator


def take_a_cpu_for_an_accelerator() -> None:
    """Run in the worker process before the app is loaded: its own parser would see a core."""
    from clients import blsgd_client
    from flower_blsgd.runtime.devices import WorkerSpec

    blsgd_client.worker_of = lambda context: WorkerSpec("cpu:0")  # type: ignore[assignment]


@pytest.mark.processes
def test_lanes_of_a_process_compute_together() -> None:
    config = RunConfig(batch_size=SIZE, threads=1, replicas="batched", processes_per_device=1)
    task = load_task("digits")
    arrays = state_record(task.initial_model(0))
    local = LocalSGD(task.initial_model(0), task.train, task.loss, weight_decay=config.weight_decay)
    states = [RecordDict() for _ in range(WORKERS)]
    grid = LocalGrid(
        [ACCELERATOR] * WORKERS,
        "clients.blsgd_client:app",
        ROOT,
        config.to_run_config(),
        threads=1,
        processes_per_device=1,
        setup=take_a_cpu_for_an_accelerator,
    )
    with grid:
        nodes = list(grid.get_node_ids())
        query = ProfileQuery().to_records()
        for reply in grid.send_and_receive([Message(query, n, "query.profile") for n in nodes]):
            assert not reply.has_error(), reply.error
        assert len(set(grid.process_ids.values())) == 1
        for server_round in (1, 2):
            orders = {n: order_of(server_round, n, arrays) for n in nodes}
            messages = [Message(order.to_records(), n, "train") for n, order in orders.items()]
            reports = {}
            for reply in grid.send_and_receive(messages):
                assert not reply.has_error(), reply.error
                node = reply.metadata.src_node_id
                reports[node] = TrainReport.from_reply(reply, orders[node])
            # All that is computed together reports the same times.
            assert len({report.started_at for report in reports.values()}) == 1
            for node, state in zip(nodes, states, strict=True):
                expected = local.run(orders[node], state)
                assert furthest(expected.arrays, reports[node].arrays) < 1e-4  # float32


def order_of(server_round: int, node: int, arrays: ArrayRecord) -> TrainOrder:
    draw = np.random.default_rng([server_round, node])
    return TrainOrder(
        round=server_round,
        epoch=1,
        local_steps=STEPS,
        batch_size=SIZE,
        learning_rate=0.05,
        seed=node,
        deadline_seconds=0.0,
        momentum_policy="keep",
        indices=draw.integers(0, 1437, STEPS * SIZE, dtype=np.int32),
        arrays=arrays,
    )
