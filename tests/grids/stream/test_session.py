"""A session's end: whatever the app does, the handler returns and the device is free."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import EventType
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.supercore.exit import exit_handler, signal_handler

from flower_blsgd import serve_sessions
from flower_blsgd.engines.mailbox import Mailbox
from flower_blsgd.engines.stream import client
from flower_blsgd.engines.stream.grid import StreamGrid
from flower_blsgd.engines.stream.request import (
    STREAM_MESSAGE,
    StreamRequest,
    at_stream_end,
)
from flower_blsgd.engines.stream.server import StreamServer
from flower_blsgd.flower import app_call
from flower_blsgd.flower.app_call import set_main_program

from ..processes import is_alive, wait_until
from .streams import (
    LOOPBACK,
    FakeFlower,
    LinkedGrid,
    answer,
    echo,
    exchange,
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


def sleep_in_a_loop(_: object = None) -> None:
    while True:
        time.sleep(0.01)


def block(released: threading.Event) -> None:
    """In one call, in which no exception reaches it."""
    released.wait(WORK_SECONDS)


def refuse_to_stop(released: threading.Event) -> None:
    end = time.monotonic() + WORK_SECONDS
    while time.monotonic() < end and not released.is_set():
        with contextlib.suppress(BaseException):
            time.sleep(0.1)


WORK = [sleep_in_a_loop, block, refuse_to_stop]


@pytest.mark.parametrize(
    ("work", "end"),
    [*((work, StreamGrid.close) for work in WORK), (sleep_in_a_loop, StreamGrid.end_at_once)],
)
def test_handler_returns_soon_after_the_end(
    work: Callable[[threading.Event], None], end: Callable[[StreamGrid], None]
) -> None:
    begun, released = threading.Event(), threading.Event()

    def handle(*_: object) -> RecordDict:
        begun.set()
        work(released)
        return answer()

    with contextlib.ExitStack() as stack:
        stack.callback(released.set)
        grid = stack.enter_context(streaming(made_app(handle)))
        answered_at = flower_of(grid).nodes[7].answered_at
        grid.push_messages([order()])
        assert begun.wait(60)
        end_at = time.monotonic()
        end(grid)
        assert wait_until(lambda: answered_at)
        assert max(answered_at.values()) - end_at < LIMIT_SECONDS


def test_end_overtakes_a_model_on_a_slow_link() -> None:
    """A stopped run does not wait for 46 MB."""

    class Narrow(LinkedGrid):
        bytes_per_second = 3_000_000

    with streaming(made_app(echo), kind=Narrow) as grid:
        (session,) = flower_of(grid).pushed
        answered_at = flower_of(grid).nodes[7].answered_at
        grid.push_messages([order(7, random_model(46_000_000))])
        assert wait_until(lambda: grid.link.passed["down"] > 1_000_000)
        grid.end_at_once()
        assert wait_until(lambda: session.metadata.message_id in answered_at)
        passed = grid.link.passed["down"]
    assert passed < 30_000_000  # what the link and its ends hold already


def test_interrupted_app_cleans_up_and_leaves_the_state_as_it_was() -> None:
    begun, cleaned = threading.Event(), threading.Event()

    def handle(_: Message, context: Context) -> RecordDict:
        context.state["half"] = ConfigRecord({"done": False})
        try:
            begun.set()
            sleep_in_a_loop()
        except Exception:
            raise AssertionError("an app's `except Exception` must not stop it") from None
        finally:
            cleaned.set()
        return answer()

    with streaming(made_app(handle)) as grid:
        node = flower_of(grid).nodes[7]
        node.context.state["kept"] = ConfigRecord({"x": 1})
        grid.push_messages([order()])
        assert begun.wait(60)
    assert cleaned.wait(60)
    assert set(node.context.state) == {"kept"}


def test_callbacks_of_the_session_are_called_at_its_end_last_first() -> None:
    ended: list[str] = []

    def handle(*_: object) -> RecordDict:
        at_stream_end(lambda: ended.append("first"))
        at_stream_end(lambda: 1 / 0)
        at_stream_end(lambda: ended.append("last"))
        return answer()

    with streaming(made_app(handle)) as grid:
        exchange(grid, order())
        assert ended == []
    assert ended == ["last", "first"]


def test_child_of_an_app_is_terminated_without_flowers_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its handler would report the task of the parent as failed, as with a Pool of processes."""
    before = {number: signal.getsignal(number) for number in signal_handler.SIGNAL_TO_EXIT_CODE}
    monkeypatch.setattr(exit_handler, "registered_exit_handlers", [])
    signal_handler.register_signal_handlers(
        EventType.FLWR_CLIENTAPP_RUN_LEAVE, exit_handlers=[lambda: os._exit(7)]
    )
    ended: list[int] = []

    def handle(*_: object) -> RecordDict:
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.write(writing, b"!")
            time.sleep(LIMIT_SECONDS)
            os._exit(8)
        os.read(reading, 1)
        os.close(reading)
        os.close(writing)
        os.kill(child, signal.SIGTERM)
        ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return answer()

    try:
        with streaming(made_app(handle)) as grid:
            exchange(grid, order())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ended == [-signal.SIGTERM]


