"""The gRPC server inside the ServerApp's process, which nodes connect to."""

import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from ...errors import UsageError
from ..mailbox import Mailbox
from .channel_options import (
    METHOD,
    NODE_KEY,
    SERVER_OPTIONS,
    SERVICE,
    SESSION_ENDED,
    TOKEN_KEY,
)
from .credentials import new_certificate, new_token, same_token
from .frames import Frame, FrameError, FrameReader
from .link import Connection, Link

_LOG = logging.getLogger(__name__)

_MOST_CONNECTIONS = 4096
_REFUSALS_LOGGED = 20
_LONGEST_ID = 20


class StreamServer:
    """Takes connections of invited nodes, and of nobody else.

    Parameters
    ----------
    address : str
        ``HOST:PORT`` that nodes are to connect to; ``:PORT`` for any host; empty for any host
        and a free port.
    mailbox : Mailbox
        Takes the replies.

    Attributes
    ----------
    links : dict of int to Link
        The invited nodes.
    port : int
        Where it listens.
    certificate : bytes
        What nodes know it by, as PEM.

    Raises
    ------
    UsageError
        If the address cannot be listened on.
    """

    def __init__(self, address: str, mailbox: Mailbox) -> None:
        self.links: dict[int, Link] = {}
        self._mailbox = mailbox
        self._refusals = 0
        certificate = new_certificate()
        self.certificate = certificate.public
        self._server = grpc.server(
            ThreadPoolExecutor(_MOST_CONNECTIONS, thread_name_prefix="stream"),
            options=SERVER_OPTIONS,
        )
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            self._session
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),)
        )
        self.port = self._listen(address, certificate.server_credentials())
        self._server.start()

    def _listen(self, address: str, credentials: grpc.ServerCredentials) -> int:
        host, port = split_address(address) if address else ("", 0)
        # A host that is not ours, such as the outside of a router, is listened for on all of ours.
        listening = _own_address(host) or ("[::]" if host.startswith("[") else "0.0.0.0")
        try:
            return int(self._server.add_secure_port(f"{listening}:{port}", credentials))
        except RuntimeError:
            raise UsageError(
                f'stream-address = "{address}": cannot listen on {listening}:{port}, another '
                "program does; name another port, or none for a free one"
            ) from None

    def invite(self, node_id: int) -> Link:
        """Let a node connect, with a new token; one that it had before is worth nothing."""
        link = Link(node_id, new_token(), self._mailbox)
        previous = self.links.get(node_id)
        self.links[node_id] = link
        if previous is not None:
            previous.give_up("a new session began")
        return link

    def end(self) -> None:
        """Tell every node that it is over. Takes no lock: a signal's handler calls it."""
        for link in list(self.links.values()):
            link.end()

    def stop(self, grace_seconds: float) -> None:
        """Stop listening; what is under way is cut off after `grace_seconds`."""
        self._server.stop(grace_seconds).wait(grace_seconds + 1)

    def _session(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        link = self._authenticated(context)
        connection = Connection()
        if not context.add_callback(connection.close):
            return  # it is over already
        context.send_initial_metadata(())
        threading.Thread(
            target=self._read, args=(link, connection, messages, context), daemon=True
        ).start()
        yield from connection.pieces()
        if connection.ended:  # a frame may be half sent, so it is not a frame that says so
            context.set_code(SESSION_ENDED)

    def _authenticated(self, context: grpc.ServicerContext) -> Link:
        """Return the link of the node that connects; anybody else gets nothing."""
        shown = dict(context.invocation_metadata())
        node_id, token = shown.get(NODE_KEY, ""), shown.get(TOKEN_KEY, b"")
        known_form = str(node_id).isdecimal() and len(node_id) <= _LONGEST_ID
        link = self.links.get(int(node_id)) if known_form else None
        expected = link.token if link is not None else new_token()
        known = isinstance(token, bytes) and same_token(token, expected)
        if link is None or not known:
            self._refusals += 1
            if self._refusals <= _REFUSALS_LOGGED:
                _LOG.warning(
                    "refused a connection to the stream from %s: %s",
                    context.peer(),
                    "its token is not that of a node of this run" if token else "it has no token",
                )
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token of this run")
        assert link is not None
        return link

    def _read(
        self,
        link: Link,
        connection: Connection,
        messages: Iterator[bytes],
        context: grpc.ServicerContext,
    ) -> None:
        try:
            for frame in FrameReader().frames(messages):
                _receive(link, connection, frame)
        except FrameError as error:
            _LOG.error("the connection of %s is closed: %s", link.label, error)
            # Else it would come back at once, and send the same again.
            link.give_up(f"what it sent cannot be read: {error}")
            context.cancel()
        except grpc.RpcError:
            pass  # it broke
        except Exception:  # gRPC raises a bare Exception where a connection ends in mid-read
            _LOG.debug("reading from %s", link.label, exc_info=True)
        finally:
            link.detach(connection)
            connection.close()


def _receive(link: Link, connection: Connection, frame: Frame) -> None:
    try:
        link.receive(connection, frame)
    except FrameError:
        raise
    except Exception as error:  # nothing that a node sends goes without a word
        _LOG.debug("reading a frame of %s", link.label, exc_info=True)
        raise FrameError(f"{type(error).__name__}: {error}") from error


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``.

    Raises
    ------
    UsageError
        If it is none.

    Examples
    --------
    >>> split_address("10.0.0.5:9100"), split_address(":9100")
    (('10.0.0.5', 9100), ('', 9100))
    """
    host, colon, port = address.rpartition(":")
    if not colon or not (port.isascii() and port.isdecimal()) or int(port) > 65_535 or " " in host:
        raise UsageError(
            f'stream-address = "{address}" is no HOST:PORT; try "10.0.0.5:9100", or ":9100" for '
            "every address of this machine"
        )
    return host, int(port)


def _own_address(host: str) -> str:
    """Return the address of a host if this machine has it, else nothing."""
    try:
        address = socket.gethostbyname(host) if host else ""
        with socket.socket() as probe:
            probe.bind((address, 0))
        return address
    except OSError:
        return ""
