"""Unknown callers, and nodes that misbehave: refused and logged, and they get nothing."""

import contextlib
import datetime
import queue
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from cryptography import x509
from flwr.app import Message, RecordDict

from flower_blsgd.engines.mailbox import Mailbox
from flower_blsgd.engines.stream import server as server_module
from flower_blsgd.engines.stream.codec import encode_messages, frame_of, read_frames
from flower_blsgd.engines.stream.encoded_arrays import Broadcast, FrameError
from flower_blsgd.engines.stream.security import (
    CLIENT_OPTIONS,
    METHOD,
    NODE_KEY,
    SERVER_NAME,
    SERVER_OPTIONS,
    SERVICE,
    STREAM_ENDED,
    TOKEN_KEY,
    WELCOME_KEY,
    new_certificate,
    own_addresses,
)
from flower_blsgd.engines.stream.server import Link, StreamServer
from flower_blsgd.errors import UsageError
from flower_blsgd.flower.internals import give_message_id

from ...log_capture import CapturedLog, captured_log
from ..processes import wait_until
from .streams import order


class Caller:
    """Somebody who speaks gRPC, and says what it likes."""

    def __init__(
        self,
        server: StreamServer,
        metadata: Sequence[tuple[str, str | bytes]],
        plain: bool = False,
    ) -> None:
        address = f"127.0.0.1:{server.port}"
        options = [*CLIENT_OPTIONS, ("grpc.max_send_message_length", -1)]
        trusted = grpc.ssl_channel_credentials(server.certificate)
        self.channel = (
            grpc.insecure_channel(address, options)
            if plain
            else grpc.secure_channel(address, trusted, options)
        )
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        call = self.channel.stream_stream(f"/{SERVICE}/{METHOD}")
        self.call = call(iter(self._outgoing.get, None), metadata=metadata, timeout=60)

    def __enter__(self) -> "Caller":
        return self

    def __exit__(self, *_: object) -> None:
        self._outgoing.put(None)
        self.call.cancel()
        self.channel.close()

    def say(self, *messages: bytes) -> "Caller":
        for message in messages:
            self._outgoing.put(message)
        return self

    @property
    def was_let_in(self) -> bool:
        return WELCOME_KEY in dict(self.call.initial_metadata())

    def all_that_comes(self) -> tuple[list[bytes], grpc.StatusCode]:
        """Return what was received until the server ended it, and how it did."""
        received = []
        try:
            for message in self.call:
                received.append(message)
        except grpc.RpcError:
            pass
        return received, self.call.code()

    def refusal(self) -> grpc.StatusCode:
        """Return how a server ended it that does not let it in, and sends nothing."""
        assert not self.was_let_in
        received, code = self.all_that_comes()
        assert received == []
        return code

    def next_message(self) -> Message:
        return next(read_frames(self.call))[0]


class Server:
    """A stream server and its mailbox, without a grid."""

    def __init__(self) -> None:
        self.mailbox = Mailbox()
        self.stream = StreamServer("127.0.0.1:0", self.mailbox)
        self.open_link = self.stream.open_link
        self.broadcasts: dict[str, Broadcast] = {}

    def call(self, link: Link) -> Caller:
        return Caller(self.stream, proof(link.node_id, link.token))

    def connect(self, link: Link) -> Caller:
        caller = self.call(link)
        assert caller.was_let_in
        return caller

    def send(self, link: Link, wire_dtype: str = "float32") -> Message:
        message = order(link.node_id, {"w": np.ones(1, np.float32)})
        self.mailbox.expect(give_message_id(message))
        link.submit(*encode_messages([message], self.broadcasts, wire_dtype))
        return message

    def replies(self, *messages: Message) -> list[Message]:
        return self.mailbox.take([message.metadata.message_id for message in messages])

    def wait_for_replies(self, *messages: Message) -> list[Message]:
        self.mailbox.wait([message.metadata.message_id for message in messages], 60)
        return self.replies(*messages)


