"""Functions by value, and what they refer to as shared memory that is copied on write."""

import gc
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord

from flower_blsgd.devices import machine
from flower_blsgd.devices.worker_spec import WorkerSpec
from flower_blsgd.engines.local.grid import LocalGrid
from flower_blsgd.engines.local.shared_memory import BufferPool, Payload
from flower_blsgd.engines.local.shipping import _torch_settings, ship
from flower_blsgd.errors import UsageError

from .channels import bytes_of, mapped_sizes, open_files, two_sides
from .processes import answer_of, ask, ask_one, needs_proc, process_ids, shared_bytes
from .test_grid_arrays import order

COUNT = 40_000
"""Elements: more than 64 KiB of any type."""


def received(payload: Payload) -> Any:
    """Return what a new process gets of a payload."""
    with two_sides() as (here, there):
        sending = threading.Thread(target=here.channel.send, args=[payload])
        sending.start()  # of what no block holds the pipe takes little at once
        content = there.receive().unpack(there.channel)
        sending.join()
        return content


def shipped(content: object) -> Any:
    return received(ship(content, BufferPool()))


OBJECTS: dict[str, Callable[[], Any]] = {
    "float32": lambda: torch.arange(COUNT, dtype=torch.float32),
    "bool": lambda: torch.arange(2 * COUNT) % 3 == 0,
    "float16": lambda: torch.full((COUNT,), 0.5, dtype=torch.float16),
    "bfloat16": lambda: torch.arange(COUNT, dtype=torch.bfloat16),
    "conjugate": lambda: torch.complex(torch.ones(COUNT), torch.ones(COUNT)).conj(),
    "transposed": lambda: torch.arange(COUNT).reshape(200, 200).T,
    "needs grad": lambda: torch.ones(COUNT, requires_grad=True),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(COUNT)),
    "small": lambda: torch.ones(3),
    "sparse": lambda: torch.eye(300).to_sparse(),
    "big-endian array": lambda: np.arange(COUNT, dtype=">i4"),
    "array of texts": lambda: np.array(["ab", "c"] * COUNT),
    "array of objects": lambda: np.array([{"a": 1}, None] * COUNT, object),
    "masked array": lambda: np.ma.masked_equal(np.arange(COUNT), 3),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11
@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
def test_every_tensor_and_array_arrives(make: Callable[[], Any]) -> None:
    sent = make()
    got = shipped({"x": [sent]})["x"][0]
    assert type(got) is type(sent)
    assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
    if isinstance(sent, torch.Tensor):
        assert (got.layout, got.requires_grad) == (sent.layout, sent.requires_grad)
        assert torch.equal(got.detach().to_dense(), sent.detach().to_dense())
    else:
        np.testing.assert_array_equal(got, sent)


def test_one_tensor_stays_one_and_what_a_receiver_writes_nobody_else_sees() -> None:
    tensor, pool = torch.zeros(COUNT), BufferPool()
    payload = ship({"a": tensor, "b": [tensor]}, pool)
    assert bytes_of(pool) == 4 * COUNT
    first, second = (received(payload) for _ in range(2))
    first["a"][:] = 1.0
    assert first["b"][0].sum() == COUNT
    tensor[:] = 5.0  # it was copied when it was shipped
    assert second["a"].sum() == 0.0
    assert received(payload)["a"].sum() == 0.0
    del payload
    gc.collect()
    assert second["a"].sum() == 0.0


@needs_proc
def test_any_number_of_tensors_needs_few_open_files() -> None:
    before = open_files()
    tensors = [torch.full((COUNT,), float(i)) for i in range(100)]
    payload = ship(tensors, BufferPool())
    got = received(payload)
    assert all(map(torch.equal, got, tensors))
    assert open_files() <= before + 10


def test_too_little_memory_for_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_bytes", lambda: 1000)
    data = torch.zeros(COUNT)
    with pytest.raises(
        UsageError,
        match=r"sharing the data with the workers needs 160.0 kB, but only 1.0 kB is free",
    ):
        LocalGrid([WorkerSpec("cpu")], "a:b", Path(), {}, setup=data.sum)


# --- state of modules -----------------------------------------------------------------------

