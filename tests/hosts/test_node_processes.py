"""A node with several devices as it really is: worker processes behind our ClientApp."""

import os
import signal
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, RecordDict

from clients.blsgd_client import app as client_app
from flower_blsgd import BiasedLocalSGD
from flower_blsgd.config import RunConfig
from flower_blsgd.grids.machine import usable_cores
from flower_blsgd.grids.stream.session import session
from flower_blsgd.hosts.several_devices import answer, node_grid
from flower_blsgd.protocol import HostReply
from flower_blsgd.tasks import load_task

from ..grids.processes import process_ids, processes_below, wait_until
from ..in_process_grid import InProcessGrid, over_the_wire
from ..log_capture import captured_log
from .host_nodes import play

ROOT = Path(__file__).parents[2]
CORE = usable_cores()[0]
CONFIG = RunConfig(batch_size=16, threads=1).to_run_config()


def context_of(devices: str) -> Context:
    return Context(1, 10, {"devices": devices}, RecordDict(), CONFIG)


@pytest.mark.processes
def test_device_whose_process_is_killed_costs_its_share_of_a_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strategy = BiasedLocalSGD(
        1437,
        16,
        local_steps=6,
        local_steps_slow=2,
        learning_rate=0.05,
        min_available_nodes=1,
        fraction_evaluate=0.0,
        seed=3,
    )
    model = ArrayRecord(load_task("digits").initial_model(1).state_dict())
    context = context_of(f"1x cpu:{CORE} fast; 2x cpu:{CORE} slow")
    with node_grid(context, "clients.blsgd_client:app", ROOT) as grid, captured_log():
        killed: list[int] = []
        push = grid.push_messages

        def kill_when_the_order_is_sent(messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            if killed or messages[0].metadata.message_type != "train":
                return push(messages)
            killed.append(process_ids(grid)[101])
            os.kill(killed[0], signal.SIGSTOP)  # or it might answer first
            ids = list(push(messages))
            os.kill(killed[0], signal.SIGKILL)
            return ids

        monkeypatch.setattr(grid, "push_messages", kill_when_the_order_is_sent)
        node = InProcessGrid({10: lambda message, _: answer(message, context, grid)})
        arrays, records = play(strategy, node, model, 3)
        assert len(process_ids(grid)) == 3
    failures = [[bool(row.failure) for row in record.workers] for record in records]
    assert failures == [[False, True, False], [False] * 3, [False] * 3]
    assert records[0].workers[1].weight == 0.0
    assert "SIGKILL" in records[0].workers[1].failure
    assert all(np.isfinite(array.numpy()).all() for array in arrays.values())


@pytest.mark.processes
def test_worker_processes_end_with_the_session() -> None:
    """Through the app, as a session calls it."""
    before = processes_below()
    message = over_the_wire(Message(RecordDict(), 10, "query.profile"))
    with session():
        reply = client_app(message, context_of(f"2x cpu:{CORE} fast"))
        assert sorted(HostReply.from_content(reply.content).parts) == [0, 1]
        assert len(processes_below() - before) == 2
    assert wait_until(lambda: processes_below() <= before)
