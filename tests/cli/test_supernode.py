"""``blsgd supernode``: workers in, SuperNode commands out; every mistake is one line."""

import os
import sys
from pathlib import Path

import pytest
from flwr.common.config import parse_config_args
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.cli.main import _parser
from flower_blsgd.cli.supernode import (
    NodeCommand,
    check_superlink,
    node_commands,
    node_config_text,
)
from flower_blsgd.devices.machine import Machine, usable_cores
from flower_blsgd.devices.worker_spec import parse_workers
from flower_blsgd.errors import UsageError

from ..refusal import refusal
from .conftest import Refused
from .servers import listening, make_certificate

MACHINE = Machine((0, 1, 2, 3), ("cuda:0", "cuda:1"))
LAB = ("supernode", "--superlink", "10.0.0.7:8100")
KEY = "--auth-supernode-private-key"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
CORE = usable_cores()[0]
ONE = ("--workers", f"1x cpu:{CORE} fast")
TWO = ("--workers", f"1x cpu:{CORE} fast; 1x cpu:{CORE} slow", "--one-node-per-device")


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for scheme in ("http", "https", "all", "no"):
        for name in (f"{scheme}_proxy", f"{scheme}_proxy".upper()):
            monkeypatch.delenv(name, raising=False)


def launched(workers: str, *arguments: str, secure: tuple[str, ...] = ()) -> list[NodeCommand]:
    command = [*LAB, *(secure or ["--insecure"]), "--workers", workers, *arguments]
    options = _parser(command).parse_args(command)
    return node_commands(options, parse_workers(workers, MACHINE))


def config_of(node: NodeCommand) -> dict[str, bool | float | int | str]:
    """Return the node config of a command as Flower reads it."""
    return parse_config_args([node.arguments[node.arguments.index("--node-config") + 1]])


# --- what is started


@pytest.mark.parametrize(
    ("specification", "further", "expected"),
    [
        ("1x cuda:1 fast", [], {"device": "cuda:1", "tier": "fast"}),
        (
            "1x cpu:1-2 slow steps=3 slowdown=4 name=hare",
            ["--name", "other"],  # its own name is nearer
            {"device": "cpu:1-2", "tier": "slow", "steps": 3, "slowdown": 4.0, "name": "hare"},
        ),
        (
            "cpu seconds-per-step=0.5",
            ["--name", "tortoise", "--node-config", "partition-id=3 site='north west'"],
            {
                **{"device": "cpu:0-3", "seconds-per-step": 0.5, "name": "tortoise"},
                **{"partition-id": 3, "site": "north west"},
            },
        ),
        ("4x cuda:0;\n  2x  cpu", [], {"devices": "4x cuda:0; 2x cpu"}),
    ],
)
def test_node_config_of_one_node(
    specification: str, further: list[str], expected: dict[str, object]
) -> None:
    (node,) = launched(specification, *further)
    assert config_of(node) == {**expected, "superlink": "10.0.0.7:8100"}


def test_nodes_for_each_device_have_names_labels_and_cores() -> None:
    nodes = launched("auto", "--one-node-per-device", "--name", "box")
    assert [config_of(node) for node in nodes] == [
        {"device": device, **role, "name": f"box-{i}", "superlink": "10.0.0.7:8100"}
        for i, (device, role) in enumerate(
            [("cuda:0", {}), ("cuda:1", {}), ("cpu:3", {"role": "evaluate"})]
        )
    ]
    assert [(node.label, node.cores) for node in nodes] == [
        *(("box-0", ()), ("box-1", ()), ("box-2", (3,)))
    ]
    nodes = launched("1x cuda:1; 1x cpu:0 name=own", "--one-node-per-device")
    assert [node.label for node in nodes] == ["0", "own"]
    (both,) = launched("1x cpu:3 fast; 2x cpu:0-1 slow", "--name", "box")
    assert both.cores == (0, 1, 3)


