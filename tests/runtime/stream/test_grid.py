"""Messages over real connections: what an app gets, what the server gets back, and when."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from flower_blsgd.array_view import view_record
from flower_blsgd.runtime.flower_internals import NODE_GONE, RAISED
from flower_blsgd.runtime.shared_arrays import accept_views
from flower_blsgd.runtime.stream import records
from flower_blsgd.runtime.stream.grid import StreamGrid
from flower_blsgd.runtime.stream.invitation import SESSION
from flower_blsgd.runtime.stream.serve import serve_sessions

from ...log_capture import captured_log
from ..processes import wait_until
from .streams import (
    LOOPBACK,
    FakeFlower,
    answer,
    ask,
    config_of,
    echo,
    flower_of,
    made_app,
    order,
    random_model,
    same_bits,
    streaming,
)


def test_messages_go_both_ways_with_several_nodes() -> None:
    def handle(message: Message, context: Context) -> RecordDict:
        config = message.content["config"]
        return answer(
            twice=2 * config["x"],
            node=context.node_id,
            kind=message.metadata.message_type,
            group=message.metadata.group_id,
        )

    with streaming(*[made_app(handle)] * 3) as grid:
        assert sorted(grid.get_node_ids()) == [7, 8, 9]
        for round_number in range(3):
            replies = ask(grid, *(order(n, x=10 * n + round_number) for n in (7, 8, 9)))
            for node_id, reply in zip((7, 8, 9), replies, strict=True):
                assert config_of(reply) == {
                    "twice": 2 * (10 * node_id + round_number),
                    "node": node_id,
                    "kind": "train",
                    "group": "3",
                }
                assert reply.metadata.src_node_id == node_id
        assert len(flower_of(grid).pushed) == 3, "one Flower message a node, however many rounds"


def test_model_of_46_megabytes_comes_back_to_the_bit() -> None:
    model = random_model(46_000_000, tensors=20)
    with streaming(made_app(echo), made_app(echo)) as grid:
        for reply in ask(grid, order(7, model), order(8, model)):
            assert same_bits(reply, model)


@pytest.mark.parametrize("views", [False, True])
def test_app_owns_what_it_gets_unless_it_takes_views(views: bool) -> None:
    def handle(message: Message, _: Context) -> RecordDict:
        array = message.content["arrays"]["w"]
        assert isinstance(array.numpy(), np.ndarray)
        array.numpy()[...] = 5
        return answer(after=float(array.numpy()[0]))

    app = made_app(handle)
    if views:
        accept_views(app)
    with streaming(app) as grid:
        (reply,) = ask(grid, order(7, {"w": np.zeros(3, np.float32)}))
        assert config_of(reply)["after"] == (5 if views else 0)


def test_reply_belongs_to_the_server() -> None:
    """Flower's strategies keep and change what they receive."""
    with streaming(made_app(echo)) as grid:
        (first,) = ask(grid, order(7, {"w": np.zeros(3, np.float32)}))
        kept = first.content["arrays"]["w"].numpy()
        kept += 1
        (second,) = ask(grid, order(7, {"w": np.full(3, 7, np.float32)}))
        np.testing.assert_array_equal(kept, [1, 1, 1])
        np.testing.assert_array_equal(second.content["arrays"]["w"].numpy(), [7, 7, 7])


def test_foreign_and_odd_arrays_pass() -> None:
    record = ArrayRecord(
        {
            "foreign": Array("x", (2,), "somebody.format", b"abc"),
            "scalar": Array(np.array(3.5)),
            "empty": Array(np.zeros((0, 4), np.int16)),
        }
    )
    message = order(7)
    message.content["arrays"] = record
    with streaming(made_app(echo)) as grid:
        found = ask(grid, message)[0].content["arrays"]
    assert found["foreign"].data == b"abc"
    assert found["scalar"].numpy() == 3.5
    assert found["empty"].numpy().shape == (0, 4)


def test_two_records_that_all_nodes_share_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encode = records.encode_arrays

    def counted(record: ArrayRecord) -> records.EncodedRecord:
        encoded.append(id(record))
        return encode(record)

    one, other = view_record({"w": np.ones(9)}), view_record({"v": np.ones(9)})
    with streaming(*[made_app(lambda *_: answer(ok=True))] * 4) as grid:
        monkeypatch.setattr(records, "encode_arrays", counted)
        messages = [order(n) for n in (7, 8, 9, 10)]
        for message in messages:
            message.content["arrays"], message.content["more"] = one, other
        assert all(config_of(reply)["ok"] for reply in ask(grid, *messages))
    assert sorted(encoded) == sorted([id(one), id(other)])


