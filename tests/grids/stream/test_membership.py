"""Which nodes are on the grid, and how each is reached: what Flower carries is a stand-in's."""

import queue
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
from flwr.app import Error, Message
from flwr.serverapp import Grid

from flower_blsgd.engines.mailbox import Mailbox
from flower_blsgd.engines.stream.grid import Membership
from flower_blsgd.engines.stream.request import STREAM_MESSAGE, StreamRequest, StreamResult
from flower_blsgd.engines.stream.server import Link, StreamServer
from flower_blsgd.flower.internals import CRASHED, RAISED, give_message_id

from ...log_capture import captured_log
from .streams import LOOPBACK


class Network:
    """A membership, its server, and Flower's grid, which carries what the test says."""

    def __init__(self) -> None:
        self.server = StreamServer(LOOPBACK, Mailbox())
        self.members = Membership(cast(Grid, self), self.server, ["10.0.0.5:9100"], "float32")
        self.requests: dict[int, Message] = {}
        self.takes_messages = True
        self.activated: dict[int, str] = {}
        self._online: list[int] = []
        self._answers: list[Message] = []

    def poll(self, *online: int) -> list[int]:
        """Do what the grid does each second; return who was sent a session request."""
        self._online, before = list(online), dict(self.requests)
        self.members.update()
        self.members.take_answers()
        return [n for n, message in self.requests.items() if before.get(n) is not message]

    def connect(self, node_id: int) -> Link:
        link = self.server.links[node_id]
        link.attach(queue.SimpleQueue(), [])
        return link

    def get_nodes(self) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(node_id=n, last_activated_at=self.activated.get(n, "10:00"))
            for n in self._online
        ]

    def push_messages(self, messages: list[Message]) -> list[str]:
        if not self.takes_messages:
            return ["" for _ in messages]
        self.requests |= {message.metadata.dst_node_id: message for message in messages}
        return [give_message_id(message) for message in messages]

    def pull_messages(self, message_ids: list[str]) -> list[Message]:
        found, self._answers = self._answers, []
        assert {answer.metadata.reply_to_message_id for answer in found} <= set(message_ids)
        return found

    def answer(self, node_id: int, answer: StreamResult | Error) -> None:
        """End a node's session with this answer."""
        message = self.requests.pop(node_id)
        is_error = isinstance(answer, Error)
        reply = Message(answer, reply_to=message) if is_error else answer.to_reply(message)
        self._answers.append(reply)
        self.members.take_answers()


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network()
    yield network
    network.server.stop(0)


def test_every_new_node_gets_one_request_with_a_token_of_its_own(network: Network) -> None:
    assert network.poll(7, 8) == [7, 8]
    assert network.poll(7, 8) == []
    assert network.poll(7, 8, 9) == [9]
    assert network.members.take_answers() == 3
    requests = {n: StreamRequest.from_message(m) for n, m in network.requests.items()}
    assert len({request.token for request in requests.values()}) == 3
    for node_id, request in requests.items():
        assert request.token == network.server.links[node_id].token
        assert request.addresses == ["10.0.0.5:9100"]
        assert request.certificate == network.server.certificate
        metadata = network.requests[node_id].metadata
        assert metadata.message_type == STREAM_MESSAGE
        assert metadata.ttl >= 7 * 86_400, "a long run"


@pytest.mark.parametrize(
    "answer",
    [
        StreamResult(True, "its connection broke (unavailable)"),
        StreamResult(True),
        Error(CRASHED, "ClientApp stopped responding."),
        Error(RAISED),
    ],
    ids=str,
)
def test_session_that_ended_is_opened_again_but_not_for_ever(
    network: Network, answer: StreamResult | Error
) -> None:
    times, tokens = 0, set()
    with captured_log() as log:
        while times < 50 and network.poll(7):
            times += 1
            assert network.members.transports == {}
            assert network.members.awaited([7]) == [7]
            link = network.connect(7)
            tokens.add(link.token)
            assert network.members.transports == {7: "stream"}
            assert network.members.awaited([7]) == []
            network.answer(7, answer)
            assert link.over, "what is pending must fail"
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
        network.connect(7)
        now += 3600.0
        network.answer(7, StreamResult(True, "its connection broke (unavailable)"))


def test_supernode_that_starts_again_with_its_id_gets_a_new_session(network: Network) -> None:
    """A registered one that was killed: nobody will answer the message that opened the old one."""
    network.poll(7, 8)
    old, other = network.connect(7), network.connect(8)
    assert network.poll(8) == []
    network.activated[7] = "11:00"
    assert network.poll(7, 8) == [7]
    assert old.over
    assert not other.over
    assert network.server.links[7].token != old.token
    assert network.poll(7, 8) == []


def test_app_that_cannot_even_start_is_left_out_and_named(network: Network) -> None:
    network.poll(7)
    with captured_log() as log:
        network.answer(7, Error(RAISED, "<class 'ImportError'>:<'No module named torch'>"))
    assert network.members.transports == {}
    assert network.poll(7) == []
    (error,) = log.errors
    assert "node 7" in error
    assert "No module named torch" in error
    network.activated[7] = "11:00"  # somebody repaired it
    assert network.poll(7) == [7]


def test_supernode_that_starts_again_is_asked_for_a_stream_and_owes_nothing(
    network: Network,
) -> None:
    network.poll(7, 8)
    for node_id in (7, 8):
        network.answer(node_id, StreamResult(False, "no way to 10.0.0.5:9100"))
    assert network.members.transports == {7: "messages", 8: "messages"}
    mailbox = network.server.mailbox
    for message_id in ("a", "b"):
        mailbox.expect(message_id)
    mailbox.give_up({"a": 7, "b": 8})
    network.activated[7] = "11:00"
    assert network.poll(7, 8) == [7]
    assert network.members.transports == {8: "messages"}
    assert mailbox.late == {"b": 8}


def test_request_that_flower_did_not_take_is_sent_again(network: Network) -> None:
    """A SuperLink returns no id for a node that left between two calls."""
    network.takes_messages = False
    assert network.poll(7) == []
    assert network.members.take_answers() == 0
    network.takes_messages = True
    assert network.poll(7) == [7]
