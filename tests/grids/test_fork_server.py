"""Cores, threads and environment of a worker, and the processes that are started for it."""

import contextlib
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from flower_blsgd.devices.machine import OWN_DEVICE, Machine, usable_cores
from flower_blsgd.devices.pinning import THREAD_VARIABLES, environment, pinned
from flower_blsgd.devices.worker_spec import WorkerSpec
from tests.log_capture import captured_log

from .processes import (
    answer_of,
    ask,
    ask_one,
    is_alive,
    is_helper,
    make_grid,
    needs_affinity,
    order,
    process_ids,
    query,
    report,
    wait_until,
)

CORES = usable_cores()


@pytest.mark.parametrize(
    ("worker", "threads", "count"),
    [
        (WorkerSpec("cpu", (0, 1, 2)), 0, "3"),
        (WorkerSpec("cpu", (0, 1, 2)), 1, "1"),
        (WorkerSpec("cpu", (4,)), 8, "8"),
        (WorkerSpec("cpu"), 0, "1"),
        (WorkerSpec("cuda:1"), 3, "3"),
    ],
)
def test_environment(
    monkeypatch: pytest.MonkeyPatch, worker: WorkerSpec, threads: int, count: str
) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "7")  # the user's
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_WAIT_POLICY", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.delenv(name, raising=False)
    # A GPU worker sees all of them: else it would be cuda:0 there.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if worker.device == "cpu" else {}
    assert environment(worker, threads) == {
        "MALLOC_TRIM_THRESHOLD_": "7",
        "MALLOC_MMAP_THRESHOLD_": "33554432",
        **dict.fromkeys(THREAD_VARIABLES, count),
        **hidden,
    }


