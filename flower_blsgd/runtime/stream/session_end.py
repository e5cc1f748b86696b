"""What must be taken down when a session ends."""

import contextlib
from collections.abc import Callable

_callbacks: list[Callable[[], object]] = []


def at_session_end(callback: Callable[[], object]) -> None:
    """Call this once when the session that this process serves ends; the last given comes first.

    A ClientApp that keeps something for the whole session, such as processes of its own, ends it
    so. What a callback raises is dropped.
    """
    _callbacks.append(callback)


def run_at_session_end() -> None:
    """Call all that were given, once."""
    while _callbacks:
        with contextlib.suppress(Exception):
            _callbacks.pop()()
