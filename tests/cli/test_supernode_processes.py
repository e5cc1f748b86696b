"""SuperNodes as real processes (a fake flower-supernode): started, shown and ended together."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flower_blsgd.devices.machine import usable_cores
from tests.grids.processes import living, wait_until

from .servers import listening

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="this system has no /proc"
)
FIRST, LAST = usable_cores()[0], usable_cores()[-1]


ROOT = Path(__file__).parents[2]
MARKER = "BLSGD_SUPERNODE_TEST"

_FAKE = Path(__file__).with_name("fake_supernode.py")
_START = """
import sys
sys.executable = sys.argv.pop(1)
from flower_blsgd.cli.main import main
sys.exit(main())
"""


class Command:
    """``blsgd supernode`` with the fake program beside its Python, started as a user would."""

    def __init__(self, folder: Path, port: int, *arguments: str) -> None:
        self.marker, self.folder = uuid.uuid4().hex, folder
        self.errors = (folder / "errors").open("w+")
        self.output = (folder / "output").open("w+")
        python = _fake_environment(folder / "bin")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-c", _START, python, "supernode", "--insecure"),
                *("--superlink", f"127.0.0.1:{port}", *arguments),
            ],
            cwd=folder,
            env={
                **{k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")},
                "PYTHONPATH": str(ROOT),
                "FAKE_FOLDER": str(folder),
                MARKER: self.marker,
            },
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.errors,
            start_new_session=True,
        )

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_: object) -> None:
        """Kill whatever is left."""
        for pid in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.errors.close()
        self.output.close()

    def notes(self) -> list[dict[str, Any]]:
        """Return what each SuperNode that runs was given, in the order of their names."""
        notes = [json.loads(path.read_text()) for path in self.folder.glob("*.json")]
        return sorted(notes, key=lambda note: str(note["name"]))

    def wait_for_nodes(self, count: int) -> list[dict[str, Any]]:
        assert wait_until(lambda: len(self.notes()) == count), self.printed()
        return self.notes()

    def printed(self) -> tuple[str, str]:
        """Return stdout and stderr so far."""
        return (self.folder / "output").read_text(), (self.folder / "errors").read_text()

    def living(self) -> list[int]:
        """Return the living processes that inherited the command's environment."""
        return living(f"{MARKER}={self.marker}")


def _fake_environment(folder: Path) -> Path:
    """Return a Python with the fake program beside it."""
    folder.mkdir()
    python = folder / "python"
    python.symlink_to(Path(sys.executable).resolve())
    program = folder / "flower-supernode"
    shutil.copy(_FAKE, program)
    program.write_text(f"#!{sys.executable}\n{program.read_text()}")
    program.chmod(0o755)
    return python


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
    with Command(tmp_path, port, "--one-node-per-device", "--workers", spec) as started:
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
    with Command(tmp_path, port, "--workers", spec) as started:
        (node,) = started.wait_for_nodes(1)
        assert node["cores"] == sorted({FIRST, LAST})
        os.killpg(started.process.pid, signal.SIGTERM)
        code, output, _ = ends(started)
    assert code == 143
    assert output.splitlines()[-1] == "SuperNode terminated gracefully."  # without a label


def test_killing_the_command_leaves_nothing(tmp_path: Path, port: int) -> None:
    with Command(tmp_path, port, *each("a", "b")) as started:
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
    with Command(tmp_path, port, *each(name, "b")) as started:
        found, output, errors = ends(started)
    assert found == code
    assert errors.startswith(f"blsgd: SuperNode {name}")
    assert errors.count("\n") == 1
    assert expected in errors
    assert f"[{name}] it says why" in output
    assert name != "crash" or "[crash] and tidies up" in output, "it is given time to end"


def test_node_that_ends_well_leaves_the_others_alone(tmp_path: Path, port: int) -> None:
    with Command(tmp_path, port, *each("leaves", "stays")) as started:
        assert wait_until(lambda: "SuperNode leaves has ended" in started.printed()[0])
        _, stays = started.wait_for_nodes(2)
        assert stays["pids"][0] in started.living()
        os.kill(stays["pids"][0], signal.SIGTERM)
        code, _, errors = ends(started)
    assert code == 0
    assert errors == ""
