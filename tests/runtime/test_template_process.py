"""Workers are forks of a template process, and otherwise as if each had been started anew."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flower_blsgd.runtime import template_process
from flower_blsgd.runtime.devices import WorkerSpec, usable_cores
from flower_blsgd.runtime.local_grid import LocalGrid
from flower_blsgd.worker import MODULES

from .processes import answer_of, ask, ask_one, is_alive, is_template, order, query, wait_until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only"),
]

APP = """
import os, random, signal, sys
import numpy, torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.query()
def query(message, context):
    said = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "folder": os.getcwd(),
        "arguments": sys.argv[1:],
        "random": random.random(),
        "numpy": float(numpy.random.random()),
        "torch": float(torch.rand(1)),
        "threads": torch.get_num_threads(),
        "native": len(os.listdir("/proc/self/task")),
        "cores": sorted(os.sched_getaffinity(0)),
        "variable": os.environ.get("BLSGD_TEST", ""),
        "path": os.environ.get("BLSGD_TEST_GONE", ""),
        "allocator": os.environ["MALLOC_TRIM_THRESHOLD_"],
        "sigchld": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
        "sigint": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
        "files": len(os.listdir("/proc/self/fd")),
    }
    return Message(RecordDict({"answer": ConfigRecord(said)}), reply_to=message)

@app.train()
def train(message, context):
    import atexit
    atexit.register(print, "at exit", flush=True)
    sys.exit("the last words")
"""


@pytest.fixture(scope="module")
def app_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template")
    (folder / "template_client.py").write_text(APP)
    return folder


def make_grid(app_dir: Path, *workers: WorkerSpec, threads: int = 0) -> LocalGrid:
    return LocalGrid(workers or [WorkerSpec("cpu")], "template_client:app", app_dir, {}, threads)


def test_a_fork_is_as_a_process_that_was_started_anew(
    app_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLSGD_TEST_GONE", "set when the template may have been started")
    template_process.prepare_template(MODULES)  # what our own app loads starts no thread
    monkeypatch.delenv("BLSGD_TEST_GONE")
    monkeypatch.setenv("BLSGD_TEST", "set since")
    monkeypatch.chdir(tmp_path)
    cores = usable_cores()[-1:]
    workers = [WorkerSpec("cpu", cores), WorkerSpec("cpu")]
    with make_grid(app_dir, *workers, threads=2) as grid:
        one, two = (answer_of(reply) for reply in ask(grid, query(100), query(101)))
    assert one["parent"] == two["parent"] != os.getpid()
    assert is_template(one["parent"])
    assert one["folder"] == str(tmp_path)
    assert one["arguments"] == []
    assert one["threads"] == two["threads"] == 2
    assert (one["cores"], two["cores"]) == (list(cores), list(usable_cores()))
    assert (one["variable"], one["path"]) == ("set since", "")
    assert one["sigchld"]
    assert one["sigint"]
    assert one["random"] != two["random"]
    assert one["numpy"] != two["numpy"]
    assert one["torch"] == two["torch"]  # torch begins with the same seed in every process
    assert one["files"] == two["files"]  # none of a fork made before


def test_a_fork_ends_as_any_program_does(app_dir: Path) -> None:
    with make_grid(app_dir) as grid:
        reason = ask_one(grid, order()).error.reason
    assert reason.splitlines()[-1].endswith("died (exit code 1)")
    assert "the last words" in reason
    assert "at exit" in reason


def test_a_template_that_is_killed_takes_its_forks_along_and_is_replaced(app_dir: Path) -> None:
    with make_grid(app_dir) as grid:
        first = answer_of(ask_one(grid, query()))
        os.kill(first["parent"], signal.SIGKILL)
        assert wait_until(lambda: not is_alive(first["pid"]))
        again = answer_of(ask_one(grid, query()))
    assert again["pid"] != first["pid"]
    assert again["parent"] != first["parent"]
    assert is_template(again["parent"])


def test_where_forks_are_not_safe_a_worker_is_started_anew(
    app_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    templates: list[template_process._Template] = []
    monkeypatch.setattr(template_process, "_templates", templates)
    template_process.prepare_template(["no_such_module", "starts_a_thread"])
    with make_grid(app_dir, WorkerSpec("cpu", usable_cores()[:1])) as grid:
        said = answer_of(ask_one(grid, query()))
        assert said["parent"] == os.getpid()
        assert said["cores"] == list(usable_cores()[:1])
        assert "the last words" in ask_one(grid, order()).error.reason
    templates[0].close()


def test_the_template_ends_with_its_program() -> None:
    program = (
        "from flower_blsgd.runtime import template_process as t; t.prepare_template(); "
        "print(t._templates[0]._process.pid)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100
    )
    assert not is_alive(int(done.stdout))


@pytest.mark.parametrize(
    ("threads", "files", "reason"),
    [
        (["1"], ["/dev/null", "/dev/nvidiactl"], ""),
        (["1", "2", "3"], [], "2 threads"),
        (["1"], ["/dev/nvidia-uvm"], "CUDA"),
    ],
)
def test_a_process_with_threads_or_cuda_is_not_forked(
    tmp_path: Path, threads: list[str], files: list[str], reason: str
) -> None:
    for folder in ("task", "fd"):
        (tmp_path / folder).mkdir()
    for thread in threads:
        (tmp_path / "task" / thread).mkdir()
    for number, file in enumerate(files):
        (tmp_path / "fd" / str(number)).symlink_to(file)
    found = template_process.unsafe_to_fork(tmp_path)
    assert reason in found
    assert bool(found) == bool(reason)
