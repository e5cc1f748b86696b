"""A node's side of letters, without a connection: what the tests of models share."""

from collections.abc import Mapping

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from flower_blsgd.array_view import AnyArray, view_record
from flower_blsgd.runtime.flower_internals import give_message_id
from flower_blsgd.runtime.stream.frames import Frame, FrameReader
from flower_blsgd.runtime.stream.held_models import HeldModels
from flower_blsgd.runtime.stream.letters import (
    Encoder,
    Letter,
    letter_pieces,
    message_in,
    reply_in,
    reply_pieces,
)

Model = dict[str, AnyArray]


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


def order_for(node_id: int, record: ArrayRecord, name: str = "arrays") -> Message:
    message = Message(RecordDict({name: record}), node_id, "train", group_id="4")
    give_message_id(message)
    return message


def frame_in(pieces: list[bytes]) -> Frame:
    (frame,) = FrameReader().frames(pieces)
    return frame


class FarNode:
    """Reads letters and writes replies as a session does; the frames go through no network."""

    def __init__(self, node_id: int = 7, wire_dtype: str = "float32", views: bool = False) -> None:
        self.node_id = node_id
        self.held = HeldModels(wire_dtype, views)
        self.versions: dict[str, int] = {}
        """What the server's link believes that the node holds."""
        self.bytes_received = 0
        self._session = Message(RecordDict(), node_id, "train.session", group_id="")

    def reconnect(self) -> None:
        """A new connection: the server cannot know what came on the last one."""
        self.versions = {}

    def receive(self, letter: Letter) -> Message:
        pieces = letter_pieces(letter, self.versions)
        self.bytes_received = sum(map(len, pieces))
        return message_in(frame_in(pieces), self._session, self.node_id, self.held)

    def answer(self, letter: Letter, message: Message, content: RecordDict) -> Message:
        """Return the reply as the server reads it."""
        reply = Message(content, reply_to=message)
        return reply_in(frame_in(reply_pieces(reply, self.held)), letter)

    def train(self, letter: Letter, delta: Model, name: str = "arrays") -> Model:
        """Add `delta` to the model in the letter; return the reply's model, as it arrived."""
        message = self.receive(letter)
        new = {
            key: (tensor + delta[key] if key in delta else tensor).astype(tensor.dtype)
            for key, tensor in tensors_in(message.content[name]).items()
        }
        reply = self.answer(letter, message, content_of(new, name))
        return tensors_in(reply.content[name])


def content_of(model: Model, name: str = "arrays") -> RecordDict:
    return RecordDict({name: view_record(model), "metrics": MetricRecord({"num-examples": 3})})


class Server:
    """Encodes models round after round, as a stream grid does."""

    def __init__(self, wire_dtype: str) -> None:
        self._wire_dtype = wire_dtype
        self.broadcasts: dict[str, object] = {}

    def send(self, record: ArrayRecord | Model, *nodes: FarNode) -> list[Letter]:
        """Return a letter to each node, with the same record."""
        shared = record if isinstance(record, ArrayRecord) else view_record(record)
        return self.send_own(dict.fromkeys(nodes, shared))

    def send_own(self, records: Mapping[FarNode, ArrayRecord]) -> list[Letter]:
        """Return a letter to each node, with a record of its own."""
        encoder = Encoder(self._wire_dtype, self.broadcasts)  # type: ignore[arg-type]
        return [encoder.letter(order_for(node.node_id, r)) for node, r in records.items()]
