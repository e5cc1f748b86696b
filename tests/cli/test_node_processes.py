"""SuperNodes as real processes (a fake flower-supernode): started, shown and ended together."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from flower_blsgd.cli.node_processes import NodeCommand, SuperNodeEndedError, _error, _Output
from flower_blsgd.errors import UsageError
from flower_blsgd.runtime.devices import usable_cores
from tests.runtime.processes import wait_until

from .launching import Command, command, without_colours
from .servers import listening

# --- what the user sees of what a node prints

CONNECTED = "SuperNode hare is connected to lab:8100 (node 77)"


def command_of(key: str = "") -> NodeCommand:
    return NodeCommand("hare", (), (), {}, "lab:8100", Path(key) if key else None, 9001)


@pytest.mark.parametrize(("alone", "prefix"), [(False, "[hare] "), (True, "")])
def test_lines_are_shown_with_the_name_of_their_node_if_there_are_several(
    alone: bool, prefix: str
) -> None:
    shown: list[str] = []
    output = _Output(command_of(), shown.append, alone)
    lines = ["INFO: Starting", "\x1b[92mINFO \x1b[0m: SuperNode ID: 77", "INFO: [RUN 1]", ""]
    for line in lines:
        output.add(line)
    expected = [f"{prefix}{line}" for line in lines]
    assert shown == [*expected[:2], CONNECTED, *expected[2:]]


@pytest.mark.parametrize("known", [True, False])
def test_reason_is_kept_back_and_said_once_if_it_is_known(known: bool) -> None:
    shown: list[str] = []
    output = _Output(command_of(), shown.append, alone=False)
    code = "[code: 2001] All SuperNodes must be registered" if known else "out of paper"
    lines = ["\x1b[91mERROR \x1b[0m:   Exit Code: 305", code, "shutting down", "a traceback"]
    for line in ("at work", *lines, *["what is ended with it"] * 99):
        output.add(line)
    assert shown == ["[hare] at work"]
    assert isinstance(output.error(1), UsageError if known else SuperNodeEndedError)
    reason = ["ERROR :   Exit Code: 305", *lines[1:]]
    assert shown[1:] == ([] if known else [f"[hare] {line}" for line in reason])


# --- why a node ended


@pytest.mark.parametrize(
    ("code", "lines", "expected"),
    [
        (
            1,
            ("ERROR :     Exit Code: 305", "[code: 2004] Failed to"),
            "flwr supernode register /k/node-1.pub NAME",
        ),
        (
            1,
            ("[code: 2001] SuperNodes must be registered via the CLI",),
            "--auth-supernode-private-key KEY",
        ),
        (
            2,
            ("usage: ...", "flower-supernode: error: unrecognized arguments: --colour"),
            "SuperNode hare: flower-supernode: unrecognized arguments: --colour",
        ),
        (1, ("ERROR: [Errno 98] bind on address: address already in use",), "port 9001"),
    ],
)
def test_mistake_of_the_user_is_explained(code: int, lines: tuple[str, ...], expected: str) -> None:
    reason = _error(command_of("/k/node-1"), code, lines)
    assert isinstance(reason, UsageError)
    assert "\n" not in str(reason)
    assert str(reason).startswith("SuperNode hare")
    assert expected in str(reason)


@pytest.mark.parametrize(
    ("code", "how"),
    [
        (3, "ended with exit code 3"),
        (-9, "was killed (SIGKILL)"),
        (250, "ended with exit code 250"),
    ],
)
def test_other_ends_are_described(code: int, how: str) -> None:
    reason = _error(command_of(), code, ["first", "  ValueError: no", "", " "])
    assert isinstance(reason, SuperNodeEndedError)
    assert str(reason) == f"SuperNode hare {how}; its last line: ValueError: no"
    assert str(_error(command_of(), code, [])) == f"SuperNode hare {how}"


# --- real processes

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
        assert b["environment"]["OMP_NUM_THREADS"] == str(len({FIRST, LAST}))
        assert a["environment"]["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
        config = f"device='cpu:{FIRST}' tier='fast' name='a' superlink='127.0.0.1:{port}'"
        assert a["arguments"][a["arguments"].index("--node-config") + 1] == config
        assert os.sched_getaffinity(started.process.pid) == set(usable_cores())
        assert wait_until(lambda: started.printed()[0].count("and goes on") == 2)
        output = without_colours(started.printed()[0])
        for name in "ab":
            assert f"SuperNode {name} is connected to 127.0.0.1:{port} (node " in output
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
    assert "Traceback" not in errors


def test_killing_the_command_leaves_nothing(tmp_path: Path, port: int) -> None:
    with command(tmp_path, port, *each("a", "b")) as started:
        started.wait_for_nodes(2)
        started.process.kill()
        assert started.process.wait() == -signal.SIGKILL
        assert wait_until(lambda: not started.living()), started.living()


def test_node_that_is_refused_is_one_line_and_ends_the_others(tmp_path: Path, port: int) -> None:
    with command(tmp_path, port, *each("stranger", "b")) as started:
        code, output, errors = ends(started)
    assert code == 2
    assert errors.startswith("blsgd: SuperNode stranger: ")
    assert errors.count("\n") == 1
    assert "register it with `flwr supernode register" in errors
    assert "[code: 2004]" not in output  # what the line says is not said twice


def test_node_that_fails_ends_the_others(tmp_path: Path, port: int) -> None:
    with command(tmp_path, port, *each("late-crash", "b")) as started:
        code, output, errors = ends(started)
    assert code == 1
    assert errors == (
        "blsgd: SuperNode late-crash ended with exit code 3; its last line: it broke in the "
        "middle\n"
    )
    assert "[b] SuperNode terminated gracefully." in output


def test_node_that_ends_well_leaves_the_others_alone(tmp_path: Path, port: int) -> None:
    with command(tmp_path, port, *each("leaves", "stays")) as started:
        assert wait_until(lambda: "SuperNode leaves has ended" in started.printed()[0])
        _, stays = started.wait_for_nodes(2)
        assert stays["pids"][0] in started.living()
        os.kill(stays["pids"][0], signal.SIGTERM)
        code, _, errors = ends(started)
    assert code == 0
    assert errors == ""
