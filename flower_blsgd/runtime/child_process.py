"""One worker process: start it, exchange messages with it, notice its death, end it."""

import collections
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from .channel import Channel
from .pinning import on_cores_of
from .shared_arrays import Packer, Parcel
from .shared_pool import Pool
from .worker_process import Answer, Job

_CLOSE_SECONDS = 5.0
_LAST_WORDS_SECONDS = 2.0
_TOLD_LINES = 20


class ChildProcess:
    """A started worker process.

    Parameters
    ----------
    job : Job
        Sent to it first.
    setup : Parcel, optional
        Sent to it next: a function that it calls before it loads the app.
    lanes : int
        How many messages it handles side by side, >= 1.
    environment : mapping
        Its environment variables.
    on_line : callable
        Called from a thread with every line that it prints.

    Raises
    ------
    OSError
        If the system cannot start it.
    """

    def __init__(
        self,
        job: Job,
        setup: Parcel | None,
        lanes: int,
        environment: Mapping[str, str],
        on_line: Callable[[str], None],
    ) -> None:
        self._on_line = on_line
        self._closing, self._closed = threading.Lock(), False
        self._last_lines: collections.deque[str] = collections.deque(maxlen=_TOLD_LINES)
        pairs = [socket.socketpair() for _ in range(lanes)]
        lifeline_end, self._lifeline = os.pipe()
        fds = [lifeline_end, *(theirs.fileno() for _, theirs in pairs)]
        try:
            self._process = _start(job, fds, environment)
        except BaseException:
            for ours, _ in pairs:
                ours.close()
            os.close(self._lifeline)
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()
            os.close(lifeline_end)
        self._channels = [Channel(ours, views=True) for ours, _ in pairs]
        assert self._process.stdout is not None
        self._listener = threading.Thread(
            target=self._listen, args=(self._process.stdout,), daemon=True
        )
        self._listener.start()
        with contextlib.suppress(OSError):  # one that dies at once is noticed by who reads
            self._channels[0].send(Packer(Pool()).pack(job))
            if setup is not None:
                self._channels[0].send(setup)

    @property
    def process_id(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    @property
    def attached_bytes(self) -> int:
        """Bytes of the shared buffers that the process made."""
        return sum(channel.attached_bytes for channel in self._channels)

    def fileno(self, lane: int) -> int:
        """Return what becomes readable when a message of a lane is answered, or it died."""
        return self._channels[lane].fileno

    def send(self, parcel: Parcel, lane: int) -> None:
        """Send a message; not while another thread receives.

        Raises
        ------
        OSError
            If the process is gone.
        """
        self._channels[lane].send(parcel)

    def poll(self, lane: int) -> bool:
        """Whether there is an answer."""
        return self._channels[lane].poll()

    def receive(self, lane: int) -> Answer:
        """Wait for an answer and return it.

        Raises
        ------
        EOFError, OSError
            If the process is gone.
        Exception
            Whatever unpickling raises, if the reply cannot be read; the process lives on.
        """
        answer: Answer = self._channels[lane].receive()
        return answer

    def obituary(self) -> str:
        """Return how the process died, and its last lines; after `end` only."""
        code = self._process.wait()
        self._listener.join(_LAST_WORDS_SECONDS)
        how = f"exit code {code}"
        if code < 0:
            known = -code in set(signal.Signals)
            how = f"signal {signal.Signals(-code).name if known else -code}"
        last = "\n".join(self._last_lines)
        return f"its last lines were:\n{last}\ndied ({how})" if last else f"died ({how})"

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def end(self) -> None:
        """Close it, which is dying or out of reach."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_WORDS_SECONDS)
        self.terminate()
        self.close()

    def close(self) -> None:
        """Wait until it is gone, kill it if it does not go, and give everything back.

        May be called twice, and from two threads.
        """
        with self._closing:
            if not self._closed:
                self._close()
                self._closed = True

    def _close(self) -> None:
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for channel in self._channels:
            channel.close()
        os.close(self._lifeline)
        self._listener.join(_LAST_WORDS_SECONDS)

    def _listen(self, output: IO[str]) -> None:
        with output, contextlib.suppress(ValueError):
            for line in output:
                self._last_lines.append(line.rstrip())
                self._on_line(line.rstrip())


def _start(job: Job, fds: Sequence[int], environment: Mapping[str, str]) -> "subprocess.Popen[str]":
    # -P: a module in the current folder must not take the place of a library's.
    command = [sys.executable, "-P", "-m", "flower_blsgd.runtime.worker_process"]
    lifeline, *sockets = map(str, fds)
    # Pinned before it exists, so that no thread of a library escapes.
    with on_cores_of(job.worker):
        return subprocess.Popen(
            [*command, lifeline, str(os.getpid()), *sockets],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            pass_fds=fds,
        )
