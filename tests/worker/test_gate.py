"""The gate between recordings and everything else that a process does on a GPU."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import RecordDict
from torch import Tensor

from flower_blsgd import LocalSGD
from flower_blsgd.errors import UsageError
from flower_blsgd.worker import calibration, local_sgd, replica_sgd
from flower_blsgd.worker import gate as gate_module
from flower_blsgd.worker.gate import Gate, gate_of
from flower_blsgd.worker.local_sgd import cross_entropy
from flower_blsgd.worker.model_transfer import ModelTransfer

from .interrupting import interrupt
from .stand_in import StandInCapture, record_on_cpu, small_model
from .test_cuda_graph import NUM_SAMPLES, SIZE, data, order_of

LONG = 60.0


def soon(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + LONG
    while not condition() and time.monotonic() < until:
        time.sleep(0.001)
    return condition()


def test_gate_lets_many_compute_and_one_record() -> None:
    gate, inside, together = Gate(), list[str](), threading.Barrier(2)
    stop = threading.Event()

    def compute() -> None:
        with gate.computing():
            together.wait(LONG)  # both are inside
            inside.append("computes")
            stop.wait(LONG)
            inside.remove("computes")

    def record() -> None:
        with gate.recording():
            assert inside == []
            inside.append("records")
            time.sleep(0.02)
            inside.remove("records")

    def pass_through() -> None:
        with gate.computing():
            inside.append("late")

    computing = [threading.Thread(target=compute) for _ in range(2)]
    for thread in computing:
        thread.start()
    assert soon(lambda: inside == ["computes"] * 2)
    recorder = threading.Thread(target=record)
    recorder.start()
    assert soon(lambda: gate._waiting == 1)
    late = threading.Thread(target=pass_through)
    late.start()
    time.sleep(0.02)
    assert late.is_alive()  # who came after the recorder waits for it
    stop.set()
    for thread in (*computing, recorder, late):
        thread.join(LONG)
        assert not thread.is_alive()
    assert inside == ["late"]


def test_gate_opens_when_what_is_inside_fails() -> None:
    gate = Gate()
    for enter in (gate.computing, gate.recording, gate.computing):
        with pytest.raises(RuntimeError), enter():
            raise RuntimeError
    assert (gate._computing, gate._recording, gate._waiting) == (0, False, 0)


def test_gate_is_one_for_all_gpus_of_a_process() -> None:
    assert gate_of(torch.device("cuda:0")) is gate_of(torch.device("cuda:1")) is gate_of("cuda:2")
    assert gate_of(torch.device("cpu")) is not gate_of(torch.device("cuda"))


def test_gate_of_cpus_is_open() -> None:
    gate = gate_of("cpu")
    with gate.recording(), gate.computing(), gate.recording():
        assert (gate._computing, gate._recording, gate._waiting) == (0, False, 0)


@pytest.mark.parametrize("way", ["computing", "recording"])
def test_who_waits_at_the_gate_can_be_interrupted(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(gate_module, "LOOK_SECONDS", 0.01)
    gate, ended, begun = Gate(), list[str](), threading.Event()

    def wait() -> None:
        try:
            begun.set()
            with getattr(gate, way)():
                ended.append("passed")
        except InterruptedError:
            ended.append("interrupted")

    thread = threading.Thread(target=wait, daemon=True)
    with gate.recording():
        thread.start()
        assert begun.wait(LONG)
        time.sleep(0.05)
        interrupt(thread)
        assert soon(lambda: ended == ["interrupted"])
    thread.join(LONG)
    assert (gate._computing, gate._recording, gate._waiting) == (0, False, 0)


# --- what passes it


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Give CPUs a gate as GPUs have it."""
    gate = Gate()
    for module in (local_sgd, calibration, replica_sgd):
        monkeypatch.setattr(module, "gate_of", lambda device: gate)
    return gate


class Noting:
    """Notes who computes and who records when something is called."""

    def __init__(self, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate, self.monkeypatch = gate, monkeypatch
        self.seen: list[tuple[object, int, bool]] = []

    def note(self, what: object) -> None:
        self.seen.append((what, self.gate._computing, self.gate._recording))

    def watch(self, holder: Any, name: str) -> None:
        call = getattr(holder, name)

        def noted(*arguments: Any, **settings: Any) -> Any:
            self.note(name)
            return call(*arguments, **settings)

        self.monkeypatch.setattr(holder, name, noted)


def test_an_order_comes_to_the_device_and_back_while_nobody_records(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    noting = Noting(gate, monkeypatch)
    sgd = LocalSGD(small_model(), data())
    noting.watch(ModelTransfer, "load")
    noting.watch(local_sgd, "load_momentum")
    noting.watch(sgd, "_indices")
    noting.watch(sgd, "_timed")
    noting.watch(local_sgd, "momentum_record")
    noting.watch(ModelTransfer, "record")
    sgd.run(order_of(1), RecordDict())
    assert noting.seen == [
        (name, 1, False)
        for name in ("load", "load_momentum", "_indices", "_timed", "momentum_record", "record")
    ]
    assert gate._computing == 0


def test_steps_are_recorded_alone(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = StandInCapture()
    record_on_cpu(monkeypatch, capture)
    noting = Noting(gate, monkeypatch)
    for name in ("warm_up", "check", "record"):
        noting.watch(capture, name)
    LocalSGD(small_model(), data()).run(order_of(1))
    assert set(noting.seen) == {(name, 0, True) for name in ("warm_up", "check", "record")}


def test_smaller_batches_are_tried_alone(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    noting = Noting(gate, monkeypatch)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        noting.note(len(targets))
        if len(targets) > 4:
            raise torch.OutOfMemoryError
        return cross_entropy(outputs, targets)

    with pytest.raises(UsageError):
        LocalSGD(small_model(), data(), loss).run(order_of(1, batch_size=12))
    assert noting.seen == [(12, 1, False), (6, 0, True), (3, 0, True)]
    assert (gate._computing, gate._recording) == (0, False)


def test_calibration_reads_the_model_while_nobody_records(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    noting = Noting(gate, monkeypatch)
    noting.watch(calibration, "state_record")
    calibration.seconds_per_step(LocalSGD(small_model(), data()), SIZE, NUM_SAMPLES, 0.001)
    assert noting.seen == [("state_record", 1, False)]


def test_models_that_were_computed_together_come_back_while_nobody_records(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    noting = Noting(gate, monkeypatch)
    for name in ("stack_models", "unstack_models", "unstack_momentum"):
        noting.watch(replica_sgd, name)
    orders = [order_of(n, momentum_policy="reset") for n in (1, 2)]
    replica_sgd.ReplicaSGD(small_model(), data()).run([(order, None) for order in orders])
    assert noting.seen == [
        (name, 1, False) for name in ("stack_models", "unstack_models", "unstack_momentum")
    ]
    assert gate._computing == 0
