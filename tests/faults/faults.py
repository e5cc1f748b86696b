"""Failures on purpose in worker processes of the local grid: who, in which round, and how.

`Faults` is the `setup` of a grid: it is called in every worker process, before that loads the app,
and puts itself around the app's calls. So the app, its processes and the server are the real ones.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
from flwr.app import Array, Context, Message

POISONS = ("nan model", "nan tensor", "nan loss", "wrong shape", "no metrics")
"""What may be wrong with a report."""

OVERFLOW = "overflow"
"""The order itself makes the model and its momentum overflow: one bad batch."""

KINDS = (
    *("raises", "out of memory", "killed", "exits", "hangs", "stopped", "slow", "paused"),
    *("no message", "another round", OVERFLOW, *POISONS),
)

COUNTED = frozenset(KINDS) - {"slow", "paused"}
"""These make the order fail; the others only take their time."""

_LONG_SECONDS = 3600.0


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong with the orders of one worker, in rounds [first, last]."""

    worker: int
    first: int
    last: int
    kind: str
    seconds: float = 0.0


def fail_at(worker: int, server_round: int, kind: str = "raises", rounds: int = 1) -> Fault:
    """Let a worker (its place in the specification) fail in one or several rounds."""
    assert kind in KINDS
    return Fault(worker, server_round, server_round + rounds - 1, kind)


def slow_at(worker: int, server_round: int, seconds: float, kind: str = "slow") -> Fault:
    return Fault(worker, server_round, server_round, kind, seconds)


class Faults:
    """The faults of a run; the `setup` of a `LocalGrid`."""

    def __init__(self, *faults: Fault) -> None:
        self.faults = faults

    @classmethod
    def random(cls, seed: int, workers: int, rounds: int, kinds: Sequence[str] = KINDS) -> "Faults":
        """Return one fault at random, not in the first rounds: those say how long a round takes."""
        draw = random.Random(seed)
        kind, worker = draw.choice(kinds), draw.randrange(workers)
        first = draw.randint(3, rounds - 1)
        last = first + draw.choice([0, 0, 0, 1, 2, 4]) if kind in COUNTED - {"hangs"} else first
        return cls(Fault(worker, first, last, kind, draw.uniform(0.1, 2.0)))

    def __call__(self) -> None:
        from flower_blsgd.engines.local import worker_process

        handler_of = worker_process.handler_of

        def with_faults(app: Any, context: Context) -> Callable[[Message], Message]:
            mine = [f for f in self.faults if f.worker == context.node_config["partition-id"]]
            return handler_of(_Failing(app, mine) if mine else app, context)

        worker_process.handler_of = with_faults  # type: ignore[assignment]


class _Failing:
    """A ClientApp that does as it should, but for its faults."""

    def __init__(self, app: Any, faults: Sequence[Fault]) -> None:
        self._app, self._faults = app, faults
        self._last: Message | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._app, name)

    def __call__(self, message: Message, context: Context) -> Message:
        fault = self._fault_of(message)
        if fault is None:
            self._last = message
            return self._app(message, context)
        before_training(fault, message)
        if fault.kind == "no message":
            return None  # type: ignore[return-value]
        if fault.kind == "another round" and self._last is not None:
            message = self._last
        reply = self._app(message, context)
        if fault.kind in POISONS:
            poison(reply, fault.kind)
        return reply

    def _fault_of(self, message: Message) -> Fault | None:
        if message.metadata.message_type != "train":
            return None
        server_round = message.content.config_records["config"]["server-round"]
        return next((f for f in self._faults if f.first <= server_round <= f.last), None)


def before_training(fault: Fault, message: Message) -> None:
    """Do what goes wrong before the order is begun."""
    if fault.kind == "raises":
        raise RuntimeError("the fan stands still")
    if fault.kind == "out of memory":
        import torch

        raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")
    if fault.kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "exits":
        os._exit(3)
    if fault.kind == "hangs":
        time.sleep(_LONG_SECONDS)
    if fault.kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault.kind == "slow":
        time.sleep(fault.seconds)
    if fault.kind == "paused":
        wake = f"sleep {fault.seconds}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", wake], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault.kind == OVERFLOW:
        message.content.config_records["config"]["lr"] = 1e38


def poison(reply: Message, kind: str) -> None:
    """Spoil a good report."""
    arrays, losses = reply.content["arrays"], reply.content["losses"]
    floating = [name for name, array in arrays.items() if array.dtype.startswith("float")]
    if kind == "nan model":  # in place: the model stays one piece of memory
        for name in floating:
            arrays[name].numpy()[...] = np.nan
    elif kind == "nan loss":
        losses["losses"] = np.array([np.nan], "<f4").tobytes() + losses["losses"][4:]
    elif kind == "no metrics":
        del reply.content["metrics"]
    else:
        tensor = np.array(arrays[floating[0]].numpy())
        if kind == "nan tensor":
            tensor.flat[-1] = np.nan
        arrays[floating[0]] = Array(tensor[None] if kind == "wrong shape" else tensor)


@contextlib.contextmanager
def short_patience(seconds: float) -> Iterator[None]:
    """Let this server wait only so long for a worker that may hang; half a minute otherwise."""
    from flower_blsgd.strategy import patience

    names = ("_LEAST_SECONDS", "_LEAST_AFTER_FAILURE_SECONDS")
    before = {name: getattr(patience, name) for name in names}
    try:
        for name in names:
            setattr(patience, name, seconds)
        yield
    finally:
        for name, value in before.items():
            setattr(patience, name, value)


# Worker processes need not find this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
