"""Messages as frames: what a node gets is what Flower would have given it; lies are refused.

In 16 bits: rounded as torch does it, equal on all nodes, with errors late and not lost.
"""

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.engines.stream import codec, encoded_arrays
from flower_blsgd.engines.stream.codec import (
    EncodedMessage,
    chunks_of,
    decode_reply,
    encode_messages,
    encode_reply,
    frame_of,
    read_frames,
)
from flower_blsgd.engines.stream.encoded_arrays import (
    CHUNK_BYTES,
    Broadcast,
    EncodedRecord,
    FrameArrays,
    FrameError,
    Tensors,
    decode_arrays,
    encode_arrays,
    from_16_bits,
    plain_arrays,
    to_16_bits,
)
from flower_blsgd.flower.array_records import AnyArray, view_record
from flower_blsgd.flower.internals import (
    RAISED,
    ProtoArray,
    ProtoArrayRecord,
    become_server,
    give_message_id,
    message_to_proto,
)

Model = dict[str, AnyArray]
DTYPES = pytest.mark.parametrize("wire_dtype", ["bfloat16", "float16"])
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Relative: half the distance of neighbours, for numbers that are not tiny."""


def model_of(**tensors: object) -> Model:
    """Return a model; numbers and lists of them become float32."""
    return {
        name: tensor if isinstance(tensor, np.ndarray) else np.array(tensor, np.float32)
        for name, tensor in tensors.items()
    }


def tensors_in(record: ArrayRecord) -> Model:
    return {name: array.numpy() for name, array in record.items()}


def assert_same_bits(one: Mapping[str, AnyArray], other: Mapping[str, AnyArray]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert tensor.shape == other[name].shape
        assert tensor.tobytes() == other[name].tobytes(), name


def over_the_wire(frame: list[bytes]) -> tuple[Message, FrameArrays]:
    (read,) = read_frames(chunks_of(frame))
    return read


class CodecNode:
    """Reads messages and writes replies as a session does; the frames go through no network."""

    def __init__(self, wire_dtype: str, node_id: int = 7) -> None:
        self.wire_dtype, self.node_id = wire_dtype, node_id
        self.held: dict[str, Tensors] = {}
        self.carried: dict[str, Tensors] = {}
        self.versions: dict[str, int] = {}
        """What the server's link believes that the node holds."""
        self.bytes_received = 0
        self._received: dict[str, dict[str, Tensors]] = {}

    def receive(self, encoded: EncodedMessage) -> Message:
        frame = frame_of(*encoded, self.versions)
        self.bytes_received = sum(map(len, frame))
        message, arrays = over_the_wire(frame)
        models = decode_arrays(message, arrays, lambda name: self.held.get(name, {}))
        self.held.update(models)
        self._received[message.metadata.message_id] = models
        return message

    def answer(self, encoded: EncodedMessage, message: Message, content: RecordDict) -> Message:
        """Return the reply as the server reads it."""
        received = self._received[message.metadata.message_id]
        reply = Message(content, reply_to=message)
        frame = encode_reply(reply, received, self.carried, self.wire_dtype)
        return decode_reply(*over_the_wire(frame), encoded.message)

    def answer_with(self, encoded: EncodedMessage, message: Message, model: Model) -> Model:
        reply = self.answer(encoded, message, RecordDict({"arrays": view_record(model)}))
        return tensors_in(reply.content["arrays"])

    def train(self, encoded: EncodedMessage, delta: Model) -> Model:
        """Add `delta` to the model that came; return the reply's model, as it arrived."""
        message = self.receive(encoded)
        found = tensors_in(message.content["arrays"])
        return self.answer_with(encoded, message, {k: t + delta[k] for k, t in found.items()})


