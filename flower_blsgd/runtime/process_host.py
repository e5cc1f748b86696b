"""The server's side of a worker process: start it, exchange messages, notice its death, end it."""

import collections
import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping

from flwr.app import Error, Message, RecordDict

from .devices import WorkerSpec
from .flower_internals import CRASHED, NODE_GONE
from .mailbox import Mailbox
from .pinning import environment, num_threads
from .shared_memory import BufferPool, Channel, Packer, Payload
from .template_process import WorkerStart, start_worker
from .worker_process import Answer, Job

_LOG = logging.getLogger(__name__)

_MAX_DEATHS = 3
_CLOSE_SECONDS = 5.0
_JOIN_SECONDS = 10.0
_LAST_WORDS_SECONDS = 2.0
_REPORTED_LINES = 20
_HIDDEN_DEATH_SECONDS = 0.2
"""How often to look for a death that a child of the process hides: it holds the socket open."""


class WorkerProcess:
    """A started worker process.

    Parameters
    ----------
    start : WorkerStart
        Its environment, cores and threads.
    job : Job
        Sent to it first.
    setup : Payload, optional
        Sent to it next: a function that it calls before it loads the app.
    on_line : callable
        Called from a thread with every line that it prints.

    Raises
    ------
    OSError
        If the system cannot start it.
    """

    def __init__(
        self,
        start: WorkerStart,
        job: Job,
        setup: Payload | None,
        on_line: Callable[[str], None],
    ) -> None:
        self._on_line = on_line
        self._closing, self._closed = threading.Lock(), False
        self._last_lines: collections.deque[str] = collections.deque(maxlen=_REPORTED_LINES)
        ours, theirs = socket.socketpair()
        lifeline_end, self._lifeline = os.pipe()
        output, output_end = os.pipe()
        try:
            self._process = start_worker(start, theirs.fileno(), lifeline_end, output_end)
        except BaseException:
            ours.close()
            os.close(self._lifeline)
            os.close(output)
            raise
        finally:
            theirs.close()
            os.close(lifeline_end)
            os.close(output_end)
        self._channel = Channel(ours)
        self._listener = threading.Thread(target=self._listen, args=(output,), daemon=True)
        self._listener.start()
        with contextlib.suppress(OSError):  # one that dies at once is noticed by who receives
            self._channel.send(Packer(BufferPool()).pack(job))
            if setup is not None:
                self._channel.send(setup)

    @property
    def process_id(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    @property
    def ended(self) -> bool:
        """Whether it is gone, or the way to it is broken; only while it handles no message."""
        return self._channel.poll() or not self.alive

    @property
    def attached_bytes(self) -> int:
        """Bytes of the shared buffers that the process made."""
        return self._channel.attached_bytes

    def send(self, payload: Payload) -> None:
        """Send a message, which `receive` returns the answer to, or fails."""
        with contextlib.suppress(OSError):
            self._channel.send(payload)

    def receive(self) -> Answer:
        """Wait for an answer and return it.

        Raises
        ------
        EOFError, OSError
            If the process is gone.
        Exception
            Whatever unpickling raises, if the reply cannot be read; the process lives on.
        """
        while not self._channel.poll(_HIDDEN_DEATH_SECONDS):
            if not self.alive and not self._channel.poll():
                raise EOFError
        answer: Answer = self._channel.receive()
        return answer

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def end(self) -> str:
        """End it, which is dying or out of reach; return how it died, and its last lines."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_WORDS_SECONDS)
        self.terminate()
        self.close()
        code = self._process.wait()
        how = f"exit code {code}"
        if -code in set(signal.Signals):
            how = f"signal {signal.Signals(-code).name}"
        last = "\n".join(self._last_lines)
        return f"its last lines were:\n{last}\ndied ({how})" if last else f"died ({how})"

    def close(self) -> None:
        """Wait until it is gone, kill it if it does not go, and give everything back.

        May be called twice, and from two threads.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
            try:
                self._process.wait(_CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._channel.close()
            os.close(self._lifeline)
            self._listener.join(_LAST_WORDS_SECONDS)

    def _listen(self, output: int) -> None:
        with open(output, errors="replace") as lines, contextlib.suppress(ValueError):
            for line in lines:
                self._last_lines.append(line.rstrip())
                self._on_line(line.rstrip())


class ProcessHost:
    """Keeps a worker process going for its node; every message gets a reply.

    A thread takes one message after another. If the process dies, the message that it handled
    fails at once, and it starts again with empty state.

    Parameters
    ----------
    worker : WorkerSpec
        Its device and cores.
    job, setup
        See `WorkerProcess`.
    threads : int
        Compute threads; 0 for one per core.
    mailbox : Mailbox
        Takes every reply, error replies included. A message whose reply nobody waits for any
        more is not begun.
    """

    def __init__(
        self, worker: WorkerSpec, job: Job, setup: Payload | None, threads: int, mailbox: Mailbox
    ) -> None:
        self._job, self._setup, self._mailbox = job, setup, mailbox
        self.label = worker.name or f"{worker.device_with_cores} (node {job.context.node_id})"
        variables: Mapping[str, str] = {**os.environ, **environment(worker, threads)}
        self._start = WorkerStart(worker, num_threads(worker, threads), variables)
        self._waiting: collections.deque[tuple[Message, Payload]] = collections.deque()
        self._sent: Message | None = None
        self._process: WorkerProcess | None = None
        self._deaths = 0
        self._closing = False
        self._thread: threading.Thread | None = None
        # A grid that is collected may close us in any thread, also in one that has the lock.
        self._changed = threading.Condition(threading.RLock())
        self.given_up = False
        """Whether it died too often and is not started again."""
        self.state = RecordDict()
        """What the node keeps in shared memory, as of its last reply: momentum, for example."""

    @property
    def process_id(self) -> int | None:
        """The process, if it runs."""
        process = self._process
        return process.process_id if process is not None and process.alive else None

    @property
    def attached_bytes(self) -> int:
        """Bytes of the shared buffers that the process made."""
        process = self._process
        return process.attached_bytes if process is not None else 0

    def submit(self, message: Message, payload: Payload) -> None:
        """Have the node handle a message; the process starts with the first one."""
        with self._changed:
            if self._closing:
                self._fail(message, NODE_GONE, " is closed")
                return
            self._waiting.append((message, payload))
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, daemon=True)
                self._thread.start()
            # From the caller's thread where that is possible: it reaches the process sooner.
            self._send_next()
            self._changed.notify()

    def begin_close(self) -> None:
        """Take no more messages, and ask the process to end."""
        with self._changed:
            self._closing = True
            if self._process is not None:
                self._process.terminate()
            self._changed.notify()

    def finish_close(self) -> None:
        """Wait until the process is gone; kill it if it does not go."""
        process, thread = self._process, self._thread
        if process is not None:
            process.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)
        with self._changed:  # the thread may have started one meanwhile
            process, self._process = self._process, None
        if process is not None:
            process.close()
        self._fail_all(NODE_GONE, " is closed")  # somebody may still wait

    def _serve(self) -> None:
        """Handle messages until `begin_close`; the thread's function."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._sent or self._waiting or self._closing)
                if self._closing:
                    return
                sent = self._sent
            if sent is not None:
                self._receive(sent)
                continue
            try:
                self._ensure_process()
            except Exception as error:  # it cannot be started
                self._fail_all(CRASHED, f": {type(error).__name__}: {error}")
            with self._changed:
                self._send_next()

    def _send_next(self) -> None:
        """Send the next message, if the process is ready for one; with the lock."""
        while self._waiting and self._sent is None:
            message, payload = self._waiting[0]
            if not self._mailbox.expects(message.metadata.message_id):
                self._waiting.popleft()
                continue
            if self._process is None or self._process.ended:
                return  # the thread starts one
            self._waiting.popleft()
            self._sent = message
            self._process.send(payload)

    def _receive(self, message: Message) -> None:
        """Wait for the reply to the message that was sent, and pass it on."""
        process = self._process
        assert process is not None
        try:
            reply, state = process.receive()
        except (EOFError, OSError):
            if not self._closing:
                self._replace(message)
            return
        except Exception as error:  # without an answer the sender would wait for ever
            reason = f"worker {self.label}: {type(error).__name__}: {error}"
            reply, state = Message(Error(CRASHED, reason), reply_to=message), self.state
        with self._changed:
            self._sent = None
            self._deaths = 0
            self.state = state
            self._send_next()
        self._mailbox.receive(reply)

    def _ensure_process(self) -> None:
        """Start the process, or start it again if it died between two messages."""
        if self.given_up:
            self._fail_all(NODE_GONE, f" died {_MAX_DEATHS} times and is given up")
        elif self._process is None:
            self._start_process()
        elif self._process.ended:
            self._replace(None)

    def _replace(self, message: Message | None) -> None:
        """Count a death, fail the message that the process handled, and start it again."""
        process = self._process
        assert process is not None
        how = process.end()  # it may live, and only the way to it be broken
        with self._changed:
            self._process, self._sent, self.state = None, None, RecordDict()
            self._deaths += 1
            self.given_up = self._deaths >= _MAX_DEATHS
        if message is not None:
            self._fail(message, CRASHED, f": the process {how}")
        else:
            _LOG.warning("worker %s: the process %s", self.label, how)
        if self._closing:
            return
        if self.given_up:
            _LOG.error("worker %s died %d times in a row: given up", self.label, _MAX_DEATHS)
        else:
            _LOG.warning("worker %s starts again", self.label)
            with contextlib.suppress(OSError):  # tried once more for the next message
                self._start_process()

    def _start_process(self) -> None:
        process = WorkerProcess(self._start, self._job, self._setup, self._on_line)
        with self._changed:
            self._process = process
            if self._closing:  # `finish_close` waits for us
                process.terminate()

    def _fail(self, message: Message, code: int, reason: str) -> None:
        error = Error(code, f"worker {self.label}{reason}")
        self._mailbox.receive(Message(error, reply_to=message))

    def _fail_all(self, code: int, reason: str) -> None:
        with self._changed:
            failed = [self._sent] if self._sent is not None else []
            failed += [message for message, _ in self._waiting]
            self._waiting.clear()
            self._sent = None
        for message in failed:
            self._fail(message, code, reason)

    def _on_line(self, line: str) -> None:
        _LOG.info("[%s] %s", self.label, line)
