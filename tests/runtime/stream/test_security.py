"""Strangers, and nodes that misbehave: refused and logged, and they get nothing."""

import contextlib
import json
import queue
import socket
import struct
import time
from collections.abc import Iterator, Sequence

import grpc
import numpy as np
import pytest
from flwr.app import Message

from flower_blsgd.array_view import view_record
from flower_blsgd.runtime.mailbox import Mailbox
from flower_blsgd.runtime.stream.channel_options import (
    CLIENT_OPTIONS,
    METHOD,
    NODE_KEY,
    SERVICE,
    SESSION_ENDED,
    TOKEN_KEY,
)
from flower_blsgd.runtime.stream.credentials import new_token
from flower_blsgd.runtime.stream.frames import (
    LONGEST_MESSAGE_BYTES,
    Frame,
    FrameReader,
    Kind,
    frame_pieces,
)
from flower_blsgd.runtime.stream.letters import Encoder
from flower_blsgd.runtime.stream.link import Link
from flower_blsgd.runtime.stream.server import StreamServer

from ...log_capture import CapturedLog, captured_log
from ..processes import wait_until
from .nodes import order_for
from .streams import ask, config_of, echo, made_app, order, streaming

HELLO = frame_pieces(Kind.HELLO, {"holding": []})


class Caller:
    """Somebody who speaks gRPC, and says what it likes."""

    def __init__(
        self,
        server: StreamServer,
        metadata: Sequence[tuple[str, str | bytes]],
        credentials: grpc.ChannelCredentials | None = None,
        plain: bool = False,
        method: str = METHOD,
    ) -> None:
        address = f"127.0.0.1:{server.port}"
        options = [*CLIENT_OPTIONS, ("grpc.max_send_message_length", -1)]
        trusted = grpc.ssl_channel_credentials(server.certificate)
        self.channel = (
            grpc.insecure_channel(address, options)
            if plain
            else grpc.secure_channel(address, credentials or trusted, options)
        )
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        call = self.channel.stream_stream(f"/{SERVICE}/{method}")
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

    def all_that_comes(self) -> tuple[list[bytes], grpc.StatusCode]:
        """Return what was received until the server ended it, and how it did."""
        received = []
        try:
            for message in self.call:
                received.append(message)
        except grpc.RpcError:
            pass
        return received, self.call.code()

    def next_frame(self) -> Frame:
        return next(FrameReader().frames(self.call))


class House:
    """A server, and the nodes that it invited."""

    def __init__(self) -> None:
        self.mailbox = Mailbox()
        self.server = StreamServer("127.0.0.1:0", self.mailbox)

    def invite(self, node_id: int) -> Link:
        return self.server.invite(node_id)

    def call(self, link: Link) -> Caller:
        return Caller(self.server, proof(link.node_id, link.token))

    def greeted(self, link: Link) -> Caller:
        caller = self.call(link).say(*HELLO)
        assert caller.next_frame().kind is Kind.WELCOME
        return caller

    def send(self, link: Link, **values: float) -> Message:
        message = order_for(link.node_id, view_record({k: np.array(v) for k, v in values.items()}))
        self.mailbox.expect(message.metadata.message_id)
        link.submit(Encoder("float32", {}).letter(message))
        return message

    def replies(self, *messages: Message) -> list[Message]:
        return self.mailbox.take([message.metadata.message_id for message in messages])


def proof(node_id: object, token: bytes) -> list[tuple[str, str | bytes]]:
    return [(NODE_KEY, str(node_id)), (TOKEN_KEY, token)]


def reply_to(message: Message) -> list[bytes]:
    header = {"reply-to": message.metadata.message_id, "records": {}}
    return frame_pieces(Kind.MESSAGE, header)


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    yield house
    house.server.stop(0)


@pytest.fixture
def log() -> Iterator[CapturedLog]:
    with captured_log() as lines:
        yield lines


# --- strangers --------------------------------------------------------------------------------


def strangers(house: House) -> dict[str, list[tuple[str, str | bytes]]]:
    seven, eight = house.invite(7), house.invite(8)
    old = eight.token
    house.invite(8)
    return {
        "no metadata": [],
        "no token": [(NODE_KEY, "7")],
        "empty token": proof(7, b""),
        "wrong token": proof(7, new_token()),
        "beginning of the token": proof(7, seven.token[:31]),
        "token and more": proof(7, seven.token + b"\0"),
        "another node's token": proof(8, seven.token),
        "old token": proof(8, old),
        "no node": [(TOKEN_KEY, seven.token)],
        "unknown node": proof(9, seven.token),
        "no number": proof("7; drop", seven.token),
        "minus": proof(-7, seven.token),
        "very long number": proof("7" * 5000, seven.token),
        "other digits": [(NODE_KEY, "7 "), (TOKEN_KEY, seven.token)],
        "token as text": [(NODE_KEY, "7"), ("token", seven.token.hex())],
    }


NAMES = [
    *["no metadata", "no token", "empty token", "wrong token", "beginning of the token"],
    *["token and more", "another node's token", "old token", "no node", "unknown node"],
    *["no number", "minus", "very long number", "other digits", "token as text"],
]