MODULES = {
    "__init__": "import threading\nlock = threading.Lock()\nseen = []",
    "config": """
size = 3
class Noise:
    level = 0
    def double(self):
        return 2 * self.level
""",
    "lazy": "rate = 0",
    "other": "unrelated = 0",
    "code": """
import collections, enum, functools, os, threading
from os import environ
import numpy as np
from . import config, lock, seen
from .config import size

missing, names, table = object(), {}, np.zeros(40_000)
guard = threading.Lock()
Color = enum.Enum("Color", "red")
def made():
    class Made: pass
    return Made
Made = made()
class Child(Made):
    @property
    def noise(self):
        return config.Noise().double()
@functools.lru_cache
def cached():
    return size
def registered(function):
    names[function.__name__] = function
    return function
@registered
def shift(value):
    return value
color = Color.red
def everything(given=missing):
    from . import lazy
    import mine.lazy as same
    seen.append(1)
    return {
        "size": (size, config.size, cached()), "noise": Child().noise, "table": float(table.sum()),
        "rate": (lazy.rate, same.rate), "shift": shift(1), "flag": getattr(everything, "flag", 0),
        "unchanged": (given is missing, isinstance(Child(), Made), color is Color.red),
        "environ": environ is os.environ, "names": list(names), "seen": len(seen),
    }
""",
}
"""A package of the user's."""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Yield a function that imports a module of the package, with what this process knows of it."""
    (tmp_path / "mine").mkdir()
    for name, text in MODULES.items():
        (tmp_path / "mine" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module
    forget_modules()


def forget_modules() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]


def in_new_process(content: object) -> Any:
    """Return what a process gets that has imported none of the modules."""
    payload = ship(content, BufferPool())
    forget_modules()
    return received(payload)


def test_a_module_has_the_values_of_the_program_and_is_else_as_its_import_makes_it(
    mine: Callable[[str], Any],
) -> None:
    code, config, lazy = mine("mine.code"), mine("mine.config"), mine("mine.lazy")
    mine("mine.other").unrelated = 1
    code.seen.append(0)
    code.size = config.size = 7
    config.Noise.level = 50
    code.everything.flag, lazy.rate = True, 9
    code.shift = lambda value: value + 100
    code.table[:] = 1.0
    code.names["added"] = len
    code.new = torch.ones(2)
    got = in_new_process(code.everything)
    assert "mine.other" not in sys.modules
    assert sys.modules["mine.code"].new.sum() == 2
    assert got() == {
        "size": (7, 7, 7),
        "noise": 100,
        "table": 40_000,
        "rate": (9, 9),
        "shift": 101,
        "flag": True,
        "unchanged": (True, True, True),
        "environ": True,
        "names": ["shift", "added"],
        "seen": 2,
    }


def test_what_cannot_be_packed_takes_no_memory_and_an_odd_module_is_nobodys(
    mine: Callable[[str], Any],
) -> None:
    code, pools = mine("mine.code"), [BufferPool(), BufferPool()]
    ship(code.everything, pools[0])
    code.held = np.zeros(10 * COUNT), threading.Lock()
    ship(code.everything, pools[1])
    assert bytes_of(pools[0]) == bytes_of(pools[1]) > 0
    mine("mine.config").__file__ = object()  # as of a module that answers every attribute
    ship(mine("mine.config").Noise, BufferPool())


class Stays:
    def __reduce__(self) -> Any:
        return divmod, (1, 0)


def test_a_value_that_cannot_be_set_is_named(mine: Callable[[str], Any]) -> None:
    mine("mine.config").size = Stays()
    with pytest.raises(ImportError, match=r"mine.config.size of the program .*ZeroDivisionError"):
        in_new_process(mine("mine.config").Noise)


@pytest.mark.parametrize("newer", [False, True])
def test_settings_of_torch_are_those_of_the_program(newer: bool) -> None:
    def settings() -> list[object]:
        backends = torch.backends
        precision = backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision
        flags = torch.are_deterministic_algorithms_enabled(), backends.cudnn.deterministic
        convolutions = backends.cudnn.conv.fp32_precision
        return [torch.get_default_dtype(), *precision, *flags, convolutions]

    before = _torch_settings()
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    if newer:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.cudnn.conv.fp32_precision = "ieee"
    else:
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.allow_tf32 = False
    payload, there = ship(1, BufferPool()), settings()
    for setting in before:
        setting()
    torch.backends.cudnn.allow_tf32 = True
    if newer:
        torch.backends.cuda.matmul.fp32_precision = "none"
    try:
        assert settings() != there
        received(payload)
        assert settings() == there
    finally:
        for setting in before:
            setting()
        torch.backends.cuda.matmul.fp32_precision = "none"
    assert torch.get_float32_matmul_precision() == "highest"


# --- with processes -------------------------------------------------------------------------


def start(app_dir: Path, setup: Callable[[], object], workers: int = 2) -> LocalGrid:
    return LocalGrid([WorkerSpec("cpu")] * workers, "arrays_client:app", app_dir, {}, setup=setup)


def call(grid: LocalGrid, node_id: int, **values: object) -> ConfigRecord:
    return answer_of(ask_one(grid, order("shipped", None, node_id, **values)))


@pytest.mark.processes
def test_a_large_tensor_is_shared_and_copied_on_write(app_dir: Path) -> None:
    """64 MiB: reading them costs a worker nothing, writing to a quarter costs that."""
    elements = 16 << 20
    data = torch.ones(elements)

    def private_kib() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))

    class Holder:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def answer(self, node_id: int, order: dict[str, object]) -> dict[str, object]:
            float(self.tensor[:1000].sum())  # whatever torch needs for itself
            before = private_kib()
            if order["what"] == "write":
                self.tensor[: elements // 4] = 7.0
            parts = [float(self.tensor[i : i + 4096].sum()) for i in range(0, elements, 4096)]
            return {"sum": sum(parts), "kib": private_kib() - before}

    holder = Holder(data)

    def setup() -> None:
        import types

        module = types.ModuleType("shipped")
        module.call = holder.answer  # type: ignore[attr-defined]
        sys.modules["shipped"] = module

    with start(app_dir, setup) as grid:
        for node_id in (100, 101):
            said = call(grid, node_id, what="read")
            assert said["sum"] == elements
            assert said["kib"] < 8 << 10
        said = call(grid, 100, what="write")
        assert 14 << 10 < said["kib"] < 24 << 10
        assert call(grid, 100, what="read")["sum"] == 2.5 * elements
        assert call(grid, 101, what="read")["sum"] == elements
        assert data.sum() == elements
        assert (64 << 20) in mapped_sizes(process_ids(grid)[100])
        assert shared_bytes(grid) == 0  # it is not for messages


@pytest.mark.processes
def test_setup_is_called_once_in_each_process_and_again_after_a_death(
    app_dir: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"

    def setup() -> None:
        with log.open("a") as file:
            file.write("x")

    with start(app_dir, setup) as grid:
        ask(grid, *[order("look", None, node) for node in (100, 101, 100)])
        assert log.read_text() == "xx"
        ask(grid, order("die"), order("look"), order("look", None, 101))
        assert log.read_text() == "xxx"
