"""16-bit changes: rounded as torch does it, equal on all nodes, with errors late and not lost."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_blsgd.array_records import view_record
from flower_blsgd.runtime.stream.codec import Encoder
from flower_blsgd.runtime.stream.frames import FrameError, encode_arrays
from flower_blsgd.runtime.stream.model_changes import (
    HeldModels,
    changed,
    decode_reply_change,
    from_16_bits,
    relative_error,
    rounded_change,
    to_16_bits,
)

from .nodes import (
    CodecNode,
    CodecServer,
    Model,
    assert_same_bits,
    content_of,
    model_of,
    normal,
    tensors_in,
    train_message,
)

ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Relative: half the distance of neighbours, for numbers that are not tiny."""
DTYPES = pytest.mark.parametrize("wire_dtype", ["bfloat16", "float16"])


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def rounded(values: np.ndarray, wire_dtype: str) -> np.ndarray:
    return from_16_bits(to_16_bits(values, wire_dtype), wire_dtype)


# --- arithmetic ---------------------------------------------------------------------------------


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


@DTYPES
def test_change_that_is_not_finite_in_16_bits_is_none(wire_dtype: str) -> None:
    base = {"w": floats(0, 0)}
    largest = 3.4e38 if wire_dtype == "bfloat16" else 65_520
    for bad in (np.nan, np.inf, -np.inf, largest):
        assert rounded_change({"w": floats(1, bad)}, base, {}, wire_dtype) is None
    assert rounded_change({"w": floats(1, 65_504)}, base, {}, wire_dtype) is not None
    assert rounded_change({"w": floats(np.inf)}, {"w": floats(np.inf)}, {}, wire_dtype) is None


def test_change_by_hand() -> None:
    new, base = {"w": floats(3.5, 1 + 2**-9)}, {"w": floats(1.0, 0.0)}
    bits, error = rounded_change(new, base, {}, "bfloat16")
    np.testing.assert_array_equal(bits["w"], np.array([0x4020, 0x3F80], np.uint16))
    np.testing.assert_array_equal(error["w"], floats(0, 2**-9))
    np.testing.assert_array_equal(changed(base, bits, "bfloat16")["w"], floats(3.5, 1.0))
    np.testing.assert_array_equal(base["w"], floats(1.0, 0.0))  # stays as it is
    # The error is in the next change: 1 + 2^-9 + 2^-9 is a tie, and goes to 1.
    _, error = rounded_change({"w": floats(0, 1 + 2**-9)}, {"w": floats(0, 0)}, error, "bfloat16")
    np.testing.assert_array_equal(error["w"], floats(0, 2**-8))


