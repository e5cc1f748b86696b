"""Functions by value, and what they refer to as shared memory that is copied on write."""

import gc
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord

from flower_blsgd.errors import UsageError
from flower_blsgd.grids import machine
from flower_blsgd.grids.local_grid import LocalGrid
from flower_blsgd.grids.shared_memory import BufferPool, Payload, ship
from flower_blsgd.grids.worker_spec import WorkerSpec

from .channels import bytes_of, mapped_sizes, two_sides
from .processes import answer_of, ask, ask_one, process_ids, shared_bytes
from .test_grid_arrays import order

COUNT = 40_000
"""Elements: more than 64 KiB of any type."""


def received(payload: Payload) -> Any:
    """Return what a new process gets of a payload."""
    with two_sides() as (here, there):
        sending = threading.Thread(target=here.channel.send, args=[payload])
        sending.start()  # of what no block holds the pipe takes little at once
        content = there.receive()
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


def test_too_little_memory_for_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_bytes", lambda: 1000)
    data = torch.zeros(COUNT)
    with pytest.raises(
        UsageError,
        match=r"sharing the data with the workers needs 160.0 kB, but only 1.0 kB is free",
    ):
        LocalGrid([WorkerSpec("cpu")], "a:b", Path(), {}, setup=data.sum)


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
