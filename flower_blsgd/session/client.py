"""The ClientApp of ``blsgd launch``: messages are answered by the user's script.

The script runs as ``__main__`` in the main thread of the worker's process. Messages arrive in
another thread.
"""

import os
import runpy
import shlex
import sys
from concurrent.futures import Future
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from ..data.source import repair_torchvision
from ..devices.machine import OWN_DEVICE, visible_card
from ..devices.pinning import pinned
from ..errors import UsageError
from ..flower.app_call import accept_views, set_main_program
from ..protocol import (
    ARRAYS,
    CONFIG,
    MOMENTUM,
    SCRIPT,
    SCRIPT_END,
    SCRIPT_JOIN,
    EvaluateOrder,
    EvaluateReport,
    TrainOrder,
    TrainReport,
)
from ..worker.profile import answer_profile, worker_of
from .exchange import HERE, End, Evaluate, Exchange, Train

MAIN_RANK = "main-rank"
"""Key of the run config: the partition id of the main worker; 0 by default."""

app = ClientApp()
accept_views(app)


def _run_script(context: Context) -> None:
    """Run the user's script as ``__main__``, in a process that sees its own card only."""
    import torch

    try:
        is_late = torch.cuda.is_initialized()  # type: ignore[no-untyped-call,unused-ignore]
        if OWN_DEVICE not in os.environ and not is_late:  # on a SuperNode
            os.environ.update(visible_card(str(context.node_config.get("device", ""))))
        worker, config, node = worker_of(context), context.run_config, context.node_config
        line = shlex.split(str(config.get(SCRIPT) or node[SCRIPT]))
        rank = int(node.get("partition-id", 0))
        seed, batch_size = int(config["seed"]), int(config["batch-size"])
        is_main = rank == int(config.get(MAIN_RANK, 0))
        exchange = HERE.exchange = Exchange(worker, rank, seed, batch_size, is_main)
    except Exception as error:  # such as a missing device
        _started.set_exception(error)
        raise
    _started.set_result(exchange)
    repair_torchvision()
    try:
        with pinned(worker, int(config["threads"])):
            _run_as_python(*line)
    except UsageError as error:  # it would be raised again
        sys.stderr.write(f"{line[0]}: {error}\n")
        exchange.end(error)
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        exchange.end(error if code else None)
        if not isinstance(error, SystemExit | KeyboardInterrupt):  # Ctrl-C in the launcher
            sys.excepthook(type(error), error, error.__traceback__)
        elif not isinstance(code, int | None):
            sys.stderr.write(f"{code}\n")
        if code:
            raise
    else:
        exchange.end(None)


def _run_as_python(script: str, *arguments: str) -> None:
    """Run a script, or ``-m MODULE``, as ``python`` does.

    It is ``__main__`` until the process ends, not only to its last line as with `runpy.run_path`.
    """
    main = sys.modules["__main__"] = ModuleType("__main__")
    sys.argv = [script, *arguments]
    if script == "-m":
        del sys.argv[0]
        sys.path.insert(0, str(Path.cwd()))
        runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]
    else:
        file = str(Path(script).absolute())
        sys.path.insert(0, str(Path(script).resolve().parent))
        loader = SourceFileLoader("__main__", file)
        code = loader.source_to_code(loader.get_data(file), file)
        arguments_of_main = main.__dict__, None, "__main__", None, None, file
        runpy._run_code(code, *arguments_of_main)  # type: ignore[attr-defined]


_started: Future[Exchange] = Future()
"""The exchange of this process, made by its main thread."""

set_main_program(app, _run_script)


@app.query("profile")
def profile(message: Message, context: Context) -> Message:
    """Reply with the worker's profile when the script waits for its first order.

    Its speed is measured in the first rounds, whose work counts.
    """
    info = _started.result().joined.result().info
    return answer_profile(message, context, info.data_fingerprint, 0.0, info.fingerprint)


@app.query(SCRIPT_JOIN)
def joined(message: Message, context: Context) -> Message:
    """Reply with what the main worker's script has told its session, and with its initial model."""
    exchange, content = _started.result(), RecordDict({CONFIG: ConfigRecord()})
    if exchange.is_main:  # else nothing is needed, also of a script that takes its time
        joined = exchange.joined.result()
        content = joined.info.to_records(joined.arrays())
    return Message(content, reply_to=message)


@app.query("momentum")
def momentum(message: Message, context: Context) -> Message:
    """Reply with the state of the script's optimizer, for a checkpoint."""
    kept = _started.result().joined.result().momentum()
    return Message(RecordDict({MOMENTUM: kept}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Reply with the script's model after the steps of an order."""
    report: TrainReport = _started.result().do(Train(TrainOrder.from_message(message)))
    return report.to_reply(message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Reply with the figures of the script's function."""
    report: EvaluateReport = _started.result().do(Evaluate(EvaluateOrder.from_message(message, 1)))
    return report.to_reply(message)


@app.query(SCRIPT_END)
def end(message: Message, context: Context) -> Message:
    """Hand over the final model if there is one, else reply when the script has ended."""
    if arrays := message.content.array_records.get(ARRAYS):
        _started.result().do(End(arrays))
    else:
        _started.result().ended.result()
    return Message(RecordDict({CONFIG: ConfigRecord()}), reply_to=message)
