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

from flower_blsgd.grids.machine import usable_cores
from flower_blsgd.grids.pinning import environment, num_threads, pinned
from flower_blsgd.grids.worker_spec import WorkerSpec
from tests.log_capture import captured_log

from .processes import (
    answer_of,
    ask,
    is_alive,
    is_helper,
    make_app,
    make_grid,
    process_ids,
    query,
    report,
    wait_until,
)

CORES = usable_cores()
needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity"
)


@pytest.mark.parametrize(
    ("worker", "threads", "expected"),
    [
        (WorkerSpec("cpu", (0, 1, 2)), 0, 3),
        (WorkerSpec("cpu", (0, 1, 2)), 1, 1),
        (WorkerSpec("cpu", (4,)), 8, 8),
        (WorkerSpec("cpu"), 0, 1),
        (WorkerSpec("cuda:0"), 4, 4),
    ],
)
def test_num_threads(worker: WorkerSpec, threads: int, expected: int) -> None:
    assert num_threads(worker, threads) == expected


@pytest.mark.parametrize(
    ("worker", "threads", "count", "more"),
    [
        (WorkerSpec("cpu", (0, 1)), 0, "2", {"CUDA_VISIBLE_DEVICES": ""}),
        (WorkerSpec("cuda:1"), 3, "3", {}),  # hides nothing: it would be cuda:0 there
    ],
)
def test_environment(worker: WorkerSpec, threads: int, count: str, more: dict[str, str]) -> None:
    assert environment(worker, threads) == {
        "MALLOC_TRIM_THRESHOLD_": "268435456",
        "MALLOC_MMAP_THRESHOLD_": "33554432",
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        **more,
    }


def test_environment_keeps_the_users_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "7")
    assert environment(WorkerSpec("cpu"))["MALLOC_TRIM_THRESHOLD_"] == "7"


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


# --- processes ------------------------------------------------------------------------------

forks = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")


@pytest.fixture(scope="module")
def app_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_app(tmp_path_factory.mktemp("foreign"))


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
    monkeypatch.setattr(sys, "argv", ["program", "argument"])
    monkeypatch.chdir(tmp_path)
    cores = usable_cores()[-1:]
    workers = [WorkerSpec("cpu", cores), WorkerSpec("cpu")]
    with make_grid(app_dir, workers, threads=2) as grid:
        one, two = (answer_of(reply) for reply in ask(grid, query(100), query(101)))
    assert one["parent"] == two["parent"]
    assert is_helper(one["parent"]) if forked else one["parent"] == os.getpid()
    assert one["folder"] == str(tmp_path)
    assert one["arguments"] == []
    assert one["threads"] == two["threads"] == 2
    assert (one["affinity"], two["affinity"]) == (list(cores), list(usable_cores()))
    assert (one["BLSGD_TEST"], one["PYTHONSAFEPATH"]) == ("set since", "not set")
    assert one["ignores_ctrl_c"]
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
