"""Replies that are waited for: how long, and which are late."""

import threading
from typing import Any

import pytest
from flwr.app import Message, RecordDict

from flower_blsgd.engines import mailbox as module
from flower_blsgd.engines.mailbox import Mailbox
from flower_blsgd.flower.internals import give_message_id


def reply_to(message: Message) -> Message:
    return Message(RecordDict(), reply_to=message)


def test_time_in_which_the_machine_slept_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four seconds two are over; the second slice lasted for an hour, as the clock says."""
    slices: list[float] = []

    class Slept(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            slices.append(timeout or 0.0)
            if len(slices) == 3:
                mailbox.receive(reply_to(message))
            return len(slices) == 3

    monkeypatch.setattr(module.threading, "Condition", Slept)
    mailbox, message = Mailbox(), Message(RecordDict(), 7, "train")
    message_id = give_message_id(message)
    mailbox.expect(message_id)
    mailbox.wait([message_id], 4.0)
    assert slices == [1.0, 1.0, 1.0]
    assert len(mailbox.take([message_id])) == 1
    slices.clear()
    mailbox.expect(message_id)
    mailbox.wait([message_id], 1.5)
    assert slices == [1.0, 0.5]


def test_replies_that_arrive_do_not_lengthen_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another reply arrives every half second, so the two seconds end after four of them."""
    waits = 0

    class Notified(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            nonlocal waits
            waits += 1
            return waits < 50

    monkeypatch.setattr(module.threading, "Condition", Notified)
    monkeypatch.setattr(module.time, "monotonic", lambda: 0.5 * waits)
    Mailbox().wait(["missing"], 2.0)
    assert waits == 4


def test_message_that_was_given_up_is_late_until_it_is_answered() -> None:
    mailbox, messages = Mailbox(), [Message(RecordDict(), node, "train") for node in (7, 8)]
    nodes: dict[str, Any] = {give_message_id(m): m.metadata.dst_node_id for m in messages}
    for message_id in nodes:
        mailbox.expect(message_id)
    mailbox.receive(reply_to(messages[0]))
    assert mailbox.give_up(nodes)
    assert list(mailbox.late.values()) == [8]
    mailbox.receive(reply_to(messages[1]))
    assert mailbox.late == {}
    assert [reply.metadata.src_node_id for reply in mailbox.take(nodes)] == [7]
    assert not mailbox.give_up(nodes)
