"""Why a SuperNode ended: one line each."""

from pathlib import Path

import pytest

from flower_blsgd.errors import UsageError
from flower_blsgd.supernode.endings import (
    SuperNodeEndedError,
    begins_verdict,
    node_id_in,
    plain,
    why_ended,
)
from flower_blsgd.supernode.node_plan import NodeLaunch

FAILED = "Failed to initialize the connection to the SuperLink."


def launch(key: str = "") -> NodeLaunch:
    return NodeLaunch("hare", (), (), {}, "lab:8100", Path(key) if key else None, 9001)


def line(code: int, *lines: str, key: str = "") -> str:
    reason = why_ended(launch(key), code, lines)
    assert isinstance(reason, UsageError)
    assert "\n" not in str(reason)
    return str(reason)


def test_key_that_is_not_registered() -> None:
    told = line(1, "ERROR :     Exit Code: 305", FAILED, "[code: 2004] Failed to", key="/k/node-1")
    assert "hare" in told
    assert "lab:8100" in told
    assert "flwr supernode register /k/node-1.pub NAME" in told


def test_no_key_where_one_is_needed() -> None:
    told = line(1, FAILED, "[code: 2001] SuperNodes must be registered via the CLI")
    assert "registered SuperNodes only" in told
    assert "--auth-supernode-private-key KEY" in told


def test_flag_that_flower_does_not_know() -> None:
    told = line(2, "usage: ...", "flower-supernode: error: unrecognized arguments: --colour")
    assert told == "SuperNode hare: flower-supernode: unrecognized arguments: --colour"


def test_port_taken_in_the_meantime() -> None:
    told = line(
        1, "ERROR: [Errno 98] error while attempting to bind on address: address already in use"
    )
    assert "port 9001" in told


@pytest.mark.parametrize(
    ("code", "how"),
    [
        (3, "ended with exit code 3"),
        (137, "was killed (SIGKILL)"),
        (250, "ended with exit code 250"),
    ],
)
def test_what_nobody_can_explain(code: int, how: str) -> None:
    reason = why_ended(launch(), code, ["first", "  ValueError: no", "", " "])
    assert isinstance(reason, SuperNodeEndedError)
    assert str(reason) == f"SuperNode hare {how}; its last line: ValueError: no"
    assert str(why_ended(launch(), code, [])) == f"SuperNode hare {how}"


def test_lines_of_flower_are_read() -> None:
    coloured = "\x1b[92mINFO \x1b[0m:      SuperNode ID: 1234567890123456789\n"
    assert plain(coloured) == "INFO :      SuperNode ID: 1234567890123456789"
    assert node_id_in(plain(coloured)) == "1234567890123456789"
    assert node_id_in("INFO : Starting Flower SuperNode") == ""
    assert begins_verdict("ERROR :     Exit Code: 305")
    assert not begins_verdict("INFO :      Starting Flower SuperNode")
    assert not begins_verdict("ERROR :     Exit Code: 250")  # a ClientApp's
