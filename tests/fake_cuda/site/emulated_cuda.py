"""What torch's Python expects of a CUDA build, and the log of copies, waits and kernels."""

import atexit
import collections
import contextlib
import ctypes
import enum
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LIBRARY = ctypes.CDLL(os.environ["FAKE_CUDA_LIB"], mode=ctypes.RTLD_GLOBAL)
for _name in ("fake_total_bytes", "fake_used_bytes", "fake_peak_bytes"):
    getattr(LIBRARY, _name).restype = ctypes.c_int64
LIBRARY.fake_uuid.restype = ctypes.c_char_p

Report = tuple[str, str, int, int, bool, bool, str, int]
"""Kind, what, bytes, card, pinned, blocking, function of the product that caused it, and line."""

_OURS = "flower_blsgd", "clients", "server"
"""Packages whose functions the log names."""


# --- the log


_subscribers: list[Callable[[Report], None]] = []
_rows: collections.Counter[tuple[str, str, int, bool, bool, str]] = collections.Counter()
_row_bytes: collections.Counter[tuple[str, str, int, bool, bool, str]] = collections.Counter()
_written_at = [0.0]


@contextlib.contextmanager
def subscribed(function: Callable[[Report], None]) -> Iterator[None]:
    """Call a function with every report, also of each kernel, inside the block."""
    _subscribers.append(function)
    LIBRARY.fake_report_kernels(1)
    try:
        yield
    finally:
        _subscribers.remove(function)
        LIBRARY.fake_report_kernels(int(bool(_subscribers)))


def _cause() -> tuple[str, int]:
    """Return the innermost function of the product, and its line; ("elsewhere", 0) without one."""
    frame = sys._getframe()
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).split(".")
        if package[0] in _OURS:
            return f"{package[-1]}.{frame.f_code.co_qualname}", frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere", 0


def _report(
    kind: bytes, what: bytes, num_bytes: int, card: int, pinned: int, blocking: int
) -> None:
    where, line = _cause()
    report = (
        kind.decode(),
        what.decode(),
        num_bytes,
        card,
        bool(pinned),
        bool(blocking),
        where,
        line,
    )
    for function in list(_subscribers):
        function(report)
    if "FAKE_CUDA_LOG" in os.environ and report[0] != "kernel":
        row = (*report[:2], LIBRARY.fake_number_in_machine(card), *report[4:7])
        _rows[row] += 1
        _row_bytes[row] += num_bytes
        if time.monotonic() - _written_at[0] > 1:  # a process may be killed at any time
            _written_at[0] = time.monotonic()
            _write_log()


_REPORTER = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64, *[ctypes.c_int] * 3
)(_report)


def _write_log() -> None:
    """Write the log of this process; cards have their numbers in the machine."""
    folder = os.environ.get("FAKE_CUDA_LOG")
    if not folder or not _initialized():
        return
    rows = [[*row, _row_bytes[row], count] for row, count in _rows.copy().items()]
    peaks = {
        LIBRARY.fake_number_in_machine(card): LIBRARY.fake_peak_bytes(card)
        for card in range(LIBRARY.fake_count())
    }
    text = json.dumps({"arguments": sys.argv, "peak_bytes": peaks, "rows": rows})
    unfinished = Path(folder, f"{os.getpid()}.part")
    unfinished.write_text(text)
    unfinished.replace(unfinished.with_suffix(".json"))


def _initialized() -> bool:
    return bool(LIBRARY.fake_is_initialized())


# --- torch.cuda


def _per_card(name: str, otherwise: str, card: int) -> str:
    values = os.environ.get(name, otherwise).split(",")
    number: int = LIBRARY.fake_number_in_machine(card)
    return values[min(number, len(values) - 1)]


class _Uuid:
    """A card's name without "GPU-", as torch prints it."""

    def __init__(self, name: str) -> None:
        self._name = name.partition("-")[2]

    def __str__(self) -> str:
        return self._name


class _Properties:
    """What ``torch.cuda.get_device_properties`` returns."""

    def __init__(self, card: int) -> None:
        self.name = _per_card("FAKE_CUDA_NAMES", "Emulated H100,Emulated RTX 2080 Ti", card)
        major, minor = _per_card("FAKE_CUDA_CAPS", "9.0,7.5", card).split(".")
        self.major, self.minor = int(major), int(minor)
        self.total_memory = LIBRARY.fake_total_bytes(card)
        self.uuid = _Uuid(LIBRARY.fake_uuid(card).decode())
        self.multi_processor_count = 132
        self.warp_size = 32
        self.L2_cache_size = 50 << 20
        self.is_integrated = 0


class _Error(enum.IntEnum):
    success = 0
    invalid_value = 1
    host_memory_already_registered = 712
    host_memory_not_registered = 713


