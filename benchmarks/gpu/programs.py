"""Checks of whole programs: kills, Ctrl-C, faults on the card, scripts, and speed of runs."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from flower_blsgd import Task

from ..images import some_images
from ..noop_rounds import NotRunError
from ..noop_rounds import run as finish
from ..rows import not_run, row
from .lines import CARD, CARRIED, IS_DRY_RUN, ON_CARD, ROOT, Lines, finished, tail

SCRIPTS = "lightning/after.py", "hf_trainer/train.py", "accelerate/after.py", "lora/train.py"
_BATCH = 16
_BLSGD = [sys.executable, "-m", "flower_blsgd"]
_OTHER = "cuda:1" if ON_CARD and torch.cuda.device_count() > 1 else CARD
_PAIR = f"1x {CARD} fast; 1x {_OTHER} slow"


def run(lines: Lines) -> None:
    """Kill a worker of a run, press Ctrl-C, resume it; then let a worker fail on the card."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "killed"
        workers = f"{_PAIR}; 1x cpu role=evaluate"
        command = _run("digits", workers, out, **{"epochs": 25, "checkpoint-minutes": 0.02})
        with _started(command) as process:
            _wait_for_rounds(out, 4, process)
            killed = min(_workers_below(process.pid))
            os.kill(killed, signal.SIGKILL)
            _wait_for_rounds(out, 12, process)
            query = "--query-compute-apps=pid,used_memory"
            apps = finished("nvidia-smi", query, "--format=csv,noheader")[1].splitlines()
            lines.expect(
                "the server has no context on the card",
                not any(app.startswith(f"{process.pid},") for app in apps),
                server=process.pid,
                apps=apps,
            )
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=20)[0]
        code = process.returncode
        lines.expect("Ctrl-C after a kill", code in (0, 130), code=code, said=tail(said))
        _expect_end(lines, "resume", out, [*_BLSGD, "run", ".", "--resume", str(out)])
        out = Path(folder) / "faulty"
        marker = Path(folder) / "marker"
        marker.touch()
        settings = {"task": f"{__name__}:faulty_task", "data": marker, "model": "resnet8"}
        settings |= {"epochs": 3, "batch-size": _BATCH, "evaluate-every-epochs": 3}
        settings |= {"local-steps-fast": 4, "local-steps-slow": 4}
        _expect_end(lines, "a fault on the card", out, _run("", _PAIR, out, **settings))
        rounds = _rounds(out)
        failed = [sum(bool(worker["failure"]) for worker in one["workers"]) for one in rounds]
        lines.expect(
            "the process of the fault was replaced",
            sum(failed) == 1 and failed[-1] == 0 and len(rounds[-1]["workers"]) == 2,
            failed_workers_by_round=failed,
        )


def faulty_task(data: str, model_name: str) -> Task:
    """Return a task in which one step reads outside a tensor: the one that finds the file `data`.

    On CUDA, this ends the use of the card by that process. The loss uses the current device.
    """
    marker, task = Path(data), some_images("512", model_name)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = functional.cross_entropy(outputs, targets, reduction="none")
        if not outputs.requires_grad or len(targets) < _BATCH:  # the task is checked with less
            return losses
        losses = losses + torch.zeros(1, device=CARD.partition(":")[0])
        with contextlib.suppress(FileNotFoundError):
            marker.unlink()
            return losses[torch.full_like(targets, 1_000_000)]
        return losses

    return Task(model=task.model, train=task.train, test=task.test, loss=loss)


def launch(lines: Lines) -> None:
    """Run scripts under `blsgd launch`, all at once; cards and MIG slices are named by UUID."""
    found = re.findall(r"UUID: ((?:MIG|GPU)-[^)]*)", finished("nvidia-smi", "-L")[1])
    slices = [name for name in found if name.startswith("MIG")]
    visible = slices[:2] or found[:2]
    other = "cuda:1" if len(visible) > 1 else _OTHER
    workers = f"1x {CARD} fast; 1x {other} batch=8"
    environment = dict(os.environ)
    if ON_CARD and visible:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        processes = {}
        for number, script in enumerate(SCRIPTS):
            out = Path(folder) / str(number)
            options = ["--workers", workers, "--samples", "3000", "-s", f"out={out}"]
            command = [*_BLSGD, "launch", *options, str(ROOT / "examples" / script)]
            started = _started(command, env=environment, cwd=folder)
            processes[script] = out, stack.enter_context(started)
        for script, (out, process) in processes.items():
            said = process.communicate()[0]
            logs = [log.read_text() for log in out.glob("worker-*.log")]
            ended = process.returncode == 0 and not _summary(out)["failures"]
            lines.expect(script, ended, visible=visible, said=tail(said, *logs))


