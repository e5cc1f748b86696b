"""A node with several devices as it really is: worker processes behind our ClientApp."""

import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, RecordDict

from clients.blsgd_client import app as client_app
from flower_blsgd import BiasedLocalSGD
from flower_blsgd.config import RunConfig
from flower_blsgd.grids.flower_internals import become_server
from flower_blsgd.grids.local_grid import LocalGrid
from flower_blsgd.grids.machine import usable_cores
from flower_blsgd.grids.stream.session import (
    begin_session,
    end_session,
)
from flower_blsgd.grids.worker_spec import parse_workers
from flower_blsgd.hosts.several_devices import answer, node_grid
from flower_blsgd.protocol import HostReply
from flower_blsgd.tasks import load_task

from ..grids.processes import process_ids, processes_below, wait_until
from ..in_process_grid import InProcessGrid, over_the_wire, tensors_of
from ..log_capture import captured_log
from .host_nodes import play

ROOT = Path(__file__).parents[2]
APP = "clients.blsgd_client:app"
CORE = usable_cores()[0]
DEVICES = f"1x cpu:{CORE} fast; 2x cpu:{CORE} slow"
CONFIG = RunConfig(batch_size=16, threads=1)


def strategy_of(nodes: int) -> BiasedLocalSGD:
    return BiasedLocalSGD(
        1437,
        16,
        local_steps=6,
        local_steps_slow=2,
        learning_rate=0.05,
        min_available_nodes=nodes,
        fraction_evaluate=0.0,
        momentum_buffers="reset",  # the second run finds the workers of the first
        seed=3,
    )


def first_model() -> ArrayRecord:
    return ArrayRecord(load_task("digits").initial_model(1).state_dict())


class RealHost:
    """A node with worker processes; its session is this object's life."""

    def __init__(self) -> None:
        config = {"devices": DEVICES, "name": "box-1"}
        self.context = Context(1, 10, config, RecordDict(), CONFIG.to_run_config())
        self.local_grid = node_grid(self.context, APP, ROOT)

    def __call__(self, message: Message, node_id: int) -> Message:
        return answer(message, self.context, self.local_grid)


@pytest.fixture(scope="module")
def host() -> Iterator[RealHost]:
    become_server(1)
    host = RealHost()
    yield host
    host.local_grid.close()


@pytest.mark.processes
def test_devices_behind_one_node_train_as_three_nodes(host: RealHost) -> None:
    """The losses of the second round differ by what the first one's average rounded off."""
    settings, flat, hosted = CONFIG.to_run_config(), strategy_of(3), strategy_of(1)
    with LocalGrid(parse_workers(DEVICES), APP, ROOT, settings) as local:
        expected, flat_records = play(flat, local, first_model(), 2)
    with captured_log() as log:
        found, records = play(hosted, InProcessGrid({10: host}), first_model(), 2)
    assert log.lines(30) == []
    assert [w.label for w in hosted.registry.workers] == [
        f"box-1/{i} (cpu:{CORE})" for i in range(3)
    ]
    for name, tensor in tensors_of(expected).items():
        assert tensors_of(found)[name] == pytest.approx(tensor, rel=1e-4, abs=1e-6), name
    assert hosted.planner.table.losses == pytest.approx(flat.planner.table.losses, rel=1e-4)
    for one, other in zip(flat_records[0].workers, records[0].workers, strict=True):
        assert (one.completed_steps, one.loss, one.weight) == (
            other.completed_steps,
            other.loss,
            other.weight,
        )
        assert other.compute_seconds > 0
    assert len(process_ids(host.local_grid)) == 3


@pytest.mark.processes
def test_device_whose_process_is_killed_costs_its_share_of_a_round(
    host: RealHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = strategy_of(1)
    host(over_the_wire(Message(RecordDict(), 7, "query.profile")), 7)  # all run
    killed: list[int] = []
    push = host.local_grid.push_messages

    def kill_when_the_order_is_sent(messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        if killed or messages[0].metadata.message_type != "train":
            return push(messages)
        killed.append(process_ids(host.local_grid)[101])
        os.kill(killed[0], signal.SIGSTOP)  # or it might answer first
        ids = list(push(messages))
        os.kill(killed[0], signal.SIGKILL)
        return ids

    monkeypatch.setattr(host.local_grid, "push_messages", kill_when_the_order_is_sent)
    with captured_log():
        arrays, records = play(strategy, InProcessGrid({10: host}), first_model(), 3)
    failures = [[bool(row.failure) for row in record.workers] for record in records]
    assert failures == [[False, True, False], [False] * 3, [False] * 3]
    assert records[0].workers[1].weight == 0.0
    assert "SIGKILL" in records[0].workers[1].failure
    assert all(np.isfinite(array.numpy()).all() for array in arrays.values())
    assert len(process_ids(host.local_grid)) == 3


@pytest.mark.processes
def test_worker_processes_end_with_the_session() -> None:
    """Through the app, as a session calls it."""
    begin_session()
    before = processes_below()
    config = CONFIG.to_run_config()
    context = Context(1, 7, {"devices": f"2x cpu:{CORE} fast"}, RecordDict(), config)
    message = over_the_wire(Message(RecordDict(), 7, "query.profile"))
    reply = client_app(message, context)
    assert sorted(HostReply.from_content(reply.content).parts) == [0, 1]
    assert len(processes_below() - before) == 2
    end_session()
    assert wait_until(lambda: processes_below() <= before)