def test_server_is_told_that_the_program_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the connection breaks in the meantime, because a call is in progress."""
    monkeypatch.setattr(client, "_PROGRAM_SECONDS", 0.2)
    begun = threading.Event()

    def program(_: Context) -> None:
        begun.wait(60)
        raise ZeroDivisionError

    app = made_app(lambda *_: begun.set() or sleep_in_a_loop() or answer())
    set_main_program(app, lambda context: program)
    with streaming(app) as grid:
        node, (session,) = flower_of(grid).nodes[7], flower_of(grid).pushed
        message_id, answers = session.metadata.message_id, node.replies
        monkeypatch.setattr(flower_of(grid), "pull_messages", lambda _: [])  # the grid's own look
        grid.push_messages([order()])
        assert wait_until(lambda: message_id in answers)
    assert answers[message_id].content["session"]["reason"] == "its program raised an exception"


def test_session_ends_if_the_accelerator_no_longer_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed message is answered first; the next session is in a new process."""
    with streaming(made_app(lambda *_: 1 / 0)) as grid:
        node, (session,) = flower_of(grid).nodes[7], flower_of(grid).pushed
        message_id, answers = session.metadata.message_id, node.replies
        monkeypatch.setattr(flower_of(grid), "pull_messages", lambda _: [])  # the grid's own look
        monkeypatch.setattr(app_call, "_accelerator_is_lost", lambda: True)
        (reply,) = exchange(grid, order())
        assert reply.error.code == app_call.PROCESS_ENDS
        assert wait_until(lambda: message_id in answers)
    assert answers[message_id].content["session"]["reason"] == "its process has to end"


@pytest.mark.parametrize("now", ["nobody listens", "another listens", "out of reach"])
def test_node_leaves_a_server_that_is_gone_for_good(
    monkeypatch: pytest.MonkeyPatch, now: str
) -> None:
    """Nothing says that the session is over, but what is where the server was says something."""
    limit = {"nobody listens": "_REFUSED_SECONDS", "out of reach": "_AWAY_SECONDS"}.get(now)
    if limit:
        monkeypatch.setattr(client, limit, 0.5)
    monkeypatch.setattr(client, "_ATTEMPT_SECONDS", 0.5)
    begun = threading.Event()
    flower = FakeFlower({7: made_app(lambda *_: begun.set() or sleep_in_a_loop() or answer())})
    grid = (LinkedGrid if now == "out of reach" else StreamGrid)(
        flower, LOOPBACK, connect_seconds=60
    )
    grid.wait_until_connected()
    grid.push_messages([order()])
    assert begun.wait(60)  # now the node too knows that it was connected
    monkeypatch.setattr(flower, "pull_messages", lambda _: [])  # the grid's own look
    grid._closed.set()  # it looks after nobody either
    if isinstance(grid, LinkedGrid):
        grid.link.cut()  # what connects is let in and thrown out again
    else:
        grid._server.stop(0)
    next_run = (
        StreamServer(f"127.0.0.1:{grid._server.port}", Mailbox()) if "another" in now else None
    )
    (session,) = flower.pushed
    assert wait_until(lambda: flower.nodes[7].replies)
    record = flower.nodes[7].replies[session.metadata.message_id].content["session"]
    assert record["connected"]
    assert record["reason"]
    if isinstance(grid, LinkedGrid):
        grid.link.close()
    grid._server.stop(0)
    if next_run:
        next_run.stop(0)
    flower.close()


