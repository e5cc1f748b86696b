"""The message that opens a session, and its answer, as they come out of Flower's own wire."""

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto

from flower_blsgd.runtime.stream.frames import FrameError
from flower_blsgd.runtime.stream.invitation import SESSION, Farewell, Invitation

INVITATION = Invitation(("10.0.0.5:9100", "127.0.0.1:9100"), b"-----PEM", b"\0\xfftoken", "float16")


def over_flower(message: Message) -> Message:
    return message_from_proto(message_to_proto(message))


def message_with(content: RecordDict) -> Message:
    return over_flower(Message(content, 7, SESSION))


def test_invitation_arrives() -> None:
    assert Invitation.from_message(message_with(INVITATION.to_records())) == INVITATION


def test_session_is_a_type_of_message_that_flower_lets_through() -> None:
    assert SESSION == "train.session"


@pytest.mark.parametrize("version", [None, 0, 2, "1"])
def test_invitation_of_another_version_is_refused_with_the_way_out(version: object) -> None:
    content = INVITATION.to_records()
    record = dict(content["session"])
    del record["version"]
    if version is not None:
        record["version"] = version
    message = message_with(RecordDict({"session": ConfigRecord(record)}))  # type: ignore[arg-type]
    with pytest.raises(FrameError, match="install the same flower-blsgd on both"):
        Invitation.from_message(message)


def test_message_that_is_no_invitation_is_refused() -> None:
    with pytest.raises(FrameError):
        Invitation.from_message(message_with(RecordDict()))


@pytest.mark.parametrize("name", ["addresses", "certificate", "token", "wire-dtype"])
def test_invitation_that_lacks_something_is_refused(name: str) -> None:
    content = INVITATION.to_records()
    del content["session"][name]
    with pytest.raises(FrameError, match=name):
        Invitation.from_message(message_with(content))


@pytest.mark.parametrize(
    ("name", "value"), [("addresses", 3), ("certificate", "a"), ("token", 1.5)]
)
def test_invitation_with_a_wrong_type_is_refused(name: str, value: object) -> None:
    content = INVITATION.to_records()
    content["session"][name] = value
    with pytest.raises(FrameError, match="cannot be read"):
        Invitation.from_message(message_with(content))


@pytest.mark.parametrize(
    "farewell",
    [Farewell(True), Farewell(True, "it broke"), Farewell(False, "it cannot reach a:1 or b:2")],
)
def test_farewell_arrives(farewell: Farewell) -> None:
    reply = over_flower(farewell.to_reply(message_with(INVITATION.to_records())))
    assert Farewell.from_reply(reply) == farewell


def test_answer_that_cannot_be_read_counts_as_never_connected() -> None:
    invitation = message_with(INVITATION.to_records())
    for content in (RecordDict(), RecordDict({"session": ConfigRecord({"connected": "yes"})})):
        assert not Farewell.from_reply(Message(content, reply_to=invitation)).connected