class CodecServer:
    """Encodes models round after round, as a stream grid does."""

    def __init__(self, wire_dtype: str) -> None:
        self.wire_dtype = wire_dtype
        self.broadcasts: dict[str, Broadcast] = {}

    def encode(self, *messages: Message) -> list[EncodedMessage]:
        for message in messages:
            give_message_id(message)
        return encode_messages(messages, self.broadcasts, self.wire_dtype)

    def send(self, record: Model | ArrayRecord, *nodes: CodecNode) -> list[EncodedMessage]:
        """Return a message to each node, with the same record."""
        arrays = record if isinstance(record, ArrayRecord) else view_record(record)
        content = RecordDict({"arrays": arrays})
        return self.encode(*(Message(content, node.node_id, "train") for node in nodes))

    def give(self, model: Model, *nodes: CodecNode) -> list[Model]:
        """Send a model to all nodes; return what arrives."""
        sent = zip(nodes, self.send(model, *nodes), strict=True)
        return [tensors_in(node.receive(message).content["arrays"]) for node, message in sent]


Ends = tuple[CodecServer, CodecNode]


@pytest.fixture(params=["bfloat16", "float16"])
def ends(request: pytest.FixtureRequest) -> Ends:
    return CodecServer(request.param), CodecNode(request.param)


# --- frames -------------------------------------------------------------------------------------


def frame_with(elements: bytes, number: int = 0) -> list[bytes]:
    """Return the frame of a message with these bytes as its only array."""
    record = encode_arrays({"w": np.frombuffer(elements, np.uint8)})
    content = RecordDict({"r": ArrayRecord(), "config": ConfigRecord({"n": number})})
    return frame_of(Message(content, 7, "train"), {"r": record})


def begin(body_bytes: int, header_bytes: int, rest: bytes = b"") -> bytes:
    """Return a first gRPC message, with lies where they are wanted."""
    return struct.pack("<QQ", body_bytes, header_bytes) + rest


def test_frames_of_any_size_one_after_another_come_out_as_they_went_in() -> None:
    sizes = [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 5]
    sent = [np.random.default_rng(size).bytes(size) for size in sizes]
    frames = [frame_with(elements, number) for number, elements in enumerate(sent)]
    chunks = [chunk for frame in frames for chunk in chunks_of(frame)]
    assert all(len(chunk) <= CHUNK_BYTES for chunk in chunks), "gRPC would refuse it"
    found = list(read_frames(chunks))
    assert [message.content["config"]["n"] for message, _ in found] == list(range(len(sent)))
    for (_, arrays), expected in zip(found, sent, strict=True):
        assert arrays.elements[: len(expected)].tobytes() == expected
    for incomplete in (chunks[:-1], [*chunks[:-1], chunks[-1][:-1]]):  # that one is not there
        assert len(list(read_frames(incomplete))) == len(sent) - 1


become_server(run_id=1)  # for the messages of the table below


def message_to_node() -> Message:
    content = RecordDict(
        {
            "z": ConfigRecord({"i": -3, "f": float("inf"), "b": True, "y": b"\0\xff", "e": []}),
            "arrays": view_record(model_of(w=[1, 2], n=np.array([3]))),
            "metrics": MetricRecord({"x": [1.0, 2.0], "large": 2**40}),
            "empty": ArrayRecord(),
        }
    )
    return Message(content, 7, "evaluate.mine", group_id="12", ttl=321.5)


def lying(elements: bytes, dtype: str, *shape: int, data: bytes = b"") -> list[bytes]:
    """Return the frame of a message whose only array is described so."""
    array = ProtoArray(dtype=dtype, shape=shape, stype="numpy.ndarray", data=data)
    record = ProtoArrayRecord(items=[ProtoArrayRecord.Item(key="w", value=array)])
    message = Message(RecordDict({"r": ArrayRecord()}), 7, "train")
    return frame_of(message, {"r": EncodedRecord(record.SerializeToString(), [elements])})


def error_with_elements() -> list[bytes]:
    (frame,) = frame_of(Message(Error(RAISED, ""), reply_to=message_to_node()), {})
    _, header_bytes = struct.unpack_from("<QQ", frame)
    return [begin(len(frame) + 64, header_bytes, frame[16:]), bytes(64)]


