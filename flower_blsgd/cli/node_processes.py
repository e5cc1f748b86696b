"""Run several SuperNodes from one command: start them, show their output, end all of them."""

import contextlib
import ctypes
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flwr.app.exception import AppExitException

from ..errors import UsageError
from ..runtime.devices import WorkerSpec
from ..runtime.pinning import on_cores_of

KEY_FLAG = "--auth-supernode-private-key"
GRACE_SECONDS = 10.0
"""How long a SuperNode and its ClientApp may take to end; Flower itself takes up to 5 s."""

_KEPT_LINES, _REASON_LINES = 60, 4
_POLL_SECONDS = 0.1
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_CONNECTED = re.compile(r"SuperNode ID: (\d+)")
_EXIT_CODE = re.compile(r"Exit Code: 3\d\d\b")  # of a SuperNode; a ClientApp has others
_REFUSED_ARGUMENT = re.compile(r"flower-supernode: error: (.*)")

_Events = queue.SimpleQueue[tuple[int, str]]
"""The index of a node, and a line that it printed."""


class SuperNodeEndedError(AppExitException):
    """A SuperNode ended with an error; the message says which one, and how."""

    exit_code = 1


@dataclass(frozen=True)
class NodeCommand:
    """The command line of one SuperNode.

    Parameters
    ----------
    label : str
        Its name in what the user reads; unique.
    command : tuple of str
        Program and arguments.
    cores : tuple of int
        The CPU cores that it is pinned to; empty: all.
    environment : mapping
        All its environment variables.
    superlink : str
        ``HOST:PORT``, for messages.
    key : Path, optional
        Its private key, for messages.
    port : int
        Of its Runtime API on the loopback interface, for messages.
    """

    label: str
    command: tuple[str, ...]
    cores: tuple[int, ...]
    environment: Mapping[str, str] = field(repr=False)
    superlink: str
    key: Path | None
    port: int


