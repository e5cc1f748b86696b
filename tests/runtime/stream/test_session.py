"""The end of a session: whatever the app does, the handler returns."""

import contextlib
import threading
import time
from collections.abc import Callable

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict

from flower_blsgd.runtime.stream import connection, session
from flower_blsgd.runtime.stream import grid as grid_module
from flower_blsgd.runtime.stream.frames import Frame, Kind
from flower_blsgd.runtime.stream.grid import StreamGrid
from flower_blsgd.runtime.stream.session_end import at_session_end

from ...log_capture import captured_log
from ..processes import wait_until
from .streams import (
    FakeFlower,
    LinkedGrid,
    answer,
    ask,
    config_of,
    echo,
    flower_of,
    made_app,
    order,
    random_model,
    streaming,
)

WORK_SECONDS = 60.0
"""How long the app works on, if it may."""
LIMIT_SECONDS = 30.0
"""Far less, and far more than it takes."""
GIVE_UP_SECONDS = connection._GIVE_UP_SECONDS


def sleep_in_a_loop(_: object = None) -> None:
    while True:
        time.sleep(0.01)


def compute_with_torch(_: object) -> None:
    weights = torch.zeros(200, 200)
    while True:
        weights = weights @ weights


def spin(_: object) -> None:
    while True:
        pass


def block(released: threading.Event) -> None:
    """In one call, in which no exception reaches it."""
    released.wait(WORK_SECONDS)


def refuse_to_stop(released: threading.Event) -> None:
    end = time.monotonic() + WORK_SECONDS
    while time.monotonic() < end and not released.is_set():
        with contextlib.suppress(BaseException):
            time.sleep(0.1)


WORK = [sleep_in_a_loop, compute_with_torch, spin, block, refuse_to_stop]


def seconds_to_end(
    work: Callable[[threading.Event], None], end: Callable[[StreamGrid], None]
) -> float:
    """Return how long after `end` the session's handler returned."""
    begun, released = threading.Event(), threading.Event()

    def handle(*_: object) -> RecordDict:
        begun.set()
        work(released)
        return answer()

    with contextlib.ExitStack() as stack:
        stack.callback(released.set)
        grid = stack.enter_context(streaming(made_app(handle)))
        (session,) = flower_of(grid).pushed
        answered_at = flower_of(grid).nodes[7].answered_at
        grid.push_messages([order()])
        assert begun.wait(60)
        time.sleep(0.1)
        begin = time.monotonic()
        end(grid)
        assert wait_until(lambda: session.metadata.message_id in answered_at)
        return answered_at[session.metadata.message_id] - begin


@pytest.mark.parametrize("work", WORK)
def test_handler_returns_soon_after_the_end(work: Callable[[threading.Event], None]) -> None:
    assert seconds_to_end(work, StreamGrid.close) < LIMIT_SECONDS


def test_handler_returns_soon_after_a_stopped_run() -> None:
    assert seconds_to_end(sleep_in_a_loop, StreamGrid.end_at_once) < LIMIT_SECONDS


def test_handler_waits_for_its_app_less_than_a_second() -> None:
    waits = (connection._FLUSH_SECONDS, session._IDLE_SECONDS, session._UNWIND_SECONDS)
    assert sum(waits) < 0.8


def test_handler_of_an_idle_node_returns_at_once() -> None:
    with streaming(made_app(echo)) as grid:
        (session,) = flower_of(grid).pushed
        begin = time.monotonic()
        grid.close()
        answered_at = flower_of(grid).nodes[7].answered_at
        assert wait_until(lambda: session.metadata.message_id in answered_at)
        assert answered_at[session.metadata.message_id] - begin < LIMIT_SECONDS


def test_end_overtakes_a_model_on_a_slow_link() -> None:
    """A stopped run does not wait for 46 MB."""

    class Narrow(LinkedGrid):
        bytes_per_second = 6_000_000

    with streaming(made_app(echo), kind=Narrow) as grid:
        (session,) = flower_of(grid).pushed
        answered_at = flower_of(grid).nodes[7].answered_at
        grid.push_messages([order(7, random_model(46_000_000))])
        assert wait_until(lambda: grid.link.passed["down"] > 1_000_000)
        grid.end_at_once()
        assert wait_until(lambda: session.metadata.message_id in answered_at)
        passed = grid.link.passed["down"]
    assert passed < 30_000_000  # what the link and its ends hold already


