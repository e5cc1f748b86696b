"""Trace one round of a worker with torch's profiler, as ``blsgd run --trace`` asks for.

Nothing here imports torch at module level: a ClientApp imports this before it knows its device.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

_LOG = logging.getLogger(__name__)


@contextlib.contextmanager
def traced(file: Path, server_round: int, device: str) -> Iterator[None]:
    """Trace what happens inside, once in a run and not in round 1.

    There everything happens for the first time: libraries choose algorithms, memory grows. torch's
    own export, for ui.perfetto.dev or chrome://tracing, is written. The results are the same to the
    bit. Where the file cannot be written one line in the log says so and the order counts all the
    same. An order that raises leaves no file.

    Parameters
    ----------
    file : Path
        What is written, unless it is there: ``<trace folder>/<worker>.json``.
    server_round : int
        The order's.
    device : str
        Where the worker computes, such as ``"cuda:1"``.
    """
    if server_round == 1 or file.exists():
        yield
        return
    # Kineto writes two lines to stderr per use, unless it is told not to before the first.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if device.startswith("cuda"):
        # What torch does by itself for graphs of its compiler: beside CUDA graphs CUPTI must not be
        # torn down and begun anew, which crashed up to CUDA 12.5.
        os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
        os.environ.setdefault("TEARDOWN_CUPTI", "0")
    from torch.profiler import profile

    with profile() as profiler:  # of all that torch can record here
        yield
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".part")
        profiler.export_chrome_trace(str(unfinished))
        unfinished.replace(file)
    except Exception as error:
        _LOG.warning("no trace of %s: %s: %s", file.stem, type(error).__name__, error)
