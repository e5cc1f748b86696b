"""Messages as frames: what a node gets is what Flower would have given it."""

import contextlib
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_blsgd.array_records import view_record
from flower_blsgd.runtime.flower_internals import RAISED, give_message_id
from flower_blsgd.runtime.stream import codec, frames, model_changes
from flower_blsgd.runtime.stream.codec import (
    SESSION_MESSAGE,
    EncodedMessage,
    Encoder,
    SessionRequest,
    SessionResult,
    decode_message,
    decode_reply,
    reply_chunks,
)
from flower_blsgd.runtime.stream.frames import EncodedRecord, Frame, FrameError, Kind
from flower_blsgd.runtime.stream.model_changes import Broadcast, HeldModels

from .nodes import JSON, CodecNode, frame_in, model_of, tensors_in, train_message


def message_to_node() -> Message:
    content = RecordDict(
        {
            "arrays": view_record(model_of(w=[1, 2], n=np.array([3]))),
            "config": ConfigRecord({"lr": 0.1, "server-round": 3}),
            "metrics": MetricRecord({"x": [1.0, 2.0]}),
        }
    )
    message = Message(content, 7, "evaluate.mine", group_id="12", ttl=321.5)
    give_message_id(message)
    return message


def encoded(message: Message, wire_dtype: str = "float32") -> EncodedMessage:
    return Encoder(wire_dtype, {}).encode(message)


def test_message_arrives_as_it_was_sent() -> None:
    sent = message_to_node()
    found = CodecNode().receive(encoded(sent))
    for name in (
        *("run_id", "message_id", "src_node_id", "dst_node_id", "reply_to_message_id"),
        *("group_id", "ttl", "message_type"),
    ):
        assert getattr(found.metadata, name) == getattr(sent.metadata, name), name
    assert set(found.content) == {"arrays", "config", "metrics"}
    np.testing.assert_array_equal(found.content["arrays"]["w"].numpy(), [1, 2])
    assert dict(found.content["config"]) == {"lr": 0.1, "server-round": 3}
    assert dict(found.content["metrics"]) == {"x": [1.0, 2.0]}
    assert not found.has_error()


def test_reply_arrives_as_an_answer_to_the_servers_own_message() -> None:
    sent, node = message_to_node(), CodecNode()
    message = node.receive(encoded(sent))
    content = RecordDict({"arrays": view_record(model_of(w=[5])), "m": MetricRecord({"a": 1})})
    found = node.answer(encoded(sent), message, content)
    assert found.metadata.reply_to_message_id == sent.metadata.message_id
    assert found.metadata.src_node_id == 7
    assert found.metadata.dst_node_id == sent.metadata.src_node_id
    assert found.metadata.message_type == "evaluate.mine"
    assert found.metadata.group_id == "12"
    np.testing.assert_array_equal(found.content["arrays"]["w"].numpy(), [5])
    assert dict(found.content["m"]) == {"a": 1}


def test_error_arrives_with_code_and_reason() -> None:
    sent = encoded(message_to_node())
    reply = Message(Error(RAISED, "Traceback: ü\n"), reply_to=CodecNode().receive(sent))
    found = decode_reply(frame_in(reply_chunks(reply, HeldModels("float32", False))), sent)
    assert found.has_error()
    assert (found.error.code, found.error.reason) == (RAISED, "Traceback: ü\n")
    assert found.metadata.reply_to_message_id == sent.message_id


@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16", "float16"])
def test_record_that_many_messages_share_is_encoded_once(
    monkeypatch: pytest.MonkeyPatch, wire_dtype: str
) -> None:
    calls: list[object] = []
    encode = frames.encode_arrays

    def counted(record: ArrayRecord) -> EncodedRecord:
        calls.append(record)
        return encode(record)

    for module in (frames, model_changes):
        monkeypatch.setattr(module, "encode_arrays", counted)
    nodes = [CodecNode(node_id, wire_dtype) for node_id in range(10)]
    broadcasts: dict[str, Broadcast] = {}
    for values in ([1, 2], [1.5, 2]):  # the second as a change, in 16 bits
        one, other = view_record(model_of(w=values)), view_record(model_of(v=values))
        encoder = Encoder(wire_dtype, broadcasts)
        for node in nodes:
            message = train_message(node.node_id, one)
            message.content["other"] = other
            found = node.receive(encoder.encode(message)).content
            assert tensors_in(found["arrays"])["w"].tolist() == values
            assert tensors_in(found["other"])["v"].tolist() == values
    assert len(calls) == 4


# --- what cannot be read ------------------------------------------------------------------------


def frame(header: Any, body: bytes = b"") -> Frame:
    return Frame(Kind.MESSAGE, header, np.frombuffer(body, np.uint8).copy())