def test_interrupted_call_leaves_the_state_as_it_was() -> None:
    states: list[RecordDict] = []

    def handle(_: Message, context: Context) -> RecordDict:
        states.append(context.state)
        context.state["half"] = ConfigRecord({"done": False})
        sleep_in_a_loop()
        return answer()

    flower = FakeFlower()
    node = flower.add(7, made_app(handle))
    node.context.state["kept"] = ConfigRecord({"x": 1})
    with StreamGrid(flower, "127.0.0.1:0") as grid:
        grid.wait_until_connected()
        grid.push_messages([order()])
        assert wait_until(lambda: states)
    flower.close()
    assert set(node.context.state) == {"kept"}


def test_exception_that_interrupts_lets_the_app_clean_up() -> None:
    begun, cleaned = threading.Event(), threading.Event()

    def handle(*_: object) -> RecordDict:
        try:
            begun.set()
            sleep_in_a_loop()
        except Exception:
            raise AssertionError("an app's `except Exception` must not stop it") from None
        finally:
            cleaned.set()
        return answer()

    with streaming(made_app(handle)) as grid:
        grid.push_messages([order()])
        assert begun.wait(60)
    assert cleaned.wait(60)


def test_what_was_kept_for_the_session_is_taken_down_last_first() -> None:
    ended: list[str] = []

    def handle(*_: object) -> RecordDict:
        at_session_end(lambda: ended.append("first"))
        at_session_end(lambda: 1 / 0)
        at_session_end(lambda: ended.append("last"))
        return answer()

    with streaming(made_app(handle)) as grid:
        ask(grid, order())
        assert ended == []
    assert ended == ["last", "first"]


def test_server_that_was_killed_lets_the_node_go_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No END, and nobody listens any more."""
    monkeypatch.setattr(connection, "_GIVE_UP_SECONDS", 1.5)
    flower = FakeFlower({7: made_app(lambda *_: sleep_in_a_loop() or answer())})
    grid = LinkedGrid(flower, "127.0.0.1:0")
    grid.wait_until_connected()
    grid.push_messages([order()])
    grid._closed.set()  # it looks after nobody either
    grid.link.cut()
    answered_at = flower.nodes[7].answered_at
    begin = time.monotonic()
    assert wait_until(lambda: answered_at)
    assert time.monotonic() - begin < LIMIT_SECONDS  # of the 60 s that other tests give it
    (session,) = flower.pushed
    reply = flower.nodes[7].replies[session.metadata.message_id]
    assert reply.content["session"]["connected"]
    assert reply.content["session"]["reason"]
    grid.link.close()
    grid._server.stop(0)
    flower.close()


def test_node_waits_for_a_killed_server_less_than_half_a_minute() -> None:
    assert GIVE_UP_SECONDS <= 30


def test_invitation_of_another_version_is_answered_with_the_way_out() -> None:
    flower = FakeFlower({7: made_app(echo)})
    invitation = Message(RecordDict({"session": ConfigRecord({"version": 99})}), 7, "train.session")
    (message_id,) = flower.push_messages([invitation])
    assert wait_until(lambda: flower.nodes[7].replies)
    record = flower.nodes[7].replies[message_id].content["session"]
    assert record["connected"] is False
    assert "install the same flower-blsgd" in str(record["reason"])
    flower.close()


def test_node_that_ended_by_itself_fails_what_it_still_owes() -> None:
    """As when Flower ends the process in good order: the session says BYE."""
    with streaming(made_app(lambda *_: sleep_in_a_loop() or answer())) as grid:
        (message_id,) = grid.push_messages([order()])
        link = grid._server.links[7]
        link.receive(link._connection, Frame(Kind.BYE, {}, None))  # type: ignore[arg-type]
        found: list[Message] = []
        assert wait_until(
            lambda: found.extend(grid.pull_messages([message_id])) or found,
            grid_module._LOST_SECONDS / 2,
        ), "it waits for the connection to come back"
        assert found[0].has_error()
        # Then it is asked in again.
        assert wait_until(lambda: len(flower_of(grid).pushed) == 2)


def test_run_after_a_run_on_the_same_nodes() -> None:
    apps = [made_app(echo), made_app(echo)]
    flower = FakeFlower(dict(zip((7, 8), apps, strict=True)))
    with captured_log() as log:
        for x in range(2):
            with StreamGrid(flower, "127.0.0.1:0") as grid:
                grid.wait_until_connected()
                replies = ask(grid, order(7, x=x), order(8, x=x))
                assert [config_of(reply)["x"] for reply in replies] == [x, x]
    flower.close()
    assert log.warnings == log.errors == []
