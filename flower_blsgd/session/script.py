"""The user's training script as the main program of a worker's process.

It runs as ``__main__`` in the main thread. Messages arrive in another thread.
"""

import contextlib
import os
import runpy
import shlex
import sys
from collections.abc import Callable
from concurrent.futures import Future
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from flwr.app import Context

from ..data.libraries import repair_torchvision
from ..devices.machine import OWN_DEVICE, visible_card
from ..devices.pinning import pinned
from ..errors import UsageError
from ..protocol import SCRIPT
from ..worker.profile import worker_of
from .exchange import HERE, Exchange

MAIN_RANK = "main-rank"
"""Key of the run config: the main worker that `launch` chose; on SuperNodes, partition 0."""

WORLD_SIZE = "world-size"
"""Key of the run config: the number of workers, from `launch`."""

MAIN_HAS_ENDED = "main-has-ended"
"""Key of the run config: see `ThisProcess`; from `launch`."""

_started: Future[Exchange] = Future()
"""The exchange of this process, made by its main thread."""


def running_script() -> Exchange:
    """Wait for the script of this process to begin, and return its exchange."""
    return _started.result()


def main_program(context: Context) -> Callable[[Context], None] | None:
    """Return the program of a node that runs a script; None for another node."""
    HERE.has_script = SCRIPT in context.run_config or SCRIPT in context.node_config
    return run_script if HERE.has_script else None


def run_script(context: Context) -> None:
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
        # Not RANK and WORLD_SIZE: with these, other libraries would make a process group.
        os.environ["BLSGD_RANK"] = str(rank)
        os.environ["BLSGD_DEVICE"] = worker.torch_device
        if WORLD_SIZE in config:
            os.environ["BLSGD_WORLD_SIZE"] = str(config[WORLD_SIZE])
            HERE.main_has_ended = Path(str(config[MAIN_HAS_ENDED]))
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
    finally:
        if is_main and HERE.main_has_ended is not None:
            with contextlib.suppress(OSError):
                HERE.main_has_ended.touch()


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