def proof(node_id: object, token: bytes) -> list[tuple[str, str | bytes]]:
    return [(NODE_KEY, str(node_id)), (TOKEN_KEY, token)]


def reply_to(message: Message) -> list[bytes]:
    return frame_of(Message(RecordDict(), reply_to=message), {})


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stream.stop(0)


@pytest.fixture
def log() -> Iterator[CapturedLog]:
    with captured_log() as lines:
        yield lines


# --- certificates, tokens, addresses ------------------------------------------------------------


def test_certificate_and_tokens_are_of_one_run_alone(server: Server) -> None:
    one, other = (x509.load_pem_x509_certificate(new_certificate()[0]) for _ in range(2))
    names = one.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(names) == [x509.DNSName(SERVER_NAME)]
    assert one.public_key() != other.public_key()
    assert one.serial_number != other.serial_number
    # Valid now and for long runs, also where clocks differ.
    now = datetime.datetime.now(datetime.UTC)
    assert one.not_valid_before_utc < now - datetime.timedelta(hours=12)
    assert one.not_valid_after_utc > now + datetime.timedelta(days=90)
    assert b"PRIVATE" not in new_certificate()[0]
    tokens = {server.open_link(node_id).token for node_id in range(100)}
    assert (len(tokens), {len(token) for token in tokens}) == (100, {32})


@pytest.mark.parametrize(
    ("superlink", "first"),
    [
        *[("127.0.0.1:9092", "127.0.0.1"), ("127.0.0.1", "127.0.0.1")],
        *[("https://127.0.0.1:9092/path", "127.0.0.1")],
        *[("", None), ("no-such-host.invalid:9092", None), ("[::1]:9092", None), (":9092", None)],
    ],
)
def test_own_addresses_are_this_machines_and_loopback(superlink: str, first: str | None) -> None:
    found = own_addresses(superlink)
    assert first in (None, found[0])
    assert "127.0.0.1" in found
    assert len(found) == len(set(found))
    for address in found:
        with socket.socket() as probe:
            probe.bind((address, 0))