def test_order_is_kept_and_a_node_does_one_message_at_a_time() -> None:
    at_work, most, seen = 0, 0, []

    def handle(message: Message, _: Context) -> RecordDict:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        time.sleep(0.005)
        seen.append(message.content["config"]["x"])
        at_work -= 1
        return answer()

    with streaming(made_app(handle)) as grid:
        messages = [order(x=x) for x in range(30)]
        for message in messages[:15]:
            grid.push_messages([message])  # without waiting
        grid.push_messages(messages[15:])
        ids = [message.metadata.message_id for message in messages]
        found: list[Message] = []
        assert wait_until(lambda: found.extend(grid.pull_messages(ids)) or len(found) == 30)
        assert {reply.metadata.reply_to_message_id for reply in found} == set(ids)
        assert list(grid.pull_messages(ids)) == [], "each is returned once"
    assert seen == list(range(30))
    assert most == 1


@pytest.mark.parametrize("wire_dtype", ["bfloat16", "float16"])
def test_messages_that_wait_at_a_node_in_16_bits(wire_dtype: str) -> None:
    """The reply to each counts from its own model."""
    go = threading.Event()

    def handle(message: Message, _: Context) -> RecordDict:
        go.wait(60)
        arrays = message.content["arrays"]
        return RecordDict({"arrays": view_record({"w": arrays["w"].numpy() + 0.5})})

    with streaming(made_app(handle), wire_dtype=wire_dtype) as grid:
        messages = [order(7, {"w": np.full(3, value, np.float32)}) for value in (1, 8, 64)]
        ids = [next(iter(grid.push_messages([message]))) for message in messages]
        time.sleep(0.3)  # all are at the node
        go.set()
        found: list[Message] = []
        assert wait_until(lambda: found.extend(grid.pull_messages(ids)) or len(found) == 3)
        values = {r.metadata.reply_to_message_id: r.content["arrays"]["w"].numpy() for r in found}
        for message_id, value in zip(ids, (1, 8, 64), strict=True):
            np.testing.assert_array_equal(values[message_id], np.float32([value + 0.5] * 3))


@pytest.mark.parametrize("wire_dtype", ["bfloat16", "float16"])
def test_nodes_hold_one_model_and_the_error_is_measured(wire_dtype: str) -> None:
    held: dict[int, bytes] = {}

    def handle(message: Message, context: Context) -> RecordDict:
        held[context.node_id] = message.content["arrays"]["w"].numpy().tobytes()
        return message.content

    rng = np.random.default_rng(1)
    model = rng.standard_normal(1000).astype(np.float32)
    with streaming(made_app(handle), made_app(handle), wire_dtype=wire_dtype) as grid:
        assert grid.wire_errors == {}
        for _ in range(5):
            model = model + 0.01 * rng.standard_normal(1000).astype(np.float32)
            record = view_record({"w": model})
            messages = [order(7), order(8)]
            for message in messages:
                message.content["arrays"] = record
            for reply in ask(grid, *messages):
                # The node changed nothing, so the server reads its own model.
                assert same_bits(reply, {"w": model})
            assert held[7] == held[8]
        (error,) = grid.wire_errors.values()
        # Of a change of 1 % of the model, half a unit in the last place at most.
        assert 0 < error < 0.01 * {"bfloat16": 2**-8, "float16": 2**-11}[wire_dtype]


def test_float32_has_no_error_and_knows_no_versions() -> None:
    with streaming(made_app(echo)) as grid:
        ask(grid, order(7, random_model(1000)))
        assert grid.wire_errors == {}


# --- the app's own ways -----------------------------------------------------------------------


def test_state_lives_on_from_message_to_message() -> None:
    def handle(_: Message, context: Context) -> RecordDict:
        record = context.state.config_records.setdefault("mine", ConfigRecord({"calls": 0}))
        record["calls"] += 1
        return answer(calls=record["calls"])

    with streaming(made_app(handle), made_app(handle)) as grid:
        assert [config_of(ask(grid, order(7))[0])["calls"] for _ in range(3)] == [1, 2, 3]
        assert config_of(ask(grid, order(8))[0])["calls"] == 1


