"""Connections that break: nothing is computed twice, nothing is lost, nobody waits for ever."""

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict

from flower_blsgd.engines.stream import client
from flower_blsgd.engines.stream.client import NodeStream
from flower_blsgd.engines.stream.codec import frame_of
from flower_blsgd.engines.stream.request import StreamRequest
from flower_blsgd.engines.stream.security import new_certificate
from flower_blsgd.flower.array_records import view_record
from flower_blsgd.flower.internals import NODE_GONE

from ...log_capture import captured_log
from ..processes import wait_until
from .slow_link import SlowLink
from .streams import (
    LinkedGrid,
    answer,
    collect,
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

MEGABYTE = 1 << 20


class Counted:
    """An app that counts its calls by the number in the message."""

    def __init__(self, work: Callable[[Message], None] = lambda _: None) -> None:
        self.calls: list[int] = []
        self._work = work
        self.app = made_app(self._handle)

    def _handle(self, message: Message, _: Context) -> RecordDict:
        self.calls.append(int(message.content["config"]["x"]))
        self._work(message)
        return message.content


class Slow(LinkedGrid):
    delay_seconds = 0.01
    bytes_per_second = 40 * MEGABYTE


@pytest.mark.parametrize(("direction", "wire_dtype"), [("down", "bfloat16"), ("up", "float32")])
def test_connection_cut_in_mid_message(direction: str, wire_dtype: str) -> None:
    counted = Counted()
    model = random_model(6 * MEGABYTE)
    with streaming(counted.app, kind=Slow, wire_dtype=wire_dtype) as grid:
        exchange(grid, order(7, model, x=0))
        for number in (1, 2):
            model = {name: tensor + 1 for name, tensor in model.items()}
            grid.link.cut_after(direction, 2 * MEGABYTE)
            (reply,) = exchange(grid, order(7, model, x=number))
            assert not grid.link.will_cut, "the cut is what this is about"
            assert same_bits(reply, model)
    assert counted.calls == [0, 1, 2], "nothing is computed twice"
    assert grid.link.connections >= 3


@pytest.mark.parametrize(
    "seconds",
    [0.2, 2.0, *(pytest.param(s, marks=pytest.mark.soak) for s in (10.0, 40.0))],
)
@pytest.mark.parametrize("kind", ["down", "reset"])
def test_outage(kind: str, seconds: float) -> None:
    """A link that is down, or connections that are reset; the longer ones run with `make soak`."""
    calls: list[Any] = []

    def count(message: Message, _: Context) -> RecordDict:
        config = message.content["config"]
        calls.append(config["x"])
        time.sleep(config["seconds"])
        return answer(x=config["x"], calls=calls)

    with streaming(made_app(count), kind=LinkedGrid) as grid:
        exchange(grid, order(x=0, seconds=0.0))
        (computing,) = grid.push_messages([order(x=1, seconds=0.3)])
        time.sleep(0.1)
        grid.link.stall() if kind == "down" else grid.link.cut()
        (sent_meanwhile,) = grid.push_messages([order(x=2, seconds=0.0)])
        time.sleep(seconds)
        grid.link.restore()
        replies = map(config_of, collect(grid, [computing, sent_meanwhile]))
        assert {reply["x"]: reply["calls"] for reply in replies} == {1: [0, 1], 2: [0, 1, 2]}
        assert wait_until(lambda: list(grid.get_node_ids()) == [7])
        (reply,) = exchange(grid, order(x=3, seconds=0.0))
        assert config_of(reply) == {"x": 3, "calls": [0, 1, 2, 3]}
        assert len(flower_of(grid).pushed) == 1, "the session is still the first"


def test_connection_that_breaks_after_a_long_time_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was refused for longer than a node waits, if the time before the break counts."""
    monkeypatch.setattr(client, "_REFUSED_SECONDS", 0.5)
    with streaming(made_app(echo), kind=LinkedGrid) as grid:
        exchange(grid, order(x=0))
        time.sleep(0.7)
        grid.link.cut()
        grid.link.restore()
        exchange(grid, order(x=1))
        assert grid.link.connections > 1
        assert len(flower_of(grid).pushed) == 1, "the session is still the first"


def test_replies_to_messages_that_wait_at_the_node_survive_a_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also that of the first, made while there was no connection, when the second is at work."""
    gates = [threading.Event() for _ in range(3)]
    counted = Counted(lambda m: gates[int(m.content["config"]["x"])].wait(60))
    taken: list[Message] = []
    take = NodeStream._receive
    monkeypatch.setattr(NodeStream, "_receive", lambda self, *f: (take(self, *f), taken.append(f)))
    models = [{"w": np.full(3, 10.0**x, np.float32)} for x in range(3)]
    with streaming(counted.app, kind=LinkedGrid, wire_dtype="bfloat16") as grid:
        ids = list(grid.push_messages([order(7, models[x], x=x) for x in range(3)]))
        assert wait_until(lambda: len(taken) == 3), "all are at the node"
        grid.link.cut()
        assert wait_until(lambda: not grid._server.links[7].connected)
        gates[0].set()
        assert wait_until(lambda: len(counted.calls) > 1)
        grid.link.restore()
        for gate in gates:
            gate.set()
        replies = {config_of(reply)["x"]: reply for reply in collect(grid, ids)}
        assert sorted(replies) == [0, 1, 2]
        for x, model in enumerate(models):
            assert same_bits(replies[x], model), "a change counts from its own message's model"
    assert counted.calls == [0, 1, 2]


def test_what_nobody_waits_for_any_more_is_dropped_and_the_node_takes_part_again() -> None:
    """An order that was lost is not sent later, and a late reply is nobody's."""
    begun, late = threading.Event(), threading.Event()

    def work(message: Message) -> None:
        if message.content["config"]["x"] == 1:
            begun.set()
            late.wait(60)

    counted = Counted(work)
    with streaming(counted.app, kind=LinkedGrid) as grid:
        exchange(grid, order(x=0))
        (computing,) = grid.push_messages([order(x=1)])
        assert begun.wait(60)
        grid.link.cut()
        assert wait_until(lambda: not list(grid.get_node_ids()))
        # It waits for its connection for as long as the caller has patience.
        assert list(grid.send_and_receive([order(x=2)], timeout=0.3)) == []
        grid._mailbox.forget([computing])
        late.set()
        grid.link.restore()
        assert wait_until(lambda: list(grid.get_node_ids()) == [7])
        assert config_of(exchange(grid, order(x=3))[0]) == {"x": 3}
        assert list(grid.pull_messages([computing])) == []
        assert not grid._server.links[7]._pending
        assert len(flower_of(grid).pushed) == 1, "the session is still the first"
    assert counted.calls == [0, 1, 3]


def test_messages_of_a_node_that_flower_says_is_gone_fail_at_once() -> None:
    begun, go = threading.Event(), threading.Event()
    counted = Counted(lambda m: m.content["config"]["x"] and (begun.set(), go.wait(60)))
    with streaming(counted.app, kind=LinkedGrid) as grid:
        exchange(grid, order(x=0))
        computing = grid.push_messages([order(x=1)])
        assert begun.wait(60)
        grid.link.cut()
        assert wait_until(lambda: not list(grid.get_node_ids()))
        waiting = grid.push_messages([order(x=2)])
        flower_of(grid).offline.add(7)
        for reply in collect(grid, [*computing, *waiting]):
            assert reply.error.code == NODE_GONE
            assert "node 7" in reply.error.reason
        (refused,) = exchange(grid, order(x=3))
        assert refused.error.code == NODE_GONE
        go.set()
        grid.link.restore()
        flower = flower_of(grid)
        assert wait_until(lambda: flower.nodes[7].answered_at), "its session is not over"


def test_message_that_comes_twice_is_computed_once() -> None:
    """As when it arrived while the node made the list of what it has."""
    go = threading.Event()
    counted = Counted(lambda _: go.wait(60))
    with streaming(counted.app) as grid:
        (sent,) = grid.push_messages([order(x=1)])
        link = grid._server.links[7]
        (message,) = link._pending.values()
        link._outgoing.put(frame_of(*message, {}))
        last = grid.push_messages([order(x=2)])
        go.set()
        collect(grid, [sent, *last])
    assert counted.calls == [1, 2]


def test_node_that_gets_garbage_ends_its_session_and_gets_a_new_one() -> None:
    with captured_log() as log, streaming(made_app(echo)) as grid:
        (sent,) = grid.push_messages([order(x=0)])
        collect(grid, [sent])
        grid._server.links[7]._outgoing.put([b"no frame at all, but it came from the server"])
        flower = flower_of(grid)
        assert wait_until(lambda: len(flower.pushed) == 2), "the session has not ended"
        assert wait_until(lambda: grid._server.links[7].connected)
        assert config_of(exchange(grid, order(x=1))[0]) == {"x": 1}
    assert any("the stream broke" in line for line in log.errors)


def lone_stream(*addresses: str) -> NodeStream:
    request = StreamRequest(list(addresses), new_certificate()[0], bytes(32))
    return NodeStream(made_app(echo), request, Context(1, 7, {}, RecordDict(), {}))


def test_node_does_not_talk_to_a_server_with_another_certificate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "_CONNECT_SECONDS", 1.0)
    with streaming(made_app(echo)) as grid, captured_log() as log:
        result = lone_stream(f"127.0.0.1:{grid._server.port}").connect()
        assert not result.connected
        assert not [line for line in log.warnings if "refused" in line], "it saw no token"