@DTYPES
@pytest.mark.parametrize("dtype", ["int64", "float64", "float16", ">f4", "bool", "float32"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_change_keeps_dtype_and_shape(wire_dtype: str, dtype: str, shape: tuple[int, ...]) -> None:
    new, base = {"w": np.full(shape, 1, dtype)}, {"w": np.full(shape, 0, dtype)}
    bits, error = rounded_change(new, base, {}, wire_dtype)
    assert set(error) == ({"w"} if dtype == "float32" else set())
    reached = changed(base, bits, wire_dtype)["w"]
    assert isinstance(reached, np.ndarray), "torch.from_numpy takes no numpy scalar"
    assert (reached.dtype, reached.shape) == (dtype, shape)
    np.testing.assert_array_equal(reached, new["w"])


def test_relative_error_by_hand() -> None:
    # sqrt((3^2 + 4^2) / (6^2 + 8^2)); tensors without an error do not count.
    model = {"a": floats(6), "b": floats(8), "n": np.array([1000])}
    assert relative_error({"a": floats(3), "b": floats(4)}, model) == pytest.approx(0.5)
    assert relative_error({"a": floats(0)}, {"a": floats(0)}) == 0


# --- models for all nodes -----------------------------------------------------------------------


def received_by(server: CodecServer, model: Model, *nodes: CodecNode) -> list[Model]:
    return [
        tensors_in(node.receive(message).content["arrays"])
        for node, message in zip(nodes, server.send(model, *nodes), strict=True)
    ]


def random_model(rng: np.random.Generator, size: int = 1000) -> Model:
    return model_of(w=normal(rng, size // 10, 10), b=normal(rng, 7), n=rng.integers(0, 1000, 3))


def walk(model: Model, rng: np.random.Generator, step: float) -> Model:
    """Return a model a little further on."""
    return {
        name: tensor + 1
        if tensor.dtype == np.int64
        else tensor + step * rng.standard_normal(tensor.shape).astype(np.float32)
        for name, tensor in model.items()
    }


def test_broadcast_by_hand() -> None:
    server, node = CodecServer("bfloat16"), CodecNode(wire_dtype="bfloat16")
    (first,) = received_by(server, model_of(w=[1.0, 2.0]), node)
    np.testing.assert_array_equal(first["w"], [1.0, 2.0])
    # The change 1 + 2^-8 is a tie, and goes to 1; the next change is 0 + 2^-8, which is exact.
    (second,) = received_by(server, model_of(w=[2 + 2**-8, 2.0]), node)
    np.testing.assert_array_equal(second["w"], [2.0, 2.0])
    (third,) = received_by(server, model_of(w=[2 + 2**-8, 2.0]), node)
    np.testing.assert_array_equal(third["w"], np.float32([2 + 2**-8, 2.0]))
    # sqrt(2^-16 / ((2 + 2^-8)^2 + 2^2))
    expected = 2**-8 / np.sqrt((2 + 2**-8) ** 2 + 4)
    assert server.broadcasts["arrays"].errors == pytest.approx([0, expected, 0])


@DTYPES
@settings(deadline=None, max_examples=50)
@given(st.lists(st.sets(st.integers(0, 2)), min_size=1, max_size=8), st.integers(0, 1000))
def test_all_nodes_hold_the_same_bits_whoever_was_there(
    wire_dtype: str, there: list[set[int]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    server = CodecServer(wire_dtype)
    nodes = [CodecNode(7 + i, wire_dtype) for i in range(3)]
    always_there = CodecNode(20, wire_dtype)
    model = random_model(rng, 50)
    for present in there:
        if rng.random() < 0.2:
            nodes[0].reconnect()
        model = walk(model, rng, 0.01)
        found = received_by(server, model, always_there, *(nodes[i] for i in sorted(present)))
        for other in found[1:]:
            assert_same_bits(found[0], other)
        np.testing.assert_array_equal(found[0]["n"], model["n"])
        np.testing.assert_allclose(found[0]["w"], model["w"], rtol=0, atol=0.01)


@DTYPES
def test_node_that_missed_a_version_gets_the_whole_model(wire_dtype: str) -> None:
    rng = np.random.default_rng(3)
    server = CodecServer(wire_dtype)
    steady, absent = CodecNode(7, wire_dtype), CodecNode(8, wire_dtype)
    model = random_model(rng, 10_000)
    received_by(server, model, steady, absent)
    whole_bytes = steady.bytes_received
    for _ in range(2):
        model = walk(model, rng, 1e-3)
        received_by(server, model, steady)
        assert steady.bytes_received < 0.55 * whole_bytes
    for fraction_at_least, fraction_at_most in ((0.95, 1.1), (0, 0.55)):
        model = walk(model, rng, 1e-3)
        received_by(server, model, steady, absent)
        assert fraction_at_least < absent.bytes_received / whole_bytes < fraction_at_most


@DTYPES
def test_error_stays_one_rounding_of_one_change(wire_dtype: str) -> None:
    """After 200 rounds the nodes' model is as near to the true one as after one."""
    rng = np.random.default_rng(4)
    server, node = CodecServer(wire_dtype), CodecNode(wire_dtype=wire_dtype)
    model, step = random_model(rng), 1e-3
    for round_number in range(200):
        model = walk(model, rng, step)
        (found,) = received_by(server, model, node)
        if round_number:
            # The largest of these normal numbers is below 6; float32 itself has 2^-24 of |w| < 6.
            bound = 1.01 * 6 * step * ROUNDING[wire_dtype] + 4 * 2**-24 * 8 + 2**-24
            assert np.abs(found["w"] - model["w"]).max() < bound
    errors = server.broadcasts["arrays"].errors
    assert len(errors) == 200
    assert errors[0] == 0
    assert 0 < np.mean(errors[150:]) < 2 * np.mean(errors[1:50])


@DTYPES
def test_models_of_another_layout_or_not_finite_travel_whole(wire_dtype: str) -> None:
    server, node = CodecServer(wire_dtype), CodecNode(wire_dtype=wire_dtype)
    for model in (
        model_of(w=[1, 2]),
        model_of(w=[1, 2, 3 + 2**-12]),
        model_of(w=[1, 2, 3 + 2**-12], v=[2**-20]),
        model_of(w=np.array([1, 2, 3 + 2**-40])),
        model_of(w=np.array([[1, 2, 3 + 2**-40]])),
        *(
            model_of(w=values)
            for values in ([1, 2], [np.nan, 2], [np.inf, -np.inf], [np.inf, 3], [3, -3], [1, 2])
        ),
    ):
        (found,) = received_by(server, model, node)
        assert_same_bits(found, model)


@DTYPES
def test_model_may_be_changed_in_place_after_it_was_sent(wire_dtype: str) -> None:
    server, node = CodecServer(wire_dtype), CodecNode(wire_dtype=wire_dtype)
    model = model_of(w=[1, 2])
    (message,) = server.send(model, node)
    model["w"][:] = 7
    received = node.receive(message)
    np.testing.assert_array_equal(tensors_in(received.content["arrays"])["w"], [1, 2])


def test_arrays_that_are_not_plain_are_refused_with_the_way_out() -> None:
    foreign = ArrayRecord({"w": Array("x", (2,), "somebody.format", b"abc")})
    for wire_dtype in ("float32", "bfloat16"):
        with pytest.raises(FrameError, match=r"'w'.*somebody\.format.*transport = \"messages\""):
            CodecServer(wire_dtype).send_own({CodecNode(): foreign})


@DTYPES
def test_two_records_in_a_message_are_two_broadcasts(wire_dtype: str) -> None:
    """The same record under two names, or another one, in turns."""
    server, node = CodecServer(wire_dtype), CodecNode(wire_dtype=wire_dtype)
    rng = np.random.default_rng(5)
    model = random_model(rng, 50)
    for round_number in range(4):
        model = walk(model, rng, 0.01)
        old = model if round_number % 2 else walk(model, rng, 1.0)
        shared = view_record(model)
        message = train_message(7, shared)
        message.content["old"] = shared if round_number % 2 else view_record(old)
        received = node.receive(Encoder(wire_dtype, server.broadcasts).encode(message)).content
        for name, expected in (("arrays", model), ("old", old)):
            np.testing.assert_allclose(
                tensors_in(received[name])["w"], expected["w"], rtol=0, atol=0.05
            )


# --- replies ------------------------------------------------------------------------------------


def test_reply_by_hand() -> None:
    server, node = CodecServer("bfloat16"), CodecNode(wire_dtype="bfloat16")
    (message,) = server.send(model_of(w=[1, 1]), node)
    node.receive(message)
    # The node holds 2 where the true model is 2 + 2^-8: a tie, as in the broadcast by hand.
    (message,) = server.send(model_of(w=[2 + 2**-8, 1]), node)
    found = node.train(message, model_of(w=[0.5, 1 + 2**-8]))
    # The change is added to the true model; the tie of the second is carried ...
    np.testing.assert_array_equal(found["w"], np.float32([2.5 + 2**-8, 2]))
    (message,) = server.send(model_of(w=[2 + 2**-8, 1]), node)
    found = node.train(message, model_of(w=[0, 1]))
    # ... into the next: 1 + 2^-8 again, and carried again.
    np.testing.assert_array_equal(found["w"], np.float32([2 + 2**-8, 2]))
    (message,) = server.send(model_of(w=[2 + 2**-8, 1]), node)
    found = node.train(message, model_of(w=[0, 1 + 2**-8]))
    # 1 + 2^-8 + 2^-8 is a number of bfloat16.
    np.testing.assert_array_equal(found["w"], np.float32([2 + 2**-8, 2 + 2**-7]))


@DTYPES
@settings(deadline=None, max_examples=50)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 20),
    st.floats(-4, 0).map(lambda exponent: 10.0**exponent),
)
def test_sum_of_replies_is_late_and_not_lost(
    wire_dtype: str, seed: int, rounds: int, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    server, node = CodecServer(wire_dtype), CodecNode(wire_dtype=wire_dtype)
    model = model_of(w=normal(rng, 20), n=np.array([0]))
    true, found = np.zeros(20), np.zeros(20)
    for _ in range(rounds):
        delta = model_of(w=np.float32(scale) * normal(rng, 20), n=np.array([1]))
        (message,) = server.send(model, node)
        reply = node.train(message, delta)
        true += delta["w"]
        found += reply["w"].astype(float) - model["w"]
        assert reply["n"] == model["n"] + 1
        model = {"w": model["w"] + 0.5 * (reply["w"] - model["w"]), "n": reply["n"]}
    one_rounding = 1.02 * ROUNDING[wire_dtype] * scale * 6 + 2.0**-25
    assert np.abs(true - found).max() < one_rounding + rounds * 2**-22 * 8


def test_float32_is_exact_both_ways() -> None:
    rng = np.random.default_rng(2)
    server, node = CodecServer("float32"), CodecNode()
    for _ in range(3):
        model = model_of(w=normal(rng, 100), n=np.array([3], np.uint8))
        (message,) = server.send(model, node)
        delta = model_of(w=normal(rng, 100))
        found = node.train(message, delta)
        assert_same_bits(found, {"w": model["w"] + delta["w"], "n": model["n"]})


@DTYPES
def test_reply_of_another_layout_or_name_travels_whole(wire_dtype: str) -> None:
    server, node = CodecServer(wire_dtype), CodecNode(wire_dtype=wire_dtype)
    (encoded,) = server.send(model_of(w=[1, 2]), node)
    message = node.receive(encoded)
    for other in (model_of(v=[1 + 2**-20]), model_of(w=[2**-20]), model_of(w=np.array([0.1, 2]))):
        reply = node.answer(encoded, message, content_of(other))
        assert_same_bits(tensors_in(reply.content["arrays"]), other)
    reply = node.answer(encoded, message, content_of(model_of(w=[5 + 2**-20, 7]), "momentum"))
    assert_same_bits(tensors_in(reply.content["momentum"]), model_of(w=[5 + 2**-20, 7]))


@DTYPES
def test_node_that_diverges_shows_it(wire_dtype: str) -> None:
    server, node = CodecServer(wire_dtype), CodecNode(wire_dtype=wire_dtype)
    for delta in (np.nan, np.inf, 1.0):
        (message,) = server.send(model_of(w=[1, 2], t=1.0), node)
        found = node.train(message, model_of(w=[delta, 0], t=0.5))
        np.testing.assert_array_equal(found["w"], np.float32([1 + delta, 2]))
        assert isinstance(found["t"], np.ndarray)
        assert found["t"].shape == ()
        assert found["t"] == 1.5


@DTYPES
def test_replies_to_two_messages_that_are_both_there(wire_dtype: str) -> None:
    """Each counts from the model in its own message, not from the newest that came."""
    server, node = CodecServer(wire_dtype), CodecNode(wire_dtype=wire_dtype)
    (warm_up,) = server.send(model_of(w=[0, 0]), node)
    node.train(warm_up, model_of(w=[0, 0]))
    sent = [server.send(model_of(w=[value, value]), node)[0] for value in (1, 64)]
    messages = [node.receive(encoded) for encoded in sent]
    for encoded, message, value in zip(sent, messages, (1, 64), strict=True):
        content = content_of(model_of(w=[value + 0.5, value]))
        found = tensors_in(node.answer(encoded, message, content).content["arrays"])
        np.testing.assert_array_equal(found["w"], np.float32([value + 0.5, value]))


@DTYPES
def test_nodes_that_each_get_a_model_of_their_own(wire_dtype: str) -> None:
    """As strategies with personal models send them, between rounds with a common one."""
    server = CodecServer(wire_dtype)
    nodes = [CodecNode(7 + i, wire_dtype) for i in range(3)]
    common = [(node, view_record(model_of(w=[1, 2]))) for node in nodes]
    own = [(node, view_record(model_of(w=[10.0 * i, 3]))) for i, node in enumerate(nodes)]
    for records in (common, own, common):
        for (node, record), message in zip(records, server.send_own(dict(records)), strict=True):
            found = node.train(message, model_of(w=[0.25, 0.5]))
            expected = tensors_in(record)["w"] + np.float32([0.25, 0.5])
            np.testing.assert_array_equal(found["w"], expected)


def test_views_only_where_the_app_takes_them() -> None:
    model = model_of(w=[1, 2])
    for views in (False, True):
        server, node = CodecServer("bfloat16"), CodecNode(wire_dtype="bfloat16", views=views)
        for message in (*server.send(model, node), *server.send(model, node)):
            array = node.receive(message).content["arrays"]["w"]
            array.numpy()[0] = 5
            assert array.numpy()[0] == (5 if views else 1)
            if views:
                array.numpy()[0] = 1


# --- changes that cannot be read ----------------------------------------------------------------


def layout_and_body(model: Model) -> tuple[object, np.ndarray]:
    encoded = encode_arrays(model)
    return encoded.description["layout"], np.frombuffer(b"".join(encoded.chunks), np.uint8).copy()


BITS = np.zeros(2, np.uint16)
OTHER_BITS: list[Model] = [
    *({"v": BITS}, {}, {"w": BITS, "v": BITS}),
    *({"w": np.zeros(3, np.uint16)}, {"w": np.zeros((1, 2), np.uint16)}),
    *({"w": np.zeros(2, dtype)} for dtype in (np.float32, np.float64, np.uint8, "U1")),
]


@pytest.mark.parametrize("bits", OTHER_BITS)
def test_change_that_does_not_fit_is_refused_at_both_ends(bits: Model) -> None:
    held = HeldModels("bfloat16", views=False)
    layout, body = layout_and_body(model_of(w=[1, 2]))
    held.read("arrays", {"kind": "arrays", "layout": layout, "version": 1}, body)
    layout, body = layout_and_body(bits)
    with pytest.raises(FrameError):
        held.read("arrays", {"kind": "change", "version": 2, "layout": layout}, body)
    for sent in (view_record(model_of(w=[1, 2])), ArrayRecord()):
        with pytest.raises(FrameError):
            decode_reply_change("w", {"layout": layout}, body, sent, "bfloat16")


@pytest.mark.parametrize("version", [None, "2", 0, 1, 3])
def test_change_to_a_version_that_is_not_next_is_refused(version: object) -> None:
    held = HeldModels("bfloat16", views=False)
    layout, body = layout_and_body(model_of(w=[1, 2]))
    held.read("arrays", {"kind": "arrays", "layout": layout, "version": 1}, body)
    layout, body = layout_and_body({"w": BITS})
    with pytest.raises(FrameError, match="this node holds 1"):
        held.read("arrays", {"kind": "change", "version": version, "layout": layout}, body)
