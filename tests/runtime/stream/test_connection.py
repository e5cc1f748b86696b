"""Connections that break: nothing is computed twice, nothing is lost, nobody waits for ever."""

import gc
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict

from flower_blsgd.array_view import view_record
from flower_blsgd.runtime.flower_internals import NODE_GONE
from flower_blsgd.runtime.stream import connection
from flower_blsgd.runtime.stream import grid as grid_module
from flower_blsgd.runtime.stream.connection import ClientConnection
from flower_blsgd.runtime.stream.credentials import new_certificate, new_token
from flower_blsgd.runtime.stream.frames import Frame
from flower_blsgd.runtime.stream.invitation import Invitation
from flower_blsgd.runtime.stream.session import Session

from ...log_capture import captured_log
from ..processes import wait_until
from .slow_link import SlowLink
from .streams import (
    LinkedGrid,
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

MEGABYTE = 1 << 20
LOST_SECONDS = grid_module._LOST_SECONDS


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


@pytest.mark.parametrize("direction", ["down", "up"])
@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16"])
def test_connection_cut_in_mid_message(direction: str, wire_dtype: str) -> None:
    counted = Counted()
    model = random_model(12 * MEGABYTE)
    with streaming(counted.app, kind=Slow, wire_dtype=wire_dtype) as grid:
        ask(grid, order(7, model, x=0))
        for number in (1, 2):
            model = {name: tensor + 1 for name, tensor in model.items()}
            grid.link.cut_after(direction, 2 * MEGABYTE)
            (reply,) = ask(grid, order(7, model, x=number))
            assert not grid.link.will_cut, "the cut is what this is about"
            assert same_bits(reply, model)
    assert counted.calls == [0, 1, 2], "nothing is computed twice"
    assert grid.link.connections >= 3


def test_connection_cut_again_and_again() -> None:
    counted = Counted()
    model = random_model(4 * MEGABYTE)
    with streaming(counted.app, counted.app, kind=LinkedGrid) as grid:
        rng = np.random.default_rng(1)
        for number in range(8):
            for direction in ("up", "down"):
                grid.link.cut_after(direction, int(rng.integers(0, 8 * MEGABYTE)))
            replies = ask(grid, order(7, model, x=number), order(8, model, x=100 + number))
            assert all(same_bits(reply, model) for reply in replies)
            assert [config_of(reply)["x"] for reply in replies] == [number, 100 + number]
    assert sorted(counted.calls) == [*range(8), *range(100, 108)]


def test_connection_cut_while_the_app_works() -> None:
    go = threading.Event()
    counted = Counted(lambda _: go.wait(60))
    with streaming(counted.app, kind=LinkedGrid) as grid:
        (first,) = grid.push_messages([order(x=5)])
        assert wait_until(lambda: counted.calls)
        grid.link.cut(for_good=False)
        assert wait_until(lambda: grid.link.connections >= 2)
        go.set()
        found: list[Message] = []
        assert wait_until(lambda: found.extend(grid.pull_messages([first])) or found)
        assert config_of(found[0]) == {"x": 5}
        assert config_of(ask(grid, order(x=6))[0]) == {"x": 6}
    assert counted.calls == [5, 6]


def test_replies_to_messages_that_wait_at_the_node_survive_a_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also that of the first, made while there was no connection, when the second is at work."""
    gates = [threading.Event() for _ in range(3)]
    counted = Counted(lambda m: gates[int(m.content["config"]["x"])].wait(60))
    taken: list[Frame] = []
    take = Session._take
    monkeypatch.setattr(Session, "_take", lambda self, f: (take(self, f), taken.append(f)))
    with streaming(counted.app, kind=LinkedGrid) as grid:
        messages = [order(x=x) for x in range(3)]
        ids = list(grid.push_messages(messages))
        assert wait_until(lambda: len(taken) == 3), "all are at the node"
        grid.link.cut()
        assert wait_until(lambda: not grid._server.links[7].connected)
        gates[0].set()
        assert wait_until(lambda: len(counted.calls) > 1)
        grid.link.mend()
        for gate in gates:
            gate.set()
        found: list[Message] = []
        assert wait_until(lambda: found.extend(grid.pull_messages(ids)) or len(found) == 3)
        assert {config_of(reply)["x"] for reply in found} == {0, 1, 2}
    assert counted.calls == [0, 1, 2]


def test_many_messages_that_wait_at_the_node_are_not_computed_twice_after_a_cut() -> None:
    counted = Counted(lambda _: time.sleep(0.03))
    with streaming(counted.app, kind=LinkedGrid) as grid:
        ids = list(grid.push_messages([order(x=x) for x in range(40)]))
        assert wait_until(lambda: len(counted.calls) > 4)
        grid.link.cut(for_good=False)
        found: list[Message] = []
        assert wait_until(lambda: found.extend(grid.pull_messages(ids)) or len(found) == 40)
        assert not [reply.error for reply in found if reply.has_error()]
    assert counted.calls == list(range(40))


def test_connection_that_does_not_come_back_fails_what_is_pending_and_the_node_comes_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grid_module, "_LOST_SECONDS", LOST_SECONDS)
    cut = threading.Event()
    counted = Counted(lambda m: m.content["config"]["x"] == 1 and cut.wait(60))
    with streaming(counted.app, kind=LinkedGrid) as grid:
        ask(grid, order(x=0))
        (sent,) = grid.push_messages([order(x=1)])
        assert wait_until(lambda: len(counted.calls) == 2)
        cut_at = time.monotonic()
        grid.link.cut()
        found: list[Message] = []
        assert wait_until(lambda: found.extend(grid.pull_messages([sent])) or found)
        assert time.monotonic() - cut_at > LOST_SECONDS
        cut.set()
        (reply,) = found
        assert reply.error.code == NODE_GONE
        assert "node 7" in reply.error.reason
        assert list(grid.get_node_ids()) == []
        (refused,) = ask(grid, order(x=2))
        assert refused.error.code == NODE_GONE
        grid.link.mend()
        assert wait_until(lambda: list(grid.get_node_ids()) == [7])
        assert config_of(ask(grid, order(x=3))[0]) == {"x": 3}
        assert len(flower_of(grid).pushed) == 1, "the session is still the first"
    assert counted.calls == [0, 1, 3]


def test_round_waits_for_a_broken_connection_two_seconds_at_most() -> None:
    assert LOST_SECONDS + 0.1 < 2.0  # it looks ten times a second


def test_others_go_on_while_one_is_away() -> None:
    with streaming(made_app(echo), kind=LinkedGrid) as grid:
        flower = flower_of(grid)
        # A second node, that connects past the link.
        link_port, direct_port = grid.link.port, grid.port
        grid._members._addresses = (f"127.0.0.1:{direct_port}",)
        flower.add(8, made_app(echo))
        assert link_port != direct_port
        assert wait_until(lambda: sorted(grid.get_node_ids()) == [7, 8])
        grid.link.cut()
        assert wait_until(lambda: list(grid.get_node_ids()) == [8])
        for x in range(20):
            assert config_of(ask(grid, order(8, x=x))[0]) == {"x": x}
        grid.link.mend()
        assert wait_until(lambda: sorted(grid.get_node_ids()) == [7, 8])


def test_session_that_gave_up_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_GIVE_UP_SECONDS", 0.8)
    with streaming(made_app(echo), kind=LinkedGrid) as grid:
        ask(grid, order(x=0))  # now the node too knows that it was connected
        grid.link.cut()
        flower = flower_of(grid)
        assert wait_until(lambda: len(flower.pushed) == 2), "the first session has not ended"
        grid.link.mend()
        assert wait_until(lambda: list(grid.get_node_ids()) == [7])
        assert config_of(ask(grid, order(x=1))[0]) == {"x": 1}


def test_silent_link_is_noticed_by_the_timeout_at_the_latest() -> None:
    """A pulled cable says nothing: the strategy's timeout, and keepalive, are what is left."""
    with streaming(made_app(echo), kind=LinkedGrid) as grid:
        grid.link.fall_silent()
        assert list(grid.send_and_receive([order(x=1)], timeout=0.5)) == []
        grid.link.mend()
        grid.link.cut(for_good=False)
        assert wait_until(lambda: list(grid.get_node_ids()) == [7])
        assert config_of(ask(grid, order(x=2))[0]) == {"x": 2}


def test_slow_link_with_a_large_model() -> None:
    class Narrow(LinkedGrid):
        delay_seconds = 0.05
        bytes_per_second = 12_500_000  # 100 Mbit/s

    model = random_model(4 * MEGABYTE)
    with streaming(made_app(lambda *_: answer(ok=True)), kind=Narrow) as grid:
        begin = time.monotonic()
        (reply,) = ask(grid, order(7, model))
        seconds = time.monotonic() - begin
        assert config_of(reply)["ok"]
    # 0.34 s for the bytes and 0.1 s for there and back: the link is what it says it is.
    assert seconds > 0.4


# --- the client's end alone -------------------------------------------------------------------


def lone_connection(*addresses: str, superlink: str = "") -> ClientConnection:
    invitation = Invitation(addresses, new_certificate().public, new_token())
    return ClientConnection(invitation, 7, superlink, lambda _: None, lambda: ([], []))


def test_node_that_cannot_connect_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_CONNECT_SECONDS", 0.5)
    client = lone_connection("127.0.0.1:1", "no-such-host.invalid:9")
    begin = time.monotonic()
    farewell = client.run()
    assert time.monotonic() - begin < 30  # of the 60 s that other tests give it
    assert not farewell.connected
    assert "127.0.0.1:1" in farewell.reason
    assert "no-such-host.invalid:9" in farewell.reason


def test_node_does_not_talk_to_a_server_with_another_certificate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "_CONNECT_SECONDS", 1.0)
    with streaming(made_app(echo)) as grid, captured_log() as log:
        farewell = lone_connection(f"127.0.0.1:{grid.port}").run()
        assert not farewell.connected
        assert not [line for line in log.warnings if "refused" in line], "it saw no token"


