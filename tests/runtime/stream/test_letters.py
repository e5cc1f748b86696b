"""Messages as frames: what a node gets is what Flower would have given it."""

import contextlib
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_blsgd.array_view import view_record
from flower_blsgd.runtime.flower_internals import RAISED, give_message_id
from flower_blsgd.runtime.stream import letters, records
from flower_blsgd.runtime.stream.frames import Frame, FrameError, Kind
from flower_blsgd.runtime.stream.held_models import HeldModels
from flower_blsgd.runtime.stream.letters import Encoder, message_in, reply_in, reply_pieces

from .nodes import FarNode, frame_in, model_of, order_for
from .test_records import JSON


def session() -> Message:
    return Message(RecordDict(), 7, "train.session")


def order() -> Message:
    content = RecordDict(
        {
            "arrays": view_record(model_of(w=[1, 2], n=np.array([3]))),
            "config": ConfigRecord({"lr": 0.1, "server-round": 3}),
            "figures": MetricRecord({"x": [1.0, 2.0]}),
        }
    )
    message = Message(content, 7, "evaluate.mine", group_id="12", ttl=321.5)
    give_message_id(message)
    return message


def letter_of(message: Message) -> letters.Letter:
    return Encoder("float32", {}).letter(message)


def test_message_arrives_as_it_was_sent() -> None:
    sent = order()
    found = FarNode().receive(letter_of(sent))
    for name in (
        *("run_id", "message_id", "src_node_id", "dst_node_id", "reply_to_message_id"),
        *("group_id", "ttl", "message_type"),
    ):
        assert getattr(found.metadata, name) == getattr(sent.metadata, name), name
    assert set(found.content) == {"arrays", "config", "figures"}
    np.testing.assert_array_equal(found.content["arrays"]["w"].numpy(), [1, 2])
    assert dict(found.content["config"]) == {"lr": 0.1, "server-round": 3}
    assert dict(found.content["figures"]) == {"x": [1.0, 2.0]}
    assert not found.has_error()


def test_reply_arrives_as_an_answer_to_the_servers_own_message() -> None:
    sent, node = order(), FarNode()
    letter = letter_of(sent)
    message = node.receive(letter)
    content = RecordDict({"arrays": view_record(model_of(w=[5])), "m": MetricRecord({"a": 1})})
    found = node.answer(letter, message, content)
    assert found.metadata.reply_to_message_id == sent.metadata.message_id
    assert found.metadata.src_node_id == 7
    assert found.metadata.dst_node_id == sent.metadata.src_node_id
    assert found.metadata.message_type == "evaluate.mine"
    assert found.metadata.group_id == "12"
    np.testing.assert_array_equal(found.content["arrays"]["w"].numpy(), [5])
    assert dict(found.content["m"]) == {"a": 1}


def test_error_arrives_with_code_and_reason() -> None:
    letter = letter_of(order())
    message = FarNode().receive(letter)
    reply = Message(Error(RAISED, "Traceback: ü\n"), reply_to=message)
    found = reply_in(frame_in(reply_pieces(reply, HeldModels("float32", False))), letter)
    assert found.has_error()
    assert (found.error.code, found.error.reason) == (RAISED, "Traceback: ü\n")
    assert found.metadata.reply_to_message_id == letter.message_id


def test_record_that_many_messages_share_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    encode = records.encode_arrays

    def counted(record: ArrayRecord) -> records.EncodedRecord:
        calls.append(record)
        return encode(record)

    monkeypatch.setattr(records, "encode_arrays", counted)
    one, other = view_record(model_of(w=[1])), view_record(model_of(v=[2]))
    encoder = Encoder("float32", {})
    for node_id in range(10):
        message = order_for(node_id, one)
        message.content["other"] = other
        letter = encoder.letter(message)
        found = FarNode(node_id).receive(letter)
        assert found.content["arrays"]["w"].numpy() == 1
        assert found.content["other"]["v"].numpy() == 2
    assert len(calls) == 2


@pytest.mark.parametrize("wire_dtype", ["bfloat16", "float16"])
def test_shared_change_is_encoded_once(wire_dtype: str) -> None:
    nodes = [FarNode(i, wire_dtype) for i in range(5)]
    broadcasts: dict[str, Any] = {}
    for values in ([1, 2], [1.5, 2]):
        record = view_record(model_of(w=values))
        encoder = Encoder(wire_dtype, broadcasts)
        sent = [encoder.letter(order_for(node.node_id, record)) for node in nodes]
        assert len({id(letter.records["arrays"]) for letter in sent}) == 1
        for node, letter in zip(nodes, sent, strict=True):
            np.testing.assert_array_equal(
                node.receive(letter).content["arrays"]["w"].numpy(), np.float32(values)
            )
    assert broadcasts["arrays"].errors == [0, 0]


def frame(header: Any, body: bytes = b"") -> Frame:
    return Frame(Kind.MESSAGE, header, np.frombuffer(body, np.uint8).copy())


HEADERS: list[dict[str, Any]] = [
    {},
    {"id": "a", "type": "train"},
    {"id": "a", "type": "train", "records": None},
    {"id": "a", "type": "train", "records": []},
    {"id": 1, "type": "train", "records": {}},
    {"id": "a", "type": 3, "records": {}},
    {"id": "a", "type": "train", "records": {"r": 3}},
    {"id": "a", "type": "train", "records": {"r": {"kind": "arrays", "bytes": 1}}},
]


@pytest.mark.parametrize("header", HEADERS, ids=str)
def test_frame_without_a_message_is_refused(header: dict[str, Any]) -> None:
    with pytest.raises(FrameError):
        message_in(frame(header), session(), 7, HeldModels("float32", False))


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"records": 5},
        {"records": {"r": {"kind": "change", "bytes": 0}}},
        {"error": 5},
        {"error": []},
        {"error": [1]},
        {"error": [1, "a", "b"]},
        {"error": ["x", "a"]},
        {"error": [None, "a"]},
        {"error": [float("inf"), "a"]},
        {"error": [float("nan"), "a"]},
        {"error": {"a": 1, "b": 2}},
    ],
    ids=str,
)
def test_frame_without_a_reply_is_refused(header: dict[str, Any]) -> None:
    with pytest.raises(FrameError):
        reply_in(frame(header), letter_of(order()))


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
    letter = Encoder("bfloat16", {}).letter(order())
    for read in (
        lambda: reply_in(frame(header, body), letter),
        lambda: message_in(frame(header, body), session(), 7, HeldModels("bfloat16", False)),
    ):
        with contextlib.suppress(FrameError):
            assert isinstance(read(), Message)
