"""Preparation of data before a script joins."""

import contextlib
import time
from collections.abc import Iterator

from .exchange import HERE

_POLL_SECONDS = 0.05


@contextlib.contextmanager
def main_first() -> Iterator[None]:
    """Run the block in the main worker first, and then in the others.

    For what is prepared once and then found by the others, such as a download or a cache. Use it
    before `join`, around code that the scripts of all workers run. Without ``blsgd launch``, and on
    SuperNodes, it does not wait.

    If the main worker's script fails or ends before, the others continue.

    Examples
    --------
    ::

        with flower_blsgd.main_first():
            dataset = load_dataset("cifar10")
    """
    exchange, ended = HERE.exchange, HERE.main_has_ended
    if exchange is None or ended is None:
        yield
        return
    HERE.main_first_blocks += 1
    done = ended.with_name(f"main-first-{HERE.main_first_blocks}")
    while not exchange.is_main and not done.exists() and not ended.exists():
        time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        if exchange.is_main:
            with contextlib.suppress(OSError):
                done.touch()
