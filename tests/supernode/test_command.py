"""``blsgd supernode``: every mistake is told in one line, before anything starts."""

import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401  # loaded before `subprocess.Popen` is taken away below

from flower_blsgd import cli
from flower_blsgd.runtime.machine import Machine, usable_cores
from flower_blsgd.supernode.node_plan import NodeLaunch

from .servers import Authority, deaf_port, listening, write_key

CORE = usable_cores()[0]
ONE = ("--workers", f"1x cpu:{CORE} fast")
TWO = ("--workers", f"1x cpu:{CORE} fast; 1x cpu:{CORE} slow", "--one-node-per-device")
LAB = ("--superlink", "127.0.0.1:1")
KEY = "--auth-supernode-private-key"

Refused = Callable[..., str]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError(f"a process was started: {arguments}")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(os, "fork", refuse)
    machine = Machine(usable_cores(), given_accelerators=())
    monkeypatch.setattr("flower_blsgd.runtime.devices.this_machine", lambda: machine)
    for scheme in ("http", "https", "all"):
        for name in (f"{scheme}_proxy", f"{scheme}_proxy".upper()):
            monkeypatch.delenv(name, raising=False)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Return a function that hands back the one line with which the command refuses."""

    def run(*arguments: str) -> str:
        assert cli.main(["supernode", *arguments]) == 2
        told = capsys.readouterr()
        assert told.err.startswith("blsgd: ")
        assert told.err.count("\n") == 1, told.err
        return told.err.removeprefix("blsgd: ").rstrip("\n")

    return run


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[NodeLaunch]:
    """Note what would be started, and start nothing."""
    found: list[NodeLaunch] = []
    monkeypatch.setattr(
        "flower_blsgd.supernode.command.run_nodes", lambda launches, tell: found.extend(launches)
    )
    return found


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "--superlink"),
        (("--superlink", "http://lab:8100", "--insecure"), "must be HOST:PORT"),
        (LAB, "give --root-certificates FILE"),
        ((*LAB, "--insecure", "--root-certificates", "ca.crt"), "exclude each other"),
        ((*LAB, "--insecure", KEY, "key"), "needs TLS, but --insecure is given"),
        ((*LAB, "--insecure", "spare"), "spare is no flag of blsgd supernode"),
        ((*LAB, "--insecure", "--", "--port", "1"), "--port comes before --"),
        ((*LAB, "--insecure", "--", "--node-config=a=1"), "--node-config comes before --"),
        ((*LAB, "--insecure", "--colour"), "--colour"),
        ((*LAB, "--insecure", "--node-config", "device='cpu'"), "--node-config device"),
        ((*LAB, "--insecure", "--workers", "1x cpu quick"), '"quick" at character 8'),
        ((*LAB, "--insecure", "--workers", "cuda:7"), "device cuda:7 is not there"),
        ((*LAB, "--insecure", "--workers", "cpu:4095"), "core 4095"),
        ((*LAB, "--insecure", *TWO, "--name", 'it\'s "a"'), "quotes of one kind"),
        ((*LAB, "--insecure", *ONE, "--port", "70000"), "--port 70000"),
        ((*LAB, "--insecure", *ONE, "--port", "http"), "--port"),
        ((*LAB, "--insecure", *ONE), "no SuperLink at 127.0.0.1:1"),
    ],
)
def test_mistake_is_refused_in_one_line(
    refused: Refused, arguments: tuple[str, ...], told: str
) -> None:
    assert told in refused(*arguments)


def test_port_that_is_taken_is_refused(refused: Refused) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        assert f"--port {port} cannot be used" in refused(*LAB, "--insecure", *ONE, "--port", port)


def test_keys_of_several_nodes_are_counted(refused: Refused, tmp_path: Path) -> None:
    key = str(write_key(tmp_path / "node"))
    ca = str(Authority().write(tmp_path / "ca.crt"))
    line = refused(*LAB, "--root-certificates", ca, KEY, key, *TWO)
    assert "once per SuperNode" in line


def test_superlink_is_looked_at_before_anything_starts(refused: Refused, tmp_path: Path) -> None:
    ca = str(Authority().write(tmp_path / "ca.crt"))
    with deaf_port() as port:
        where = ("--superlink", f"127.0.0.1:{port}")
        assert "nobody listens" in refused(*where, "--insecure", *ONE)
        assert "nobody listens" in refused(*where, "--root-certificates", ca, *ONE)
    with listening() as port:
        where = ("--superlink", f"127.0.0.1:{port}")
        assert "does not speak TLS" in refused(*where, "--root-certificates", ca, *ONE)
        missing = str(tmp_path / "missing.crt")
        assert "cannot be read" in refused(*where, "--root-certificates", missing, *ONE)


def test_what_is_right_is_started(started: list[NodeLaunch]) -> None:
    with listening() as port:
        where = ("--superlink", f"127.0.0.1:{port}")
        further = ("--node-config", "site='north'", "--", "--max-retries", "3")
        assert cli.main(["supernode", *where, "--insecure", *TWO, *further]) == 0
    first, second = (node.command for node in started)
    assert first[first.index("--node-config") + 1] == (
        f"device='cpu:{CORE}' tier='fast' superlink='127.0.0.1:{port}' site='north'"
    )
    assert first[-2:] == second[-2:] == ("--max-retries", "3")
    assert first[first.index("--port") + 1] != second[second.index("--port") + 1]


def test_tls_and_keys_are_handed_on(
    started: list[NodeLaunch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority()
    authority.write(tmp_path / "ca.crt")
    write_key(tmp_path / "a")
    write_key(tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    keys = (KEY, "a", KEY, "b")
    with listening(authority.server(tmp_path, "localhost")) as port:
        where = ("--superlink", f"localhost:{port}", "--root-certificates", "ca.crt")
        assert cli.main(["supernode", *where, *keys, *TWO]) == 0
    assert [node.key for node in started] == [tmp_path / "a", tmp_path / "b"]
    for node in started:
        flag = node.command.index("--root-certificates")
        assert node.command[flag + 1] == str(tmp_path / "ca.crt")
        assert "--insecure" not in node.command
