"""A link that is down, and connections that are reset, while a node computes and while it waits.

The round waits, the session stays, nothing is computed twice, and no reply is lost. Through a
proxy, and with `make soak` also between two network namespaces where this machine allows them.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flower_blsgd.grids.app_call import serve_sessions
from flower_blsgd.grids.stream.grid import StreamGrid
from flower_blsgd.grids.stream.session import SessionRequest, SessionResult

from ..processes import wait_until
from .node_process import counting_app, request_as_json
from .streams import (
    FakeFlower,
    LinkedGrid,
    collect,
    config_of,
    exchange,
    flower_of,
    order,
    streaming,
)

KINDS = pytest.mark.parametrize("kind", ["down", "reset"])
Outage = Callable[[str], contextlib.AbstractContextManager[None]]


def survive(grid: StreamGrid, outage: Outage, kind: str, seconds: float) -> None:
    """Let an outage begin while node 7 computes, and end; see what arrives."""

    def replies(*ids: str) -> list[dict[str, object]]:
        return sorted((config_of(r) for r in collect(grid, ids)), key=lambda c: str(c["x"]))

    exchange(grid, order(x=0, seconds=0.0))
    (computing,) = grid.push_messages([order(x=1, seconds=0.3)])
    time.sleep(0.1)
    with outage(kind):
        (sent_meanwhile,) = grid.push_messages([order(x=2, seconds=0.0)])
        time.sleep(seconds)
    first, second = replies(computing, sent_meanwhile)
    assert first == {"x": 1, "calls": [0, 1]}
    assert second == {"x": 2, "calls": [0, 1, 2]}
    assert wait_until(lambda: list(grid.get_node_ids()) == [7])
    (reply,) = exchange(grid, order(x=3, seconds=0.0))
    assert config_of(reply) == {"x": 3, "calls": [0, 1, 2, 3]}
    assert len(flower_of(grid).pushed) == 1, "the session is still the first"


# --- through a proxy ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seconds",
    [0.2, 2.0, *(pytest.param(s, marks=pytest.mark.soak) for s in (10.0, 40.0))],
)
@KINDS
def test_outage_of_a_proxy(kind: str, seconds: float) -> None:
    with streaming(serve_sessions(counting_app()), kind=LinkedGrid) as grid:

        @contextlib.contextmanager
        def outage(kind: str) -> Iterator[None]:
            grid.link.stall() if kind == "down" else grid.link.cut()
            yield
            grid.link.restore()

        survive(grid, outage, kind, seconds)


# --- between two network namespaces -------------------------------------------------------------

NAMESPACE, HERE, THERE = f"blsgd-{os.getpid()}", f"bl{os.getpid()}a", f"bl{os.getpid()}b"
SERVER_ADDRESS, NODE_ADDRESS = "10.231.7.1", "10.231.7.2"


def ip(*arguments: str) -> bool:
    return subprocess.run(["ip", *arguments], capture_output=True, check=False).returncode == 0


@pytest.fixture
def namespace() -> Iterator[None]:
    """Make a network namespace that one link leads to."""
    if not (shutil.which("ip") and shutil.which("ss") and ip("netns", "add", NAMESPACE)):
        pytest.skip("this machine allows no network namespaces")
    try:
        for command in (
            f"link add {HERE} type veth peer name {THERE} netns {NAMESPACE}",
            f"address add {SERVER_ADDRESS}/24 dev {HERE}",
            f"link set {HERE} up",
            f"-n {NAMESPACE} address add {NODE_ADDRESS}/24 dev {THERE}",
            f"-n {NAMESPACE} link set {THERE} up",
            f"-n {NAMESPACE} link set lo up",
        ):
            assert ip(*command.split()), command
        yield
    finally:
        ip("link", "delete", HERE)
        ip("netns", "delete", NAMESPACE)


def serve_there(message: Message, _: Context) -> Message:
    """Serve a session as a process in the other namespace does; its ClientApp counts."""
    done = subprocess.run(
        ["ip", "netns", "exec", NAMESPACE, sys.executable, "-m", f"{__package__}.node_process"],
        input=request_as_json(SessionRequest.from_message(message)),
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
        text=True,
        check=True,
    )
    return SessionResult(**json.loads(done.stdout)).to_reply(message)


@contextlib.contextmanager
def outage_of_the_link(kind: str) -> Iterator[None]:
    over = threading.Event()

    def reset() -> None:
        while not over.wait(0.05):
            subprocess.run(["ss", "-K", "dst", NODE_ADDRESS], capture_output=True, check=False)

    resetting = threading.Thread(target=reset)
    if kind == "down":
        assert ip("link", "set", HERE, "down")
    else:
        resetting.start()
    try:
        yield
    finally:
        over.set()
        if kind == "down":
            assert ip("link", "set", HERE, "up")
        else:
            resetting.join()


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.usefixtures("namespace")
@pytest.mark.parametrize("seconds", [0.2, 2.0, 10.0, 40.0])
@KINDS
def test_outage_between_two_network_namespaces(kind: str, seconds: float) -> None:
    flower = FakeFlower({7: cast(ClientApp, serve_there)})
    try:
        with StreamGrid(flower, f"{SERVER_ADDRESS}:0", connect_seconds=60) as grid:
            grid.wait_until_connected()
            survive(grid, outage_of_the_link, kind, seconds)
    finally:
        flower.close()
