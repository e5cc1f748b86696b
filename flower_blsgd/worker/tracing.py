"""What a ClientApp did when, of one order: recorded if the server asks for it, and sent along."""

import contextlib
import threading
import time
from collections.abc import Iterator
from itertools import accumulate

from flwr.app import Message

from ..protocol import CONFIG, TRACE, TrainReport, WorkerTrace
from ..protocol.tracing import (
    COLLECT,
    GET_READY,
    LOAD_MODEL,
    READ_PROFILER,
    SLOWDOWN,
    START_PROFILER,
    STEPS,
    asked_level,
)
from ..runtime.devices import WorkerSpec
from .operators import OperatorProfiler


class OrderTrace:
    """Times the stages of one order; does nothing unless the server asked for that.

    Make it first of all in the handler::

        trace = OrderTrace(message)
        with trace.around_steps(worker):
            report = sgd.run(order, state=context.state)
        return trace.reply(report, message)

    Nothing that it does changes what is computed. If torch's profiler fails, the reply says so and
    has no operators.

    Parameters
    ----------
    message : Message
        The order's.
    """

    def __init__(self, message: Message) -> None:
        self._level = asked_level(message.content.config_records.get(CONFIG))
        if self._level:
            self._began_ns = self._ended_ns = time.time_ns()
            self._stages: list[tuple[str, int]] = []
            self._step_ends_ns: list[int] = []
            self._slowed = False
            self._operators = b""
            self._note = ""

    @contextlib.contextmanager
    def around_steps(self, worker: WorkerSpec) -> Iterator[None]:
        """Record what happens within: `LocalSGD.run`, on this worker's device."""
        if not self._level:
            yield
            return
        self._slowed = worker.slowdown > 1
        self._end(GET_READY)
        profiler = None
        if self._level == "operators":
            profiler = OperatorProfiler(worker.device)
            self._end(START_PROFILER)
        try:
            with _ends_of_steps(worker.device, self._step_ends_ns):
                yield
        finally:
            self._ran_ns = time.time_ns()
            operators = profiler.stop() if profiler else None
        if profiler is not None:
            self._operators = operators.pack() if operators else b""
            self._note = profiler.note
            self._read_ns = time.time_ns()

    def reply(self, report: TrainReport, message: Message) -> Message:
        """Return the reply to the order, with what was recorded."""
        reply = report.to_reply(message)
        if not self._level:
            return reply
        started = round(report.started_at * 1e9)
        steps_ended = ended = round(report.ended_at * 1e9)
        # Before that the optimizer may have been tried out, as for a model that is compiled.
        step_ends = [end for end in self._step_ends_ns if end > started]
        if len(step_ends) != report.completed_steps:
            step_ends = []  # steps that optimizers do not tell of, as in a CUDA graph
        elif step_ends and self._slowed:
            steps_ended = step_ends[-1]
        self._end(LOAD_MODEL, started)
        began = self._ended_ns
        self._end(STEPS, steps_ended)
        if steps_ended < ended:
            self._end(SLOWDOWN, ended)
        self._end(COLLECT, self._ran_ns)
        if self._level == "operators":
            self._end(READ_PROFILER, self._read_ns)
        self._end(COLLECT)
        steps = list(accumulate((max(end, began) for end in step_ends), max))
        trace = WorkerTrace(self._began_ns, self._stages, steps, self._operators, self._note)
        reply.content[TRACE] = trace.to_record()
        return reply

    def _end(self, stage: str, at_ns: int | None = None) -> None:
        """End a stage, now or then, but never before it began: the clock may have been set."""
        self._ended_ns = max(self._ended_ns, time.time_ns() if at_ns is None else at_ns)
        self._stages.append((stage, self._ended_ns))


@contextlib.contextmanager
def _ends_of_steps(device: str, ends_ns: list[int]) -> Iterator[None]:
    """Note the end of every optimizer step of this thread, where a step has ended by then.

    An accelerator still computes when the optimizer returns.
    """
    if device.partition(":")[0] != "cpu":
        yield
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    thread = threading.get_ident()

    def note(*_: object) -> None:
        if threading.get_ident() == thread:
            ends_ns.append(time.time_ns())

    handle = register_optimizer_step_post_hook(note)
    try:
        yield
    finally:
        handle.remove()