@pytest.mark.parametrize(
    "address",
    [
        *["9100", "host", "host:", ":", "host:port", "host:70000", "host:-1", "host:1.5"],
        *["a host:9100", "host:9100 ", "http://host", "host:\u0663"],
    ],
)
def test_bad_address_is_refused_in_one_line(address: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT") as caught:
        StreamServer(address, Mailbox())
    assert "\n" not in str(caught.value)
    assert address in str(caught.value)


def test_port_that_is_taken_is_refused_in_one_line(server: Server) -> None:
    """By another program, or by another run."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        own = f"127.0.0.1:{server.stream.port}"
        for address in (f"127.0.0.1:{port}", f":{port}", f"localhost:{port}", own):
            with pytest.raises(UsageError, match=f'stream-address = "{address}".*port') as caught:
                StreamServer(address, Mailbox())
            assert "\n" not in str(caught.value)


def test_own_name_that_means_loopback_is_listened_to_on_all_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Debian gives a machine's name the address 127.0.1.1; the nodes are told the name."""
    own = socket.gethostbyname

    def debian(host: str) -> str:
        return "127.0.1.1" if host == "server-1" else own(host)

    monkeypatch.setattr(socket, "gethostbyname", debian)
    stream = StreamServer("server-1:0", Mailbox())
    try:
        with socket.create_connection(("127.0.0.1", stream.port), timeout=5):
            pass
    finally:
        stream.stop(0)


# --- unknown callers ----------------------------------------------------------------------------


def test_callers_without_the_token_are_refused_and_logged_and_get_nothing(
    server: Server, log: CapturedLog
) -> None:
    seven, replaced = server.open_link(7), server.open_link(8)
    server.open_link(8)
    waiting = [server.send(link) for link in server.stream.links.values()]
    callers: dict[str, list[tuple[str, str | bytes]]] = {
        "no metadata": [],
        "no token": [(NODE_KEY, "7")],
        "empty token": proof(7, b""),
        "wrong token": proof(7, bytes(32)),
        "beginning of the token": proof(7, seven.token[:31]),
        "other last byte": proof(7, seven.token[:31] + bytes([seven.token[31] ^ 1])),
        "token and more": proof(7, seven.token + b"\0"),
        "another node's token": proof(8, seven.token),
        "token of an earlier session": proof(8, replaced.token),
        "no node": [(TOKEN_KEY, seven.token)],
        "unknown node": proof(9, seven.token),
        "no number": proof("7; drop", seven.token),
        "very long number": proof("7" * 5000, seven.token),
        "token as text": [(NODE_KEY, "7"), ("token", seven.token.hex())],
    }
    for number, (name, metadata) in enumerate(callers.items(), start=1):
        with Caller(server.stream, metadata).say(*reply_to(waiting[0])) as caller:
            assert caller.refusal() is grpc.StatusCode.UNAUTHENTICATED, name
        assert wait_until(lambda number=number: len(log.warnings) == number), name
    assert all("refused a connection to the stream from ipv4:127.0.0.1" in w for w in log.warnings)
    assert not any(link.was_connected for link in server.stream.links.values())
    assert server.replies(*waiting) == [], "no message of anybody is answered by another"
    with server.connect(seven):
        assert seven.connected


def test_refused_callers_do_not_fill_the_log(server: Server, log: CapturedLog) -> None:
    for _ in range(60):
        with Caller(server.stream, proof(7, b"x")) as caller:
            caller.refusal()
    assert 1 <= len(log.warnings) < 60


def test_strangers_cannot_open_all_files_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module.resource, "getrlimit", lambda _: (6, 6))  # half of them
    server = StreamServer("127.0.0.1:0", Mailbox())
    context = ssl.create_default_context(cadata=server.certificate.decode())
    context.set_alpn_protocols(["h2"])
    with contextlib.ExitStack() as opened:

        def connects() -> bool:
            place = "127.0.0.1", server.port
            stranger = opened.enter_context(socket.create_connection(place, timeout=10))
            try:
                opened.enter_context(context.wrap_socket(stranger, server_hostname=SERVER_NAME))
            except OSError:
                return False
            return True

        assert [connects() for _ in range(5)] == [True] * 3 + [False] * 2
    server.stop(0)


