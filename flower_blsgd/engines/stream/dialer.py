"""Connections of a node to the server, over the first address that answers."""

import contextlib
import functools
import queue
import ssl
from collections.abc import Iterator
from typing import Any, Literal

import grpc

from .security import CLIENT_OPTIONS, SERVICE


class Dialer:
    """Connects to the server with a certificate (PEM) at one of several addresses."""

    def __init__(self, addresses: list[str], certificate: bytes) -> None:
        self.addresses = addresses
        self._certificate = certificate
        self._answered = ""

    @contextlib.contextmanager
    def channel(self, seconds: float) -> Iterator[grpc.Channel | None]:
        """Yield a channel to the first address that answers with the certificate, or None.

        Each attempt opens new channels to all addresses: an old channel may wait for lost packets.
        """
        credentials = grpc.ssl_channel_credentials(self._certificate)
        ready: queue.SimpleQueue[str] = queue.SimpleQueue()

        def note(answer: Any, address: str) -> None:
            # There is no such method, which only the server can report.
            if answer.code() is grpc.StatusCode.UNIMPLEMENTED:
                ready.put(address)

        with contextlib.ExitStack() as stack:
            channels: dict[str, grpc.Channel] = {}
            for address in self.addresses:
                channel = grpc.secure_channel(address, credentials, CLIENT_OPTIONS)
                channels[address] = stack.enter_context(channel)
                hello: grpc.UnaryUnaryMultiCallable[bytes, bytes]
                hello = channel.unary_unary(f"/{SERVICE}/Hello")
                answer = hello.future(b"", timeout=seconds, wait_for_ready=True)
                answer.add_done_callback(functools.partial(note, address=address))
            try:
                self._answered = ready.get(timeout=seconds)
            except queue.Empty:
                yield None
                return
            for other in channels.keys() - {self._answered}:
                channels[other].close()
            yield channels[self._answered]

    def listener(self, seconds: float) -> Literal["", "nobody", "another"]:
        """Return who listens where the server did; empty if it may be the server."""
        host, _, port = self._answered.rpartition(":")
        try:
            place = host.strip("[]"), int(port)
            shown = ssl.get_server_certificate(place, timeout=seconds)
            expected = ssl.PEM_cert_to_DER_cert(self._certificate.decode())
            return "" if ssl.PEM_cert_to_DER_cert(shown) == expected else "another"
        except ConnectionRefusedError:
            return "nobody"
        except (OSError, ValueError):  # unreachable, interrupted, or not connected yet
            return ""