def with_metadata(size: int) -> list[bytes]:
    proto = message_to_proto(message_to_node())
    proto.metadata.group_id = "x" * size
    header = proto.SerializeToString()
    body_bytes = 64 * (len(header) // 64 + 2)
    return [begin(body_bytes, len(header), header).ljust(body_bytes, b"\0")]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([b""], "cannot begin with 0 bytes"),
        ([b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"], "is too large"),
        ([begin(2**36 + 1, 0)], "is too large"),
        ([begin(64, 49)], "message of 49 bytes does not fit"),
        ([begin(1 << 30, (1 << 26) + 1)], "does not fit"),
        ([begin(64, 2**64 - 1)], "does not fit into its frame"),
        ([begin(0, 0)], "message of 0 bytes does not fit"),
        ([begin(64, 5, b"\xff" * 48)], "message cannot be read"),
        ([begin(64, 0, bytes(48))], "message cannot be read"),  # neither content nor error
        ([begin(64, 5, bytes(40)), bytes(9)], "more than 64 bytes arrived"),
        (lying(bytes(12), "float32", 3), "not in their frame"),  # no padding
        (lying(bytes(128), "float32", 3), "64 bytes of a frame belong to no array"),
        (error_with_elements(), "64 bytes of a frame belong to no array"),
        *((lying(bytes(64), dtype, 1), "not in its frame") for dtype in ("O", "|O8", "object")),
        (lying(b"", "f4," * 1000 + "f4", 0), "invalid description"),
        (lying(b"", "(" * 30 + "f4", 0), "cannot be read|not in (its|their) frame"),
        (lying(b"", "float32", *[2**31 - 1] * 200_000), "invalid description"),
        (lying(b"", "float32", 0, data=b"abc"), "invalid description"),
        (with_metadata(1 << 17), "its metadata has"),
    ],
    ids=range(21),
)
def test_bytes_that_are_no_frame_are_refused(parts: list[bytes], reason: str) -> None:
    with pytest.raises(FrameError, match=reason):
        [decode_arrays(*frame, lambda _: {}) for frame in read_frames(parts)]


def test_message_that_no_end_would_take_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    content = RecordDict({"config": ConfigRecord({"b": bytes(5000)})})
    monkeypatch.setattr(codec, "LONGEST_HEADER_BYTES", 5000)
    held = {"model": 2}
    record = EncodedRecord(b"", [], version=3)
    with pytest.raises(FrameError, match=r'put them into an ArrayRecord.*transport = "messages"'):
        frame_of(Message(content, 7, "train"), {"model": record}, held)
    assert held == {"model": 2}  # so the next change is not one to a model that it lacks


def test_frame_longer_than_allowed_or_than_free_memory_is_refused_before_memory_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(codec, "free_bytes", lambda: 100 << 20)
    assert list(read_frames([begin(100 << 20, 0)])) == []
    with pytest.raises(FrameError, match="is too large"):
        list(read_frames([begin((100 << 20) + 1, 0)]))
    frame = frame_with(b"")
    size = sum(map(len, frame))
    monkeypatch.setattr(codec, "LONGEST_BODY_BYTES", size)
    assert len(list(read_frames(chunks_of(frame)))) == 1
    monkeypatch.setattr(codec, "LONGEST_BODY_BYTES", size - 1)
    with pytest.raises(FrameError, match=f"{size} bytes"):
        list(read_frames(chunks_of(frame)))


# --- arrays -------------------------------------------------------------------------------------

PLAIN_DTYPES = [
    *["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"],
    *["float16", "float32", "float64", "complex64", "complex128"],
    *[">f4", ">i8", "datetime64[ms]", "timedelta64[s]", "S5", "U3", ">U2"],
]
SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (7,), (2, 3, 5)]


def sent_and_read(record: ArrayRecord) -> Model:
    """Return a record's arrays as they arrive, which must be aligned views on the frame."""
    encoded = encode_arrays(plain_arrays(record))
    message = Message(RecordDict({"r": record}), 7, "train")
    message, arrays = over_the_wire(frame_of(message, {"r": encoded}))
    models = decode_arrays(message, arrays, lambda _: {})
    elements = arrays.elements
    start = elements.__array_interface__["data"][0]
    for array in models["r"].values():
        assert (array.__array_interface__["data"][0] - start) % 64 == 0
        assert np.may_share_memory(array, elements) or not array.nbytes
    return dict(models["r"])


