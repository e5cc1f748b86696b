"""Who is on the grid, and how each is reached: a fake server, and Flower's own words."""

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from flower_blsgd.runtime.flower_internals import CRASHED, NODE_GONE, RAISED, give_message_id
from flower_blsgd.runtime.stream.invitation import SESSION, Farewell, Invitation
from flower_blsgd.runtime.stream.membership import Membership
from flower_blsgd.runtime.stream.server import StreamServer

from ...log_capture import CapturedLog, captured_log


class FakeServer:
    """Hands out links that are connected when the test says so."""

    certificate = b"-----PEM"

    def __init__(self) -> None:
        self.links: dict[int, Any] = {}
        self.tokens: list[bytes] = []

    def invite(self, node_id: int) -> Any:
        self.tokens.append(b"token %d of %d" % (len(self.tokens), node_id))
        link = SimpleNamespace(
            node_id=node_id,
            token=self.tokens[-1],
            connected=False,
            greeted=threading.Event(),
            lost_at=None,
            gone=[],
        )
        link.give_up = link.gone.append
        self.links[node_id] = link
        return link

    def connect(self, node_id: int) -> None:
        self.links[node_id].connected = True
        self.links[node_id].greeted.set()


class House:
    """A membership, its server, and what Flower would carry."""

    def __init__(self) -> None:
        self.server = FakeServer()
        self.members = Membership(cast(StreamServer, self.server), ("10.0.0.5:9100",), "float32")
        self.open: dict[int, Message] = {}

    def look(self, *online: int) -> list[int]:
        """Do what the grid does each second; return who was invited."""
        invitations = self.members.update(set(online))
        for node_id, message in invitations:
            assert message.metadata.dst_node_id == node_id
            self.open[node_id] = message
        self.members.invited(
            (node_id, give_message_id(message)) for node_id, message in invitations
        )
        return [node_id for node_id, _ in invitations]

    def answer(self, node_id: int, answer: Farewell | Error) -> None:
        message = self.open.pop(node_id)
        self.server.links[node_id].connected = False
        reply = (
            Message(answer, reply_to=message)
            if isinstance(answer, Error)
            else answer.to_reply(message)
        )
        self.members.take_answers([reply])


@pytest.fixture
def house() -> House:
    return House()


@pytest.fixture
def log() -> Iterator[CapturedLog]:
    with captured_log() as lines:
        yield lines


def test_every_new_node_is_invited_once_with_a_token_of_its_own(house: House) -> None:
    assert house.look(7, 8) == [7, 8]
    assert house.look(7, 8) == []
    assert house.look(7, 8, 9) == [9]
    invitations = {n: Invitation.from_message(message) for n, message in house.open.items()}
    assert len({invitation.token for invitation in invitations.values()}) == 3
    for node_id, invitation in invitations.items():
        assert invitation.token == house.server.links[node_id].token
        assert invitation.addresses == ("10.0.0.5:9100",)
        assert invitation.certificate == FakeServer.certificate
    assert {message.metadata.message_type for message in house.open.values()} == {SESSION}


def test_invitation_lives_as_long_as_a_long_run(house: House) -> None:
    house.look(7)
    assert house.open[7].metadata.ttl >= 7 * 86_400


def test_node_is_on_the_grid_while_it_is_connected(house: House) -> None:
    house.look(7)
    assert house.members.transports == {}
    assert house.members.unsettled([7]) == [7]
    house.server.connect(7)
    assert house.members.transports == {7: "stream"}
    assert house.members.settled([7])
    house.server.links[7].connected = False
    assert house.members.transports == {}


def answer_of_an_app_without_sessions() -> Error:
    """As a SuperNode words it."""
    message = Message(RecordDict(), 7, SESSION)
    try:
        ClientApp()(message, Context(1, 7, {}, RecordDict(), {}))
    except ValueError as error:
        return Error(RAISED, f"{type(error)}:<'{error}'>")
    raise AssertionError("an app without the handler answered")


def test_app_without_the_handler_gets_plain_messages_and_a_warning(
    house: House, log: CapturedLog
) -> None:
    house.look(7, 8)
    house.server.connect(8)
    house.answer(7, answer_of_an_app_without_sessions())
    assert house.members.transports == {7: "messages", 8: "stream"}
    (warning,) = log.warnings
    assert "node 7" in warning
    assert "serve_sessions" in warning
    assert "plain messages" in warning
    assert house.look(7, 8) == []