def _page_lock(pointer: int, size: int, _flags: int) -> _Error:
    return _Error(LIBRARY.fake_register_host(ctypes.c_void_p(pointer), ctypes.c_size_t(size)))


def _unlock(pointer: int) -> _Error:
    return _Error(LIBRARY.fake_unregister_host(ctypes.c_void_p(pointer)))


def _memory_info(card: int) -> tuple[int, int]:
    total: int = LIBRARY.fake_total_bytes(card)
    return total - LIBRARY.fake_used_bytes(card), total


def _error_text(error: _Error) -> str:
    return error.name.replace("_", " ")


_CUDART = SimpleNamespace(
    cudaError=_Error,
    cudaGetErrorString=_error_text,
    cudaHostRegister=_page_lock,
    cudaHostUnregister=_unlock,
    cudaMemGetInfo=_memory_info,
)
"""What ``torch.cuda.cudart()`` returns."""


def patch(torch: Any) -> None:
    """Replace what a CPU build of torch lacks; called once, after torch was imported."""
    c, cuda = torch._C, torch.cuda
    LIBRARY.fake_set_reporter(_REPORTER)

    def init() -> None:
        if not LIBRARY.fake_count():
            raise RuntimeError("No CUDA GPUs are available")
        LIBRARY.fake_init()
        generators = []
        for card in range(LIBRARY.fake_count()):
            LIBRARY.fake_want_default_generator(card)
            generators.append(torch.Generator(f"cuda:{card}"))
        cuda.default_generators = tuple(generators)

    # Functions of ctypes have no hash, which torch.compile's tables need.
    def count() -> int:
        return int(LIBRARY.fake_count())

    def exchange(card: int) -> int:
        return int(LIBRARY.fake_exchange(card))

    def reset_peak(card: int) -> None:
        LIBRARY.fake_reset_peak(card)

    def current_device() -> int:
        cuda._lazy_init()
        return int(LIBRARY.fake_current())

    def set_device(card: int) -> None:
        if card >= LIBRARY.fake_count():
            raise torch.AcceleratorError("CUDA error: invalid device ordinal")
        cuda._lazy_init()
        LIBRARY.fake_exchange(card)

    def synchronize() -> None:
        if LIBRARY.fake_synchronize(LIBRARY.fake_current()):
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    def memory_stats(card: int) -> dict[str, Any]:
        used, peak = LIBRARY.fake_used_bytes(card), LIBRARY.fake_peak_bytes(card)
        stats = {"all": {"current": used, "peak": peak}}
        return {"allocated_bytes": stats, "reserved_bytes": stats}

    def leave_quietly() -> None:
        _write_log()
        if _initialized():  # a thread of the last backward pass may still free Python objects
            time.sleep(0.05)

    c._has_cuda = torch.has_cuda = True
    torch.version.cuda = "13.0"
    c._cuda_getDeviceCount = cuda.device_count = count
    c._cuda_init = init
    c._cuda_getDevice = current_device
    c._cuda_setDevice = set_device
    c._cuda_synchronize = synchronize
    c._cuda_isInBadFork = cuda._is_in_bad_fork = lambda: bool(LIBRARY.fake_is_bad_fork())
    c._cuda_getArchFlags = lambda: os.environ.get(
        "FAKE_CUDA_ARCHS", "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"
    )
    c._cuda_memoryStats = memory_stats
    c._cuda_resetPeakMemoryStats = reset_peak
    c._cuda_resetAccumulatedMemoryStats = c._cuda_set_sync_debug_mode = lambda _: None
    c._cuda_emptyCache = c._cuda_ipc_collect = lambda: None
    c._cuda_getCurrentRawStream = lambda _: 0
    c._cuda_isCurrentStreamCapturing = lambda: False
    c._cuda_exchangeDevice = c._cuda_maybeExchangeDevice = exchange
    cuda._exchange_device = cuda._maybe_exchange_device = exchange
    cuda._cudart = _CUDART
    cuda._get_device_properties = _Properties
    cuda.graphs._cuda_isCurrentStreamCapturing = c._cuda_isCurrentStreamCapturing

    # A card has one stream, which torch.Stream represents.
    def stream(device: Any = None) -> Any:
        return torch.accelerator.current_stream(cuda._get_device_index(device, optional=True))

    class Event(torch.Event):  # type: ignore[misc]
        def __new__(cls, enable_timing: bool = False, **_: bool) -> Any:
            return super().__new__(cls, torch.device("cuda"), enable_timing=enable_timing)

    cuda.current_stream = cuda.default_stream = stream
    cuda.Event = Event

    atexit.register(leave_quietly)
    leave = os._exit  # which processes of multiprocessing call, without atexit

    def write_and_leave(code: int) -> None:
        _write_log()
        leave(code)

    os._exit = write_and_leave  # type: ignore[assignment]
