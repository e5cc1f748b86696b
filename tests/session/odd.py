"""A training script that does odd things, by the words on its command line."""

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path

LEARNING_RATE = 0.125


def leave_much(rank: int) -> None:
    """Leave what an interpreter ends: files, functions, a folder, a child; end others before."""

    def write(what: str, text: str) -> None:
        Path(f"{what}-{rank}").write_text(text)

    def write_late() -> None:
        threading.main_thread().join()
        write("thread", "written")

    with multiprocessing.get_context("fork").Pool(1) as pool:  # ends its processes with a signal
        assert pool.map(abs, [-1]) == [1]
    for number in (15, 2):
        with subprocess.Popen(["sleep", "90"]) as process:
            process.send_signal(number)
        assert process.returncode == -number
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(90,), daemon=True)
    child.start()
    write("child", str(child.pid))
    global unclosed, folder  # noqa: PLW0603
    unclosed = open(f"unclosed-{rank}", "w")  # noqa: SIM115
    unclosed.write("written")
    folder = tempfile.TemporaryDirectory()
    write("folder", folder.name)
    weakref.finalize(write_late, write, "finalize", "written")
    atexit.register(write, "atexit", "written")
    atexit.register(print, "at exit", rank)
    threading.Thread(target=write_late).start()
    write("names", f"{__file__} {sys.argv[0]} {sys.path[0]} {sys.modules['__main__'].__name__}")


def main(oddities: set[str]) -> None:
    """Train until the run is over, or the loader ends."""
    # A spawned process imports this file again, and needs none of these.
    import torch
    from torch import nn

    import flower_blsgd
    from flower_blsgd.session.exchange import HERE

    rank = HERE.exchange.rank if HERE.exchange else 0
    if "raise" in oddities:
        raise ValueError("no data")
    if "begin" in oddities and rank == 1:
        raise OSError("no such card")
    if "spawn" in oddities:
        assert os.environ["BLSGD_RANK"] == str(rank)
        time.sleep(1.0 if rank == 0 else 0.0)
        with flower_blsgd.main_first(), open("first", "a") as file:
            file.write(f"{rank} of {os.environ['BLSGD_WORLD_SIZE']}\n")
        process = multiprocessing.get_context("spawn").Process(target=int)
        process.start()
        process.join()
        assert process.exitcode == 0
    if "leave" in oddities:
        leave_much(rank)
    model = nn.Linear(4, 2)
    model.bias.requires_grad_("freeze" not in oddities or rank == 0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE / (1 + rank))
    session = flower_blsgd.join(model, optimizer)
    if "loss" in oddities:  # as the Trainer without compute_metrics
        values = iter([3.0, float("nan"), 1.0, *[2.0] * 10**4])
        session.evaluate(lambda _: {"loss": next(values), "note": "text"}, every=80, metric="loss")
    inputs = torch.randn(8, 4)
    for step in range(20 if "early" in oddities and rank == 2 else 10**9):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if "nan" in oddities and rank == 1 and step == 9:
            nn.init.constant_(model.weight, float("nan"))
        session.step(samples=len(inputs))
        if session.done:
            break
    if "fail" in oddities and rank < 2 and session.done:
        if rank == 0:
            sys.exit(3)
        raise OSError(28, "No space left on device")
    server = multiprocessing.parent_process()
    if "orphan" in oddities and server and server.pid != os.getppid():
        os.kill(os.getppid(), signal.SIGKILL)  # the fork server
    if "quit" in oddities:
        os._exit(rank)


if __name__ == "__main__":
    main(set(sys.argv[1:]))
