"""The command with real processes: what starts together ends together."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flower_blsgd.runtime.machine import usable_cores
from tests.runtime.processes import wait_until

from .launching import Command, command, without_colours
from .servers import listening

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="this system has no /proc"),
]

FIRST, LAST = usable_cores()[0], usable_cores()[-1]


def each(*names: str) -> tuple[str, ...]:
    spec = "; ".join(f"1x cpu:{LAST} name={name}" for name in names)
    return ("--one-node-per-device", "--workers", spec)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Somebody who answers in the SuperLink's place."""
    with listening() as port:
        yield port


def ends(started: Command) -> tuple[int, str, str]:
    code = started.process.wait(60)
    assert wait_until(lambda: not started.living()), "something is left"
    return code, *started.told()


def test_nodes_get_their_cores_threads_ports_and_configs(tmp_path: Path, port: int) -> None:
    spec = f"1x cpu:{FIRST} fast name=a; 1x cpu:{FIRST},{LAST} slow name=b"
    with command(tmp_path, port, "--one-node-per-device", "--workers", spec) as started:
        a, b = started.wait_for_nodes(2)
        assert a["cores"] == [FIRST]
        assert b["cores"] == sorted({FIRST, LAST})
        assert a["environment"]["OMP_NUM_THREADS"] == "1"
        assert b["environment"]["OMP_NUM_THREADS"] == str(len({FIRST, LAST}))
        assert a["environment"]["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
        config = f"device='cpu:{FIRST}' tier='fast' name='a' superlink='127.0.0.1:{port}'"
        assert a["arguments"][a["arguments"].index("--node-config") + 1] == config
        # The keepers keep to the cores as well, and the command itself does not.
        assert os.sched_getaffinity(os.getpgid(a["pids"][0])) == {FIRST}
        assert os.sched_getaffinity(started.process.pid) == set(usable_cores())
        assert wait_until(lambda: started.told()[0].count("and goes on") == 2)
        output = without_colours(started.told()[0])
        for name in "ab":
            assert f"SuperNode {name} is connected to 127.0.0.1:{port} (node " in output
            assert f"[{name}] and goes on" in output
        assert "Starting Flower SuperNode" not in output
        assert started.told()[1] == ""


def test_several_devices_behind_one_node(tmp_path: Path, port: int) -> None:
    spec = f"1x cpu:{FIRST} fast; 1x cpu:{LAST} slow"
    with command(tmp_path, port, "--name", "box", "--workers", spec) as started:
        (node,) = started.wait_for_nodes(1)
        config = f"devices='{spec}' name='box' superlink='127.0.0.1:{port}'"
        assert node["arguments"][node["arguments"].index("--node-config") + 1] == config
        assert node["cores"] == sorted({FIRST, LAST})


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ending_the_command_ends_all_and_waits(
    tmp_path: Path, port: int, number: signal.Signals, code: int
) -> None:
    with command(tmp_path, port, *each("a", "b")) as started:
        notes = started.wait_for_nodes(2)
        assert len(started.living()) == 1 + 2 * 3  # the command; keepers, nodes, and below them
        # As a terminal does it: the whole group of the command, of which the nodes are none.
        os.killpg(started.process.pid, number)
        found, output, errors = ends(started)
        assert found == code
        assert output.count("terminated gracefully") == len(notes)
        assert "Traceback" not in errors


def test_killing_the_command_leaves_nothing(tmp_path: Path, port: int) -> None:
    with command(tmp_path, port, *each("a", "b")) as started:
        started.wait_for_nodes(2)
        started.process.kill()
        assert started.process.wait() == -signal.SIGKILL
        assert wait_until(lambda: not started.living()), started.living()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of that")
def test_killing_a_keeper_leaves_nothing_either(tmp_path: Path, port: int) -> None:
    with command(tmp_path, port, *each("a", "b")) as started:
        node, _ = started.wait_for_nodes(2)
        keeper = _parent_of(node["pids"][0])
        os.kill(keeper, signal.SIGKILL)
        code, _, errors = ends(started)
        assert code == 1
        assert errors.startswith("blsgd: SuperNode a was killed (SIGKILL)")


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("stranger", "register it with `flwr supernode register"),
        ("keyless", "takes registered SuperNodes only"),
    ],
)
def test_node_that_is_refused_is_told_in_one_line(
    tmp_path: Path, port: int, name: str, told: str
) -> None:
    with command(tmp_path, port, *each(name, "b")) as started:
        code, output, errors = ends(started)
    assert code == 2
    assert errors.startswith(f"blsgd: SuperNode {name}: ")
    assert errors.count("\n") == 1
    assert told in errors
    assert f"[{name}]" not in output  # what the line says is not said twice


def test_node_that_fails_ends_the_others(tmp_path: Path, port: int) -> None:
    with command(tmp_path, port, *each("late-crash", "b")) as started:
        code, output, errors = ends(started)
    assert code == 1
    assert errors == (
        "blsgd: SuperNode late-crash ended with exit code 3; its last line: it broke in the "
        "middle\n"
    )
    assert "[b] SuperNode terminated gracefully." in output


def test_node_that_fails_for_an_unknown_reason_is_shown_whole(tmp_path: Path, port: int) -> None:
    with command(tmp_path, port, *each("crash")) as started:
        code, output, errors = ends(started)
    assert code == 1
    assert "ZeroDivisionError: division by zero" in errors
    assert "Starting Flower SuperNode" in output
    assert "Traceback" in output


def test_node_that_ends_well_leaves_the_others_alone(tmp_path: Path, port: int) -> None:
    with command(tmp_path, port, *each("leaves", "stays")) as started:
        assert wait_until(lambda: "SuperNode leaves has ended" in started.told()[0])
        _, stays = started.wait_for_nodes(2)
        assert stays["pids"][0] in started.living()
        os.kill(stays["pids"][0], signal.SIGTERM)
        code, _, errors = ends(started)
    assert code == 0
    assert errors == ""