def test_worker_that_evaluates_and_those_beside_it_have_nodes_of_their_own() -> None:
    nodes = launched("2x cuda:0; 1x cpu:0 role=evaluate")
    roles = [(config_of(node)["device"], config_of(node).get("role")) for node in nodes]
    assert roles == [("cuda:0", None), ("cuda:0", None), ("cpu:0", "evaluate")]
    together, apart = (config_of(node) for node in launched("auto", "--name", "host"))
    assert (together["devices"], together["name"]) == ("auto", "host-0")
    assert (apart["device"], apart["role"], apart["name"]) == ("cpu:3", "evaluate", "host-1")


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*THREADS, "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("PATH", "/usr/bin")
    gpu, cpu = (node.environment for node in launched("cuda:1; cpu:0-2", "--one-node-per-device"))
    assert [gpu[name] for name in THREADS] == ["1", "1", "1"]
    assert [cpu[name] for name in THREADS] == ["3", "3", "3"]
    assert gpu["CUDA_VISIBLE_DEVICES"] == "0,1"  # as it was: cuda:1 stays cuda:1
    assert cpu["CUDA_VISIBLE_DEVICES"] == ""
    for found in (gpu, cpu):
        assert found["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
        assert found["PYTHONUNBUFFERED"] == "1"
        assert found["PATH"] == f"{Path(sys.executable).parent}{os.pathsep}/usr/bin"
    monkeypatch.setenv("FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", "0")
    (both,) = launched("cuda:1; cpu:0-2")
    assert both.environment["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "0"  # the user's
    assert both.environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert not any(name in both.environment for name in THREADS)


def test_command_lines_with_tls_and_keys_are_as_flower_reads_them(tmp_path: Path) -> None:
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

    ca, *keys = (str(tmp_path / name) for name in ("ca.crt", "node-0", "node-1"))
    for path in (ca, *keys):
        Path(path).touch()
    further = (KEY, keys[0], KEY, keys[1], "--", "--max-retries", "3")
    secure = ("--root-certificates", ca)
    nodes = launched("2x cpu:0-1", "--one-node-per-device", *further, secure=secure)
    ports = [node.arguments[node.arguments.index("--port") + 1] for node in nodes]
    assert len(set(ports)) == 2
    for i, node in enumerate(nodes):
        assert node.arguments == (
            *("flower-supernode", "--superlink", "10.0.0.7:8100", "--root-certificates", ca),
            *(KEY, keys[i], "--host", "127.0.0.1", "--port", ports[i]),
            *("--node-config", f"device='cpu:{i}' superlink='10.0.0.7:8100'"),
            *("--max-retries", "3"),
        )
        options = _parse_args_run_supernode().parse_args(node.arguments[1:])
        assert options.superlink == "10.0.0.7:8100"
        assert (options.host, options.port) == ("127.0.0.1", int(ports[i]))
        assert options.auth_supernode_private_key == keys[i]


texts = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S", "Zs"]), max_size=20)
values = st.one_of(st.integers(-(2**63), 2**63 - 1), texts) | st.floats(
    allow_nan=False, allow_infinity=False
)


@given(st.dictionaries(st.from_regex(r"[a-z][a-z-]{0,9}", fullmatch=True), values, min_size=1))
def test_node_config_is_read_by_flower_or_refused(config: dict[str, object]) -> None:
    try:
        text = node_config_text(config)
    except UsageError:
        assert any(
            isinstance(v, str) and (not v.isprintable() or "'" in v) for v in config.values()
        )
    else:
        found = parse_config_args([text])
        assert found == config
        assert [type(value) for value in found.values()] == [type(v) for v in config.values()]


# --- what is refused

AT = ("--superlink", "127.0.0.1:1")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (AT, "--root-certificates --insecure is required"),
        ((*AT, "--insecure", "--root-certificates", __file__), "not allowed with argument"),
        ((*AT, "--root-certificates", "ca.crt"), "ca.crt is not a file"),
        ((*AT, "--insecure", KEY, "key"), "key is not a file"),
        ((*AT, "--insecure", KEY, __file__, *TWO), f"1 {KEY} for 2 SuperNodes; give it once per"),
        ((*AT, "--insecure", "--colour"), "--colour"),
        ((*AT, "--insecure", "--workers", "1x cpu quick"), '"quick" at character 8'),
        ((*AT, "--insecure", *TWO, "--name", "it's"), "leave out quotes, and in a path"),
        ((*AT, "--insecure", *ONE), "no SuperLink answers at http://127.0.0.1:1/"),
        (("--superlink", "http://lab:8100", "--insecure", *ONE), "check HOST:PORT"),
    ],
)
def test_mistake_is_refused_in_one_line(
    refused: Refused, arguments: tuple[str, ...], expected: str
) -> None:
    assert expected in refused("supernode", *arguments)


