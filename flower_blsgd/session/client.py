"""The ClientApp of ``blsgd launch``: messages are answered by the user's script.

The script runs as ``__main__`` in the main thread of the worker's process. Messages arrive in
another thread.
"""

import os
import runpy
import shlex
import sys
import traceback
from concurrent.futures import Future
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from ..errors import UsageError
from ..grids.app_call import accept_views, set_main_program
from ..grids.machine import OWN_DEVICE, visible_card
from ..grids.pinning import pinned
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

    is_late = torch.cuda.is_initialized()  # type: ignore[no-untyped-call,unused-ignore]
    if OWN_DEVICE not in os.environ and not is_late:  # on a SuperNode
        os.environ.update(visible_card(str(context.node_config.get("device", ""))))
    worker, config, node = worker_of(context), context.run_config, context.node_config
    script, *arguments = shlex.split(str(config.get(SCRIPT) or node[SCRIPT]))
    rank = int(node.get("partition-id", 0))
    seed, batch_size = int(config["seed"]), int(config["batch-size"])
    is_main = rank == int(config.get(MAIN_RANK, 0))
    exchange = Exchange(worker, rank, seed, batch_size, is_main)
    HERE.exchange = exchange
    _started.set_result(exchange)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        with pinned(worker, int(config["threads"])):
            runpy.run_path(script, run_name="__main__")
    except UsageError as error:  # it would be raised again
        sys.stderr.write(f"{script}: {error}\n")
        exchange.end(error)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            exchange.end(None)
            return
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        exchange.end(error)
        raise
    else:
        exchange.end(None)


_started: Future[Exchange] = Future()
"""The exchange of this process, made by its main thread."""

set_main_program(app, _run_script)


@app.query("profile")
def profile(message: Message, context: Context) -> Message:
    """Reply with the worker's profile when the script waits for its first order.

    Its speed is measured in the first rounds, whose work counts.
    """
    info = _exchange().joined.result().info
    return answer_profile(message, context, info.data_fingerprint, 0.0, info.fingerprint)


@app.query(SCRIPT_JOIN)
def joined(message: Message, context: Context) -> Message:
    """Reply with what the script has told its session, and with its initial model."""
    joined = _exchange().joined.result()
    is_main = joined.info.is_main  # the others' models are not needed
    arrays = joined.arrays() if is_main else ArrayRecord()
    return Message(joined.info.to_records(arrays), reply_to=message)


@app.query("momentum")
def momentum(message: Message, context: Context) -> Message:
    """Reply with the state of the script's optimizer, for a checkpoint."""
    kept = _exchange().joined.result().momentum()
    return Message(RecordDict({MOMENTUM: kept}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Reply with the script's model after the steps of an order."""
    report: TrainReport = _exchange().do(Train(TrainOrder.from_message(message)))
    return report.to_reply(message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Reply with the figures of the script's function."""
    report: EvaluateReport = _exchange().do(Evaluate(EvaluateOrder.from_message(message, 1)))
    return report.to_reply(message)


@app.query(SCRIPT_END)
def end(message: Message, context: Context) -> Message:
    """Hand over the final model, and reply when the script has ended."""
    _exchange().do(End(message.content.array_records[ARRAYS]))
    return Message(RecordDict({CONFIG: ConfigRecord()}), reply_to=message)


def _exchange() -> Exchange:
    return _started.result()