@pytest.mark.parametrize(
    ("limit", "with_tls"),
    [("grpc.server_handshake_timeout_ms", False), ("grpc.max_connection_idle_ms", True)],
)
def test_idle_strangers_are_disconnected(
    limit: str, with_tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(SERVER_OPTIONS)
    assert options[limit] == 10_000
    monkeypatch.setattr(server_module, "SERVER_OPTIONS", [*{**options, limit: 200}.items()])
    server = StreamServer("127.0.0.1:0", Mailbox())
    context = ssl.create_default_context(cadata=server.certificate.decode())
    context.set_alpn_protocols(["h2"])
    with contextlib.ExitStack() as opened:
        place = "127.0.0.1", server.port
        stranger = opened.enter_context(socket.create_connection(place, timeout=8))
        if with_tls:
            secure = context.wrap_socket(stranger, server_hostname=SERVER_NAME)
            stranger = opened.enter_context(secure)
        with contextlib.suppress(ConnectionError):
            while stranger.recv(1 << 16):  # TimeoutError if it stays open
                pass
    server.stop(0)


def test_plain_text_gets_nothing(server: Server) -> None:
    link = server.open_link(7)
    with Caller(server.stream, proof(7, link.token), plain=True) as caller:
        assert caller.refusal() is grpc.StatusCode.UNAVAILABLE
    assert not link.was_connected


# --- nodes that have their token ----------------------------------------------------------------


def test_node_with_its_token_gets_messages_and_replies(server: Server) -> None:
    link = server.open_link(7)
    with server.connect(link) as caller:
        assert link.connected
        message = server.send(link)
        assert caller.next_message().metadata.message_id == message.metadata.message_id
        last = server.send(link)
        caller.say(*reply_to(message), *reply_to(message), *reply_to(last))
        replies = server.wait_for_replies(message, last)
        assert len(replies) == 2, "two replies to one message are one"
        assert not any(reply.has_error() for reply in replies)
        assert server.replies(message, last) == []
        assert link.connected


def test_new_session_ends_the_connection_of_the_one_before(server: Server) -> None:
    old = server.open_link(7)
    with server.connect(old) as caller:
        new = server.open_link(7)
        assert caller.all_that_comes()[0] == []
        with server.call(old) as again:
            assert again.refusal() is grpc.StatusCode.UNAUTHENTICATED
        with server.connect(new):
            assert new.connected


def test_node_that_connects_when_all_is_over_is_told_so(server: Server) -> None:
    """Else it would wait for a server that is gone, and its device with it."""
    closed, ended = server.open_link(7), server.open_link(8)
    closed.close("its session ended")
    server.stream.end()
    for link in (closed, ended):
        with server.call(link) as caller:
            assert caller.all_that_comes()[1] is STREAM_ENDED


def test_second_connection_with_the_same_token_replaces_the_first(server: Server) -> None:
    link = server.open_link(7)
    with server.connect(link) as first, server.connect(link) as second:
        assert first.all_that_comes()[0] == []
        message = server.send(link)
        assert second.next_message().metadata.message_id == message.metadata.message_id
        assert link.connected, "the end of the first is not the end of the second"
        second.say(*reply_to(message))
        assert len(server.wait_for_replies(message)) == 1


def test_call_that_is_cancelled_while_it_is_attached_is_a_lost_connection(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = server.open_link(7)
    attach, begun = link.attach, threading.Event()
    # Attached when the server knows that the call is over: then something is in the queue.
    monkeypatch.setattr(link, "attach", lambda *a: (begun.set(), a[0].get(), attach(*a)))
    with server.call(link):
        assert begun.wait(60)
    assert wait_until(lambda: link.was_connected and not link.connected), "it would be on the grid"


def test_node_that_sends_and_never_reads_is_cut_off(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each frame makes one that waits for it."""
    monkeypatch.setattr(server_module, "_MOST_UNREAD", 10)
    link, outgoing = server.open_link(7), queue.SimpleQueue[Any]()
    ((reply, elements),) = read_frames(reply_to(order()))
    for _ in range(11):
        link._receive(outgoing, reply, elements)
    with pytest.raises(FrameError, match="does not read"):
        link._receive(outgoing, reply, elements)


def test_garbage_closes_the_connection_of_its_node_and_fails_its_messages_alone(
    server: Server, log: CapturedLog
) -> None:
    """The node may come back, and nobody waits for ever."""
    bad, good = server.open_link(7), server.open_link(8)
    with server.connect(bad) as caller, server.connect(good) as other:
        unanswered, message = server.send(bad), server.send(good)
        caller.next_message()
        caller.say(b"hello, this is not a frame at all")
        assert caller.all_that_comes()[0] == []
        assert wait_until(lambda: not bad.connected)
        (reply,) = server.wait_for_replies(unanswered)
        assert reply.metadata.src_node_id == 7
        assert reply.has_error()
        assert "node 7" in log.errors[0]
        assert server.replies(message) == []
        other.next_message()
        other.say(*reply_to(message))
        (reply,) = server.wait_for_replies(message)
        assert not reply.has_error()
        assert good.connected


def test_reply_to_another_nodes_message_is_dropped(server: Server) -> None:
    bad, good = server.open_link(7), server.open_link(8)
    with server.connect(bad) as caller, server.connect(good):
        message, own = server.send(good), server.send(bad)
        caller.say(*reply_to(message), *reply_to(own))
        (reply,) = server.wait_for_replies(own)
        assert reply.metadata.src_node_id == 7
        assert server.replies(message) == []
