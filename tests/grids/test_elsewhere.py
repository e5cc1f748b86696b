"""Workers whose process has another interpreter, as of an environment with another torch."""

import json
import os
import signal
import site
import sys
import threading
import uuid
import venv
from importlib.metadata import version
from multiprocessing import Pipe
from pathlib import Path

import pytest

import flower_blsgd
from flower_blsgd.devices.machine import usable_cores
from flower_blsgd.devices.worker_spec import cores_note, parse_workers
from flower_blsgd.engines.local.elsewhere import OtherProcess

from ..faults.kill_server import printed, running
from ..refusal import refusal
from .processes import living, needs_proc, wait_until

ROOT = Path(__file__).parents[2]
FIRST, LAST = min(usable_cores()), max(usable_cores())
OWN = {
    "Python": sys.version.split()[0],
    **{name: version(name) for name in ("flower-blsgd", "flwr", "torch", "numpy")},
}


@pytest.fixture
def other(tmp_path: Path) -> str:
    """Return the interpreter of another environment with the same packages."""
    venv.create(tmp_path / "venv", symlinks=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (packages / "all.pth").write_text("\n".join([str(ROOT), *lines]))
    return str(tmp_path / "venv" / "bin" / "python")


def made(folder: Path, accelerators: dict[str, str] | None = None, **versions: str) -> str:
    """Return a program that answers as an interpreter with these versions and accelerators."""
    answer = {"versions": OWN | versions, "accelerators": accelerators or {}}
    program = folder / "python"
    program.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.processes
def test_another_interpreter_trains_the_same_model_bit_by_bit(other: str, tmp_path: Path) -> None:
    models = []
    for name, python in (("here", ""), ("there", f" python={other}")):
        flower_blsgd.train(
            "digits",
            workers=f"1x cpu:{FIRST} fast steps=4; 1x cpu:{LAST} slow steps=2{python}",
            epochs=1,
            local_steps_fast="4",
            out=str(tmp_path / name),
        )
        models.append((tmp_path / name / "model.safetensors").read_bytes())
    assert models[0] == models[1]


@needs_proc
@pytest.mark.processes
def test_its_process_ends_with_the_server(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv("BLSGD_ELSEWHERE_TEST", mark)
    workers = f"1x cpu:{FIRST} fast; 1x cpu:{LAST} slow python={other}"
    with running(tmp_path, "-c", "digits", "--workers", workers, "-s", "epochs=1000000") as server:
        rounds = tmp_path / "runs" / "latest" / "rounds.jsonl"
        assert wait_until(lambda: rounds.exists() and rounds.read_text()), printed(tmp_path)
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
        mine = f"BLSGD_ELSEWHERE_TEST={mark}"
        assert wait_until(lambda: not living(mine)), living(mine)


def test_what_cannot_be_pickled_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: started.append(None))
    control, theirs = Pipe()
    with control, theirs, pytest.raises(TypeError, match="pickle"):
        OtherProcess(sys.executable, {}, (print, (control, threading.Lock())), None)
    assert not started


def test_what_cannot_be_used_is_refused(tmp_path: Path) -> None:
    def line(python: str, device: str = "cpu") -> str:
        return refusal(parse_workers, f"1x cpu fast; 1x {device} slow python={python}")

    missing = tmp_path / "missing"
    assert line(str(missing)).startswith(f"workers: python={missing} cannot be started")
    false = tmp_path / "false"
    false.write_text("#!/bin/sh\necho 'No module named torch' >&2\nexit 1\n")
    false.chmod(0o755)
    assert line(str(false)).startswith(f"workers: python={false}: No module named torch; it must")
    for package, number in (("flower-blsgd", "0.0.9"), ("flwr", "1.40.0")):
        folder = tmp_path / package
        folder.mkdir()
        assert f"has {package} {number}, and this one {OWN[package]}" in line(
            made(folder, **{package: number})
        )


def test_its_devices_are_those_of_its_torch(tmp_path: Path) -> None:
    python = made(tmp_path, {"xpu:0": "", "xpu:1": "xpu:1 is too old"}, torch="9.9.9+xpu")
    workers = parse_workers(f"1x cpu fast; 1x xpu:0 python={python}")
    assert [worker.device for worker in workers] == ["cpu", "xpu:0"]
    assert f"{python} has torch 9.9.9+xpu (here {OWN['torch']})" in cores_note(workers)
    for device, reason in (
        ("cuda:0", "device cuda:0 is not available; it has cpu, xpu:0, xpu:1"),
        ("xpu:1", "xpu:1 is too old"),
    ):
        line = refusal(parse_workers, f"1x {device} python={python}")
        assert line == f"workers: python={python}: {reason}"
