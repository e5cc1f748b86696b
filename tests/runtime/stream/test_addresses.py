"""Where nodes may reach this machine."""

import socket

import pytest

from flower_blsgd.runtime.stream.addresses import own_addresses


@pytest.mark.parametrize(
    "superlink",
    ["127.0.0.1:9092", "http://127.0.0.1:9092", "https://127.0.0.1:9092/path", "127.0.0.1"],
)
def test_superlink_on_this_machine_is_reached_over_loopback(superlink: str) -> None:
    assert own_addresses(superlink)[0] == "127.0.0.1"


@pytest.mark.parametrize("superlink", ["", "no-such-host.invalid:9092", "[::1]:9092", ":9092"])
def test_superlink_that_is_not_known_leaves_loopback(superlink: str) -> None:
    found = own_addresses(superlink)
    assert "127.0.0.1" in found
    assert len(found) == len(set(found))
    assert all(found)


def test_every_address_is_one_of_this_machine() -> None:
    for address in own_addresses("127.0.0.1:9092"):
        with socket.socket() as probe:
            probe.bind((address, 0))
