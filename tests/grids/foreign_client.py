"""A small Flower app that knows nothing of flower_blsgd. The grid's tests copy it into a folder."""

import contextlib
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

LONGEST_WAIT_SECONDS = 60.0

app = ClientApp()
not_an_app = "a text"


def wait_for(path: str) -> None:
    """Wait until the file is there; a test that forgets to make it does not hang for ever."""
    deadline = time.monotonic() + LONGEST_WAIT_SECONDS
    while not Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def counted(context: Context) -> int:
    """Count the calls in context.state."""
    record = context.state.config_records.setdefault("calls", ConfigRecord({"count": 0}))
    record["count"] += 1
    return record["count"]


def answer(message: Message, **values: object) -> Message:
    return Message(RecordDict({"answer": ConfigRecord(values)}), reply_to=message)


def lose_the_accelerator() -> None:
    """Fail as CUDA does after an assertion in a kernel: from then on, every call raises."""
    text = (
        "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA` to know more."
    )

    def fail() -> None:
        raise torch.AcceleratorError(text)

    its = torch.accelerator
    its.is_available, its.device_count, its.memory_reserved = lambda: True, lambda: 1, lambda _: 512
    its.synchronize, its.device_index = lambda _: fail(), lambda _: contextlib.nullcontext()
    fail()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Do what the order says, then echo its content and the number of calls so far."""
    order = message.content["order"]
    count = counted(context)
    if "touch" in order:
        Path(order["touch"]).touch()
    if "log" in order:
        with open(order["log"], "a") as file:
            file.write(f"begin {order['text']}\n")
    if "wait-for" in order:
        wait_for(order["wait-for"])
    if "print" in order:
        print(order["print"], flush=True)
    what = order["do"]
    if what == "exit":
        os._exit(3)
    if what == "sys-exit":
        sys.exit(5)
    if what == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(LONGEST_WAIT_SECONDS)
    if what == "fork-and-exit":
        if os.fork() == 0:
            wait_for(order["child-waits-for"])
            os._exit(0)
        os._exit(3)
    if what == "signal":  # to itself and to a child, which has Python's own handlers at once
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
            if (child := os.fork()) == 0:
                time.sleep(LONGEST_WAIT_SECONDS)
                os._exit(0)
            os.kill(child, signal.SIGTERM)
            assert os.waitpid(child, 0)[1] == signal.SIGTERM
        # Else a terminal would stop this process, which is not in its foreground group.
        assert {signal.SIGTTIN, signal.SIGTTOU} <= signal.pthread_sigmask(signal.SIG_BLOCK, [])
    if what == "hold-the-gil":
        sum(range(10**12))  # one call of a C function that never lets another thread run
    if what == "lose-the-accelerator":
        lose_the_accelerator()
    if "log" in order:
        with open(order["log"], "a") as file:
            file.write(f"end {order['text']}\n")
    message.content["answer"] = ConfigRecord({"count": count, "pid": os.getpid()})
    return Message(message.content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    return answer(message, what="evaluate", count=counted(context))


@app.query()
def query(message: Message, context: Context) -> Message:
    """Report what this process is."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    names += ("BLSGD_TEST", "PYTHONSAFEPATH")
    return answer(
        message,
        pid=os.getpid(),
        parent=os.getppid(),
        folder=os.getcwd(),
        arguments=sys.argv[1:],
        random=[random.random(), float(np.random.random()), float(torch.rand(1))],
        threads=torch.get_num_threads(),
        files=len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0,
        affinity=_affinity(0),
        native_affinity=sorted({core for t in _native_threads() for core in _affinity(t)}),
        node_id=context.node_id,
        compile_threads=getattr(sys.modules.get("torch._inductor.config"), "compile_threads", 0),
        **{name: os.environ.get(name, "not set") for name in names},
        **{f"node:{key}": value for key, value in context.node_config.items()},
        **{f"run:{key}": value for key, value in context.run_config.items()},
    )


def _affinity(thread_id: int) -> list[int]:
    if not hasattr(os, "sched_getaffinity"):
        return []
    return sorted(os.sched_getaffinity(thread_id))


def _native_threads() -> list[int]:
    """Return the threads that a library started, such as those of numpy's BLAS."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return []
    pythons = {thread.native_id for thread in threading.enumerate()}
    return [int(task.name) for task in tasks.iterdir() if int(task.name) not in pythons]