def test_superlink_without_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ca, context = make_certificate(tmp_path)
    with listening() as port:
        check_superlink(f"127.0.0.1:{port}", None)
        line = refusal(check_superlink, f"127.0.0.1:{port}", ca)
        assert "SSL" in line
        assert "--insecure if it has no certificate" in line
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")  # which reaches it
        check_superlink("superlink.example:8100", None)
        monkeypatch.delenv("http_proxy")
    for server in (listening(answer=b"SSH-2.0-OpenSSH_9.6\r\n"), listening(context)):
        with server as port:
            line = refusal(check_superlink, f"127.0.0.1:{port}", None)
            assert "else --root-certificates FILE" in line


def test_superlink_with_tls_is_verified(tmp_path: Path) -> None:
    ca, context = make_certificate(tmp_path)
    with listening(context) as port:
        check_superlink(f"127.0.0.1:{port}", ca)
        other, _ = make_certificate(tmp_path)
        line = refusal(check_superlink, f"127.0.0.1:{port}", other)
        assert "CERTIFICATE_VERIFY_FAILED" in line
    ca, context = make_certificate(tmp_path, "10.0.0.1")
    with listening(context) as port:
        line = refusal(check_superlink, f"127.0.0.1:{port}", ca)
        assert "certificate is not valid for '127.0.0.1'" in line
    ca.write_text("no certificate")
    assert f"--root-certificates {ca} cannot be used" in refusal(check_superlink, "lab:1", ca)


def test_script_is_the_worker_of_one_node_per_device(tmp_path: Path) -> None:
    script, notebook = tmp_path / "train.py", tmp_path / "train.ipynb"
    script.touch()
    notebook.touch()
    given = "partition-id=3 my-partition-id=1"
    further = ("--script", f"{script} --lr 0.1", "--node-config", given)
    nodes = [config_of(node) for node in launched("1x cpu:0; 1x cpu:1", *further)]
    assert [(node["device"], node["partition-id"], node["my-partition-id"]) for node in nodes] == [
        ("cpu:0", 3, 1),
        ("cpu:1", 4, 1),
    ]
    assert {node["script"] for node in nodes} == {f"{script} --lr 0.1"}
    line = refusal(launched, "1x cpu:0", "--script", "none.py")
    assert line == f"script '{Path('none.py').absolute()}' is not a file"
    assert "is a notebook" in refusal(launched, "1x cpu:0", "--script", str(notebook))
    line = refusal(launched, "1x cpu:0 precision=tf32", "--script", str(script))
    assert line == "workers: precision=tf32: a script decides this itself"
    line = refusal(launched, "1x cpu:0", "--script", "train.py --name it's")
    assert line.endswith("No closing quotation; write 'SCRIPT ARGUMENTS'")
    assert refusal(launched, "1x cpu:0", "--script", " ").endswith("is not a file")
    (node,) = launched("1x cpu:0", "--script", "-m json.tool x")
    assert config_of(node)["script"] == "-m json.tool x"