def test_node_that_cannot_connect_gets_plain_messages_and_a_warning(
    house: House, log: CapturedLog
) -> None:
    house.look(7)
    house.answer(7, Farewell(False, "it cannot reach 10.0.0.5:9100"))
    assert house.members.transports == {7: "messages"}
    assert house.members.settled([7])
    (warning,) = log.warnings
    assert "node 7" in warning
    assert "10.0.0.5:9100" in warning
    assert house.look(7) == []


def test_node_with_plain_messages_is_off_the_grid_while_it_is_offline(house: House) -> None:
    house.look(7)
    house.answer(7, Farewell(False, "no way"))
    house.look()
    assert house.members.transports == {}
    house.look(7)
    assert house.members.transports == {7: "messages"}


@pytest.mark.parametrize(
    "answer",
    [
        Farewell(True, "its connection broke (unavailable)"),
        Farewell(True),
        Error(CRASHED, "ClientApp stopped responding."),
        Error(NODE_GONE, "Node Unavailable"),
        Error(RAISED, ""),
        Error(RAISED),
    ],
    ids=str,
)
def test_session_that_ended_is_opened_again_but_not_for_ever(
    house: House, log: CapturedLog, answer: Farewell | Error
) -> None:
    times = 0
    tokens = set()
    for _ in range(50):
        if not house.look(7):
            break
        times += 1
        tokens.add(house.server.links[7].token)
        link = house.server.links[7]
        house.server.connect(7)
        assert house.members.transports == {7: "stream"}
        house.answer(7, answer)
        assert link.gone, "what is pending must fail"
        assert house.members.transports == {}
    assert 2 <= times < 50
    assert len(tokens) == times
    assert "node 7" in log.errors[-1]
    assert house.look(7, 8) == [8]
    assert house.members.settled([7])


def test_sessions_that_lasted_do_not_count(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose id stays may restart once an hour for days."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for _ in range(20):
        assert house.look(7) == [7]
        house.server.connect(7)
        now += 3600.0
        house.answer(7, Farewell(True, "its connection broke (unavailable)"))


def test_node_that_is_gone_is_invited_when_it_is_back(house: House) -> None:
    house.look(7)
    house.server.connect(7)
    house.answer(7, Error(NODE_GONE, "Node Unavailable"))
    assert house.look() == []
    assert house.look(7) == [7]


def test_app_that_cannot_even_start_is_left_out_and_named(house: House, log: CapturedLog) -> None:
    house.look(7)
    house.answer(7, Error(RAISED, "<class 'ImportError'>:<'No module named torch'>"))
    assert house.members.transports == {}
    assert house.look(7) == []
    (error,) = log.errors
    assert "node 7" in error
    assert "No module named torch" in error


def test_answer_to_somebody_elses_message_is_nothing(house: House) -> None:
    house.look(7)
    stranger = Message(RecordDict(), 7, SESSION)
    give_message_id(stranger)
    house.members.take_answers([Message(Error(RAISED, "x"), reply_to=stranger)])
    assert house.look(7) == []
    assert len(house.members.sessions) == 1


def test_invitation_that_flower_did_not_take_is_sent_again(house: House) -> None:
    """A SuperLink returns None for a node that left between two calls."""
    (invitation,) = house.members.update({7})
    house.members.invited([(7, cast(str, None))])
    assert house.members.sessions == []
    assert [node_id for node_id, _ in house.members.update({7})] == [7]
    assert invitation[0] == 7


def test_sessions_are_the_messages_that_are_not_answered(house: House) -> None:
    house.look(7, 8)
    assert set(house.members.sessions) == {m.metadata.message_id for m in house.open.values()}
    house.answer(7, Farewell(True))
    assert house.members.sessions == [house.open[8].metadata.message_id]


def test_lost_connections_fail_after_the_given_time_only(house: House) -> None:
    house.look(7, 8, 9)
    failed: list[tuple[int, str]] = []
    for node_id, seconds_ago in ((7, 2.0), (8, 0.5), (9, None)):
        link = house.server.links[node_id]
        link.lost_at = None if seconds_ago is None else time.monotonic() - seconds_ago
        link.fail_pending = lambda reason, node_id=node_id: failed.append((node_id, reason))
    house.members.give_up_lost(1.5)
    assert [node_id for node_id, _ in failed] == [7]
    assert "connection" in failed[0][1]
