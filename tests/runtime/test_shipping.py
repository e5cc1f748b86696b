"""Functions by value, and what they refer to as shared memory that is copied on write."""

import gc
import io
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord

from flower_blsgd.errors import UsageError
from flower_blsgd.runtime import memory
from flower_blsgd.runtime.devices import WorkerSpec
from flower_blsgd.runtime.flower_internals import NOT_LOADED
from flower_blsgd.runtime.local_grid import LocalGrid
from flower_blsgd.runtime.shared_arrays import unpack
from flower_blsgd.runtime.shared_pool import Pool
from flower_blsgd.runtime.shipping import ship

from .channels import mapped_sizes, open_files
from .processes import answer_of, ask, ask_one
from .test_grid_arrays import order

COUNT = 40_000
"""Elements: more than 64 KiB of any type."""


def shipped(content: object) -> object:
    pool = Pool()
    parcel = ship(content, pool)
    return unpack(parcel.payload, parcel.blocks, True)


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "float32": lambda: torch.arange(COUNT, dtype=torch.float32),
    "bool": lambda: torch.arange(2 * COUNT) % 3 == 0,
    "float16": lambda: torch.full((COUNT,), 0.5, dtype=torch.float16),
    "int64 of two dimensions": lambda: torch.arange(COUNT).reshape(100, -1),
    "complex": lambda: torch.complex(torch.ones(COUNT), torch.arange(COUNT, dtype=torch.float32)),
    "bfloat16": lambda: torch.arange(COUNT, dtype=torch.bfloat16),
    "conjugate": lambda: torch.complex(torch.ones(COUNT), torch.ones(COUNT)).conj(),
    "negative view": lambda: torch.complex(torch.ones(COUNT), torch.ones(COUNT)).conj().imag,
    "transposed": lambda: torch.arange(COUNT).reshape(200, 200).T,
    "strided": lambda: torch.arange(3 * COUNT)[::3],
    "expanded": lambda: torch.arange(200).expand(200, 200),
    "needs grad": lambda: torch.ones(COUNT, requires_grad=True),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(COUNT)),
    "small": lambda: torch.ones(3),
    "empty": lambda: torch.ones(0, 5),
    "sparse": lambda: torch.eye(300).to_sparse(),
}


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
def test_every_tensor_arrives(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    got = shipped({"x": [tensor]})["x"][0]  # type: ignore[index]
    assert type(got) is type(tensor)
    assert (got.dtype, got.shape, got.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert got.requires_grad == tensor.requires_grad
    if tensor.layout is torch.strided:
        assert torch.equal(
            got.detach().float() if got.dtype.itemsize == 1 else got.detach(),
            tensor.detach().float() if got.dtype.itemsize == 1 else tensor.detach(),
        )
    else:
        assert torch.equal(got.to_dense(), tensor.to_dense())


ARRAYS: dict[str, Callable[[], np.ndarray]] = {
    "float64": lambda: np.arange(float(COUNT)),
    "big-endian": lambda: np.arange(COUNT, dtype=">i4"),
    "times": lambda: np.arange(COUNT).astype("datetime64[ns]"),
    "texts": lambda: np.array(["ab", "c"] * COUNT),
    "named fields": lambda: np.ones(COUNT, [("a", "<i4"), ("b", "<f8")]),
    "objects": lambda: np.array([{"a": 1}, None] * COUNT, object),
    "fortran": lambda: np.asfortranarray(np.arange(COUNT).reshape(200, 200)),
    "reversed": lambda: np.arange(COUNT)[::-1],
    "read-only": lambda: np.broadcast_to(np.arange(200.0), (200, 200)),
    "masked": lambda: np.ma.masked_equal(np.arange(COUNT), 3),
}


@pytest.mark.parametrize("make", ARRAYS.values(), ids=ARRAYS)
def test_every_array_arrives(make: Callable[[], np.ndarray]) -> None:
    array = make()
    got = shipped([array])[0]  # type: ignore[index]
    assert type(got) is type(array)
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(got, array)


def test_memory_maps_arrive_as_arrays(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "file", np.float32, "w+", shape=(COUNT,))
    mapped[:] = 3
    got = shipped(mapped)
    assert type(got) is np.ndarray
    assert got.sum() == 3 * COUNT


def test_arrays_of_the_same_place_and_shape_that_differ() -> None:
    """A square array and its transpose; every second element and the first half."""
    square = np.arange(COUNT).reshape(200, 200)
    long = np.arange(2 * COUNT)
    content = [square, square.T, long[::2], long[:COUNT]]
    for got, sent in zip(shipped(content), content, strict=True):  # type: ignore[call-overload]
        np.testing.assert_array_equal(got, sent)


def test_a_tensor_and_an_array_of_the_same_memory() -> None:
    array = np.arange(COUNT)
    got = shipped([array, torch.from_numpy(array), array])
    assert [type(one) for one in got] == [np.ndarray, torch.Tensor, np.ndarray]  # type: ignore[attr-defined]


class Gives:
    """Makes a new array each time it is pickled."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __getstate__(self) -> np.ndarray:
        return np.full(COUNT, self.value)

    def __setstate__(self, array: np.ndarray) -> None:
        self.value = int(array[0]) if array.min() == array.max() else -1


def test_arrays_that_live_only_while_they_are_pickled() -> None:
    """Each may get the address of the one before."""
    got = shipped([Gives(value) for value in range(8)])
    assert [one.value for one in got] == list(range(8))  # type: ignore[attr-defined]


def test_one_tensor_stays_one() -> None:
    tensor = torch.zeros(COUNT)
    pool = Pool()
    parcel = ship({"a": tensor, "b": [tensor]}, pool)
    assert pool.num_bytes == 4 * COUNT
    got = unpack(parcel.payload, parcel.blocks, True)
    got["a"][0] = 1.0
    assert got["b"][0][0] == 1.0


def test_what_one_receiver_writes_nobody_else_sees() -> None:
    tensor = torch.zeros(COUNT)
    parcel = ship(tensor, Pool())
    first, second = (unpack(parcel.payload, parcel.blocks, True) for _ in range(2))
    first[:] = 1.0
    assert second.sum() == 0.0
    assert tensor.sum() == 0.0
    assert unpack(parcel.payload, parcel.blocks, True).sum() == 0.0
    assert first.sum() == COUNT
    tensor[:] = 5.0  # it was copied when it was shipped
    assert second.sum() == 0.0


def test_shipped_memory_outlives_the_parcel() -> None:
    parcel = ship(torch.full((COUNT,), 2.0), Pool())
    got = unpack(parcel.payload, parcel.blocks, True)[10:]
    del parcel
    gc.collect()
    assert got.sum() == 2.0 * (COUNT - 10)


def test_too_little_memory_for_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: 1000)
    data = torch.zeros(COUNT)
    with pytest.raises(
        UsageError,
        match=r"sharing the data with the workers needs 160.0 kB, but only 1.0 kB is free",
    ):
        LocalGrid([WorkerSpec("cpu")], "a:b", Path(), {}, setup=data.sum)


# --- with processes -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def app_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shipping")
    shutil.copy(Path(__file__).with_name("arrays_client.py"), folder)
    return folder


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
            total = float(self.tensor.double().mean() if order["what"] == "mean" else 0.0)
            first = float(self.tensor[0])
            ends = [float(self.tensor[i : i + 4096].sum()) for i in range(0, elements, 4096)]
            return {"mean": total, "first": first, "sum": sum(ends), "kib": private_kib() - before}

    holder = Holder(data)

    def setup() -> None:
        import sys
        import types

        module = types.ModuleType("shipped")
        module.call = holder.answer  # type: ignore[attr-defined]
        sys.modules["shipped"] = module

    with start(app_dir, setup) as grid:
        for node_id in (100, 101):
            said = call(grid, node_id, what="read")
            assert (said["first"], said["sum"]) == (1.0, float(elements))
            assert said["kib"] < 8 << 10
        said = call(grid, 100, what="write")
        assert said["first"] == 7.0
        assert 14 << 10 < said["kib"] < 24 << 10
        assert call(grid, 100, what="read")["sum"] == 2.5 * elements
        assert call(grid, 101, what="read")["sum"] == elements
        assert data.sum() == elements
        assert (64 << 20) in mapped_sizes(grid.process_ids[100])
        assert grid.shared_bytes == 0  # it is not for messages


@pytest.mark.processes
def test_setup_that_raises_is_told_with_every_message(app_dir: Path) -> None:
    def setup() -> None:
        raise LookupError("the data is not there")

    with start(app_dir, setup) as grid:
        for node_id in (100, 101, 100):
            reply = ask_one(grid, order("look", None, node_id))
            assert reply.error.code == NOT_LOADED
            assert "Traceback" in reply.error.reason
            assert "LookupError: the data is not there" in reply.error.reason
        assert list(grid.get_node_ids()) == [100, 101]


@pytest.mark.processes
def test_setup_that_cannot_be_read_is_told_with_every_message(app_dir: Path) -> None:
    class Broken:
        def __call__(self) -> None:
            pass

        def __reduce__(self) -> object:
            return (lambda: 1 / 0), ()

    with start(app_dir, Broken(), 1) as grid:
        for _ in range(2):
            reply = ask_one(grid, order("look"))
            assert reply.error.code == NOT_LOADED
            assert "ZeroDivisionError" in reply.error.reason


@pytest.mark.parametrize(
    "held", [threading.Lock(), io.FileIO(0, closefd=False)], ids=["lock", "file"]
)
def test_setup_that_cannot_travel_is_refused_before_any_process(
    held: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr(subprocess, "Popen", started.append)
    files = open_files()
    with pytest.raises(TypeError, match="cannot pickle"):
        LocalGrid([WorkerSpec("cpu")], "a:b", Path(), {}, setup=lambda: held)
    assert started == []
    assert open_files() == files


SCRIPT = """
    import sys
    import types
    from pathlib import Path

    import torch

    from flower_blsgd.runtime.devices import WorkerSpec
    from flower_blsgd.runtime.local_grid import LocalGrid
    from tests.runtime.processes import answer_of, ask
    from tests.runtime.test_grid_arrays import order

    WEIGHTS = torch.arange(100_000.0)
    FACTOR = 3

    class Model:
        def __init__(self, factor):
            self.factor = factor

        def total(self):
            return helper(self.factor)

    def helper(factor):
        return factor * float(WEIGHTS.double().sum())

    def call(node_id, order):
        return {"total": Model(FACTOR).total(), "main": __name__}

    def setup():
        module = types.ModuleType("shipped")
        module.call = call
        sys.modules["shipped"] = module

    if __name__ != "__main__":
        raise SystemExit("a worker imported the script")

    workers = [WorkerSpec("cpu")] * 2
    with LocalGrid(workers, "arrays_client:app", Path(sys.argv[1]), {}, setup=setup) as grid:
        for reply in ask(grid, order("shipped", None, 100), order("shipped", None, 101)):
            print(answer_of(reply)["total"], answer_of(reply)["main"])
"""


@pytest.mark.processes
def test_functions_and_classes_of_a_script(app_dir: Path, tmp_path: Path) -> None:
    script = tmp_path / "my_script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run(
        [sys.executable, str(script), str(app_dir)],
        check=False,
        capture_output=True,
        text=True,
        timeout=250,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    total = 3.0 * 99_999 * 100_000 / 2
    assert done.stdout.splitlines() == [f"{total} __main__"] * 2
    assert done.stderr == ""


@pytest.mark.processes
def test_setup_is_called_once_in_each_process_and_again_after_a_death(
    app_dir: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"

    def setup() -> None:
        with log.open("a") as file:
            file.write("x")

    workers = [WorkerSpec("cpu")] * 2
    with LocalGrid(workers, "arrays_client:app", app_dir, {}, 0, 1, setup=setup) as grid:
        ask(grid, *[order("look", None, node) for node in (100, 101, 100)])
        assert log.read_text() == "x"
        ask(grid, order("die"), order("look"), order("look", None, 101))
        assert log.read_text() == "xx"
