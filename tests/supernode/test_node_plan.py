"""Worker specification in, command lines, cores and environments out: worked by hand."""

import os
import socket
import sys
from pathlib import Path

import pytest
from flwr.common.config import parse_config_args

from flower_blsgd.errors import UsageError
from flower_blsgd.runtime.devices import parse_workers, worker_from_node_config
from flower_blsgd.runtime.machine import Machine
from flower_blsgd.supernode.node_plan import (
    NodeLaunch,
    NodePlan,
    free_ports,
    launches,
    plan_nodes,
)
from flower_blsgd.supernode.superlink import SuperLinkAddress

MACHINE = Machine((0, 1, 2, 3), ("cuda:0", "cuda:1"))
LAB = SuperLinkAddress("10.0.0.7", 8100)
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def plan(specification: str, each: bool = False, name: str = "") -> list[NodePlan]:
    return plan_nodes(parse_workers(specification, MACHINE), specification, each, name)


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Put a flower-supernode beside a Python of the test's own."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    found = tmp_path / "flower-supernode"
    found.touch()
    return found


def launched(nodes: list[NodePlan], *further: str, secure: bool = False) -> list[NodeLaunch]:
    ports = range(9000, 9000 + len(nodes))
    keys = [Path(f"/tls/node-{i}") if secure else None for i in range(len(nodes))]
    root = Path("/tls/ca.crt") if secure else None
    return launches(nodes, LAB, root, keys, list(ports), {}, further)


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
    (node,) = plan(specification, name=name)
    assert node.node_config(LAB) == {**expected, "superlink": "10.0.0.7:8100"}


def test_node_reads_its_config_back_as_the_worker_that_was_meant() -> None:
    """Also where it is pinned already, and so sees its own cores only."""
    specification = "1x cpu:1-2 slow steps=3 slowdown=4 name=hare"
    ((launch,),) = [launched(plan(specification))]
    config = parse_config_args([launch.command[launch.command.index("--node-config") + 1]])
    (meant,) = parse_workers(specification, MACHINE)
    assert worker_from_node_config(config, MACHINE) == meant
    assert worker_from_node_config(config, Machine((1, 2), ())) == meant


def test_one_node_per_device() -> None:
    nodes = plan("auto", each=True)
    found = [node.node_config(LAB) for node in nodes]
    assert found == [
        {"device": "cuda:0", "tier": "fast", "superlink": "10.0.0.7:8100"},
        {"device": "cuda:1", "tier": "fast", "superlink": "10.0.0.7:8100"},
        {"device": "cpu:3", "tier": "slow", "superlink": "10.0.0.7:8100"},
    ]


def test_names() -> None:
    assert [node.name for node in plan("3x cpu", each=True, name="box")] == [
        "box-0",
        "box-1",
        "box-2",
    ]
    assert [node.name for node in plan("2x cpu name=a", each=True)] == ["a-0", "a-1"]
    assert [node.name for node in plan("cpu", each=True, name="box")] == ["box"]
    with pytest.raises(UsageError, match="--name box: the worker is named name=a already"):
        plan("cpu name=a", name="box")
    # Behind one node the workers have names of their own.
    (node,) = plan("2x cpu name=a", name="box")
    assert (node.name, node.devices) == ("box", "2x cpu name=a")


# --- cores and environment


@pytest.mark.parametrize(
    ("specification", "cores"),
    [
        ("cpu:1-2", (1, 2)),
        ("cuda:0", ()),
        ("1x cpu:3 fast; 2x cpu:0-1 slow", (0, 1, 3)),
        ("1x cuda:0; 1x cpu:3", ()),
    ],
)
def test_cores_of_a_node(specification: str, cores: tuple[int, ...]) -> None:
    (node,) = plan(specification)
    assert node.cores == cores
    assert launched([node])[0].cores == cores


def test_environment(monkeypatch: pytest.MonkeyPatch, program: Path) -> None:
    for name in (*THREADS, "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("PATH", "/usr/bin")
    gpu, cpu = (node.environment for node in launched(plan("cuda:1; cpu:0-2", each=True)))
    assert [gpu[name] for name in THREADS] == ["1", "1", "1"]
    assert [cpu[name] for name in THREADS] == ["3", "3", "3"]
    assert gpu["CUDA_VISIBLE_DEVICES"] == "0,1"  # as it was: cuda:1 stays cuda:1
    assert cpu["CUDA_VISIBLE_DEVICES"] == ""
    for found in (gpu, cpu):
        assert found["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
        assert found["PYTHONUNBUFFERED"] == "1"
        assert found["PATH"] == f"{program.parent}{os.pathsep}/usr/bin"
    ((both,),) = [launched(plan("cuda:1; cpu:0-2"))]
    assert both.environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert not any(name in both.environment for name in THREADS)


def test_environment_keeps_what_the_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", "0")
    (node,) = launched(plan("cpu"))
    assert node.environment["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "0"


# --- the command line


def test_command_line_without_tls(program: Path) -> None:
    (node,) = launched(plan("1x cuda:0 fast"), "--max-retries", "3")
    assert node.command == (
        *(str(program), "--superlink", "10.0.0.7:8100", "--insecure"),
        *("--host", "127.0.0.1", "--port", "9000"),
        *("--node-config", "device='cuda:0' tier='fast' superlink='10.0.0.7:8100'"),
        *("--max-retries", "3"),
    )


def test_command_lines_with_tls_and_keys(program: Path) -> None:
    nodes = launched(plan("2x cpu:0-1", each=True), secure=True)
    for place, node in enumerate(nodes):
        assert node.command == (
            *(str(program), "--superlink", "10.0.0.7:8100"),
            *("--root-certificates", "/tls/ca.crt"),
            *("--auth-supernode-private-key", f"/tls/node-{place}"),
            *("--host", "127.0.0.1", "--port", str(9000 + place)),
            *("--node-config", f"device='cpu:{place}' superlink='10.0.0.7:8100'"),
        )


def test_further_keys_come_behind() -> None:
    found = launches(plan("cpu:0"), LAB, None, [None], [9000], {"partition-id": 3}, [])
    assert found[0].command[-1] == "device='cpu:0' superlink='10.0.0.7:8100' partition-id=3"


def test_flower_takes_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every flag that we give is one that flower-supernode has."""
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

    (node,) = launched(plan("cpu:0"), secure=True)
    options = _parse_args_run_supernode().parse_args(node.command[1:])
    assert options.superlink == "10.0.0.7:8100"
    assert (options.host, options.port) == ("127.0.0.1", 9000)
    assert options.auth_supernode_private_key == "/tls/node-0"


def test_labels_differ() -> None:
    nodes = launched(plan("2x cuda:0; 1x cuda:1; 1x cpu:0 name=slow-one", each=True))
    assert [node.label for node in nodes] == ["cuda:0 #1", "cuda:0 #2", "cuda:1", "slow-one"]


def test_program_that_is_not_there(program: Path) -> None:
    program.unlink()
    with pytest.raises(UsageError, match="flower-supernode is not beside"):
        launched(plan("cpu"))


# --- ports


def test_free_ports_differ_and_are_free() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_free_ports_from_a_given_one_on() -> None:
    first = free_ports(1)[0]
    assert free_ports(1, first) == [first]


def test_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        with pytest.raises(UsageError, match=f"--port {taken} cannot be used .*leave --port out"):
            free_ports(1, taken)


@pytest.mark.parametrize("port", [70_000, -1])
def test_port_that_is_none_is_refused(port: int) -> None:
    with pytest.raises(UsageError, match=f"--port {port}"):
        free_ports(1, port)
