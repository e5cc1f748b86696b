"""The ClientApp: a message in, a call of the worker's executor, a reply out.

Nothing here imports torch at module level: the device is known only inside a handler, which must
pin the process before it imports torch.
"""

import contextlib
import functools
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from .devices.worker_spec import WorkerSpec
from .engines.stream.serving import serve_sessions
from .errors import UsageError
from .flower.app_call import accept_views, after_reply, set_main_program
from .hosts.several_devices import several_devices
from .protocol import (
    ARRAYS,
    CONFIG,
    MOMENTUM,
    OWN_MODEL,
    SCRIPT_END,
    SCRIPT_JOIN,
    TRACE_FOLDER,
    EvaluateOrder,
    ProfileQuery,
    TrainOrder,
)
from .session.exchange import HERE, Exchange
from .session.script import main_program, running_script
from .task_executor import task_executor
from .worker.executor import Executor
from .worker.profile import answer_profile, answer_sum, worker_of
from .worker.trace import traced

app = ClientApp(mods=[several_devices(f"{__name__}:app", Path(__file__).parents[1])])
accept_views(app)
serve_sessions(app)
set_main_program(app, main_program)


@contextlib.contextmanager
def _executor(context: Context) -> Iterator[tuple[WorkerSpec, Executor]]:
    """Yield the worker and its executor, on the worker's device and cores."""
    if HERE.has_script:
        script = running_script()  # which is pinned
        yield script.worker, script
    else:
        worker = worker_of(context)
        with task_executor(worker, context) as executor:
            yield worker, executor


@app.query("profile")
def profile(message: Message, context: Context) -> Message:
    """Reply with the worker's profile and, if queried and not given, its measured speed."""
    query = ProfileQuery.from_message(message)
    with _executor(context) as (worker, executor):
        seconds = 0.0
        if query.calibrate and not worker.seconds_per_step:
            seconds = executor.seconds_per_step(query.batch_size, query.seconds)
        data, model = executor.fingerprints()
    return answer_profile(message, context, data, seconds, model)


@app.query("momentum")
def optimizer_state(message: Message, context: Context) -> Message:
    """Reply with the state of the worker's optimizer, for a checkpoint."""
    with _executor(context) as (_, executor):
        content = RecordDict({MOMENTUM: executor.optimizer_state()})
        if message.content.config_records[CONFIG].get(OWN_MODEL):
            content[OWN_MODEL] = executor.own_model()
    return Message(content, reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Run the steps of one order."""
    order = TrainOrder.from_message(message)
    folder: Any = message.content[CONFIG].get(TRACE_FOLDER)
    with _executor(context) as (_, executor):
        if folder is None:
            report = executor.train(order)
        else:
            file = Path(str(folder)) / f"worker-{context.node_config.get('partition-id', 0)}.json"
            with traced(file, order.round) as is_traced:
                report = executor.train(order)
            report = replace(report, traced=int(is_traced))
    if order.next_indices is not None and not HERE.has_script:  # which does it by itself
        after_reply(functools.partial(_work_ahead, context))
    return report.to_reply(message)


def _work_ahead(context: Context) -> None:
    with task_executor(worker_of(context), context) as executor:
        executor.work_ahead()


@app.train("sum")
def reduce(message: Message, context: Context) -> Message:
    """Average a slice of the other workers' models."""
    with _executor(context):
        return answer_sum(message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate a slice of the test set, or all of it if the order has no slice."""
    with _executor(context) as (worker, executor):
        order = EvaluateOrder.from_message(message, executor.num_test)
        start = time.perf_counter()
        report = executor.evaluate(order)
        # A busy core, as in training, would slow its neighbor, which a separate device does not.
        time.sleep((worker.slowdown - 1) * (time.perf_counter() - start))
        report = replace(report, seconds=time.perf_counter() - start)
    return report.to_reply(message)


# --- messages of `blsgd launch`


def _script() -> Exchange:
    if not HERE.has_script:
        raise UsageError("this node runs no script; its node config has no script=")
    return running_script()


@app.query(SCRIPT_JOIN)
def joined(message: Message, context: Context) -> Message:
    """Reply with what the main worker's script has told its session, and with its initial model."""
    script, content = _script(), RecordDict({CONFIG: ConfigRecord()})
    if script.is_main:  # else nothing is needed, also of a script that takes its time
        its = script.joined.result()
        content = its.info.to_records(its.arrays())
    return Message(content, reply_to=message)


@app.query(SCRIPT_END)
def end(message: Message, context: Context) -> Message:
    """Hand over the final model if there is one, else reply when the script has ended."""
    script = _script()
    if arrays := message.content.array_records.get(ARRAYS):
        script.finish(arrays)
    else:
        script.ended.result()
    return Message(RecordDict({CONFIG: ConfigRecord()}), reply_to=message)
