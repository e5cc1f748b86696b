"""Which nodes are on the grid, and how each is reached, with a fake server."""

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from flower_blsgd.runtime.flower_internals import CRASHED, RAISED, give_message_id
from flower_blsgd.runtime.stream.codec import SESSION_MESSAGE, SessionRequest, SessionResult
from flower_blsgd.runtime.stream.grid import Membership
from flower_blsgd.runtime.stream.server import StreamServer

from ...log_capture import CapturedLog, captured_log


class FakeServer:
    """Hands out links that are connected when the test says so."""

    certificate = b"-----PEM"

    def __init__(self) -> None:
        self.links: dict[int, Any] = {}
        self.tokens: list[bytes] = []

    def open_session(self, node_id: int) -> Any:
        self.tokens.append(b"token %d of %d" % (len(self.tokens), node_id))
        link = SimpleNamespace(
            node_id=node_id,
            token=self.tokens[-1],
            connected=False,
            was_connected=threading.Event(),
            lost_at=None,
            closed=[],
        )
        link.close = link.closed.append
        self.links[node_id] = link
        return link

    def connect(self, node_id: int) -> None:
        self.links[node_id].connected = True
        self.links[node_id].was_connected.set()


class Network:
    """A membership, its server, and what Flower would carry."""

    def __init__(self) -> None:
        self.server = FakeServer()
        self.members = Membership(cast(StreamServer, self.server), ("10.0.0.5:9100",), "float32")
        self.requests: dict[int, Message] = {}

    def poll(self, *online: int) -> list[int]:
        """Do what the grid does each second; return who was sent a session request."""
        requests = self.members.update(set(online))
        for node_id, message in requests:
            assert message.metadata.dst_node_id == node_id
            self.requests[node_id] = message
        self.members.requested((node_id, give_message_id(message)) for node_id, message in requests)
        return [node_id for node_id, _ in requests]

    def answer(self, node_id: int, answer: SessionResult | Error) -> None:
        """End a node's session with this answer."""
        message = self.requests.pop(node_id)
        self.server.links[node_id].connected = False
        reply = (
            Message(answer, reply_to=message)
            if isinstance(answer, Error)
            else answer.to_reply(message)
        )
        self.members.take_answers([reply])


@pytest.fixture
def network() -> Network:
    return Network()


@pytest.fixture
def log() -> Iterator[CapturedLog]:
    with captured_log() as lines:
        yield lines


def test_every_new_node_gets_one_request_with_a_token_of_its_own(network: Network) -> None:
    assert network.poll(7, 8) == [7, 8]
    assert network.poll(7, 8) == []
    assert network.poll(7, 8, 9) == [9]
    ids = {message.metadata.message_id for message in network.requests.values()}
    assert set(network.members.sessions) == ids
    requests = {n: SessionRequest.from_message(m) for n, m in network.requests.items()}
    assert len({request.token for request in requests.values()}) == 3
    for node_id, request in requests.items():
        assert request.token == network.server.links[node_id].token
        assert request.addresses == ("10.0.0.5:9100",)
        assert request.certificate == FakeServer.certificate
        metadata = network.requests[node_id].metadata
        assert metadata.message_type == SESSION_MESSAGE
        assert metadata.ttl >= 7 * 86_400, "a long run"


def answer_of_an_app_without_sessions() -> Error:
    """As a SuperNode words it."""
    message = Message(RecordDict(), 7, SESSION_MESSAGE)
    try:
        ClientApp()(message, Context(1, 7, {}, RecordDict(), {}))
    except ValueError as error:
        return Error(RAISED, f"{type(error)}:<'{error}'>")
    raise AssertionError("an app without the handler answered")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "serve_sessions"),
        (SessionResult(False, "it cannot reach 10.0.0.5:9100"), "10.0.0.5:9100"),
    ],
)
def test_node_that_cannot_stream_gets_plain_messages_and_a_warning(
    network: Network, log: CapturedLog, answer: SessionResult | None, words: str
) -> None:
    network.poll(7, 8)
    network.server.connect(8)
    network.answer(7, answer or answer_of_an_app_without_sessions())
    assert network.members.transports == {7: "messages", 8: "stream"}
    assert network.members.awaited([7]) == []
    (warning,) = log.warnings
    for part in ("node 7", "plain messages", words):
        assert part in warning
    assert network.poll(7, 8) == []
    network.poll(8)
    assert network.members.transports == {8: "stream"}, "node 7 is offline"
    network.poll(7, 8)
    assert network.members.transports == {7: "messages", 8: "stream"}


@pytest.mark.parametrize(
    "answer",
    [
        SessionResult(True, "its connection broke (unavailable)"),
        SessionResult(True),
        Error(CRASHED, "ClientApp stopped responding."),
        Error(RAISED),
    ],
    ids=str,
)
def test_session_that_ended_is_opened_again_but_not_for_ever(
    network: Network, log: CapturedLog, answer: SessionResult | Error
) -> None:
    times = 0
    tokens = set()
    while times < 50 and network.poll(7):
        times += 1
        link = network.server.links[7]
        tokens.add(link.token)
        assert network.members.transports == {}
        assert network.members.awaited([7]) == [7]
        network.server.connect(7)
        assert network.members.transports == {7: "stream"}
        assert network.members.awaited([7]) == []
        network.answer(7, answer)
        assert link.closed, "what is pending must fail"
        assert network.members.transports == {}
        assert network.poll() == [], "it is offline"
    assert 2 <= times < 50
    assert len(tokens) == times
    assert "node 7" in log.errors[-1]
    assert network.poll(7, 8) == [8]
    assert network.members.awaited([7]) == []


def test_sessions_that_lasted_do_not_count(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node whose id stays may restart once an hour for days."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for _ in range(20):
        assert network.poll(7) == [7]
        network.server.connect(7)
        now += 3600.0
        network.answer(7, SessionResult(True, "its connection broke (unavailable)"))


def test_app_that_cannot_even_start_is_left_out_and_named(
    network: Network, log: CapturedLog
) -> None:
    network.poll(7)
    network.answer(7, Error(RAISED, "<class 'ImportError'>:<'No module named torch'>"))
    assert network.members.transports == {}
    assert network.poll(7) == []
    (error,) = log.errors
    assert "node 7" in error
    assert "No module named torch" in error


def test_request_that_flower_did_not_take_is_sent_again(network: Network) -> None:
    """A SuperLink returns None for a node that left between two calls."""
    assert [node_id for node_id, _ in network.members.update({7})] == [7]
    network.members.requested([(7, None)])
    assert network.members.sessions == []
    assert [node_id for node_id, _ in network.members.update({7})] == [7]


def test_lost_connections_fail_after_the_given_time_only(network: Network) -> None:
    network.poll(7, 8, 9)
    failed: list[tuple[int, str]] = []
    for node_id, seconds_ago in ((7, 2.0), (8, 0.5), (9, None)):
        link = network.server.links[node_id]
        link.lost_at = None if seconds_ago is None else time.monotonic() - seconds_ago
        link.fail_pending = lambda reason, node_id=node_id: failed.append((node_id, reason))
    network.members.fail_lost(1.5)
    assert [node_id for node_id, _ in failed] == [7]
    assert "connection" in failed[0][1]
