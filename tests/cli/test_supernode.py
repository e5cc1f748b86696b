"""``blsgd supernode``: workers in, SuperNode commands out; every mistake is one line."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from flwr.common.config import parse_config_args
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.cli import main as cli
from flower_blsgd.cli.node_processes import NodeCommand
from flower_blsgd.cli.superlink import SuperLinkAddress
from flower_blsgd.cli.supernode import (
    Value,
    check_keys,
    free_ports,
    node_commands,
    node_config_text,
    read_node_config,
)
from flower_blsgd.errors import UsageError
from flower_blsgd.runtime.devices import (
    Machine,
    parse_workers,
    usable_cores,
    worker_from_node_config,
)

from .conftest import Refused
from .servers import Authority, deaf_port, listening, write_key

MACHINE = Machine((0, 1, 2, 3), ("cuda:0", "cuda:1"))
LAB = SuperLinkAddress("10.0.0.7", 8100)
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Put a flower-supernode beside a Python of the test's own."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    found = tmp_path / "flower-supernode"
    found.touch()
    return found


def launched(
    specification: str, *further: str, each: bool = False, name: str = "", secure: bool = False
) -> list[NodeCommand]:
    workers = parse_workers(specification, MACHINE)
    devices = "" if each or len(workers) == 1 else specification
    count = 1 if devices else len(workers)
    keys = [Path(f"/tls/node-{i}") if secure else None for i in range(count)]
    root = Path("/tls/ca.crt") if secure else None
    ports = range(9000, 9000 + count)
    return node_commands(workers, devices, name, LAB, root, keys, ports, {}, further)


def config_of(node: NodeCommand) -> dict[str, Value]:
    """Return the node config of a command as Flower reads it."""
    return parse_config_args([node.command[node.command.index("--node-config") + 1]])


# --- the node config


@pytest.mark.parametrize(
    ("specification", "name", "expected"),
    [
        ("1x cuda:1 fast", "", {"device": "cuda:1", "tier": "fast"}),
        (
            "1x cpu:1-2 slow steps=3 slowdown=4 name=hare",
            "",
            {"device": "cpu:1-2", "tier": "slow", "steps": 3, "slowdown": 4.0, "name": "hare"},
        ),
        ("cpu", "tortoise", {"device": "cpu:0-3", "name": "tortoise"}),
        (
            "1x cpu:0 seconds-per-step=0.5",
            "",
            {"device": "cpu:0", "seconds-per-step": 0.5},
        ),
        ("4x cuda:0;\n  2x  cpu", "", {"devices": "4x cuda:0; 2x cpu"}),
        ("auto", "host", {"devices": "auto", "name": "host"}),
    ],
)
def test_node_config_of_one_node(
    specification: str, name: str, expected: dict[str, object]
) -> None:
    (node,) = launched(specification, name=name)
    assert config_of(node) == {**expected, "superlink": "10.0.0.7:8100"}


def test_node_reads_its_config_back_as_the_worker_that_was_meant() -> None:
    """Also where it is pinned already, and so sees its own cores only."""
    specification = "1x cpu:1-2 slow steps=3 slowdown=4 name=hare"
    (node,) = launched(specification)
    (meant,) = parse_workers(specification, MACHINE)
    assert worker_from_node_config(config_of(node), MACHINE) == meant
    assert worker_from_node_config(config_of(node), Machine((1, 2), ())) == meant


def test_nodes_for_each_device_have_names_labels_and_cores(program: Path) -> None:
    nodes = launched("auto", each=True, name="box")
    assert [config_of(node) for node in nodes] == [
        {"device": device, "tier": tier, "name": f"box-{i}", "superlink": "10.0.0.7:8100"}
        for i, (device, tier) in enumerate(
            [("cuda:0", "fast"), ("cuda:1", "fast"), ("cpu:3", "slow")]
        )
    ]
    assert [(node.label, node.cores) for node in nodes] == [
        *(("box-0", ()), ("box-1", ()), ("box-2", (3,)))
    ]
    nodes = launched("2x cuda:0; 1x cuda:1; 1x cpu:0 name=own", each=True)
    assert [node.label for node in nodes] == ["cuda:0 #1", "cuda:0 #2", "cuda:1", "own"]
    with pytest.raises(UsageError, match="--name box: the worker is named name=a already"):
        launched("cpu name=a", name="box")
    (both,) = launched("1x cpu:3 fast; 2x cpu:0-1 slow", name="box")
    assert both.cores == (0, 1, 3)
    program.unlink()
    with pytest.raises(UsageError, match="flower-supernode is not beside"):
        launched("cpu")


def test_environment(monkeypatch: pytest.MonkeyPatch, program: Path) -> None:
    for name in (*THREADS, "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("PATH", "/usr/bin")
    gpu, cpu = (node.environment for node in launched("cuda:1; cpu:0-2", each=True))
    assert [gpu[name] for name in THREADS] == ["1", "1", "1"]
    assert [cpu[name] for name in THREADS] == ["3", "3", "3"]
    assert gpu["CUDA_VISIBLE_DEVICES"] == "0,1"  # as it was: cuda:1 stays cuda:1
    assert cpu["CUDA_VISIBLE_DEVICES"] == ""
    for found in (gpu, cpu):
        assert found["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
        assert found["PYTHONUNBUFFERED"] == "1"
        assert found["PATH"] == f"{program.parent}{os.pathsep}/usr/bin"
    monkeypatch.setenv("FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", "0")
    (both,) = launched("cuda:1; cpu:0-2")
    assert both.environment["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "0"  # the user's
    assert both.environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert not any(name in both.environment for name in THREADS)


# --- the command line


def test_command_lines_with_tls_and_keys_are_as_flower_reads_them(program: Path) -> None:
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

    nodes = launched("2x cpu:0-1", "--max-retries", "3", each=True, secure=True)
    for i, node in enumerate(nodes):
        assert node.command == (
            *(str(program), "--superlink", "10.0.0.7:8100"),
            *("--root-certificates", "/tls/ca.crt"),
            *("--auth-supernode-private-key", f"/tls/node-{i}"),
            *("--host", "127.0.0.1", "--port", str(9000 + i)),
            *("--node-config", f"device='cpu:{i}' superlink='10.0.0.7:8100'"),
            *("--max-retries", "3"),
        )
        options = _parse_args_run_supernode().parse_args(node.command[1:])
        assert options.superlink == "10.0.0.7:8100"
        assert (options.host, options.port) == ("127.0.0.1", 9000 + i)
        assert options.auth_supernode_private_key == f"/tls/node-{i}"


# --- ports and keys


def test_ports_are_free_and_differ_or_are_refused() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    assert free_ports(1, ports[0]) == [ports[0]]
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        for port in (taken, 70_000, -1):
            with pytest.raises(UsageError, match=f"--port {port} cannot be used .*leave --port"):
                free_ports(1, port)


def test_each_node_has_its_key_and_what_is_none_is_refused(tmp_path: Path) -> None:
    one, two = write_key(tmp_path / "node-1"), write_key(tmp_path / "node-2")
    assert check_keys([two, one], 2) == [two, one]
    assert check_keys([], 3) == [None, None, None]
    locked, edwards = tmp_path / "locked", tmp_path / "edwards"
    make = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "secret", "-f", locked]
    subprocess.run(make, check=True)
    private = ed25519.Ed25519PrivateKey.generate()
    edwards.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    copied = tmp_path / "copied"
    copied.write_bytes(one.read_bytes())
    cases = [
        ([one, two], 1, "2 --auth-supernode-private-key for 1 SuperNode; give it once per"),
        ([one, two], 3, "2 --auth-supernode-private-key for 3 SuperNodes"),
        ([one, copied], 2, f"{copied} is the key of {one}"),
        ([tmp_path / "missing"], 1, "cannot be read"),
        ([one.with_suffix(".pub")], 1, "is no OpenSSH private key"),
        ([locked], 1, "without a password"),
        ([edwards], 1, "is not on an elliptic curve; make one with ssh-keygen"),
    ]
    for paths, num_nodes, expected in cases:
        with pytest.raises(UsageError, match=re.escape(expected)) as refused:
            check_keys(paths, num_nodes)
        assert "\n" not in str(refused.value)


# --- the text of a node config


texts = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S", "Zs"]), max_size=20)
values = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), texts) | st.floats(
    allow_nan=False, allow_infinity=False
)


@given(st.dictionaries(st.from_regex(r"[a-z][a-z-]{0,9}", fullmatch=True), values, min_size=1))
def test_what_is_written_is_read_by_flower_or_refused(config: dict[str, Value]) -> None:
    try:
        text = node_config_text(config)
    except UsageError:
        assert any(
            isinstance(v, str) and (not v.isprintable() or ("'" in v and '"' in v))
            for v in config.values()
        )
    else:
        found = parse_config_args([text])
        assert found == config
        assert [type(value) for value in found.values()] == [type(v) for v in config.values()]


def test_further_keys() -> None:
    text = "partition-id=3 site='north west' weight=0.5 spare=false"
    expected = {"partition-id": 3, "site": "north west", "weight": 0.5, "spare": False}
    assert read_node_config(text) == expected
    assert read_node_config("") == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("partition-id", "cannot be read"),
        ("site=north", "with texts in quotes"),
        ("a=1 b", "cannot be read"),
        ("a=1 a=2", "cannot be read"),
        ("device='cpu'", "--node-config device"),
        ("ids=[1,2]", "--node-config ids"),
    ],
)
def test_further_keys_that_are_none(text: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected) as refused:
        read_node_config(text)
    assert "\n" not in str(refused.value)


# --- the command

CORE = usable_cores()[0]
ONE = ("--workers", f"1x cpu:{CORE} fast")
TWO = ("--workers", f"1x cpu:{CORE} fast; 1x cpu:{CORE} slow", "--one-node-per-device")
AT = ("--superlink", "127.0.0.1:1")
KEY = "--auth-supernode-private-key"


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for scheme in ("http", "https", "all"):
        for name in (f"{scheme}_proxy", f"{scheme}_proxy".upper()):
            monkeypatch.delenv(name, raising=False)


@pytest.fixture
def started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[NodeCommand]:
    """Return the commands that would be started; nothing is."""
    found: list[NodeCommand] = []
    monkeypatch.setattr(
        "flower_blsgd.cli.supernode.run_nodes", lambda commands, show: found.extend(commands)
    )
    return found


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--superlink", "http://lab:8100", "--insecure"), "must be HOST:PORT"),
        (AT, "give --root-certificates FILE"),
        ((*AT, "--insecure", "--root-certificates", "ca.crt"), "exclude each other"),
        ((*AT, "--insecure", KEY, "key"), "needs TLS, but --insecure is given"),
        ((*AT, "--insecure", "spare"), "spare is no flag of blsgd supernode"),
        ((*AT, "--insecure", "--", "--port", "1"), "--port comes before --"),
        ((*AT, "--insecure", "--", "--node-config=a=1"), "--node-config comes before --"),
        ((*AT, "--insecure", "--colour"), "--colour"),
        ((*AT, "--insecure", "--node-config", "device='cpu'"), "--node-config device"),
        ((*AT, "--insecure", "--workers", "1x cpu quick"), '"quick" at character 8'),
        ((*AT, "--insecure", "--workers", "cuda:7"), "device cuda:7 is not there"),
        ((*AT, "--insecure", "--workers", "cpu:4095"), "core 4095"),
        ((*AT, "--insecure", *TWO, "--name", 'it\'s "a"'), "quotes of one kind"),
        ((*AT, "--insecure", *ONE, "--port", "70000"), "--port 70000"),
        ((*AT, "--insecure", *ONE, "--port", "http"), "--port"),
        ((*AT, "--insecure", *ONE), "no SuperLink at 127.0.0.1:1"),
    ],
)
def test_mistake_is_refused_in_one_line(
    refused: Refused, arguments: tuple[str, ...], expected: str
) -> None:
    assert expected in refused("supernode", *arguments)


def test_superlink_and_keys_are_looked_at_before_anything_starts(
    refused: Refused, tmp_path: Path
) -> None:
    ca = str(Authority().write(tmp_path / "ca.crt"))
    key = str(write_key(tmp_path / "node"))
    line = refused("supernode", *AT, "--root-certificates", ca, KEY, key, *TWO)
    assert "once per SuperNode" in line
    with deaf_port() as port:
        where = ("--superlink", f"127.0.0.1:{port}")
        assert "connection refused" in refused("supernode", *where, "--root-certificates", ca, *ONE)
    with listening() as port:
        where = ("--superlink", f"127.0.0.1:{port}")
        assert "does not speak TLS" in refused("supernode", *where, "--root-certificates", ca, *ONE)


def test_what_is_right_is_started(started: list[NodeCommand]) -> None:
    with listening() as port:
        where = ("--superlink", f"127.0.0.1:{port}")
        further = ("--node-config", "site='north'", "--", "--max-retries", "3")
        assert cli.main(["supernode", *where, "--insecure", *TWO, *further]) == 0
    first, second = (node.command for node in started)
    assert "--insecure" in first
    assert first[first.index("--node-config") + 1] == (
        f"device='cpu:{CORE}' tier='fast' superlink='127.0.0.1:{port}' site='north'"
    )
    assert first[-2:] == second[-2:] == ("--max-retries", "3")
    assert first[first.index("--port") + 1] != second[second.index("--port") + 1]


def test_tls_and_keys_are_handed_on(started: list[NodeCommand], tmp_path: Path) -> None:
    authority = Authority()
    authority.write(tmp_path / "ca.crt")
    keys = [write_key(tmp_path / name) for name in ("a", "b")]
    with listening(authority.server(tmp_path, "localhost")) as port:
        where = ("--superlink", f"localhost:{port}", "--root-certificates", "ca.crt")
        assert cli.main(["supernode", *where, KEY, "a", KEY, "b", *TWO]) == 0
    assert [node.key for node in started] == keys
    for node in started:
        flag = node.command.index("--root-certificates")
        assert node.command[flag + 1] == str(tmp_path / "ca.crt")
        assert "--insecure" not in node.command
