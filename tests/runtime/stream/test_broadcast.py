"""One model for all nodes: whoever missed a version gets the whole, and all hold the same bits."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_blsgd.array_view import view_record
from flower_blsgd.runtime.stream.broadcast import Broadcast
from flower_blsgd.runtime.stream.letters import Encoder
from flower_blsgd.runtime.stream.wire_dtype import from_16_bits, to_16_bits

from .nodes import FarNode, Model, Server, assert_same_bits, model_of, normal, order_for, tensors_in

DTYPES = pytest.mark.parametrize("wire_dtype", ["bfloat16", "float16"])


def models_in(wire_dtype: str, model: Model, server: Server, *nodes: FarNode) -> list[Model]:
    letters = server.send(model, *nodes)
    return [
        tensors_in(node.receive(letter).content["arrays"])
        for node, letter in zip(nodes, letters, strict=True)
    ]


def random_model(rng: np.random.Generator, size: int = 1000) -> Model:
    return model_of(
        w=normal(rng, size // 10, 10),
        b=normal(rng, 7),
        n=rng.integers(0, 1000, 3),
    )


def walk(model: Model, rng: np.random.Generator, step: float) -> Model:
    """Return a model a little further on."""
    return {
        name: tensor + 1
        if tensor.dtype == np.int64
        else tensor + step * rng.standard_normal(tensor.shape).astype(np.float32)
        for name, tensor in model.items()
    }


def test_change_by_hand() -> None:
    server, node = Server("bfloat16"), FarNode(wire_dtype="bfloat16")
    (first,) = models_in("bfloat16", model_of(w=[1.0, 2.0]), server, node)
    np.testing.assert_array_equal(first["w"], [1.0, 2.0])
    # The change 1 + 2^-8 is a tie, and goes to 1; the next change is 0 + 2^-8, which is exact.
    (second,) = models_in("bfloat16", model_of(w=[2 + 2**-8, 2.0]), server, node)
    np.testing.assert_array_equal(second["w"], [2.0, 2.0])
    (third,) = models_in("bfloat16", model_of(w=[2 + 2**-8, 2.0]), server, node)
    np.testing.assert_array_equal(third["w"], np.float32([2 + 2**-8, 2.0]))
    # sqrt(2^-16 / ((2 + 2^-8)^2 + 2^2))
    expected = 2**-8 / np.sqrt((2 + 2**-8) ** 2 + 4)
    assert server.broadcasts["arrays"].errors == pytest.approx([0, expected, 0])  # type: ignore[attr-defined]


@DTYPES
@settings(deadline=None, max_examples=50)
@given(st.lists(st.sets(st.integers(0, 2)), min_size=1, max_size=8), st.integers(0, 1000))
def test_all_nodes_hold_the_same_bits_whoever_was_there(
    wire_dtype: str, there: list[set[int]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    server = Server(wire_dtype)
    nodes = [FarNode(7 + i, wire_dtype) for i in range(3)]
    witness = FarNode(20, wire_dtype)
    model = random_model(rng, 50)
    for present in there:
        if rng.random() < 0.2:
            nodes[0].reconnect()
        model = walk(model, rng, 0.01)
        found = models_in(wire_dtype, model, server, witness, *(nodes[i] for i in sorted(present)))
        for other in found[1:]:
            assert_same_bits(found[0], other)
        np.testing.assert_array_equal(found[0]["n"], model["n"])
        np.testing.assert_allclose(found[0]["w"], model["w"], rtol=0, atol=0.01)


@DTYPES
def test_node_that_missed_a_version_gets_the_whole(wire_dtype: str) -> None:
    rng = np.random.default_rng(3)
    server = Server(wire_dtype)
    steady, absent = FarNode(7, wire_dtype), FarNode(8, wire_dtype)
    model = random_model(rng, 10_000)
    models_in(wire_dtype, model, server, steady, absent)
    whole_bytes = steady.bytes_received
    for _ in range(2):
        model = walk(model, rng, 1e-3)
        models_in(wire_dtype, model, server, steady)
        assert steady.bytes_received < 0.55 * whole_bytes
    model = walk(model, rng, 1e-3)
    models_in(wire_dtype, model, server, steady, absent)
    assert absent.bytes_received > 0.95 * whole_bytes
    model = walk(model, rng, 1e-3)
    models_in(wire_dtype, model, server, steady, absent)
    assert absent.bytes_received < 0.55 * whole_bytes


@DTYPES
def test_error_stays_one_rounding_of_one_change(wire_dtype: str) -> None:
    """After 200 rounds the nodes' model is as near to the true one as after one."""
    rng = np.random.default_rng(4)
    server, node = Server(wire_dtype), FarNode(wire_dtype=wire_dtype)
    model = random_model(rng)
    for round_number in range(200):
        step = 1e-3
        model = walk(model, rng, step)
        (found,) = models_in(wire_dtype, model, server, node)
        if round_number:
            # The largest of these normal numbers is below 6; float32 itself has 2^-24 of |w| < 6.
            rounding = {"bfloat16": 2**-8, "float16": 2**-11}[wire_dtype]
            bound = 1.01 * 6 * step * rounding + 4 * 2**-24 * 8 + 2**-24
            assert np.abs(found["w"] - model["w"]).max() < bound
    errors = server.broadcasts["arrays"].errors  # type: ignore[attr-defined]
    assert len(errors) == 200
    assert errors[0] == 0
    assert 0 < np.mean(errors[150:]) < 2 * np.mean(errors[1:50])


