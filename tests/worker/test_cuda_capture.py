"""The order of the calls that record a graph, on a torch that only writes them down."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flower_blsgd.worker import cuda_capture
from flower_blsgd.worker.cuda_capture import CudaCapture, Gate, gate_of

from .stand_in import small_model


class Calls(list[str]):
    """What was called, in order; `recording` says whether a graph is being recorded."""

    recording = False


class FakeTorch:
    """As much of torch as `CudaCapture` calls."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.default = FakeGenerator("default", calls)
        self.streams = 0
        self.graphs = 0
        self.device = torch.device
        self.cuda = SimpleNamespace(
            Stream=lambda device: self._stream(),
            current_stream=lambda device: FakeStream("current", calls),
            stream=lambda stream: self._scope(f"on {stream.name}"),
            device=lambda device: self._scope(f"device {device}"),
            default_generators=[None, self.default],
            CUDAGraph=self._graph,
            graph=self._recording,
        )

    def Generator(self, device: torch.device) -> "FakeGenerator":  # noqa: N802
        assert device == torch.device("cuda:1")
        return FakeGenerator("own", self.calls)

    def _stream(self) -> "FakeStream":
        self.streams += 1
        return FakeStream(f"side-{self.streams}", self.calls)

    def _graph(self) -> "FakeGraph":
        self.graphs += 1
        return FakeGraph(self.graphs, self.calls)

    @contextlib.contextmanager
    def _scope(self, name: str) -> Iterator[None]:
        self.calls.append(f"enter {name}")
        try:
            yield
        finally:
            self.calls.append(f"leave {name}")

    @contextlib.contextmanager
    def _recording(
        self, graph: "FakeGraph", pool: Any, stream: "FakeStream", capture_error_mode: str
    ) -> Iterator[None]:
        self.calls.append(
            f"record graph-{graph.number} pool={pool} {stream.name} {capture_error_mode} "
            f"default={self.default.state.name}"
        )
        self.calls.recording = True
        yield  # as torch's own does: no finally, an error leaves without putting the stream back
        self.calls.recording = False
        self.calls.append("recorded")


class FakeGenerator:
    def __init__(self, name: str, calls: Calls) -> None:
        self.name, self.calls = name, calls
        self.state = self
        self.seeds: list[int] = []

    def graphsafe_get_state(self) -> "FakeGenerator":
        return self.state

    def graphsafe_set_state(self, state: "FakeGenerator") -> None:
        self.calls.append(f"{self.name} draws from {state.name}")
        self.state = state

    def manual_seed(self, seed: int) -> None:
        self.seeds.append(seed)


class FakeStream:
    def __init__(self, name: str, calls: Calls) -> None:
        self.name, self.calls = name, calls

    def wait_stream(self, other: "FakeStream") -> None:
        self.calls.append(f"{self.name} waits for {other.name}")


class FakeGraph:
    def __init__(self, number: int, calls: Calls) -> None:
        self.number, self.calls = number, calls
        self.generators: list[FakeGenerator] = []

    def register_generator_state(self, generator: FakeGenerator) -> None:
        self.generators.append(generator)

    def pool(self) -> str:
        return f"pool-{self.number}"

    def replay(self) -> None:
        self.calls.append(f"replay graph-{self.number}")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    fake = FakeTorch(Calls())
    monkeypatch.setattr(cuda_capture, "torch", fake)
    return fake


def adamw() -> torch.optim.Optimizer:
    return torch.optim.AdamW(small_model().parameters())


def test_warm_up_is_on_the_stream_that_will_be_recorded(fake: FakeTorch) -> None:
    capture = CudaCapture(torch.device("cuda:1"))
    capture.warm_up(lambda generator: fake.calls.append("step"), 2)
    assert fake.calls == [
        "side-1 waits for current",
        "enter device cuda:1",
        "enter on side-1",
        "step",
        "step",
        "leave on side-1",
        "leave device cuda:1",
        "current waits for side-1",
    ]


def test_recording_draws_from_generators_of_its_own(fake: FakeTorch) -> None:
    optimizer = adamw()
    seen: list[tuple[Any, bool]] = []

    def body(generator: Any) -> None:
        fake.calls.append("step")
        seen.append((generator, optimizer.param_groups[0]["capturable"]))

    recording = CudaCapture(torch.device("cuda:1")).record(body, optimizer)
    assert fake.calls == [
        "default draws from own",
        "side-1 waits for current",
        "enter device cuda:1",
        "enter on side-1",
        "record graph-1 pool=None side-1 thread_local default=own",
        "step",
        "recorded",
        "leave on side-1",
        "leave device cuda:1",
        "current waits for side-1",
        "default draws from default",
    ]
    assert seen == [(recording.augmentation, True)]
    assert not optimizer.param_groups[0]["capturable"]
    assert recording.graph.generators == [recording.augmentation, recording.dropout]
    recording.seed(9)
    recording.replay()
    assert recording.augmentation.seeds == recording.dropout.seeds == [9]
    assert fake.calls[-1] == "replay graph-1"


def test_recordings_share_a_pool_until_it_is_released(fake: FakeTorch) -> None:
    capture = CudaCapture(torch.device("cuda:1"))
    for _ in range(2):
        capture.record(lambda generator: None, adamw())
    capture.release()
    capture.record(lambda generator: None, adamw())
    pools = [call.split()[2] for call in fake.calls if call.startswith("record graph")]
    assert pools == ["pool=None", "pool=pool-1", "pool=None"]


def test_recording_that_fails_puts_all_back(fake: FakeTorch) -> None:
    optimizer = adamw()

    def body(generator: Any) -> None:
        raise RuntimeError("a step reads a number out of a tensor")

    capture = CudaCapture(torch.device("cuda:1"))
    with pytest.raises(RuntimeError, match="reads a number"):
        capture.record(body, optimizer)
    assert fake.calls[-4:] == [
        "leave on side-1",
        "leave device cuda:1",
        "current waits for side-1",
        "default draws from default",
    ]
    assert not optimizer.param_groups[0]["capturable"]


# --- the gate


def soon(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + 5
    while not condition() and time.monotonic() < until:
        time.sleep(0.001)
    return condition()


def test_gate_lets_many_compute_and_one_record() -> None:
    gate, inside, together = Gate(), list[str](), threading.Barrier(2)
    stop = threading.Event()

    def compute() -> None:
        with gate.computing():
            together.wait(5)  # both are inside
            inside.append("computes")
            stop.wait(5)
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
        thread.join(5)
        assert not thread.is_alive()
    assert inside == ["late"]


def test_gate_opens_when_what_is_inside_fails() -> None:
    gate = Gate()
    for enter in (gate.computing, gate.recording, gate.computing):
        with pytest.raises(RuntimeError), enter():
            raise RuntimeError
    assert (gate._computing, gate._recording, gate._waiting) == (0, False, 0)


def test_gate_is_one_for_all_gpus_of_a_process() -> None:
    assert gate_of(torch.device("cuda:0")) is gate_of(torch.device("cuda:1"))
    assert gate_of(torch.device("cpu")) is not gate_of(torch.device("cuda"))