def run_nodes(commands: Sequence[NodeCommand], show: Callable[[str], None]) -> None:
    """Start SuperNodes and stay until all have ended; however this is left, none remains.

    Parameters
    ----------
    commands : sequence of NodeCommand
        What to start.
    show : callable
        Called with each line for the user.

    Raises
    ------
    UsageError
        If one ends with an error that the user can correct; the others are ended first.
    SuperNodeEndedError
        If one ends with another error; likewise.
    """
    if _PRCTL is not None:  # what an ended SuperNode leaves behind becomes our child
        _PRCTL(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    events: _Events = queue.SimpleQueue()
    outputs = [_Output(command, show, alone=len(commands) == 1) for command in commands]
    nodes: list[subprocess.Popen[str]] = []
    listeners: list[threading.Thread] = []
    try:
        nodes.extend(_start(command) for command in commands)  # before there are threads
        for index, node in enumerate(nodes):
            listeners.append(threading.Thread(target=_listen, args=(index, node, events)))
            listeners[-1].start()
        running = set(range(len(nodes)))
        while running:
            with contextlib.suppress(queue.Empty):
                index, line = events.get(timeout=_POLL_SECONDS)
                outputs[index].add(line)
                continue
            # Not by the end of its output, which what it started may hold open.
            for index in [index for index in running if nodes[index].poll() is not None]:
                running.discard(index)
                if code := nodes[index].returncode:
                    raise outputs[index].error(code)
                show(f"SuperNode {commands[index].label} has ended")
                _signal(_left_behind(nodes), signal.SIGTERM)
    finally:
        _end(nodes)
        for listener in listeners:
            listener.join()
        while not events.empty():  # what they printed while they ended
            index, line = events.get()
            outputs[index].add(line)


def _start(command: NodeCommand) -> "subprocess.Popen[str]":
    parent = os.getpid()

    def set_up_child() -> None:
        # A shell starts what it puts into the background with Ctrl-C ignored. Flower's programs
        # end themselves with that signal, and would inherit it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if _PRCTL is not None:
            _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

    # Pinned before it exists, so that all that it starts is.
    with on_cores_of(WorkerSpec("cpu", command.cores)):
        return subprocess.Popen(
            command.command,
            env=dict(command.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches this process alone
            preexec_fn=set_up_child,  # noqa: PLW1509  # safe: there are no other threads yet
        )


def _listen(index: int, node: "subprocess.Popen[str]", events: _Events) -> None:
    assert node.stdout is not None
    with node.stdout as output:
        for line in output:
            events.put((index, line.rstrip("\n")))


def _end(nodes: Sequence["subprocess.Popen[str]"]) -> None:
    """End the nodes and all that they started; what is left after the grace time is killed."""
    for node in nodes:
        node.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    terminated: set[int] = set()
    while (running := [node for node in nodes if node.poll() is None]) or _left_behind(nodes):
        left_behind = set(_left_behind(nodes))
        if not running:  # their own children, which nobody else ends
            _signal(left_behind - terminated, signal.SIGTERM)
            terminated |= left_behind
        if time.monotonic() > deadline:
            _signal([*(node.pid for node in running), *left_behind], signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def _signal(process_ids: Iterable[int], number: signal.Signals) -> None:
    for process_id in process_ids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, number)


def _left_behind(nodes: Sequence["subprocess.Popen[str]"]) -> list[int]:
    """Return the living processes that ended SuperNodes left to this one (Linux only)."""
    own = {node.pid for node in nodes}
    found = []
    for process_id, state in _children():
        if process_id in own:
            continue
        if state == "Z":
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process_id, os.WNOHANG)
        else:
            found.append(process_id)
    return found


def _children() -> Iterator[tuple[int, str]]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid():
                yield int(stat.parent.name), state


class _Output:
    """Shows what one node prints, and keeps the reason why it ended."""

    def __init__(self, command: NodeCommand, show: Callable[[str], None], alone: bool) -> None:
        self._command, self._show = command, show
        self._prefix = "" if alone else f"[{command.label}] "
        self._last: deque[str] = deque(maxlen=_KEPT_LINES)
        self._reason: list[str] = []

    def add(self, line: str) -> None:
        """Show a line; from the reason of an end on, keep it back."""
        text = _COLOURS.sub("", line).rstrip()
        self._last.append(text)
        if self._reason or _EXIT_CODE.search(text):
            # What its own processes print while they are ended explains nothing.
            self._reason = [*self._reason, text][:_REASON_LINES]
            return
        self._show(self._prefix + line)
        if connected := _CONNECTED.search(text):
            where = f"{self._command.superlink} (node {connected[1]})"
            self._show(f"SuperNode {self._command.label} is connected to {where}")

    def error(self, code: int) -> Exception:
        """Return what to raise for a node that ended with this exit code (-n: by signal n)."""
        error = _error(self._command, code, self._reason or list(self._last))
        if not isinstance(error, UsageError):
            for line in self._reason:
                self._show(self._prefix + line)
        return error


def _error(node: NodeCommand, code: int, lines: Sequence[str]) -> Exception:
    """Return the UsageError that tells the user what to change, else a SuperNodeEndedError."""
    who = f"SuperNode {node.label}"
    text = "\n".join(lines)
    if "[code: 2001]" in text:
        return UsageError(
            f"{who}: the SuperLink at {node.superlink} takes registered SuperNodes only; make a "
            "key, register it with `flwr supernode register KEY.pub NAME`, and give "
            f"{KEY_FLAG} KEY"
        )
    if "[code: 2004]" in text:
        public = f"{node.key}.pub" if node.key else "KEY.pub"
        return UsageError(
            f"{who}: the SuperLink at {node.superlink} does not take the key {node.key}; "
            f"register it with `flwr supernode register {public} NAME`, or leave it "
            "out if that SuperLink has no --enable-supernode-auth; if it is registered, a "
            "SuperNode has it already, or was killed less than a minute ago"
        )
    if argument := _REFUSED_ARGUMENT.search(text):
        return UsageError(f"{who}: flower-supernode: {argument[1]}")
    if "address already in use" in text.lower():
        return UsageError(
            f"{who}: port {node.port} was taken in the meantime; leave --port out for a free one"
        )
    how = f"ended with exit code {code}"
    if code < 0:
        with contextlib.suppress(ValueError):
            how = f"was killed ({signal.Signals(-code).name})"
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return SuperNodeEndedError(f"{who} {how}{f'; its last line: {last}' if last else ''}")