@DTYPES
def test_another_layout_is_sent_whole(wire_dtype: str) -> None:
    server, node = Server(wire_dtype), FarNode(wire_dtype=wire_dtype)
    for model in (
        model_of(w=[1, 2]),
        model_of(w=[1, 2, 3 + 2**-12]),
        model_of(w=[1, 2, 3 + 2**-12], v=[2**-20]),
        model_of(w=np.array([1, 2, 3 + 2**-40])),
        model_of(w=np.array([[1, 2, 3 + 2**-40]])),
    ):
        (found,) = models_in(wire_dtype, model, server, node)
        assert_same_bits(found, model)


@DTYPES
def test_models_that_are_not_finite_travel_whole_until_they_are(wire_dtype: str) -> None:
    server, node = Server(wire_dtype), FarNode(wire_dtype=wire_dtype)
    for values in ([1, 2], [np.nan, 2], [np.inf, -np.inf], [np.inf, 3], [3, -3], [1, 2]):
        (found,) = models_in(wire_dtype, model_of(w=values), server, node)
        np.testing.assert_array_equal(found["w"], np.float32(values))


@DTYPES
def test_parameter_without_dimensions(wire_dtype: str) -> None:
    """Such as a learned temperature."""
    for views in (False, True):
        server, node = Server(wire_dtype), FarNode(wire_dtype=wire_dtype, views=views)
        for value in (1.0, 1.5, 1.75):
            (found,) = models_in(wire_dtype, model_of(t=value, w=[value]), server, node)
            assert isinstance(found["t"], np.ndarray)
            assert found["t"].shape == ()
            assert found["t"] == value


@DTYPES
def test_servers_own_memory_may_change_afterwards(wire_dtype: str) -> None:
    server, here, late = Server(wire_dtype), FarNode(7, wire_dtype), FarNode(8, wire_dtype)
    memory = np.array([1.0, 2.0], np.float32)
    record = view_record({"w": memory})
    first, second = server.send(record, here, late)
    expected = tensors_in(here.receive(first).content["arrays"])
    memory[...] = 99
    # Encoded late, such as for a node that connects again.
    assert_same_bits(tensors_in(late.receive(second).content["arrays"]), expected)


def test_record_that_is_not_of_plain_numbers_has_no_versions() -> None:
    foreign = ArrayRecord({"a": Array("x", (1,), "somebody.format", b"abc")})
    assert Broadcast("bfloat16").next(foreign) is None
    server, node = Server("bfloat16"), FarNode(wire_dtype="bfloat16")
    for _ in range(2):
        (letter,) = server.send(foreign, node)
        assert node.receive(letter).content["arrays"]["a"].data == b"abc"


def test_one_object_under_two_names() -> None:
    """Versions of one name never pass for those of another."""
    server = Server("bfloat16")
    node = FarNode(wire_dtype="bfloat16")
    rng = np.random.default_rng(5)
    model = random_model(rng, 50)

    def send(**records: ArrayRecord) -> Model:
        encoder = Encoder("bfloat16", server.broadcasts)  # type: ignore[arg-type]
        message = order_for(7, ArrayRecord())
        message.content.clear()
        message.content.update(records)
        received = node.receive(encoder.letter(message))
        return {
            f"{name}.{key}": tensor
            for name in records
            for key, tensor in tensors_in(received.content[name]).items()
        }

    for round_number in range(4):
        model = walk(model, rng, 0.01)
        shared = view_record(model)
        other = view_record(walk(model, rng, 1.0))
        found = (
            send(arrays=shared, old=shared) if round_number % 2 else send(arrays=shared, old=other)
        )
        expected = tensors_in(shared if round_number % 2 else other)
        np.testing.assert_allclose(found["old.w"], expected["w"], rtol=0, atol=0.05)
        np.testing.assert_allclose(found["arrays.w"], model["w"], rtol=0, atol=0.05)


def test_rounding_of_a_change_is_that_of_the_wire() -> None:
    """What a node holds is the sum that both ends compute, to the bit."""
    server, node = Server("bfloat16"), FarNode(wire_dtype="bfloat16")
    rng = np.random.default_rng(6)
    first = model_of(w=normal(rng, 500))
    second = model_of(w=first["w"] + np.float32(0.1) * normal(rng, 500))
    models_in("bfloat16", first, server, node)
    (found,) = models_in("bfloat16", second, server, node)
    change = from_16_bits(to_16_bits(second["w"] - first["w"], "bfloat16"), "bfloat16")
    assert_same_bits(found, {"w": first["w"] + change})