# --- how a session is opened and answered -------------------------------------------------------

REQUEST = StreamRequest(["10.0.0.5:9100", "127.0.0.1:9100"], b"-----PEM", b"\0\xfftoken", "float16")


def over_flower(content: RecordDict) -> Message:
    """Return a message to a node, as it comes out of Flower's own wire format."""
    return message_from_proto(message_to_proto(Message(content, 7, STREAM_MESSAGE)))


@pytest.mark.parametrize(
    "lie",
    [
        *({name: None} for name in ("version", "addresses", "certificate", "token")),
        *({"addresses": value} for value in ([], "10.0.0.5:9100", [1, 2])),
        *({"token": "text"}, {"certificate": 1}, {"wire_dtype": "int8"}),
        {"version": 99},
    ],
    ids=str,
)
def test_request_that_lacks_something_or_lies_is_answered_with_the_way_out(
    lie: dict[str, Any],
) -> None:
    content = REQUEST.to_records()
    for name, value in lie.items():
        if value is None:
            del content["session"][name]
        else:
            content["session"][name] = value
    context = Context(1, 7, {}, RecordDict(), {})
    answered = client.serve_stream(made_app(echo), over_flower(content), context)
    record = answered.content["session"]
    assert record["connected"] is False
    way_out = "install the same flower-blsgd" if "version" in lie else "cannot be read"
    assert way_out in str(record["reason"])


# --- the ClientApp's line -----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_app_with_client_fn_is_refused_with_the_way_out() -> None:
    app = ClientApp(client_fn=lambda context: NumPyClient().to_client())
    with pytest.raises(ValueError, match=r"client_fn.*@app\.train"):
        serve_sessions(app)


# --- the end of the SuperNode: real processes, killed -------------------------------------------

ANCESTORS = Path(__file__).with_name("ancestors.py")


@pytest.mark.processes
@pytest.mark.parametrize("top_name", ["flower-supernode", "somebodys-shell"])
def test_process_dies_with_its_supernode_or_parent_and_not_with_a_shell_above_that(
    tmp_path: Path, top_name: str
) -> None:
    """With ``--isolation process`` a shell starts the executor."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    top = subprocess.Popen([sys.executable, ANCESTORS, "top", tmp_path, top_name], env=environment)

    def process_id(role: str) -> int:
        file = tmp_path / f"{role}.pid"
        assert wait_until(lambda: file.exists() and file.read_text())
        return int(file.read_text())

    try:
        app, executor = process_id("app"), process_id("executor")
        assert not wait_until(lambda: not is_alive(app), 0.7), "it died while all were there"
        top.kill()
        top.wait()
        if top_name == "somebodys-shell":
            assert not wait_until(lambda: not is_alive(app), 0.8)
            os.kill(executor, signal.SIGKILL)
        else:
            assert is_alive(executor)  # so it is not that one's end
        assert wait_until(lambda: not is_alive(app))
    finally:
        top.kill()
        top.wait()
        for role in ("app", "executor"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id(role), signal.SIGKILL)