@pytest.mark.parametrize("dtype", PLAIN_DTYPES)
def test_arrays_of_any_dtype_and_shape(dtype: str) -> None:
    rng = np.random.default_rng(7)
    arrays = {
        str(shape): np.asarray(rng.integers(0, 100, shape)).astype(dtype).reshape(shape)
        for shape in SHAPES
    }
    whole = np.asarray(rng.integers(0, 100, (3, 4, 5))).astype(dtype)
    arrays |= {"step": whole[:, ::2], "transposed": whole.T, "reversed": whole[::-1]}
    arrays["broadcast"] = np.broadcast_to(whole[0], (2, 4, 5))
    by_flower = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    for record in by_flower, view_record(arrays):
        assert_same_bits(sent_and_read(record), arrays)


# --- messages and replies -----------------------------------------------------------------------


def test_message_arrives_as_it_was_sent_and_the_reply_as_an_answer_to_it() -> None:
    sent, node = message_to_node(), CodecNode("float32")
    (encoded,) = CodecServer("float32").encode(sent)
    message = node.receive(encoded)
    for name in (
        *("run_id", "message_id", "src_node_id", "dst_node_id", "reply_to_message_id"),
        *("group_id", "ttl", "message_type"),
    ):
        assert getattr(message.metadata, name) == getattr(sent.metadata, name), name
    assert list(message.content) == ["z", "arrays", "metrics", "empty"]
    assert dict(message.content["z"]) == dict(sent.content["z"])
    assert type(message.content["z"]["b"]) is bool
    assert dict(message.content["metrics"]) == dict(sent.content["metrics"])
    assert_same_bits(tensors_in(message.content["arrays"]), tensors_in(sent.content["arrays"]))
    assert not message.content["empty"]

    content = RecordDict({"arrays": view_record(model_of(w=[5])), "m": MetricRecord({"a": 1})})
    reply = node.answer(encoded, message, content)
    assert_same_bits(tensors_in(reply.content["arrays"]), model_of(w=[5]))
    assert dict(reply.content["m"]) == {"a": 1}
    failure = Message(Error(RAISED, "Traceback: ü\n"), reply_to=message)
    failure = decode_reply(*over_the_wire(encode_reply(failure, {}, {}, "float32")), sent)
    assert (failure.error.code, failure.error.reason) == (RAISED, "Traceback: ü\n")
    for answer in (reply, failure):
        assert answer.metadata.reply_to_message_id == sent.metadata.message_id
        assert answer.metadata.src_node_id == 7
        assert answer.metadata.dst_node_id == sent.metadata.src_node_id
        assert answer.metadata.message_type == "evaluate.mine"
        assert answer.metadata.group_id == "12"


@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16", "float16"])
def test_record_that_many_messages_share_is_encoded_once(
    monkeypatch: pytest.MonkeyPatch, wire_dtype: str
) -> None:
    calls: list[object] = []
    encode = codec.encode_arrays

    def counted(*arguments: Any) -> EncodedRecord:
        calls.append(arguments)
        return encode(*arguments)

    for module in (codec, encoded_arrays):
        monkeypatch.setattr(module, "encode_arrays", counted)
    nodes = [CodecNode(wire_dtype, node_id) for node_id in range(10)]
    server = CodecServer(wire_dtype)
    for values in ([1, 2], [1.5, 2]):  # the second as a change, in 16 bits
        one, other = view_record(model_of(w=values)), view_record(model_of(v=values))
        content = RecordDict({"arrays": one, "other": other})
        messages = [Message(content, node.node_id, "train") for node in nodes]
        for node, encoded in zip(nodes, server.encode(*messages), strict=True):
            found = node.receive(encoded).content
            assert tensors_in(found["arrays"])["w"].tolist() == values
            assert tensors_in(found["other"])["v"].tolist() == values
    assert len(calls) == 4


