"""A TCP proxy that is slow, or breaks: what lies between a node and the server."""

import contextlib
import queue
import socket
import struct
import threading
import time

_CHUNK_BYTES = 16 << 10


class SlowLink:
    """Listens on a port of its own, and passes on what comes to a port of this machine.

    Parameters
    ----------
    target_port : int
        Where to.
    delay_seconds : float (default: 0)
        How long each byte is on the way, in either direction.
    bytes_per_second : float (default: infinity)
        Of each direction of each connection.
    """

    def __init__(
        self, target_port: int, delay_seconds: float = 0, bytes_per_second: float = float("inf")
    ) -> None:
        self._target = "127.0.0.1", target_port
        self._delay_seconds, self._bytes_per_second = delay_seconds, bytes_per_second
        limited = bytes_per_second < float("inf")
        chunks = 2 * delay_seconds * bytes_per_second / _CHUNK_BYTES if limited else 256
        self._most_chunks = 4 + int(chunks)  # more waits at its sender
        self._open = True
        self._flows = threading.Event()
        self._flows.set()
        self._cut_after: dict[str, int] = {}
        self._sockets: list[socket.socket] = []
        self.connections = 0
        self.passed = {"up": 0, "down": 0}
        """Bytes so far, from the node and to it."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "SlowLink":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cut(self, for_good: bool = True) -> None:
        """Break all connections; refuse new ones until `restore`, unless not `for_good`."""
        self._open = not for_good
        for end in list(self._sockets):
            _reset(end)

    def cut_after(self, direction: str, num_bytes: int) -> None:
        """Break all connections once, when so many more bytes went ``"up"`` or ``"down"``."""
        self._cut_after[direction] = self.passed[direction] + num_bytes

    @property
    def will_cut(self) -> bool:
        """Whether `cut_after` still has something to do."""
        return bool(self._cut_after)

    def stall(self) -> None:
        """Pass nothing on and tell nobody, as a link that is down, until `restore`."""
        self._flows.clear()

    def restore(self) -> None:
        """Let connections through again."""
        self._open = True
        self._flows.set()

    def close(self) -> None:
        """End everything."""
        self._flows.set()
        self.cut()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                node, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._target)
                except OSError:
                    _reset(node)
                    continue
                self._sockets += [node, server]
                if not self._open:
                    self.cut()
                    continue
                self.connections += 1
                for ends in (("up", node, server), ("down", server, node)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, direction: str, source: socket.socket, sink: socket.socket) -> None:
        on_the_way: queue.Queue[tuple[float, bytes]] = queue.Queue(self._most_chunks)
        arguments = direction, on_the_way, sink
        threading.Thread(target=self._deliver, args=arguments, daemon=True).start()
        free_at = time.monotonic()
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                free_at = max(free_at, time.monotonic()) + len(data) / self._bytes_per_second
                on_the_way.put((free_at + self._delay_seconds, data))
        on_the_way.put((0.0, b""))

    def _deliver(
        self, direction: str, on_the_way: "queue.Queue[tuple[float, bytes]]", sink: socket.socket
    ) -> None:
        while (item := on_the_way.get())[1]:
            due, data = item
            time.sleep(max(0.0, due - time.monotonic()))
            self._flows.wait()
            with contextlib.suppress(OSError):
                sink.sendall(data)
                self.passed[direction] += len(data)
            if self.passed[direction] >= self._cut_after.get(direction, 1 << 62):
                self._cut_after.pop(direction, None)
                self.cut(for_good=not self._open)
        _reset(sink)


def _reset(end: socket.socket) -> None:
    """Break a connection as a network does, and wake who waits for it."""
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RDWR)
    end.close()
