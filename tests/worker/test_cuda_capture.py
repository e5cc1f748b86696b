"""The order of the calls that record a graph, on a torch that only writes them down."""

import contextlib
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flower_blsgd.worker import cuda_capture
from flower_blsgd.worker.cuda_capture import CudaCapture

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
        self.sync_debug_mode: int | str = 1
        self.device = torch.device
        self.cuda = SimpleNamespace(
            Stream=lambda device: self._stream(),
            current_stream=lambda device: FakeStream("current", calls),
            stream=lambda stream: self._scope(f"on {stream.name}"),
            device=lambda device: self._scope(f"device {device}"),
            default_generators=[None, self.default],
            CUDAGraph=self._graph,
            graph=self._recording,
            get_sync_debug_mode=lambda: self.sync_debug_mode,
            set_sync_debug_mode=self._set_sync_debug_mode,
        )

    def Generator(self, device: torch.device) -> "FakeGenerator":  # noqa: N802
        assert device == torch.device("cuda:1")
        return FakeGenerator("own", self.calls)

    def _set_sync_debug_mode(self, mode: int | str) -> None:
        self.calls.append(f"waiting for the device is now {mode}")
        self.sync_debug_mode = mode
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

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
    monkeypatch.setattr(cuda_capture, "_STREAMS", {})
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


def test_step_that_is_checked_may_not_wait_for_the_device(fake: FakeTorch) -> None:
    capture = CudaCapture(torch.device("cuda:1"))
    capture.check(lambda generator: fake.calls.append("step"))
    assert fake.calls == [
        "side-1 waits for current",
        "enter device cuda:1",
        "enter on side-1",
        "waiting for the device is now error",
        "step",
        "waiting for the device is now 1",
        "leave on side-1",
        "leave device cuda:1",
        "current waits for side-1",
    ]


def test_step_that_waits_for_the_device_puts_all_back(fake: FakeTorch) -> None:
    def body(generator: Any) -> None:
        raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(RuntimeError, match="called a synchronizing"):
        CudaCapture(torch.device("cuda:1")).check(body)
    assert fake.calls[-4:] == [
        "waiting for the device is now 1",
        "leave on side-1",
        "leave device cuda:1",
        "current waits for side-1",
    ]


def test_all_workers_of_a_process_record_on_one_stream_of_a_device(fake: FakeTorch) -> None:
    devices = [torch.device("cuda:1")] * 40 + [torch.device("cuda:0")] * 40
    streams: list[Any] = [CudaCapture(device)._stream for device in devices]
    assert [stream.name for stream in streams] == ["side-1"] * 40 + ["side-2"] * 40


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
