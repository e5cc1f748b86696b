"""The floor of a stream: bare Python gRPC with TLS that moves the same bytes.

One server process; every client is a process of its own, gets all pieces, and sends them back.
``python -m benchmarks.bare_grpc CLIENT ADDRESS CERTIFICATE`` is one client.
"""

import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from flower_blsgd.engines.stream.encoded_arrays import CHUNK_BYTES
from flower_blsgd.engines.stream.security import CLIENT_OPTIONS, SERVER_OPTIONS, new_certificate

METHOD = "/bare.Bare/Echo"
END = b""


def round_seconds(num_clients: int, num_bytes: int, rounds: int) -> list[float]:
    """Return the seconds in which all clients got so many bytes and sent them back."""
    model = [bytes(min(CHUNK_BYTES, num_bytes - at)) for at in range(0, num_bytes, CHUNK_BYTES)]
    outgoing: list[queue.SimpleQueue[list[bytes] | None]] = []
    arrived: queue.SimpleQueue[int] = queue.SimpleQueue()

    def read(messages: Iterator[bytes]) -> None:
        arrived.put(0)  # it is there
        for message in messages:
            if message == END:
                arrived.put(1)

    def echo(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        mine: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        outgoing.append(mine)
        threading.Thread(target=read, args=(messages,), daemon=True).start()
        while (pieces := mine.get()) is not None:
            yield from pieces

    server = grpc.server(ThreadPoolExecutor(num_clients), options=SERVER_OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(echo)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("bare.Bare", {"Echo": handler}),)
    )
    certificate, credentials = new_certificate()
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "certificate.pem"
        path.write_bytes(certificate)
        command = [sys.executable, "-m", "benchmarks.bare_grpc", f"127.0.0.1:{port}", str(path)]
        clients = [subprocess.Popen(command) for _ in range(num_clients)]
        for _ in clients:
            arrived.get()
        while len(outgoing) < num_clients:
            time.sleep(0.01)
        for _ in range(rounds):
            began = time.perf_counter()
            for one in outgoing:
                one.put([*model, END])
            for _ in clients:
                arrived.get()
            seconds.append(time.perf_counter() - began)
        for one in outgoing:
            one.put(None)
        for client in clients:
            client.wait()
    server.stop(0)
    return seconds


def client(address: str, certificate: Path) -> None:
    """Send back what comes, each time when all of it is there."""
    credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
    replies: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()

    def outgoing() -> Iterator[bytes]:
        while (pieces := replies.get()) is not None:
            yield from pieces

    with grpc.secure_channel(address, credentials, CLIENT_OPTIONS) as channel:
        pieces: list[bytes] = []
        for message in channel.stream_stream(METHOD)(outgoing()):
            pieces.append(message)
            if message == END:
                replies.put(pieces)
                pieces = []
        replies.put(None)


if __name__ == "__main__":
    client(sys.argv[1], Path(sys.argv[2]))