def together(lines: Lines) -> None:
    """Measure several workers on one card, and CPU workers next to one."""
    counts, data, local_steps = ((1, 2), 512, 4) if IS_DRY_RUN else ((1, 2, 4, 8), 8192, 32)
    settings = {"task": "benchmarks.images:some_images", "data": data, "model": "resnet20"}
    settings |= {"batch-size": 32, "local-steps-fast": local_steps, "local-steps-slow": "auto"}
    settings |= {"epochs": 3, "evaluate-every-epochs": 100}
    base: list[float] = []
    for workers in [*(f"{count}x {CARD} fast" for count in counts), f"1x {CARD} fast; 1x cpu slow"]:
        title = f"ResNet20, B 32: {workers}"
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            try:
                finish(_run("", workers, out, **settings, **{"min-workers": 1}), 60)
            except NotRunError as error:
                lines.rows([not_run(title, str(error), "images per s")])
                continue
            rounds = _rounds(out)[2:]
        speeds = [
            sum(worker["num_examples"] for worker in one["workers"])
            / (one["round_seconds"] + one["planning_seconds"])
            for one in rounds
        ]
        base = base or speeds
        lines.rows([row(title, speeds, "images per s", base, f"1x {CARD}")])
        overhead = [
            1e3 * (one["round_seconds"] - max(w["compute_seconds"] for w in one["workers"]))
            for one in rounds
        ]
        lines.rows([row(f"{title}: round beyond computing", overhead, "ms")])


def gain(lines: Lines) -> None:
    """Train on real images for the same time with a card alone, and with a slower second one."""
    data, seconds = CARRIED / "cifar10", 4 if IS_DRY_RUN else 10
    if not data.is_dir():
        lines.rows([not_run("accuracy on CIFAR-10", "python -m benchmarks.gpu.prepare", "of 1")])
        return
    settings = {"task": "benchmarks.images:carried_images", "data": data, "model": "resnet8"}
    settings |= {"batch-size": 32}
    settings |= {"seconds": seconds, "evaluate-every-epochs": 100, "min-workers": 1}
    base: dict[str, float] = {}
    for workers in (f"1x {CARD} fast", f"1x {CARD} fast; 1x {_OTHER} slow slowdown=2"):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            finish(_run("", workers, out, **settings), 60)
            summary = _summary(out)
        speed = summary["samples"] / summary["training_seconds"]
        figures = {"images per s": speed, "of 1": summary["accuracy"]}
        base = base or figures
        for unit, figure in figures.items():
            title = f"{seconds} s of CIFAR-10, ResNet8, B 32: {workers}"
            lines.rows([row(title, [figure], unit, [base[unit]], "alone")])


def _run(config: str, workers: str, out: Path, **settings: Any) -> list[str]:
    """Return the command of a run."""
    settings = {**settings, "workers": workers, "out": out}
    words = [word for key, value in settings.items() for word in ("-s", f"{key}={value}")]
    return [*_BLSGD, "run", ".", *(["-c", config] if config else []), *words]


@contextlib.contextmanager
def _started(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a command; end it with the block."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, **{"cwd": ROOT, **pipes, **options})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _expect_end(lines: Lines, name: str, out: Path, command: list[str]) -> None:
    """Run a command to its end, and expect a result."""
    began = time.monotonic()
    code, said = finished(*command)
    seconds = round(time.monotonic() - began, 1)
    ended = code == 0 and (out / "summary.json").exists()
    lines.expect(name, ended, seconds=seconds, said=tail(said))


def _rounds(out: Path) -> list[dict[str, Any]]:
    path = out / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _summary(out: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def _wait_for_rounds(out: Path, count: int, process: subprocess.Popen[str]) -> None:
    path = out / "rounds.jsonl"
    while not path.exists() or path.read_text().count("\n") < count:
        if process.poll() is not None:
            raise RuntimeError(f"the run has ended: {tail(process.communicate()[0])}")
        time.sleep(0.05)


def _workers_below(root: int) -> list[int]:
    """Return the worker processes that descend from a process."""
    parents, names = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            head, _, rest = path.read_text().rpartition(")")
            parents[int(path.parent.name)] = int(rest.split()[1])
            names[int(path.parent.name)] = head.partition("(")[2]
    found, below = {root}, -1
    while len(found) != below:
        below = len(found)
        found |= {process for process, parent in parents.items() if parent in found}
    return sorted(process for process in found if names.get(process) == "blsgd-worker")