def test_environment_next_to_other_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    card, one, two = (WorkerSpec("cuda:1"), WorkerSpec("cpu", (0,)), WorkerSpec("cpu", (1,)))
    monkeypatch.setattr("flower_blsgd.devices.pinning.this_machine", lambda: Machine((0, 1, 2, 3)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)

    def added(worker: WorkerSpec, *workers: WorkerSpec, alone: bool = False) -> dict[str, str]:
        return dict(environment(worker, 0, workers, alone).items() - environment(worker).items())

    compiling = "TORCHINDUCTOR_COMPILE_THREADS"
    assert added(one, one, card) == {"OMP_WAIT_POLICY": "PASSIVE", compiling: "2"}
    assert added(one, one, two) == {compiling: "2"}  # waiting threads cost nobody a core
    assert added(card, *[card] * 8) == {compiling: "1"}
    seen = {"CUDA_VISIBLE_DEVICES": "5", OWN_DEVICE: "cuda:1"}
    assert added(card, card, one, alone=True) == {compiling: "2", **seen}
    assert added(one, one, two, alone=True) == {compiling: "2"}
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")  # the user's
    monkeypatch.setenv(compiling, "7")
    assert added(one, one, card) == {"OMP_WAIT_POLICY": "ACTIVE", compiling: "7"}


@pytest.fixture
def other_thread_count() -> int:
    """A number of threads that torch does not have now."""
    return torch.get_num_threads() + 3


@needs_affinity
def test_pinned_and_undone_also_after_an_error(other_thread_count: int) -> None:
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    with (
        contextlib.suppress(RuntimeError),
        pinned(WorkerSpec("cpu", CORES[-1:]), other_thread_count),
    ):
        assert os.sched_getaffinity(0) == {CORES[-1]}
        assert torch.get_num_threads() == other_thread_count
        assert inherited_affinity() == {CORES[-1]}
        raise RuntimeError("in the handler")
    assert os.sched_getaffinity(0) == cores
    assert torch.get_num_threads() == threads


def inherited_affinity() -> set[int]:
    """Return the cores of a thread that starts now."""
    found: list[set[int]] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    return found[0]


def test_pinned_without_affinity(monkeypatch: pytest.MonkeyPatch, other_thread_count: int) -> None:
    """As on macOS: a warning, and the threads still count."""
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    with captured_log() as log, pinned(WorkerSpec("cpu", (0, 1)), other_thread_count):
        assert torch.get_num_threads() == other_thread_count
    assert log.warnings == ["no CPU affinity on this system: cpu is not pinned"]
    with captured_log() as log, pinned(WorkerSpec("cuda:0"), 1):
        assert torch.get_num_threads() == 1
    assert log.lines() == []  # there is nothing to warn of where nothing was asked


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_workers_card_is_the_current_one() -> None:
    for card in ("cuda:1", "cuda:0", "cuda:1"):  # as in Flower's simulation
        with pinned(WorkerSpec(card)):
            assert str(torch.zeros(1, device="cuda").device) == card
            with pinned(WorkerSpec("cpu", CORES[:1])):
                assert torch.cuda.current_device() == torch.device(card).index
        assert torch.cuda.current_device() == 0


# --- processes ------------------------------------------------------------------------------

forks = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")


@forks
@pytest.mark.processes
@pytest.mark.parametrize("forked", [True, False], ids=["forked", "anew"])
def test_a_worker_is_as_a_process_that_was_started_now(
    app_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: bool
) -> None:
    def no_server(fds: object) -> None:
        raise ConnectionRefusedError

    if not forked:
        monkeypatch.setattr(multiprocessing.forkserver, "connect_to_new_process", no_server)
    monkeypatch.setenv("BLSGD_TEST", "set since")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(sys, "argv", ["program", "argument"])
    monkeypatch.chdir(tmp_path)
    cores = usable_cores()[-1:]
    workers = [WorkerSpec("cpu", cores), WorkerSpec("cuda:0")]
    with make_grid(app_dir, workers, threads=2) as grid:
        one, two = (answer_of(reply) for reply in ask(grid, query(100), query(101)))
        answer_of(ask_one(grid, order(100, do="signal")))
    assert one["parent"] == two["parent"]
    assert is_helper(one["parent"]) if forked else one["parent"] == os.getpid()
    assert one["folder"] == str(tmp_path)
    assert one["arguments"] == []
    assert one["threads"] == two["threads"] == 2
    assert (one["affinity"], two["affinity"]) == (list(cores), list(usable_cores()))
    # Numpy's BLAS starts its threads when it is imported: a process that is pinned only then has
    # them anywhere.
    assert set(one["native_affinity"]) <= set(cores)
    assert (one["CUDA_VISIBLE_DEVICES"], two["CUDA_VISIBLE_DEVICES"]) == ("", "0,1")
    assert [said[name] for said in (one, two) for name in THREAD_VARIABLES] == ["2"] * 6
    assert (one["BLSGD_TEST"], one["PYTHONSAFEPATH"]) == ("set since", "not set")
    if forked:  # torch.compile's settings were read in the fork server
        assert one["compile_threads"] == max(1, len(usable_cores()) // 2)
    assert len({*one["random"], *two["random"]}) == 6
    assert one["files"] == two["files"]  # none of a fork made before


@forks
@pytest.mark.processes
def test_a_fork_server_that_is_killed_leaves_its_workers_and_is_replaced(app_dir: Path) -> None:
    with make_grid(app_dir, 2) as grid:
        first = report(grid)
        os.kill(first["parent"], signal.SIGKILL)
        assert wait_until(lambda: not is_alive(first["parent"]))
        assert report(grid)["pid"] == first["pid"]
        second = report(grid, 101)
        assert is_helper(second["parent"])
        os.kill(first["pid"], signal.SIGKILL)
        assert wait_until(lambda: set(process_ids(grid)) == {101})
        assert report(grid)["parent"] == second["parent"]
    assert not process_ids(grid)


SCRIPT = """
import multiprocessing.forkserver, pathlib, sys
from tests.grids.processes import is_helper, make_grid, processes_below, report

print("begins", flush=True)  # and there is no `if __name__ == "__main__"`

def ask_worker():
    with make_grid(pathlib.Path(sys.argv[1])) as grid:
        said = report(grid)
        print(said["arguments"], is_helper(said["parent"]))

def refuse(fds):
    raise OSError("no fork server")

ask_worker()
multiprocessing.forkserver.connect_to_new_process = refuse
ask_worker()
print(*processes_below(helpers=True))
"""


@pytest.mark.processes
def test_a_program_is_not_run_again_in_its_workers_and_leaves_no_process(
    app_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(SCRIPT)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "queue.py").write_text("raise SystemExit('not the standard library')")
    (folder / "foreign_client.py").write_text("raise SystemExit('another app')")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), str(app_dir)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=250,
    )
    *printed, helpers = done.stdout.splitlines()
    assert printed == ["begins", f"[] {sys.platform == 'linux'}", "[] False"]
    assert wait_until(lambda: not any(is_alive(int(pid)) for pid in helpers.split()))
