"""Profiler trace of one round of a worker, for ``blsgd run --trace``.

This module does not import torch at module level, because a ClientApp imports it before it knows
its device.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

_LOG = logging.getLogger(__name__)


@contextlib.contextmanager
def traced(file: Path, server_round: int) -> Iterator[bool]:
    """Trace the block with torch's profiler, once per run and not in round 1; yield whether it is.

    Round 1 includes all warm-up, such as the choice of algorithms. If `file` exists, nothing is
    traced. Results stay bit-identical. If the file cannot be written, one line is logged. An order
    that raises leaves no file.
    """
    if server_round == 1 or file.exists():
        yield False
        return
    # Otherwise Kineto writes two lines to stderr per use; must be set before the first use.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.profiler import profile

    # All activities that torch supports here. torch 2.11 warns that it might keep too little.
    with profile(acc_events=True) as profiler:
        yield True
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".part")
        profiler.export_chrome_trace(str(unfinished))
        unfinished.replace(file)
    except Exception as error:
        _LOG.warning("no trace of %s: %s: %s", file.stem, type(error).__name__, error)
