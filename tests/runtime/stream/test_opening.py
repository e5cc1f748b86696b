"""The ServerApp's line: which grid it gives, and what it refuses."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from flower_blsgd import StreamGrid, UsageError, stream
from flower_blsgd.runtime.flower_internals import empty_run
from flower_blsgd.runtime.stream import opening
from flower_blsgd.runtime.stream.server import split_address

from ..processes import wait_until
from .streams import LOOPBACK, FakeFlower, ask, config_of, echo, made_app, order


def context(**settings: Any) -> Context:
    return Context(1, 1, {}, RecordDict(), settings)


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let the fake of Flower's grid pass for a deployment's; return the exit handlers."""
    found: list[Any] = []
    monkeypatch.setattr(opening, "is_deployment", lambda grid: True)
    monkeypatch.setattr(opening, "add_exit_handler", found.append)
    return found


@pytest.fixture
def flower() -> Iterator[FakeFlower]:
    grid = FakeFlower({7: made_app(echo)})
    yield grid
    grid.close()


@pytest.mark.parametrize("transport", [None, "auto", "messages"])
@pytest.mark.parametrize("settings", [{}, {"transport": "auto"}, {"transport": "messages"}])
def test_other_grids_are_left_as_they_are(
    flower: FakeFlower, transport: Any, settings: dict[str, Any]
) -> None:
    with stream(flower, context(**settings), transport) as fast:
        assert fast is flower
    assert flower.pushed == []


@pytest.mark.parametrize("by_argument", [False, True])
def test_stream_on_another_grid_is_refused_with_the_way_out(
    flower: FakeFlower, by_argument: bool
) -> None:
    settings = {} if by_argument else {"transport": "stream"}
    arguments: Any = ("stream",) if by_argument else ()
    with (
        pytest.raises(UsageError, match=r'transport = "stream".*FakeFlower.*"auto"') as caught,
        stream(flower, context(**settings), *arguments),
    ):
        pass
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transport": "pigeon"}, r'transport = "pigeon"; use "auto", "stream" or "messages"'),
        ({"transport": 3}, r'transport = "3"'),
        ({"wire-dtype": "int8"}, r'wire-dtype = "int8"; use "float32", "bfloat16" or "float16"'),
    ],
)
def test_unknown_values_are_refused_on_any_grid(
    flower: FakeFlower, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message), stream(flower, context(**settings)):
        pass


@pytest.mark.parametrize("transport", ["auto", "stream"])
def test_deployment_streams(flower: FakeFlower, handlers: list[Any], transport: str) -> None:
    settings = context(transport=transport, **{"stream-address": LOOPBACK})
    with stream(flower, settings) as fast:
        assert isinstance(fast, StreamGrid)
        assert list(fast.get_node_ids()) == [7]
        assert config_of(ask(fast, order(x=1))[0]) == {"x": 1}
        assert len(handlers) == 1
    assert wait_until(lambda: flower.nodes[7].answered_at)


def test_deployment_with_messages_is_left_as_it_is(flower: FakeFlower, handlers: list[Any]) -> None:
    with stream(flower, context(transport="messages")) as fast:
        assert fast is flower


def test_arguments_win_over_the_run_config(flower: FakeFlower, handlers: list[Any]) -> None:
    settings = context(transport="messages", **{"stream-address": "x:1", "wire-dtype": "int8"})
    with stream(flower, settings, "stream", LOOPBACK, "float16") as fast:
        assert isinstance(fast, StreamGrid)
        assert fast._wire_dtype == "float16"


def test_exit_handler_ends_the_sessions_of_a_stopped_run(
    flower: FakeFlower, handlers: list[Any]
) -> None:
    with stream(flower, context(**{"stream-address": LOOPBACK})):
        (end,) = handlers
        end()
        assert wait_until(lambda: flower.nodes[7].answered_at)
        end()  # may be called again


def test_error_in_the_block_ends_the_sessions_and_goes_on_up(
    flower: FakeFlower, handlers: list[Any]
) -> None:
    with (
        pytest.raises(RuntimeError, match="the strategy's own"),
        stream(flower, context(**{"stream-address": LOOPBACK})),
    ):
        raise RuntimeError("the strategy's own")
    assert wait_until(lambda: flower.nodes[7].answered_at)


def test_port_that_is_taken_is_one_line(flower: FakeFlower, handlers: list[Any]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for address in (f"127.0.0.1:{port}", f":{port}", f"localhost:{port}"):
            with (
                pytest.raises(UsageError, match=f'stream-address = "{address}"') as caught,
                stream(flower, context(**{"stream-address": address})),
            ):
                pass
            assert "\n" not in str(caught.value)
            assert "port" in str(caught.value)
    assert flower.pushed == []


def test_port_is_free_again_afterwards(flower: FakeFlower, handlers: list[Any]) -> None:
    with stream(flower, context(**{"stream-address": LOOPBACK})) as fast:
        assert isinstance(fast, StreamGrid)
        port = fast.port
    with stream(flower, context(**{"stream-address": f"127.0.0.1:{port}"})) as fast:
        assert config_of(ask(fast, order(x=1))[0]) == {"x": 1}


@pytest.mark.parametrize(
    "address",
    [
        *["9100", "host", "host:", ":", "host:port", "host:70000", "host:-1", "host:1.5"],
        *["a host:9100", "host:9100 ", "http://host", "host:\u0663"],
    ],
)
def test_bad_address_is_one_line(flower: FakeFlower, handlers: list[Any], address: str) -> None:
    with (
        pytest.raises(UsageError, match="HOST:PORT") as caught,
        stream(flower, context(**{"stream-address": address})),
    ):
        pass
    assert "\n" not in str(caught.value)
    assert address in str(caught.value)


def test_addresses_that_are_fine() -> None:
    assert split_address("10.0.0.5:9100") == ("10.0.0.5", 9100)
    assert split_address(":9100") == ("", 9100)
    assert split_address("gpu-1.example.org:0") == ("gpu-1.example.org", 0)
    assert split_address("[fd00::1]:9100") == ("[fd00::1]", 9100)


def test_address_of_a_router_is_told_to_the_nodes_and_listened_for_everywhere(
    flower: FakeFlower, handlers: list[Any]
) -> None:
    grid = StreamGrid(FakeFlower(), "192.0.2.1:0")
    try:
        assert grid._members._addresses == (f"192.0.2.1:{grid.port}",)
        with socket.create_connection(("127.0.0.1", grid.port), 5):
            pass
    finally:
        grid.close()


def test_one_port_without_a_host_is_told_with_this_machines_addresses() -> None:
    grid = StreamGrid(FakeFlower(), ":0")
    try:
        assert f"127.0.0.1:{grid.port}" in grid._members._addresses
    finally:
        grid.close()


def test_grid_without_nodes_opens_and_closes(handlers: list[Any]) -> None:
    with stream(FakeFlower(), context(**{"stream-address": LOOPBACK})) as fast:
        assert list(fast.get_node_ids()) == []
        assert fast.run == empty_run(1)
