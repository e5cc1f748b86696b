"""The operators and kernels of an order's steps, from torch's profiler, on Unix time.

Nothing here imports torch at module level: a ClientApp imports this before it knows its device.
"""

import contextlib
import json
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..protocol import Operators
from ..protocol.tracing import LONGEST_NAME, MAX_LANES, MAX_OPERATORS

if TYPE_CHECKING:
    import torch

_ONE_AT_A_TIME = threading.Lock()
"""torch has one profiler per process, and workers that share one may run side by side."""

_OF_THREADS = ("cpu_op", "user_annotation")
_OF_DEVICES = ("kernel", "gpu_memcpy", "gpu_memset")
_OF_RUNTIMES = ("_runtime", "_driver")  # cuda_runtime, xpu_runtime, cuda_driver


class OperatorProfiler:
    """Records what torch does between its making and `stop`, on the calling thread and a device.

    It never raises: where torch's profiler does not work, `note` says why.

    Parameters
    ----------
    device : str
        Such as ``"cpu"`` or ``"cuda:1"``.

    Attributes
    ----------
    note : str
        Why there are no operators; empty if there are.
    """

    def __init__(self, device: str) -> None:
        self.note = ""
        self._profiler: torch.profiler.profile | None = None
        if not _ONE_AT_A_TIME.acquire(blocking=False):
            self.note = "no operators: another worker of this process is being profiled"
            return
        self._device = device
        try:
            with _while_nobody_records(device):
                self._profiler = _started(device)
        except Exception as error:
            self._give_up("start", error)

    def stop(self) -> Operators | None:
        """Return the operators; None if there are none. May be called twice."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return None
        try:
            with _while_nobody_records(self._device):  # it waits for the whole device
                profiler.stop()
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "operators.json"
                profiler.export_chrome_trace(str(file))
                # Unix time in microseconds with three decimals is more than a float can hold.
                told = json.loads(file.read_text(), parse_float=Decimal)
            operators = operators_in(told, threading.get_native_id())
        except Exception as error:
            self._give_up("stop", error)
            return None
        _ONE_AT_A_TIME.release()
        return operators

    def _give_up(self, what: str, error: Exception) -> None:
        told = (str(error) or type(error).__name__).splitlines()[0]
        self.note = f"no operators: torch's profiler did not {what}: {told}"[:LONGEST_NAME]
        _ONE_AT_A_TIME.release()


def _started(device: str) -> "torch.profiler.profile":
    # Kineto writes two lines to stderr per use, unless it is told not to before the first.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if device.startswith("cuda"):
        # What torch does by itself for graphs of its compiler: beside CUDA graphs CUPTI must not be
        # torn down and begun anew, which crashed up to CUDA 12.5.
        os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
        os.environ.setdefault("TEARDOWN_CUPTI", "0")
    from torch.profiler import ProfilerActivity, profile, supported_activities

    wanted = {"CPU", device.partition(":")[0].upper()}  # such as CUDA or XPU
    activities = [a for a in supported_activities() if a.name in wanted]  # type: ignore[no-untyped-call]
    profiler = profile(activities=activities or [ProfilerActivity.CPU])
    profiler.start()
    return profiler


@contextlib.contextmanager
def _while_nobody_records(device: str) -> Iterator[None]:
    """Let no other thread of this process record a CUDA graph meanwhile."""
    if not device.startswith("cuda"):
        yield
        return
    from .gate import gate_of

    with gate_of(device).computing():
        yield


def operators_in(trace: Mapping[str, Any], thread: int) -> Operators:
    """Return the operators in torch's Chrome trace.

    Kernels that another thread of this process launched, for a worker that shares it, are left
    out.

    Parameters
    ----------
    trace : mapping
        What ``torch.profiler.profile.export_chrome_trace`` wrote.
    thread : int
        The thread that did the steps, whose lane comes first.
    """
    events = _of_this_worker([event for event in trace["traceEvents"] if event.get("ph") == "X"])
    base = int(trace.get("baseTimeNanoseconds", 0))
    lanes: dict[str, int] = {_lane(thread, thread): 0}
    names: dict[str, int] = {}
    rows = []
    for event in events:
        where = _device_lane(event) if event["cat"] in _OF_DEVICES else _lane(event["tid"], thread)
        start = base + round(event["ts"] * 1000)
        rows.append((where, str(event["name"])[:LONGEST_NAME], start, round(event["dur"] * 1000)))
    rows.sort(key=lambda row: row[2])
    kept = [
        (lanes.setdefault(where, len(lanes)), names.setdefault(name, len(names)), start, duration)
        for where, name, start, duration in rows[:MAX_OPERATORS]
        if where in lanes or len(lanes) < MAX_LANES
    ]
    return Operators(list(lanes), list(names), kept, len(rows) - len(kept))


def _of_this_worker(spans: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    # Operators are recorded on the threads of the one who profiles only, all else on all threads.
    threads = {event["tid"] for event in spans if event.get("cat") in _OF_THREADS}
    calls = [event for event in spans if str(event.get("cat")).endswith(_OF_RUNTIMES)]
    ours = [event for event in calls if event["tid"] in threads]
    foreign = {_correlation(event) for event in calls if event["tid"] not in threads}
    if not ours:  # threads that cannot be told apart
        foreign = set()
    return [
        *(event for event in spans if event.get("cat") in _OF_THREADS),
        *ours,
        *(e for e in spans if e.get("cat") in _OF_DEVICES and _correlation(e) not in foreign),
    ]


def _correlation(event: Mapping[str, Any]) -> object:
    """Return what a kernel and the call that launched it have in common."""
    return event.get("args", {}).get("correlation")


def _lane(thread: int, main: int) -> str:
    return "operators" if thread == main else f"operators, thread {thread}"


def _device_lane(event: Mapping[str, Any]) -> str:
    return f"device {event['pid']}, stream {event['tid']}"