def test_node_tries_all_addresses_and_the_superlinks_host() -> None:
    with streaming(made_app(echo)) as grid:
        link = SlowLink(grid.port)
        members = grid._members
        members._addresses = ("192.0.2.1:9", "no-such-host.invalid:9", f"127.0.0.1:{link.port}")
        flower_of(grid).add(8, made_app(echo))
        assert wait_until(lambda: 8 in grid.get_node_ids())
        members._addresses = (f"192.0.2.1:{link.port}",)
        # The host of the SuperLink, with the stream's port.
        flower_of(grid).add(9, made_app(echo), superlink="127.0.0.1:9092")
        assert wait_until(lambda: 9 in grid.get_node_ids())
        assert link.connections == 2
    link.close()


def test_node_that_cannot_connect_gets_plain_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_CONNECT_SECONDS", 0.5)
    with captured_log() as log, streaming(made_app(echo)) as grid:
        grid._members._addresses = ("127.0.0.1:1",)
        flower_of(grid).add(8, made_app(echo))
        assert wait_until(lambda: grid.transports.get(8) == "messages")
        model = {"w": np.ones(3, np.float32)}
        replies = ask(grid, order(7, model), order(8, model))
        assert all(same_bits(reply, model) for reply in replies)
    (warning,) = [line for line in log.warnings if "node 8" in line]
    assert "127.0.0.1:1" in warning


def test_close_ends_a_connection_that_is_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_CONNECT_SECONDS", 20.0)
    client = lone_connection("192.0.2.1:9")
    thread = threading.Thread(target=client.run, daemon=True)
    thread.start()
    time.sleep(0.2)
    begin = time.monotonic()
    client.close()
    assert time.monotonic() - begin < 10  # it does not wait until the other gives up


def test_records_of_views_are_not_kept_by_a_reply_that_arrived() -> None:
    """The next message frees the last reply: a node holds one at most."""
    alive: list[weakref.ref[np.ndarray]] = []

    def handle(message: Message, _: Context) -> RecordDict:
        made = np.ones(1000, np.float32)
        alive.append(weakref.ref(made))
        return RecordDict({"arrays": view_record({"w": made})})

    with streaming(made_app(handle)) as grid:
        for _ in range(4):
            ask(grid, order())
        gc.collect()
        assert sum(ref() is not None for ref in alive) <= 1