def read_message(header: Any, body: bytes = b"", wire_dtype: str = "float32") -> Message:
    session = Message(RecordDict(), 7, SESSION_MESSAGE)
    return decode_message(frame(header, body), session, 7, HeldModels(wire_dtype, False))


VALID = {"id": "a", "type": "train", "group": "", "ttl": 1.0, "records": {}}


@pytest.mark.parametrize(
    "lie",
    [
        *[{"id": 1}, {"type": 3}, {"group": 4}, {"ttl": "1"}, {"records": None}, {"records": []}],
        *[{"records": {"r": 3}}, {"records": {"r": {"kind": "arrays", "bytes": 1}}}],
    ],
    ids=str,
)
def test_frame_without_a_message_is_refused(lie: dict[str, Any]) -> None:
    assert read_message(VALID).metadata.message_id == "a"
    with pytest.raises(FrameError):
        read_message(VALID | lie)


@pytest.mark.parametrize(
    "header",
    [
        *[{}, {"records": 5}, {"records": {"r": {"kind": "change", "bytes": 0}}}],
        *[{"error": error} for error in (5, [], [1], [1, "a", "b"], ["x", "a"], [None, "a"])],
        *[{"error": error} for error in ([float("inf"), "a"], [float("nan"), ""], {"a": 1})],
    ],
    ids=str,
)
def test_frame_without_a_reply_is_refused(header: dict[str, Any]) -> None:
    with pytest.raises(FrameError):
        decode_reply(frame(header), encoded(message_to_node()))


LIES = st.dictionaries(
    st.sampled_from(["records", "error", "id", "type", "reply-to", "group", "ttl"]),
    JSON
    | st.dictionaries(
        st.sampled_from(["arrays", "config", "x"]),
        st.dictionaries(
            st.sampled_from(["kind", "bytes", "layout", "version", "base", "rounded"]),
            JSON
            | st.sampled_from(["arrays", "change", "config", "metrics"])
            | st.just([["w", "<u2", [2]]])
            | st.just([["w", "<f4", [2]]]),
        ),
    ),
)


@settings(deadline=None)
@given(LIES, st.binary(max_size=130))
def test_any_header_raises_nothing_but_frame_error(header: dict[str, Any], body: bytes) -> None:
    sent = encoded(message_to_node(), "bfloat16")
    with contextlib.suppress(FrameError):
        assert isinstance(decode_reply(frame(header, body), sent), Message)
    for maybe_valid in (header, VALID | header):
        with contextlib.suppress(FrameError):
            assert isinstance(read_message(maybe_valid, body, "bfloat16"), Message)


# --- how a session is opened and answered -------------------------------------------------------

REQUEST = SessionRequest(
    ("10.0.0.5:9100", "127.0.0.1:9100"), b"-----PEM", b"\0\xfftoken", "float16"
)


def over_flower(content: RecordDict) -> Message:
    """Return a message to a node, as it comes out of Flower's own wire format."""
    return message_from_proto(message_to_proto(Message(content, 7, SESSION_MESSAGE)))


def test_session_request_arrives() -> None:
    assert SessionRequest.from_message(over_flower(REQUEST.to_records())) == REQUEST
    assert codec.SESSION_MESSAGE == "train.session"  # a type that Flower lets through


@pytest.mark.parametrize("version", [None, 0, 2])
def test_request_of_another_version_is_refused_with_the_way_out(version: Any) -> None:
    record = dict(REQUEST.to_records()["session"]) | {"version": version}
    content = RecordDict() if version is None else RecordDict({"session": ConfigRecord(record)})
    with pytest.raises(FrameError, match="install the same flower-blsgd on both"):
        SessionRequest.from_message(over_flower(content))


@pytest.mark.parametrize("name", ["addresses", "certificate", "token", "wire-dtype"])
def test_request_that_lacks_something_is_refused(name: str) -> None:
    content = REQUEST.to_records()
    del content["session"][name]
    with pytest.raises(FrameError, match="cannot be read"):
        SessionRequest.from_message(over_flower(content))


@pytest.mark.parametrize(
    "result",
    [
        SessionResult(True),
        SessionResult(True, "it broke"),
        SessionResult(False, "it cannot reach a:1 or b:2"),
    ],
)
def test_session_result_arrives(result: SessionResult) -> None:
    reply = result.to_reply(over_flower(REQUEST.to_records()))
    there = message_from_proto(message_to_proto(reply))
    assert SessionResult.from_reply(there) == result


def test_result_that_cannot_be_read_counts_as_never_connected() -> None:
    request = over_flower(REQUEST.to_records())
    for content in (RecordDict(), RecordDict({"session": ConfigRecord({"connected": "yes"})})):
        assert not SessionResult.from_reply(Message(content, reply_to=request)).connected
