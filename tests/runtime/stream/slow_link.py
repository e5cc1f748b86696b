"""A TCP proxy that is slow, or breaks: what lies between a node and the server."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

_CHUNK_BYTES = 16 << 10
_Result = TypeVar("_Result")


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
        self._target_port = target_port
        self._delay_seconds, self._bytes_per_second = delay_seconds, bytes_per_second
        self._open = True
        self._cut_after: dict[str, int] = {}
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = 0
        self.passed = {"up": 0, "down": 0}
        """Bytes so far, from the node and to it."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._call(self._listen())
        self.port: int = self._server.sockets[0].getsockname()[1]

    def __enter__(self) -> "SlowLink":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cut(self, for_good: bool = True) -> None:
        """Break all connections; refuse new ones until `restore`, unless not `for_good`."""
        self._open = not for_good
        self._loop.call_soon_threadsafe(self._break)

    def cut_after(self, direction: str, num_bytes: int) -> None:
        """Break all connections once, when so many more bytes went ``"up"`` or ``"down"``."""
        self._cut_after[direction] = self.passed[direction] + num_bytes

    @property
    def will_cut(self) -> bool:
        """Whether `cut_after` still has something to do."""
        return bool(self._cut_after)

    def restore(self) -> None:
        """Let connections through again."""
        self._open = True

    def close(self) -> None:
        """End everything."""
        self._call(self._shut_down())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._connected, "127.0.0.1", 0)

    async def _shut_down(self) -> None:
        self._server.close()
        self._break()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _break(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        if not self._open:
            writer.transport.abort()
            return
        self.connections += 1
        try:
            there = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(there[1])
        self._start(self._pass_on("up", reader, there[1]))
        self._start(self._pass_on("down", there[0], writer))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass_on(
        self, direction: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(self._most_chunks())
        self._start(self._deliver(direction, on_the_way, writer))
        free_at = time.monotonic()
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                free_at = max(free_at, time.monotonic()) + len(data) / self._bytes_per_second
                await on_the_way.put((free_at + self._delay_seconds, data))
        await on_the_way.put((0.0, b""))

    def _most_chunks(self) -> int:
        """Return how much the cable holds: more waits at its sender."""
        if self._bytes_per_second == float("inf"):
            return 256
        return 4 + int(2 * self._delay_seconds * self._bytes_per_second / _CHUNK_BYTES)

    async def _deliver(
        self,
        direction: str,
        on_the_way: "asyncio.Queue[tuple[float, bytes]]",
        writer: asyncio.StreamWriter,
    ) -> None:
        try:
            while True:
                due, data = await on_the_way.get()
                if not data:
                    break
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                writer.write(data)
                await writer.drain()
                self.passed[direction] += len(data)
                if self.passed[direction] >= self._cut_after.get(direction, 1 << 62):
                    del self._cut_after[direction]
                    self._break()
        except OSError:
            pass
        writer.transport.abort()