def test_arrays_that_are_not_plain_are_refused_with_the_way_out() -> None:
    foreign = ArrayRecord({"w": Array("x", (2,), "somebody.format", b"abc")})
    objects = ArrayRecord({"w": Array("object", (1,), "numpy.ndarray", bytes(128))})
    with pytest.raises(FrameError, match="not a numpy array of numbers"):
        plain_arrays(objects)
    for wire_dtype in ("float32", "bfloat16"):
        with pytest.raises(FrameError, match=r"'w'.*somebody\.format.*transport = \"messages\""):
            CodecServer(wire_dtype).send(foreign, CodecNode(wire_dtype))


# --- changes in 16 bits: arithmetic ---------------------------------------------------------------


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def rounded(values: np.ndarray, wire_dtype: str) -> np.ndarray:
    return from_16_bits(to_16_bits(values, wire_dtype), wire_dtype)


@DTYPES
def test_rounding_of_all_kinds_of_bits_is_that_of_torch(wire_dtype: str) -> None:
    patterns = np.random.default_rng(1).integers(0, 2**32, 1 << 18, dtype=np.uint32)
    edges = [0, 1, 0x7FFF, 0x8000, 0x7F7F_FFFF, 0x7F80_0000, 0x7F80_0001, 0x7FFF_FFFF, 0xFFFF_FFFF]
    # Ties above 1: half way to the even neighbour below, and to the one above; and in float16.
    edges += [0x3F80_8000, 0x3F81_8000, 0x3F80_1000, 0x3F80_3000, 0x477F_EFFF, 0x477F_F000]
    patterns[: len(edges)] = edges
    values = patterns.view(np.float32)
    by_torch = torch.from_numpy(values.copy()).to(getattr(torch, wire_dtype)).to(torch.float32)
    found = rounded(values, wire_dtype)
    np.testing.assert_array_equal(found, by_torch.numpy())
    assert found.dtype == np.float32


