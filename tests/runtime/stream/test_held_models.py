"""Models of replies: what the server reads is its own true model plus the node's change."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_blsgd.array_view import view_record
from flower_blsgd.runtime.stream.frames import FrameError
from flower_blsgd.runtime.stream.held_models import HeldModels, reply_record
from flower_blsgd.runtime.stream.letters import reply_pieces
from flower_blsgd.runtime.stream.records import encode_arrays

from .nodes import (
    FarNode,
    Model,
    Server,
    assert_same_bits,
    content_of,
    model_of,
    normal,
    tensors_in,
)

DTYPES = pytest.mark.parametrize("wire_dtype", ["bfloat16", "float16"])


def body_of(model: Model) -> tuple[list[object], np.ndarray]:
    encoded = encode_arrays(view_record(model))
    return encoded.description["layout"], np.frombuffer(b"".join(encoded.pieces), np.uint8).copy()


def test_reply_by_hand() -> None:
    server, node = Server("bfloat16"), FarNode(wire_dtype="bfloat16")
    (letter,) = server.send(model_of(w=[1, 1]), node)
    node.receive(letter)
    # The node holds 2 where the true model is 2 + 2^-8: a tie, see test_broadcast.
    (letter,) = server.send(model_of(w=[2 + 2**-8, 1]), node)
    found = node.train(letter, model_of(w=[0.5, 1 + 2**-8]))
    # The change is added to the true model; the tie of the second is carried ...
    np.testing.assert_array_equal(found["w"], np.float32([2.5 + 2**-8, 2]))
    (letter,) = server.send(model_of(w=[2 + 2**-8, 1]), node)
    found = node.train(letter, model_of(w=[0, 1]))
    # ... into the next: 1 + 2^-8 again, and carried again.
    np.testing.assert_array_equal(found["w"], np.float32([2 + 2**-8, 2]))
    (letter,) = server.send(model_of(w=[2 + 2**-8, 1]), node)
    found = node.train(letter, model_of(w=[0, 1 + 2**-8]))
    # 1 + 2^-8 + 2^-8 is a number of bfloat16.
    np.testing.assert_array_equal(found["w"], np.float32([2 + 2**-8, 2 + 2**-7]))


@DTYPES
@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(1, 20))
def test_sum_of_replies_is_late_and_not_lost(wire_dtype: str, seed: int, rounds: int) -> None:
    rng = np.random.default_rng(seed)
    server, node = Server(wire_dtype), FarNode(wire_dtype=wire_dtype)
    model = model_of(w=normal(rng, 20), n=np.array([0]))
    true, found = np.zeros(20), np.zeros(20)
    for _ in range(rounds):
        delta = model_of(w=np.float32(0.1) * normal(rng, 20), n=np.array([1]))
        (letter,) = server.send(model, node)
        reply = node.train(letter, delta)
        true += delta["w"]
        found += reply["w"].astype(float) - model["w"]
        assert reply["n"] == model["n"] + 1
        model = {"w": model["w"] + 0.5 * (reply["w"] - model["w"]), "n": reply["n"]}
    one_rounding = {"bfloat16": 2**-8, "float16": 2**-11}[wire_dtype] * 0.1 * 6
    assert np.abs(true - found).max() < one_rounding + rounds * 2**-22 * 8


@DTYPES
def test_reply_of_a_node_whose_model_is_whole_has_half_the_bytes(wire_dtype: str) -> None:
    rng = np.random.default_rng(1)
    server, node = Server(wire_dtype), FarNode(wire_dtype=wire_dtype)
    model = model_of(w=normal(rng, 10_000))
    (letter,) = server.send(model, node)
    message = node.receive(letter)
    reply = Message(content_of(model_of(w=model["w"] + 1)), reply_to=message)
    assert sum(map(len, reply_pieces(reply, node.held))) < 0.55 * node.bytes_received


def test_float32_is_exact_both_ways() -> None:
    rng = np.random.default_rng(2)
    server, node = Server("float32"), FarNode()
    for _ in range(3):
        model = model_of(w=normal(rng, 100), n=np.array([3], np.uint8))
        (letter,) = server.send(model, node)
        delta = model_of(w=normal(rng, 100))
        found = node.train(letter, delta)
        assert_same_bits(found, {"w": model["w"] + delta["w"], "n": model["n"]})


@DTYPES
def test_reply_of_another_layout_travels_whole(wire_dtype: str) -> None:
    server, node = Server(wire_dtype), FarNode(wire_dtype=wire_dtype)
    (letter,) = server.send(model_of(w=[1, 2]), node)
    message = node.receive(letter)
    for other in (model_of(v=[1 + 2**-20]), model_of(w=[2**-20]), model_of(w=np.array([0.1, 2]))):
        reply = node.answer(letter, message, content_of(other))
        assert_same_bits(tensors_in(reply.content["arrays"]), other)
    foreign = ArrayRecord({"w": Array("x", (2,), "somebody.format", b"abc")})
    content = content_of({})
    content["arrays"] = foreign
    assert node.answer(letter, message, content).content["arrays"]["w"].data == b"abc"


@DTYPES
def test_node_that_diverges_shows_it(wire_dtype: str) -> None:
    server, node = Server(wire_dtype), FarNode(wire_dtype=wire_dtype)
    for delta in (np.nan, np.inf, 1.0):
        (letter,) = server.send(model_of(w=[1, 2]), node)
        found = node.train(letter, model_of(w=[delta, 0]))
        np.testing.assert_array_equal(found["w"], np.float32([1 + delta, 2]))


@DTYPES
def test_parameter_without_dimensions_in_a_reply(wire_dtype: str) -> None:
    server, node = Server(wire_dtype), FarNode(wire_dtype=wire_dtype)
    (letter,) = server.send(model_of(t=1.0), node)
    found = node.train(letter, model_of(t=0.5))
    assert isinstance(found["t"], np.ndarray)
    assert found["t"].shape == ()
    assert found["t"] == 1.5


@DTYPES
def test_record_of_another_name_is_not_a_change(wire_dtype: str) -> None:
    server, node = Server(wire_dtype), FarNode(wire_dtype=wire_dtype)
    (letter,) = server.send(model_of(w=[1, 2]), node)
    message = node.receive(letter)
    content = content_of(model_of(w=[5 + 2**-20, 7]), "momentum")
    reply = node.answer(letter, message, content)
    assert_same_bits(tensors_in(reply.content["momentum"]), model_of(w=[5 + 2**-20, 7]))


@DTYPES
def test_replies_to_two_messages_that_are_both_there(wire_dtype: str) -> None:
    """Each counts from the model in its own message, not from the newest that came."""
    server, node = Server(wire_dtype), FarNode(wire_dtype=wire_dtype)
    (warm_up,) = server.send(model_of(w=[0, 0]), node)
    node.train(warm_up, model_of(w=[0, 0]))
    letters = [server.send(model_of(w=[value, value]), node)[0] for value in (1, 64)]
    messages = [node.receive(letter) for letter in letters]
    for letter, message, value in zip(letters, messages, (1, 64), strict=True):
        content = content_of(model_of(w=[value + 0.5, value]))
        found = tensors_in(node.answer(letter, message, content).content["arrays"])
        np.testing.assert_array_equal(found["w"], np.float32([value + 0.5, value]))


@DTYPES
def test_nodes_that_each_get_a_model_of_their_own(wire_dtype: str) -> None:
    """As strategies with personal models send them, after rounds with a common one."""
    server = Server(wire_dtype)
    nodes = [FarNode(7 + i, wire_dtype) for i in range(3)]
    for letter, node in zip(server.send(model_of(w=[1, 2]), *nodes), nodes, strict=True):
        node.train(letter, model_of(w=[0, 0]))
    own = {node: view_record(model_of(w=[10.0 * (i + 1), 3])) for i, node in enumerate(nodes)}
    letters = server.send_own(own)
    for i, (letter, node) in enumerate(zip(letters, nodes, strict=True)):
        found = node.train(letter, model_of(w=[0.25, 0.5]))
        np.testing.assert_array_equal(found["w"], np.float32([10 * (i + 1) + 0.25, 3.5]))
    for letter, node in zip(server.send(model_of(w=[1, 2]), *nodes), nodes, strict=True):
        found = node.train(letter, model_of(w=[0.25, 0.5]))
        np.testing.assert_array_equal(found["w"], np.float32([1.25, 2.5]))


def test_views_only_where_the_app_takes_them() -> None:
    model = model_of(w=[1, 2])
    for views in (False, True):
        server, node = Server("bfloat16"), FarNode(wire_dtype="bfloat16", views=views)
        for letter in (*server.send(model, node), *server.send(model, node)):
            array = node.receive(letter).content["arrays"]["w"]
            array.numpy()[0] = 5
            assert array.numpy()[0] == (5 if views else 1)
            if views:
                array.numpy()[0] = 1


# --- what cannot be read --------------------------------------------------------------------


def test_change_to_a_model_that_is_not_held_is_refused() -> None:
    server, first, second = Server("bfloat16"), FarNode(7, "bfloat16"), FarNode(8, "bfloat16")
    (letter,) = server.send(model_of(w=[1, 2]), first)
    first.receive(letter)
    letters = server.send(model_of(w=[1, 3]), first)
    second.versions = dict(first.versions)  # the server is wrong about this node
    with pytest.raises(FrameError, match="this node holds 0"):
        second.receive(letters[0])


@pytest.mark.parametrize(
    "described",
    [
        {"kind": "change", "version": 2, "base": 1, "rounded": None},
        {"kind": "change", "version": 2, "base": 1, "rounded": 5},
        {"kind": "change", "version": 2, "base": None, "rounded": ["w"]},
    ],
)
def test_change_that_is_not_described_is_refused(described: dict[str, object]) -> None:
    held = HeldModels("bfloat16", views=False)
    layout, body = body_of(model_of(w=[1, 2]))
    held.read("arrays", {"kind": "arrays", "layout": layout, "version": 1}, body)
    layout, body = body_of(model_of(w=np.zeros(2, np.uint16)))
    with pytest.raises(FrameError):
        held.read("arrays", {**described, "layout": layout}, body)


def test_change_of_other_tensors_is_refused() -> None:
    held = HeldModels("bfloat16", views=False)
    layout, body = body_of(model_of(w=[1, 2]))
    held.read("arrays", {"kind": "arrays", "layout": layout, "version": 1}, body)
    described = {"kind": "change", "version": 2, "base": 1, "rounded": ["w"]}
    for other in (model_of(v=np.zeros(2, np.uint16)), model_of(w=np.zeros(3, np.uint16))):
        layout, body = body_of(other)
        with pytest.raises(FrameError):
            held.read("arrays", {**described, "layout": layout}, body)


def test_foreign_arrays_with_a_version_are_refused() -> None:
    held = HeldModels("bfloat16", views=False)
    layout = [["w", "x", [1], "somebody.format", 3]]
    with pytest.raises(FrameError, match="no plain arrays"):
        held.read("w", {"kind": "arrays", "layout": layout, "version": 1}, np.zeros(64, np.uint8))


@pytest.mark.parametrize(
    ("bits", "described"),
    [
        (model_of(v=np.zeros(2, np.uint16)), {"rounded": ["w"]}),
        (model_of(w=np.zeros(3, np.uint16)), {"rounded": ["w"]}),
        (model_of(w=np.zeros(2, np.uint16)), {"rounded": None}),
        (model_of(w=np.zeros(2, np.uint16)), {"rounded": 7}),
        (model_of(w=np.zeros(2, np.uint16)), {}),
        (model_of(w=np.zeros(2, np.float64)), {"rounded": ["w"]}),
        (model_of(w=np.zeros(2, np.uint8)), {"rounded": ["w"]}),
        (model_of(w=np.array(["a", "b"])), {"rounded": ["w"]}),
    ],
)
@DTYPES
def test_reply_that_does_not_fit_is_refused(
    wire_dtype: str, bits: Model, described: dict[str, object]
) -> None:
    layout, body = body_of(bits)
    sent = view_record(model_of(w=[1, 2]))
    with pytest.raises(FrameError):
        reply_record("w", {**described, "layout": layout}, body, sent, wire_dtype)


def test_reply_that_is_a_change_to_nothing_is_refused() -> None:
    layout, body = body_of(model_of(w=np.zeros(2, np.uint16)))
    with pytest.raises(FrameError):
        reply_record("w", {"rounded": ["w"], "layout": layout}, body, ArrayRecord(), "bfloat16")