@pytest.mark.parametrize("name", NAMES)
def test_stranger_is_refused_and_logged_and_gets_nothing(
    house: House, log: CapturedLog, name: str
) -> None:
    metadata = strangers(house)[name]
    waiting = [house.send(link, w=1.0) for link in house.server.links.values()]
    with Caller(house.server, metadata).say(*HELLO, *reply_to(waiting[0])) as caller:
        received, code = caller.all_that_comes()
    assert received == []
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert wait_until(lambda: log.warnings)
    assert "refused a connection to the stream from ipv4:127.0.0.1" in log.warnings[0]
    assert not any(link.connected for link in house.server.links.values())
    assert house.replies(*waiting) == [], "no message of anybody is answered by a stranger"


def test_all_strangers_were_tried(house: House) -> None:
    assert list(strangers(house)) == NAMES


def test_plain_text_gets_nothing(house: House) -> None:
    link = house.invite(7)
    with Caller(house.server, proof(7, link.token), plain=True).say(*HELLO) as caller:
        received, code = caller.all_that_comes()
    assert received == []
    assert code is grpc.StatusCode.UNAVAILABLE
    assert not link.connected


def test_bytes_that_are_no_tls_get_nothing_but_perhaps_an_alert(house: House) -> None:
    house.invite(7)
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bytes(500)):
        with socket.create_connection(("127.0.0.1", house.server.port), 5) as raw:
            raw.sendall(garbage)
            received = b""
            with contextlib.suppress(OSError):
                while chunk := raw.recv(4096):
                    received += chunk
        assert b"flower" not in received
        assert len(received) < 100


def test_node_without_our_certificate_does_not_connect(house: House) -> None:
    """So a server in the middle gets no token."""
    link = house.invite(7)
    with Caller(house.server, proof(7, link.token), credentials=grpc.ssl_channel_credentials()).say(
        *HELLO
    ) as caller:
        received, code = caller.all_that_comes()
    assert received == []
    assert code is grpc.StatusCode.UNAVAILABLE
    assert not link.greeted.is_set()


def test_other_methods_are_not_there(house: House) -> None:
    link = house.invite(7)
    with Caller(house.server, proof(7, link.token), method="Other") as caller:
        assert caller.all_that_comes() == ([], grpc.StatusCode.UNIMPLEMENTED)


def test_strangers_do_not_fill_the_log(house: House, log: CapturedLog) -> None:
    for _ in range(60):
        with Caller(house.server, proof(7, b"x")) as caller:
            caller.all_that_comes()
    assert 1 <= len(log.warnings) < 60


def test_stranger_with_an_oversized_message_gets_nothing(house: House) -> None:
    house.invite(7)
    with Caller(house.server, proof(7, b"x")).say(bytes(2 * LONGEST_MESSAGE_BYTES)) as caller:
        received, code = caller.all_that_comes()
    assert received == []
    assert code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED)


# --- nodes that have their token --------------------------------------------------------------


def test_node_with_its_token_is_let_in(house: House) -> None:
    link = house.invite(7)
    with house.greeted(link) as caller:
        assert link.connected
        message = house.send(link, w=2.0)
        frame = caller.next_frame()
        assert frame.kind is Kind.MESSAGE
        assert frame.header["id"] == message.metadata.message_id
        caller.say(*reply_to(message))
        assert wait_until(lambda: house.mailbox._replies)
        (reply,) = house.replies(message)
        assert not reply.has_error()


def test_token_of_an_earlier_session_is_worth_nothing_and_its_connection_ends(
    house: House, log: CapturedLog
) -> None:
    old = house.invite(7)
    with house.greeted(old) as caller:
        new = house.invite(7)
        assert new.token != old.token
        received, _ = caller.all_that_comes()
        assert received == []
        with house.call(old).say(*HELLO) as again:
            assert again.all_that_comes() == ([], grpc.StatusCode.UNAUTHENTICATED)
        with house.greeted(new):
            assert new.connected
    assert log.warnings


def test_node_that_connects_when_all_is_over_is_told_so(house: House) -> None:
    """Else it would wait for a server that is gone, and its device with it."""
    link = house.invite(7)
    house.server.end()
    with house.call(link).say(*HELLO) as caller:
        _, code = caller.all_that_comes()
    assert code is SESSION_ENDED


def test_second_connection_with_the_same_token_wins(house: House) -> None:
    link = house.invite(7)
    with house.greeted(link) as first, house.greeted(link) as second:
        received, _ = first.all_that_comes()
        assert received == []
        message = house.send(link, w=2.0)
        assert second.next_frame().header["id"] == message.metadata.message_id
        assert wait_until(lambda: link.connected)
        time.sleep(0.1)  # the end of the first is not the end of the second
        assert link.connected
        second.say(*reply_to(message))
        assert wait_until(lambda: house.mailbox._replies)


def lie(header: object, body_bytes: int = 0) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<4sBIQ", b"blsg", 3, len(text), body_bytes) + text