@pytest.mark.parametrize("dtype", ["int64", "float64", "float16", ">f4", "bool", "float32"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_change_keeps_dtype_and_shape(ends: Ends, dtype: str, shape: tuple[int, ...]) -> None:
    server, node = ends
    server.give({"w": np.full(shape, 0, dtype)}, node)
    new = {"w": np.full(shape, 1, dtype)}
    (message,) = server.send(new, node)
    (record,) = message.records.values()
    form = server.wire_dtype if dtype == "float32" else "numpy.ndarray"
    (item,) = ProtoArrayRecord.FromString(record.description).items
    assert item.value.stype == form
    found = tensors_in(node.receive(message).content["arrays"])
    assert isinstance(found["w"], np.ndarray), "torch.from_numpy takes no numpy scalar"
    assert_same_bits(found, new)


@pytest.mark.parametrize(
    "held",
    [
        *({}, {"v": floats(1, 2)}, {"w": floats(1, 2, 3)}, {"w": floats(1, 2).reshape(1, 2)}),
        *({"w": np.zeros(2, dtype)} for dtype in (np.float64, np.uint16, np.uint8, "U1")),
    ],
    ids=str,
)
def test_change_to_another_model_is_refused_at_both_ends(held: Model) -> None:
    change = encode_arrays({"w": floats(0, 0)}, {"w": np.zeros(2, np.uint16)}, "bfloat16")
    message = Message(RecordDict({"arrays": ArrayRecord()}), 7, "train")
    frame = frame_of(message, {"arrays": change})
    with pytest.raises(FrameError, match="relative to another model"):
        decode_arrays(*over_the_wire(frame), lambda _: held)
    sent = Message(RecordDict({"arrays": view_record(held)}), 7, "train")
    with pytest.raises(FrameError, match="relative to another model"):
        decode_reply(*over_the_wire(frame), sent)


# --- models for all nodes -----------------------------------------------------------------------


def random_model(rng: np.random.Generator, size: int = 1000) -> Model:
    weights = rng.standard_normal((size // 10, 10), np.float32)
    return {"w": weights, "t": np.float32(rng.random()).reshape(()), "n": rng.integers(0, 99, 3)}


def walk(model: Model, rng: np.random.Generator, step: float) -> Model:
    """Return a model a little further on."""
    moved = model["w"] + step * rng.standard_normal(model["w"].shape, np.float32)
    return {**model, "w": moved, "n": model["n"] + 1}


def test_broadcast_by_hand() -> None:
    server, node = CodecServer("bfloat16"), CodecNode("bfloat16")
    (first,) = server.give(model_of(w=[1.0, 2.0]), node)
    np.testing.assert_array_equal(first["w"], [1.0, 2.0])
    # The change 1 + 2^-8 is a tie, and goes to 1; the next change is 0 + 2^-8, which is exact.
    (second,) = server.give(model_of(w=[2 + 2**-8, 2.0]), node)
    np.testing.assert_array_equal(second["w"], [2.0, 2.0])
    (third,) = server.give(model_of(w=[2 + 2**-8, 2.0]), node)
    np.testing.assert_array_equal(third["w"], np.float32([2 + 2**-8, 2.0]))
    # sqrt(2^-16 / ((2 + 2^-8)^2 + 2^2))
    expected = 2**-8 / np.sqrt((2 + 2**-8) ** 2 + 4)
    assert server.broadcasts["arrays"].errors == pytest.approx([0, expected, 0])


@DTYPES
@given(st.lists(st.sets(st.integers(0, 2)), min_size=1, max_size=8), st.integers(0, 1000))
def test_all_nodes_hold_the_same_bits_whoever_was_there(
    wire_dtype: str, there: list[set[int]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    server = CodecServer(wire_dtype)
    always_there, *nodes = (CodecNode(wire_dtype, 7 + i) for i in range(4))
    model = random_model(rng, 50)
    for present in there:
        if rng.random() < 0.2:
            nodes[0].versions = {}  # it connected again: nobody knows what came before
        model = walk(model, rng, 0.01)
        found = server.give(model, always_there, *(nodes[i] for i in sorted(present)))
        for other in found[1:]:
            assert_same_bits(found[0], other)
        np.testing.assert_array_equal(found[0]["n"], model["n"])
        np.testing.assert_allclose(found[0]["w"], model["w"], rtol=0, atol=0.01)


def test_node_that_missed_a_version_gets_the_whole_model(ends: Ends) -> None:
    rng = np.random.default_rng(3)
    (server, steady), absent = ends, CodecNode(ends[0].wire_dtype, 8)
    model = random_model(rng, 10_000)
    server.give(model, steady, absent)
    whole_bytes = steady.bytes_received
    for _ in range(2):
        model = walk(model, rng, 1e-3)
        server.give(model, steady)
        assert steady.bytes_received < 0.55 * whole_bytes
    for fraction_at_least, fraction_at_most in ((0.95, 1.1), (0, 0.55)):
        model = walk(model, rng, 1e-3)
        server.give(model, steady, absent)
        assert fraction_at_least < absent.bytes_received / whole_bytes < fraction_at_most


def test_error_stays_one_rounding_of_one_change(ends: Ends) -> None:
    """After 200 rounds the nodes' model is as near to the true one as after one."""
    rng = np.random.default_rng(4)
    server, node = ends
    model, step = random_model(rng), 1e-3
    for round_number in range(200):
        model = walk(model, rng, step)
        (found,) = server.give(model, node)
        if round_number:
            # The largest of these normal numbers is below 6; float32 itself has 2^-24 of |w| < 6.
            bound = 1.01 * 6 * step * ROUNDING[server.wire_dtype] + 4 * 2**-24 * 8 + 2**-24
            assert np.abs(found["w"] - model["w"]).max() < bound
    errors = server.broadcasts["arrays"].errors
    assert (len(errors), errors[0]) == (200, 0)
    assert 0 < np.mean(errors[150:]) < 2 * np.mean(errors[1:50])


def test_models_of_another_layout_or_not_finite_travel_whole(ends: Ends) -> None:
    server, node = ends
    layouts = (
        model_of(w=[1, 2]),
        model_of(w=[1, 2, 3 + 2**-12]),
        model_of(w=[1, 2, 3 + 2**-12], v=[2**-20]),
        model_of(w=np.array([1, 2, 3 + 2**-40])),
        model_of(w=np.array([[1, 2, 3 + 2**-40]])),
    )
    largest = 3.4e38 if server.wire_dtype == "bfloat16" else 1e5  # its change is infinite
    values = ([1, 2], [np.nan, 2], [np.inf, -np.inf], [np.inf, 3], [3, -3], [largest, 0], [1, 2])
    for model in (*layouts, *(model_of(w=v) for v in values)):
        (found,) = server.give(model, node)
        assert_same_bits(found, model)


def test_model_may_be_changed_in_place_after_it_was_sent(ends: Ends) -> None:
    server, node = ends
    model = model_of(w=[1, 2])
    (message,) = server.send(model, node)
    model["w"][:] = 7
    found = tensors_in(node.receive(message).content["arrays"])
    np.testing.assert_array_equal(found["w"], [1, 2])


def test_nodes_that_each_get_a_model_of_their_own(ends: Ends) -> None:
    """As strategies with personal models send them, between rounds with a common one."""
    server, first = ends
    nodes = [first, CodecNode(server.wire_dtype, 8), CodecNode(server.wire_dtype, 9)]
    common = [view_record(model_of(w=[1, 2]))] * 3
    own = [view_record(model_of(w=[10.0 * number, 3])) for number in range(3)]
    for records in (common, own, common):
        contents = [RecordDict({"arrays": record}) for record in records]
        sent = server.encode(
            *(Message(c, n.node_id, "train") for c, n in zip(contents, nodes, strict=True))
        )
        for node, message, record in zip(nodes, sent, records, strict=True):
            found = node.train(message, model_of(w=[0.25, 0.5]))
            expected = tensors_in(record)["w"] + np.float32([0.25, 0.5])
            np.testing.assert_array_equal(found["w"], expected)


# --- replies ------------------------------------------------------------------------------------


def test_reply_by_hand() -> None:
    server, node = CodecServer("bfloat16"), CodecNode("bfloat16")
    server.give(model_of(w=[1, 1]), node)
    # The node holds 2 where the true model is 2 + 2^-8: a tie, as in the broadcast by hand.
    # The change is added to the true model; the tie of the second is carried into the next:
    # 1 + 2^-8 again, and carried again. 1 + 2^-8 + 2^-8 is a number of bfloat16.
    for delta, expected in (
        ([0.5, 1 + 2**-8], [2.5 + 2**-8, 2]),
        ([0, 1], [2 + 2**-8, 2]),
        ([0, 1 + 2**-8], [2 + 2**-8, 2 + 2**-7]),
    ):
        (message,) = server.send(model_of(w=[2 + 2**-8, 1]), node)
        found = node.train(message, model_of(w=delta))
        np.testing.assert_array_equal(found["w"], np.float32(expected))


@DTYPES
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 20),
    st.floats(-4, 0).map(lambda exponent: 10.0**exponent),
)
def test_sum_of_replies_is_late_and_not_lost(
    wire_dtype: str, seed: int, rounds: int, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    server, node = CodecServer(wire_dtype), CodecNode(wire_dtype)
    model = model_of(w=rng.standard_normal(20, np.float32), n=np.array([0]))
    true, found = np.zeros(20), np.zeros(20)
    for _ in range(rounds):
        change = np.float32(scale) * rng.standard_normal(20, np.float32)
        (message,) = server.send(model, node)
        reply = node.train(message, {"w": change, "n": np.array([1])})
        true += change
        found += reply["w"].astype(float) - model["w"]
        assert reply["n"] == model["n"] + 1
        model = {"w": model["w"] + 0.5 * (reply["w"] - model["w"]), "n": reply["n"]}
    one_rounding = 1.02 * ROUNDING[wire_dtype] * scale * 6 + 2.0**-25
    assert np.abs(true - found).max() < one_rounding + rounds * 2**-22 * 8