def test_mods_are_called_for_each_message_and_not_for_the_session() -> None:
    seen: list[str] = []

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        seen.append(message.metadata.message_type)
        reply = call_next(message, context)
        reply.content["config"]["mod"] = True
        return reply

    with streaming(made_app(lambda *_: answer(x=1), mods=[mod])) as grid:
        for _ in range(3):
            assert config_of(ask(grid, order())[0]) == {"x": 1, "mod": True}
    assert seen == ["train"] * 3


def test_lifespan_is_never_entered_twice_at_a_time() -> None:
    """One that holds a device's lock would wait for itself."""
    lock = threading.Lock()
    app = made_app(echo)

    @app.lifespan()
    def lifespan(_: Context) -> Iterator[None]:
        assert lock.acquire(timeout=2), "the lifespan is entered already"
        try:
            yield
        finally:
            lock.release()

    with streaming(app) as grid:
        for _ in range(2):
            (reply,) = ask(grid, order(x=3))
            assert config_of(reply) == {"x": 3}
    assert not lock.locked()


def test_all_functions_of_an_app_are_reached() -> None:
    app = ClientApp()

    @app.query("names")
    def names(message: Message, _: Context) -> Message:
        return Message(answer(kind=message.metadata.message_type), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, _: Context) -> Message:
        return Message(answer(kind=message.metadata.message_type), reply_to=message)

    with streaming(serve_sessions(app)) as grid:
        for kind in ("query.names", "evaluate"):
            (reply,) = ask(grid, Message(RecordDict(), 7, kind))
            assert config_of(reply)["kind"] == kind
        (reply,) = ask(grid, Message(RecordDict(), 7, "train"))
        assert "No train function registered" in reply.error.reason


def test_exception_is_an_error_reply_and_the_session_goes_on() -> None:
    def handle(message: Message, context: Context) -> RecordDict:
        record = context.state.config_records.setdefault("mine", ConfigRecord({"calls": 0}))
        record["calls"] += 1
        context.state["scratch"] = ConfigRecord({"half": True})
        if message.content["config"]["fail"]:
            raise KeyError("no such layer")
        return answer(calls=record["calls"])

    with streaming(made_app(handle)) as grid:
        assert config_of(ask(grid, order(fail=False))[0])["calls"] == 1
        (reply,) = ask(grid, order(fail=True))
        assert reply.error.code == RAISED
        assert "Traceback" in reply.error.reason
        assert "KeyError: 'no such layer'" in reply.error.reason
        assert config_of(ask(grid, order(fail=False))[0])["calls"] == 2, "state is rolled back"
        assert len(flower_of(grid).pushed) == 1