GARBAGE: dict[str, list[bytes]] = {
    "no frame": [b"hello, this is not a frame at all"],
    "empty": [b""],
    "kind of the server": frame_pieces(Kind.END, {}),
    "welcome": frame_pieces(Kind.WELCOME, {}),
    "body of 60 GB": [lie({}, 60 << 30)],
    "body of all bytes": [lie({}, 2**64 - 1)],
    "body and more": [lie({}, 3), b"abcdef"],
    "header that is a list": [lie([1])],
    "holding a number": frame_pieces(Kind.HELLO, {"holding": 5}),
    "holding a number in a list": frame_pieces(Kind.HELLO, {"holding": {"a": [5]}}),
    "oversized": [bytes(LONGEST_MESSAGE_BYTES + 1)],
}
HARMLESS = {"holding a number in a list"}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_closes_the_connection_of_its_node_alone(
    house: House, log: CapturedLog, name: str
) -> None:
    bad, good = house.invite(7), house.invite(8)
    with house.greeted(bad) as caller, house.greeted(good) as other:
        caller.say(*GARBAGE[name])
        if name in HARMLESS:
            message = house.send(bad, w=1.0)
            assert wait_until(lambda: bad.connected)
            return
        received, code = caller.all_that_comes()
        assert received == []
        assert code is not None
        assert wait_until(lambda: not bad.connected)
        if name != "oversized":  # which gRPC itself refuses
            assert wait_until(lambda: log.errors), "the log names the node"
            assert "node 7" in log.errors[0]
        message = house.send(good, w=1.0)
        assert other.next_frame().header["id"] == message.metadata.message_id
        assert good.connected


REPLIES: dict[str, dict[str, object]] = {
    "no records": {},
    "records that are none": {"records": 3},
    "record that is none": {"records": {"r": None}},
    "kind that is a list": {"records": {"r": {"kind": [], "bytes": 0}}},
    "too many bytes": {"records": {"r": {"kind": "arrays", "bytes": 100, "layout": []}}},
    "object array": {"records": {"r": {"kind": "arrays", "bytes": 0, "layout": [["a", "O", [0]]]}}},
    "huge and empty": {
        "records": {"r": {"kind": "arrays", "bytes": 0, "layout": [["a", "<f4", [0, 2**70]]]}}
    },
    "broken dtype": {
        "records": {"r": {"kind": "arrays", "bytes": 0, "layout": [["a", "f4,(", [0]]]}}
    },
    "change to nothing": {"records": {"r": {"kind": "change", "bytes": 0, "layout": []}}},
    "error that is none": {"error": 5},
    "infinite error": {"error": [float("inf"), ""]},
}


@pytest.mark.parametrize("name", REPLIES)
def test_reply_that_cannot_be_read_fails_its_message_and_no_other(
    house: House, log: CapturedLog, name: str
) -> None:
    """The node may come back, and nobody waits for ever."""
    bad, good = house.invite(7), house.invite(8)
    with house.greeted(bad) as caller, house.greeted(good) as other:
        messages = house.send(bad, w=1.0), house.send(good, w=1.0)
        caller.next_frame()
        header = {"reply-to": messages[0].metadata.message_id, **REPLIES[name]}
        caller.say(*frame_pieces(Kind.MESSAGE, header))
        assert caller.all_that_comes()[0] == []
        assert wait_until(lambda: log.errors)
        assert "node 7" in log.errors[0]
        assert wait_until(lambda: house.mailbox._replies), "its message waits for ever"
        (reply,) = house.replies(*messages)
        assert reply.metadata.src_node_id == 7
        assert reply.has_error()
        other.next_frame()
        other.say(*reply_to(messages[1]))
        assert wait_until(lambda: house.mailbox._replies)
        (reply,) = house.replies(*messages)
        assert not reply.has_error()


def test_reply_to_somebody_elses_message_is_nothing(house: House) -> None:
    bad, good = house.invite(7), house.invite(8)
    with house.greeted(bad) as caller, house.greeted(good):
        message = house.send(good, w=1.0)
        caller.say(*reply_to(message))
        own = house.send(bad, w=1.0)
        caller.next_frame()
        caller.say(*reply_to(own))
        assert wait_until(lambda: house.mailbox._replies)
        assert [reply.metadata.src_node_id for reply in house.replies(message, own)] == [7]


def test_two_replies_to_one_message_are_one(house: House) -> None:
    link = house.invite(7)
    with house.greeted(link) as caller:
        message, last = house.send(link, w=1.0), house.send(link, w=2.0)
        caller.say(*reply_to(message), *reply_to(message), *reply_to(last))
        assert wait_until(lambda: len(house.mailbox._replies) == 2)
        assert len(house.replies(message, last)) == 2
        assert house.replies(message, last) == []
        assert link.connected


def test_run_goes_on_beside_strangers() -> None:
    with streaming(made_app(echo)) as grid:
        server = grid._server
        for x in range(5):
            with Caller(server, proof(7, b"x")).say(*HELLO) as stranger:
                assert config_of(ask(grid, order(x=x))[0]) == {"x": x}
                assert stranger.all_that_comes()[0] == []
