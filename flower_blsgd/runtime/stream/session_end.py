"""Whether a session is served, and what must be taken down when it ends."""

import contextlib
import threading
from collections.abc import Callable

_callbacks: list[Callable[[], object]] = []
_serving = threading.Event()


def session_begins() -> None:
    """Say that this process serves a session from now on, until `run_at_session_end`."""
    _serving.set()


def in_session() -> bool:
    """Whether this process serves a session: what it keeps lives on from message to message."""
    return _serving.is_set()


def at_session_end(callback: Callable[[], object]) -> None:
    """Call this once when the session that this process serves ends; the last given comes first.

    A ClientApp that keeps something for the whole session, such as processes of its own, ends it
    so. What a callback raises is dropped.
    """
    _callbacks.append(callback)


def run_at_session_end() -> None:
    """Call all that were given, once."""
    _serving.clear()
    while _callbacks:
        with contextlib.suppress(Exception):
            _callbacks.pop()()
