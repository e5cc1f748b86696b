"""A node's end of the message codec, without a connection."""

from collections.abc import Mapping

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from hypothesis import strategies as st

from flower_blsgd.array_records import AnyArray, view_record
from flower_blsgd.runtime.flower_internals import give_message_id
from flower_blsgd.runtime.stream.codec import (
    EncodedMessage,
    Encoder,
    decode_message,
    decode_reply,
    message_chunks,
    reply_chunks,
)
from flower_blsgd.runtime.stream.frames import Frame, read_frames
from flower_blsgd.runtime.stream.model_changes import Broadcast, HeldModels

Model = dict[str, AnyArray]

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 9)
    | st.floats()
    | st.sampled_from(["<f4", "|u1", "O", "U3", "f4,f4", "(2,)i4", "M8[s]", "V4", "T"])
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)
"""What headers that lie may hold."""


def model_of(**tensors: object) -> Model:
    """Return a model; numbers and lists of them become float32."""
    return {
        name: tensor if isinstance(tensor, np.ndarray) else np.array(tensor, np.float32)
        for name, tensor in tensors.items()
    }


def normal(rng: np.random.Generator, *shape: int) -> AnyArray:
    return rng.standard_normal(shape, np.float32)


def tensors_in(record: ArrayRecord) -> Model:
    return {name: array.numpy() for name, array in record.items()}


def assert_same_bits(one: Mapping[str, AnyArray], other: Mapping[str, AnyArray]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert tensor.shape == other[name].shape
        assert tensor.tobytes() == other[name].tobytes(), name


def train_message(node_id: int, record: ArrayRecord, name: str = "arrays") -> Message:
    message = Message(RecordDict({name: record}), node_id, "train", group_id="4")
    give_message_id(message)
    return message


def frame_in(chunks: list[bytes]) -> Frame:
    (frame,) = read_frames(chunks)
    return frame


def content_of(model: Model, name: str = "arrays") -> RecordDict:
    return RecordDict({name: view_record(model), "metrics": MetricRecord({"num-examples": 3})})


class CodecNode:
    """Reads messages and writes replies as a session does; the frames go through no network."""

    def __init__(self, node_id: int = 7, wire_dtype: str = "float32", views: bool = False) -> None:
        self.node_id = node_id
        self.held = HeldModels(wire_dtype, views)
        self.versions: dict[str, int] = {}
        """What the server's link believes that the node holds."""
        self.bytes_received = 0
        self._session = Message(RecordDict(), node_id, "train.session", group_id="")

    def reconnect(self) -> None:
        """Use a new connection: the server cannot know what came on the last one."""
        self.versions = {}

    def receive(self, encoded: EncodedMessage) -> Message:
        chunks = message_chunks(encoded, self.versions)
        self.bytes_received = sum(map(len, chunks))
        return decode_message(frame_in(chunks), self._session, self.node_id, self.held)

    def answer(self, encoded: EncodedMessage, message: Message, content: RecordDict) -> Message:
        """Return the reply as the server reads it."""
        reply = Message(content, reply_to=message)
        return decode_reply(frame_in(reply_chunks(reply, self.held)), encoded)

    def train(self, encoded: EncodedMessage, delta: Model) -> Model:
        """Add `delta` to the model that came; return the reply's model, as it arrived."""
        message = self.receive(encoded)
        new = {
            key: (tensor + delta[key] if key in delta else tensor).astype(tensor.dtype)
            for key, tensor in tensors_in(message.content["arrays"]).items()
        }
        return tensors_in(self.answer(encoded, message, content_of(new)).content["arrays"])


class CodecServer:
    """Encodes models round after round, as a stream grid does."""

    def __init__(self, wire_dtype: str) -> None:
        self.wire_dtype = wire_dtype
        self.broadcasts: dict[str, Broadcast] = {}

    def send(self, model: Model, *nodes: CodecNode) -> list[EncodedMessage]:
        """Return a message to each node, with the same record."""
        return self.send_own(dict.fromkeys(nodes, view_record(model)))

    def send_own(self, records: Mapping[CodecNode, ArrayRecord]) -> list[EncodedMessage]:
        """Return a message to each node, with a record of its own."""
        encoder = Encoder(self.wire_dtype, self.broadcasts)
        return [encoder.encode(train_message(node.node_id, r)) for node, r in records.items()]
