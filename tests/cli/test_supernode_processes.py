"""SuperNodes as real processes (a fake flower-supernode): started, shown and ended together."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from flower_blsgd.grids.machine import usable_cores
from tests.grids.processes import wait_until

from .launching import Command, command
from .servers import listening

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="this system has no /proc"
)
FIRST, LAST = usable_cores()[0], usable_cores()[-1]


def each(*names: str) -> tuple[str, ...]:
    spec = "; ".join(f"1x cpu:{LAST} name={name}" for name in names)
    return ("--one-node-per-device", "--workers", spec)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Return the port of a server that answers as a SuperLink does."""
    with listening() as port:
        yield port


def ends(started: Command) -> tuple[int, str, str]:
    code = started.process.wait(60)
    assert wait_until(lambda: not started.living()), "something is left"
    return code, *started.printed()


def test_nodes_get_their_cores_threads_and_configs_and_ctrl_c_ends_them(
    tmp_path: Path, port: int
) -> None:
    spec = f"1x cpu:{FIRST} fast name=a; 1x cpu:{FIRST},{LAST} slow name=b"
    with command(tmp_path, port, "--one-node-per-device", "--workers", spec) as started:
        a, b = started.wait_for_nodes(2)
        assert a["cores"] == [FIRST]
        assert b["cores"] == sorted({FIRST, LAST})
        assert a["environment"]["OMP_NUM_THREADS"] == "1"
        config = f"device='cpu:{FIRST}' tier='fast' name='a' superlink='127.0.0.1:{port}'"
        assert a["arguments"][a["arguments"].index("--node-config") + 1] == config
        assert os.sched_getaffinity(started.process.pid) == set(usable_cores())
        assert wait_until(lambda: started.printed()[0].count("and goes on") == 2)
        output = started.printed()[0]
        for name in "ab":
            assert f"[{name}] flower-supernode --superlink 127.0.0.1:{port} --insecure" in output
            assert f"[{name}] and goes on" in output
        assert started.printed()[1] == ""
        assert len(started.living()) == 1 + 2 * 2  # the command; nodes, and below them
        # As a terminal does it: the whole group of the command, of which the nodes are none.
        os.killpg(started.process.pid, signal.SIGINT)
        code, output, errors = ends(started)
    assert code == 130
    assert output.count("terminated gracefully") == 2
    assert "Traceback" not in errors


def test_one_node_with_several_devices_is_ended_by_sigterm(tmp_path: Path, port: int) -> None:
    spec = f"1x cpu:{FIRST} fast; 1x cpu:{LAST} slow"
    with command(tmp_path, port, "--name", "box", "--workers", spec) as started:
        (node,) = started.wait_for_nodes(1)
        config = f"devices='{spec}' name='box' superlink='127.0.0.1:{port}'"
        assert node["arguments"][node["arguments"].index("--node-config") + 1] == config
        assert node["cores"] == sorted({FIRST, LAST})
        os.killpg(started.process.pid, signal.SIGTERM)
        code, output, errors = ends(started)
    assert code == 143
    assert output.count("terminated gracefully") == 1
    assert "[" not in output.splitlines()[-1]  # one node's lines are as they are
    assert "Traceback" not in errors


def test_killing_the_command_leaves_nothing(tmp_path: Path, port: int) -> None:
    with command(tmp_path, port, *each("a", "b")) as started:
        started.wait_for_nodes(2)
        started.process.kill()
        assert started.process.wait() == -signal.SIGKILL
        assert wait_until(lambda: not started.living()), started.living()


@pytest.mark.parametrize(
    ("name", "code", "expected"),
    [
        ("stranger", 2, "register it with `flwr supernode register KEY.pub NAME`"),
        ("crash", 1, "SuperNode crash ended with exit code 3; see the output above"),
    ],
)
def test_node_that_fails_is_one_line_and_ends_the_others(
    tmp_path: Path, port: int, name: str, code: int, expected: str
) -> None:
    with command(tmp_path, port, *each(name, "b")) as started:
        found, output, errors = ends(started)
    assert found == code
    assert errors.startswith(f"blsgd: SuperNode {name}")
    assert errors.count("\n") == 1
    assert expected in errors
    assert f"[{name}] it says why" in output
    assert name != "crash" or "[crash] and tidies up" in output, "it is given time to end"


def test_node_that_ends_well_leaves_the_others_alone(tmp_path: Path, port: int) -> None:
    with command(tmp_path, port, *each("leaves", "stays")) as started:
        assert wait_until(lambda: "SuperNode leaves has ended" in started.printed()[0])
        _, stays = started.wait_for_nodes(2)
        assert stays["pids"][0] in started.living()
        os.kill(stays["pids"][0], signal.SIGTERM)
        code, _, errors = ends(started)
    assert code == 0
    assert errors == ""
