"""Trace one round of a worker with torch's profiler, as ``blsgd run --trace`` asks for.

Nothing here imports torch at module level: a ClientApp imports this before it knows its device.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import ConfigRecord, Message

from ..protocol import CONFIG, SERVER_ROUND, TRACE_FOLDER

if TYPE_CHECKING:
    from torch.profiler import profile

_LOG = logging.getLogger(__name__)

_FIRST_TRACED_ROUND = 2
"""In round 1 everything happens for the first time: libraries choose algorithms, memory grows."""


@contextlib.contextmanager
def traced(message: Message, device: str, name: str) -> Iterator[None]:
    """Trace what happens inside, once in a run and only if the order's message asks for it.

    torch's own export, for ui.perfetto.dev or chrome://tracing, is written to
    ``<trace folder>/<name>.json``. The results are the same to the bit. Where the profiler fails,
    or the file cannot be written, one line in the log says so and the order is done as ever. An
    order that raises leaves no file.

    Parameters
    ----------
    message : Message
        The order's; its ConfigRecord names the folder.
    device : str
        Where the worker computes, such as ``"cuda:1"``.
    name : str
        Of the file.
    """
    config = message.content.config_records.get(CONFIG) or ConfigRecord()
    folder, server_round = config.get(TRACE_FOLDER), config.get(SERVER_ROUND)
    if not isinstance(folder, str) or not isinstance(server_round, int):
        yield
        return
    file = Path(folder) / f"{name}.json"
    if server_round < _FIRST_TRACED_ROUND or file.exists():
        yield
        return
    profiler = None
    with _logged_failure(name):
        profiler = _started(device)
    try:
        yield
    except BaseException:
        if profiler is not None:
            with _logged_failure(name):
                profiler.stop()
        raise
    if profiler is not None:
        with _logged_failure(name):
            profiler.stop()
            file.parent.mkdir(parents=True, exist_ok=True)
            unfinished = file.with_suffix(".part")
            profiler.export_chrome_trace(str(unfinished))
            unfinished.replace(file)


def _started(device: str) -> "profile":
    # Kineto writes two lines to stderr per use, unless it is told not to before the first.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if device.startswith("cuda"):
        # What torch does by itself for graphs of its compiler: beside CUDA graphs CUPTI must not be
        # torn down and begun anew, which crashed up to CUDA 12.5.
        os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
        os.environ.setdefault("TEARDOWN_CUPTI", "0")
    from torch.profiler import profile

    profiler = profile()  # of all that torch can record here
    profiler.start()
    return profiler


@contextlib.contextmanager
def _logged_failure(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        _LOG.warning("no trace of worker %s: %s: %s", name, type(error).__name__, error)