@pytest.mark.parametrize("leave", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_app_that_wants_to_leave_gets_an_error_reply_too(leave: BaseException) -> None:
    """Nobody waits for it for ever."""

    def handle(message: Message, _: Context) -> RecordDict:
        if message.content["config"]["fail"]:
            raise leave
        return answer(fine=True)

    with streaming(made_app(handle)) as grid:
        (reply,) = ask(grid, order(fail=True))
        assert reply.has_error()
        assert type(leave).__name__ in reply.error.reason
        assert wait_until(lambda: 7 in grid.get_node_ids())
        assert config_of(ask(grid, order(fail=False))[0])["fine"]


@pytest.mark.parametrize("answered", [None, "text", "another"])
def test_what_is_no_reply_is_an_error_reply(answered: object) -> None:
    def handle(message: Message, _: Context) -> RecordDict:
        if answered != "another":
            return answered  # type: ignore[return-value]
        other = order()
        other.metadata.__dict__["_message_id"] = "another"
        return Message(RecordDict(), reply_to=other)  # type: ignore[return-value]

    with streaming(made_app(handle)) as grid:
        for _ in range(2):
            (reply,) = ask(grid, order())
            assert reply.error.code == RAISED


def test_reply_that_a_stream_cannot_carry_is_an_error_reply() -> None:
    """A header of more than 2 MB: a hundred thousand tensors."""

    def handle(message: Message, _: Context) -> RecordDict:
        if message.content["config"]["large"]:
            tensors = {"x" * 40 + str(i): np.zeros(1, np.int8) for i in range(40_000)}
            return RecordDict({"arrays": view_record(tensors)})
        return answer(fine=True)

    with streaming(made_app(handle)) as grid:
        (reply,) = ask(grid, order(large=True))
        assert "fewer, larger tensors" in reply.error.reason
        assert config_of(ask(grid, order(large=False))[0])["fine"]


# --- the grid's own ways ----------------------------------------------------------------------


def test_message_to_a_node_that_is_not_there_gets_an_error_reply() -> None:
    with streaming(made_app(echo)) as grid:
        here, gone = ask(grid, order(7, x=1), order(99, x=1))
        assert config_of(here) == {"x": 1}
        assert gone.error.code == NODE_GONE
        assert "99" in gone.error.reason


def test_reply_after_the_timeout_is_dropped_and_the_node_goes_on() -> None:
    go = threading.Event()

    def handle(message: Message, _: Context) -> RecordDict:
        if message.content["config"]["late"]:
            assert go.wait(60)
        return message.content

    with streaming(made_app(handle)) as grid:
        late = order(late=True)
        assert list(grid.send_and_receive([late], timeout=0.1)) == []
        go.set()
        # The node serves in turn: when this reply is here, the late one has come before.
        assert config_of(ask(grid, order(late=False))[0]) == {"late": False}
        assert list(grid.pull_messages([late.metadata.message_id])) == []


def test_flowers_own_names_of_the_grid() -> None:
    flower = FakeFlower({7: made_app(echo)})
    flower.get_nodes = lambda: [type("Node", (), {"node_id": n})() for n in (7, 8)]  # type: ignore[method-assign]
    try:
        with StreamGrid(flower, LOOPBACK) as grid:
            grid.wait_until_connected()
            assert grid.run.run_id == flower.run.run_id
            assert [node.node_id for node in grid.get_nodes()] == [7]
            message = grid.create_message(RecordDict(), "query.x", 7, "12", 5.0)
            assert message.metadata.group_id == "12"
            assert message.metadata.ttl == 5.0
    finally:
        flower.close()


def test_node_that_comes_later_is_invited() -> None:
    with streaming(made_app(echo)) as grid:
        flower_of(grid).add(20, made_app(echo))
        assert wait_until(lambda: sorted(grid.get_node_ids()) == [7, 20])
        assert config_of(ask(grid, order(20, x=2))[0]) == {"x": 2}


def test_app_without_sessions_gets_plain_messages_beside_the_stream() -> None:
    plain = ClientApp()

    @plain.train()
    def train(message: Message, _: Context) -> Message:
        return Message(message.content, reply_to=message)

    model = random_model(10_000)
    with captured_log() as log, streaming(made_app(echo), plain) as grid:
        assert dict(grid.transports) == {7: "stream", 8: "messages"}
        messages = [order(7, model), order(8, model)]
        for message, reply in zip(messages, ask(grid, *messages), strict=True):
            assert same_bits(reply, model)
            assert reply.metadata.reply_to_message_id == message.metadata.message_id
        sent = [m.metadata.message_type for m in flower_of(grid).pushed]
        assert sent.count(SESSION) == 2
        assert sent.count("train") == 1
    (warning,) = [line for line in log.warnings if "node 8" in line]
    assert "serve_sessions" in warning


def test_plain_message_that_flower_does_not_take_gets_an_error_reply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Flower returns None for it, or nothing at all for messages that are too large."""
    with streaming(made_app(echo), ClientApp()) as grid:
        assert dict(grid.transports) == {7: "stream", 8: "messages"}
        for refusal in ([None], []):
            monkeypatch.setattr(flower_of(grid), "push_messages", lambda _, r=refusal: r)
            here, refused = ask(grid, order(7, x=1), order(8, x=1))
            assert config_of(here) == {"x": 1}
            assert refused.has_error()
        time.sleep(1.2)  # and the grid still looks after its nodes
        monkeypatch.undo()
        flower_of(grid).add(20, made_app(echo))
        assert wait_until(lambda: 20 in grid.get_node_ids())


def test_superlink_that_does_not_answer_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[int]:
        raise ConnectionError("connection refused")

    with captured_log() as log, streaming(made_app(echo)) as grid:
        with monkeypatch.context() as patch:
            patch.setattr(flower_of(grid), "get_node_ids", fail)
            assert wait_until(lambda: any("connection refused" in line for line in log.warnings))
            assert config_of(ask(grid, order(x=1))[0]) == {"x": 1}
        flower_of(grid).add(20, made_app(echo))
        assert wait_until(lambda: 20 in grid.get_node_ids())