def test_node_tries_all_addresses_and_the_superlinks_host() -> None:
    with streaming(made_app(echo)) as grid:
        link = SlowLink(grid._server.port)
        members = grid._members
        members._addresses = ["192.0.2.1:9", "no-such-host.invalid:9", f"127.0.0.1:{link.port}"]
        flower_of(grid).add(8, made_app(echo))
        assert wait_until(lambda: 8 in grid.get_node_ids())
        members._addresses = [f"192.0.2.1:{link.port}"]
        # The host of the SuperLink, with the stream's port.
        flower_of(grid).add(9, made_app(echo), superlink="127.0.0.1:9092")
        assert wait_until(lambda: 9 in grid.get_node_ids())
        assert link.connections == 2
    link.close()


def test_node_that_cannot_connect_gets_plain_messages_and_says_where_it_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "_CONNECT_SECONDS", 0.5)
    with captured_log() as log, streaming(made_app(echo)) as grid:
        grid._members._addresses = ["127.0.0.1:1", "no-such-host.invalid:9"]
        flower_of(grid).add(8, made_app(echo))
        assert wait_until(lambda: grid.transports.get(8) == "messages")
        model = {"w": np.ones(3, np.float32)}
        replies = exchange(grid, order(7, model), order(8, model))
        assert all(same_bits(reply, model) for reply in replies)
    (warning,) = [line for line in log.warnings if "node 8" in line]
    assert "127.0.0.1:1" in warning
    assert "no-such-host.invalid:9" in warning


def test_close_ends_a_connection_that_is_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_CONNECT_SECONDS", 1.0)
    connection = lone_stream("192.0.2.1:9")
    thread = threading.Thread(target=connection.connect, daemon=True)
    thread.start()
    connection.close()
    thread.join(60)
    assert not thread.is_alive()


def test_node_keeps_neither_arrays_nor_bytes_of_a_reply_that_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive: list[weakref.ref[np.ndarray]] = []
    streams: list[NodeStream] = []
    talk = NodeStream._talk
    monkeypatch.setattr(
        NodeStream, "_talk", lambda self, *a: streams.append(self) or talk(self, *a)
    )

    def handle(message: Message, _: Context) -> RecordDict:
        made = np.ones(1000, np.float32)
        alive.append(weakref.ref(made))
        return RecordDict({"arrays": view_record({"w": made})})

    with streaming(made_app(handle)) as grid:
        for _ in range(4):
            exchange(grid, order())
        gc.collect()
        assert sum(ref() is not None for ref in alive) <= 1
        (stream,) = streams
        assert wait_until(lambda: not stream._replies)
