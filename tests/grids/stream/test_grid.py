"""Messages over real connections: what an app gets, and what the server gets back."""

import inspect
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.proto.node_pb2 import NodeInfo
from flwr.superlink.grid.http_grid import HttpGrid

from flower_blsgd import StreamGrid, UsageError, stream
from flower_blsgd.engines.stream import grid as grid_module
from flower_blsgd.engines.stream.encoded_arrays import FrameError
from flower_blsgd.engines.stream.request import STREAM_MESSAGE
from flower_blsgd.engines.stream.serving import serve_sessions
from flower_blsgd.flower.app_call import accept_views
from flower_blsgd.flower.array_records import view_record
from flower_blsgd.flower.internals import NODE_GONE, RAISED, is_deployment, superlink_of

from ...log_capture import captured_log
from ..processes import wait_until
from .streams import (
    LOOPBACK,
    PATIENCE_SECONDS,
    FakeFlower,
    answer,
    config_of,
    echo,
    exchange,
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
            replies = exchange(grid, *(order(n, x=10 * n + round_number) for n in (7, 8, 9)))
            for node_id, reply in zip((7, 8, 9), replies, strict=True):
                assert config_of(reply) == {
                    "twice": 2 * (10 * node_id + round_number),
                    "node": node_id,
                    "kind": "train",
                    "group": "3",
                }
                assert reply.metadata.src_node_id == node_id
        assert len(flower_of(grid).pushed) == 3, "one Flower message a node, however many rounds"
        here, gone = exchange(grid, order(7, x=1), order(99, x=1))
        assert config_of(here)["twice"] == 2
        assert gone.error.code == NODE_GONE
        assert "99" in gone.error.reason


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
        (reply,) = exchange(grid, order(7, {"w": np.zeros(3, np.float32)}))
        assert config_of(reply)["after"] == (5 if views else 0)


def test_models_travel_in_16_bits_and_the_error_is_measured() -> None:
    with streaming(made_app(echo), made_app(echo), wire_dtype="bfloat16") as grid:
        assert grid.wire_errors == {}
        for number in range(4):
            model = {"w0": np.random.default_rng(1).standard_normal(1000, np.float32)}
            model["w0"] *= np.float32(1 + 0.01 * number)
            record = view_record(model)
            messages = [order(7), order(8)]
            for message in messages:
                message.content["arrays"] = record
            for reply in exchange(grid, *messages):
                assert same_bits(reply, model), "the node changed nothing"
        (error,) = grid.wire_errors.values()
        # Of a change of 1 % of the model, half a unit in the last place at most.
        assert 0 < error < 0.01 * 2**-8


# --- what an app relies on ----------------------------------------------------------------------


def test_mods_are_called_for_each_message_and_the_lifespan_is_entered_once() -> None:
    """One that holds a device's lock would wait for itself; mods expect models in a message."""
    lock, seen = threading.Lock(), []

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        seen.append(message.metadata.message_type)
        reply = call_next(message, context)
        reply.content["config"]["mod"] = True
        return reply

    app = made_app(lambda *_: answer(x=1), mods=[mod])

    @app.lifespan()
    def lifespan(_: Context) -> Iterator[None]:
        assert lock.acquire(timeout=2), "the lifespan is entered already"
        try:
            yield
        finally:
            lock.release()

    with streaming(app) as grid:
        for _ in range(3):
            assert config_of(exchange(grid, order())[0]) == {"x": 1, "mod": True}
    assert seen == ["train"] * 3, "the session's own message is none of theirs"
    assert not lock.locked()


def test_all_functions_of_an_app_are_reached() -> None:
    app = ClientApp()

    def handle(message: Message, _: Context) -> Message:
        return Message(answer(kind=message.metadata.message_type), reply_to=message)

    app.query("names")(handle)
    app.evaluate()(handle)
    assert serve_sessions(app) is serve_sessions(app) is app, "twice is as good as once"
    app.evaluate("later")(handle)
    with streaming(app) as grid:
        for kind in ("query.names", "evaluate", "evaluate.later"):
            (reply,) = exchange(grid, Message(RecordDict(), 7, kind))
            assert config_of(reply)["kind"] == kind
        (reply,) = exchange(grid, Message(RecordDict(), 7, "train"))
        assert "No train function registered" in reply.error.reason


def test_call_that_fails_in_any_way_is_an_error_reply_and_the_session_goes_on() -> None:
    def handle(message: Message, context: Context) -> RecordDict:
        record = context.state.config_records.setdefault("mine", ConfigRecord({"calls": 0}))
        record["calls"] += 1
        if message.content["config"]["kind"] == "ends the process":
            raise SystemExit(3)
        if message.content["config"]["kind"] == "cannot be carried":
            foreign = Array("x", (2,), "somebody.format", b"abc")
            return RecordDict({"arrays": ArrayRecord({"w": foreign})})
        return answer(calls=record["calls"])

    with streaming(made_app(handle)) as grid:
        ended, _, foreign, last = exchange(
            grid,
            *(order(kind=k) for k in ("ends the process", "fine", "cannot be carried", "fine")),
        )
        assert ended.error.code == foreign.error.code == RAISED
        assert "Traceback" in ended.error.reason
        assert "SystemExit" in ended.error.reason
        assert 'transport = "messages"' in foreign.error.reason
        assert config_of(last)["calls"] == 3, "only the first is rolled back"
        assert len(flower_of(grid).pushed) == 1


# --- what a strategy relies on ------------------------------------------------------------------


def test_node_that_is_late_gets_nothing_new_until_it_has_answered() -> None:
    answers = threading.Event()

    def hang(message: Message, _: Context) -> RecordDict:
        if message.content["config"]["n"] == 1:
            answers.wait(PATIENCE_SECONDS)
        return message.content

    try:
        with streaming(made_app(hang), made_app(echo)) as grid:
            assert list(grid.send_and_receive([order(n=1)], timeout=0.2)) == []
            assert list(grid.get_node_ids()) == [8]
            exchange(grid, order(8, n=2))
            answers.set()
            assert wait_until(lambda: list(grid.get_node_ids()) == [7, 8])
            (reply,) = exchange(grid, order(n=3))
            assert config_of(reply) == {"n": 3}
    finally:
        answers.set()


def test_app_without_sessions_gets_plain_messages_beside_the_stream() -> None:
    plain = ClientApp()

    @plain.train()
    def train(message: Message, _: Context) -> Message:
        return Message(message.content, reply_to=message)

    model = random_model(10_000)
    with captured_log() as log, streaming(made_app(echo), plain) as grid:
        assert dict(grid.transports) == {7: "stream", 8: "messages"}
        assert grid.connected_nodes == {7}
        messages = [order(7, model), order(8, model)]
        for message, reply in zip(messages, exchange(grid, *messages), strict=True):
            assert same_bits(reply, model)
            assert reply.metadata.reply_to_message_id == message.metadata.message_id
        sent = [m.metadata.message_type for m in flower_of(grid).pushed]
        assert sent.count(STREAM_MESSAGE) == 2
        assert sent.count("train") == 1
        messages[0].content["arrays"]["foreign"] = Array("x", (2,), "somebody.format", b"abc")
        with pytest.raises(FrameError, match="foreign"):
            grid.push_messages(messages)
        assert not grid._mailbox._expected, "nobody will ask for the replies"
    (warning,) = [line for line in log.warnings if "node 8" in line]
    assert "serve_sessions" in warning


def test_flower_that_takes_no_message_or_does_not_answer_for_a_while() -> None:
    """It returns None for such a message, or nothing at all for messages that are too large."""

    def fail() -> list[int]:
        raise ConnectionError("connection refused")

    with captured_log() as log, streaming(made_app(echo), ClientApp()) as grid:
        assert dict(grid.transports) == {7: "stream", 8: "messages"}
        with pytest.MonkeyPatch.context() as patch:
            for refusal in ([None], []):
                patch.setattr(flower_of(grid), "push_messages", lambda _, r=refusal: r)
                here, refused = exchange(grid, order(7, x=1), order(8, x=1))
                assert config_of(here) == {"x": 1}
                assert refused.has_error()
            patch.setattr(flower_of(grid), "get_node_ids", fail)
            assert wait_until(lambda: any("connection refused" in line for line in log.warnings))
            assert config_of(exchange(grid, order(x=1))[0]) == {"x": 1}
        flower_of(grid).add(20, made_app(echo))
        assert wait_until(lambda: 20 in grid.get_node_ids())


@pytest.mark.parametrize("call", ["get_nodes", "pull_messages"])
def test_close_does_not_wait_for_a_superlink_that_never_answers(
    flower: FakeFlower, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    asked, freed = threading.Event(), threading.Event()

    def hang(*_: Any) -> list[Any]:
        asked.set()
        freed.wait()
        return []

    monkeypatch.setattr(grid_module, "_CLOSE_SECONDS", 0.1, raising=False)
    monkeypatch.setattr(grid_module, "_POLL_SECONDS", 0.05)
    with StreamGrid(flower, LOOPBACK) as grid:
        grid.wait_until_connected()
        monkeypatch.setattr(flower, call, hang)
        assert asked.wait(PATIENCE_SECONDS)
        closing = threading.Thread(target=grid.close)
        closing.start()
        closing.join(PATIENCE_SECONDS)
        is_closed = not closing.is_alive()
        freed.set()
        closing.join()
    assert is_closed


# --- the ServerApp's line -----------------------------------------------------------------------


def context(**settings: Any) -> Context:
    return Context(1, 1, {}, RecordDict(), settings)


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let the fake of Flower's grid pass for a deployment's; return the exit handlers."""
    found: list[Any] = []
    monkeypatch.setattr(grid_module, "is_deployment", lambda grid: True)
    monkeypatch.setattr(grid_module, "add_exit_handler", found.append)
    return found


@pytest.fixture
def flower() -> Iterator[FakeFlower]:
    grid = FakeFlower({7: made_app(echo)})
    yield grid
    grid.close()


@pytest.mark.parametrize("transport", [None, "auto", "messages"])
@pytest.mark.parametrize("settings", [{}, {"transport": "messages"}])
def test_other_grids_are_left_as_they_are(
    flower: FakeFlower, transport: Any, settings: dict[str, Any]
) -> None:
    with stream(flower, context(**settings), transport) as streams:
        assert streams is flower
    assert flower.pushed == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transport": "pigeon"}, r'transport = "pigeon"; use "auto", "stream" or "messages"'),
        ({"transport": "stream"}, r'transport = "stream".*FakeFlower.*"auto"'),
        ({"wire-dtype": "int8"}, r'wire-dtype = "int8"; use "float32", "bfloat16" or "float16"'),
    ],
)
def test_unknown_values_are_refused_on_any_grid(
    flower: FakeFlower, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message), stream(flower, context(**settings)):
        pass


@pytest.mark.parametrize("transport", ["auto", "stream"])
def test_deployment_streams_and_frees_its_port(
    flower: FakeFlower, handlers: list[Any], transport: str
) -> None:
    settings = {"transport": transport, "stream-address": LOOPBACK}
    for number in (1, 2):
        with stream(flower, context(**settings)) as streams:
            assert isinstance(streams, StreamGrid)
            assert list(streams.get_node_ids()) == [7]
            assert config_of(exchange(streams, order(x=1))[0]) == {"x": 1}
            assert [end.__func__ for end in handlers] == [StreamGrid.end_at_once] * number
            settings["stream-address"] = f"127.0.0.1:{streams._server.port}"
        assert wait_until(lambda number=number: len(flower.nodes[7].answered_at) == number)
    handlers[0]()  # when the run is long over
    with stream(flower, context(transport="messages")) as streams:
        assert streams is flower


def test_arguments_win_over_the_run_config(flower: FakeFlower, handlers: list[Any]) -> None:
    settings = context(transport="messages", **{"stream-address": "x:1", "wire-dtype": "int8"})
    with stream(flower, settings, "stream", LOOPBACK, "float16") as streams:
        assert isinstance(streams, StreamGrid)


def test_nodes_get_the_address_that_was_given_or_this_machines() -> None:
    with StreamGrid(FakeFlower(), "192.0.2.1:0") as grid:  # of a router: listen everywhere
        assert grid._members._addresses == [f"192.0.2.1:{grid._server.port}"]
        with socket.create_connection(("127.0.0.1", grid._server.port), 60):
            pass
    with StreamGrid(FakeFlower(), ":0") as grid:
        assert list(grid.get_node_ids()) == []
        assert f"127.0.0.1:{grid._server.port}" in grid._members._addresses


def test_deployment_is_flowers_http_grid_alone_and_it_knows_the_superlinks_address() -> None:
    """A contract with Flower."""
    parameters = inspect.signature(HttpGrid.__init__).parameters
    address = next(name for name in parameters if "address" in name)
    values = {address: "127.0.0.1:9999"}
    for name, parameter in parameters.items():
        if name not in ("self", address) and parameter.default is parameter.empty:
            values[name] = "x"
    grid = HttpGrid(**values)  # type: ignore[arg-type]
    assert is_deployment(grid)
    assert "127.0.0.1:9999" in superlink_of(grid)
    assert hasattr(grid, "get_nodes")
    assert NodeInfo(last_activated_at="2026-01-01").last_activated_at
    assert not is_deployment(FakeFlower())
    assert superlink_of(FakeFlower()) == ""
