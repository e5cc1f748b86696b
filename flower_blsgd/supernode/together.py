"""Several SuperNodes that start together and end together."""

import math
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence

from ..errors import UsageError
from .endings import begins_verdict, node_id_in, plain, why_ended
from .node_plan import NodeLaunch
from .node_process import Ended, Events, NodeProcess, Said

_REMEMBERED_LINES = 60
_VERDICT_LINES = 4
_QUIET_SECONDS = 20.0
"""What a node says while it connects is shown if that takes longer, or goes wrong."""


def run_nodes(launches: Sequence[NodeLaunch], tell: Callable[[str], None]) -> None:
    """Start SuperNodes and stay until all have ended; however this is left, none remains.

    Parameters
    ----------
    launches : sequence of NodeLaunch
        What to start.
    tell : callable
        Called with each line for the user.

    Raises
    ------
    UsageError
        If one ends with an error that the user can mend; the others are ended first.
    SuperNodeEndedError
        If one ends with another error; likewise.
    """
    events: Events = queue.SimpleQueue()
    voices = [_Voice(launch, tell, alone=len(launches) == 1) for launch in launches]
    nodes: list[NodeProcess] = []
    try:
        for number, launch in enumerate(launches):
            nodes.append(NodeProcess(number, launch, events))
        running = set(range(len(nodes)))
        while running:
            for voice in voices:
                voice.lose_patience()
            try:
                event = events.get(timeout=1.0)
            except queue.Empty:
                continue
            voice = voices[event.node]
            if isinstance(event, Said):
                voice.hear(event.line)
                continue
            running.discard(event.node)
            if event.code:
                raise voice.end(event)
            tell(f"SuperNode {launches[event.node].label} has ended")
    finally:
        for node in nodes:
            node.let_go()
        for node in nodes:
            node.wait()
        while not events.empty():  # their last words
            event = events.get()
            if isinstance(event, Said):
                voices[event.node].hear(event.line)


class _Voice:
    """What one node says, for the user: a line when it is connected, and from then on all."""

    def __init__(self, launch: NodeLaunch, tell: Callable[[str], None], alone: bool) -> None:
        self._launch, self._tell = launch, tell
        self._prefix = "" if alone else f"[{launch.label}] "
        self._patience_ends = math.inf
        self._holds_back, self._held = True, list[str]()
        self._last: deque[str] = deque(maxlen=_REMEMBERED_LINES)
        self._verdict: list[str] = []

    def hear(self, line: str) -> None:
        """Take a line."""
        text = plain(line)
        self._last.append(text)
        self._patience_ends = min(self._patience_ends, time.monotonic() + _QUIET_SECONDS)
        if self._verdict or begins_verdict(text):
            # What its own processes say while they are ended explains nothing.
            self._holds_back = True
            self._verdict.append(text)
            del self._verdict[_VERDICT_LINES:]
        if not self._holds_back:
            self._tell(self._prefix + line)
        elif node_id := node_id_in(text):
            self._holds_back, self._held = False, []
            where = f"{self._launch.superlink} (node {node_id})"
            self._tell(f"SuperNode {self._launch.label} is connected to {where}")
        else:
            self._held.append(line)

    def lose_patience(self) -> None:
        """Show what was held back if connecting takes long."""
        if not self._verdict and time.monotonic() > self._patience_ends:
            self._show_held()

    def end(self, ended: Ended) -> Exception:
        """Return why it ended with an error; what nobody can explain is shown whole."""
        reason = why_ended(self._launch, ended.code, self._verdict or self._last)
        if not isinstance(reason, UsageError):
            self._show_held()
        return reason

    def _show_held(self) -> None:
        self._holds_back = False
        for line in self._held:
            self._tell(self._prefix + line)
        self._held = []
