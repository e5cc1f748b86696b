"""One SuperNode that runs: start it, hear what it says, let it go."""

import os
import queue
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from ..runtime.devices import WorkerSpec
from ..runtime.pinning import on_cores_of
from .node_plan import NodeLaunch

GRACE_SECONDS = 10.0
"""How long a SuperNode and its ClientApp may take to end; Flower itself takes up to 5 s."""

_KEEPER = Path(__file__).with_name("keeper.py")


@dataclass(frozen=True)
class Said:
    """A node printed a line."""

    node: int
    line: str


@dataclass(frozen=True)
class Ended:
    """A node and all that it started are gone; 128 and more: by that signal."""

    node: int
    code: int


Events = queue.SimpleQueue[Said | Ended]


class NodeProcess:
    """A started SuperNode. It ends when it is let go, or when this process does.

    Parameters
    ----------
    number : int
        What its events call it.
    launch : NodeLaunch
        What to start.
    events : queue
        Gets what it prints, and its end.

    Raises
    ------
    OSError
        If the system cannot start it.
    """

    def __init__(self, number: int, launch: NodeLaunch, events: Events) -> None:
        self._number, self._events = number, events
        lifeline_end, self._lifeline = os.pipe()
        keeper = [sys.executable, "-I", "-S", str(_KEEPER), str(lifeline_end), str(GRACE_SECONDS)]
        try:
            # Pinned before it exists, so that all that it starts is.
            with on_cores_of(WorkerSpec("cpu", launch.cores)):
                self._process = subprocess.Popen(
                    [*keeper, *launch.command],
                    env=dict(launch.environment),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    pass_fds=[lifeline_end],
                    start_new_session=True,  # Ctrl-C reaches us alone, and we decide
                )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(lifeline_end)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def let_go(self) -> None:
        """Ask it to end, with all that it started; what does not go in time is killed."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def wait(self) -> None:
        """Wait until it is gone."""
        self._process.wait()
        self._listener.join()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self._events.put(Said(self._number, line.rstrip("\n")))
        code = self._process.wait()
        self._events.put(Ended(self._number, code if code >= 0 else 128 - code))
