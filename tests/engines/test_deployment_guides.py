"""The guides: every command for a SuperLink is in a script, and the script works."""

import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.grids.processes import living, wait_until

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "deployment" / "run_all.sh"
GUIDES = ("how-to/deployment.md", "tutorials/three-machines.md")
MARKER = "BLSGD_GUIDES_TEST"

# What differs between the guides and a script for one machine with ports of its own.
IN_GUIDES = [
    (r",IP:192\.168\.1\.10\b", ""),
    (r"192\.168\.1\.10", "127.0.0.1"),
    (r"--host 0\.0\.0\.0", "--host HOST"),
    (r"TLS=~/flower-tls", "TLS=FOLDER"),
    (r"-c 'epochs=2'", "-c SETTINGS"),
    (r"--port 9202", "--port NODE_PORT"),
]
IN_SCRIPT = [
    (r"^start \S+ ", ""),
    (r"cpu:\$first\b", "cpu:0"),
    (r"cpu:\$last\b", "cpu:1"),
    (r"--port \$node_port\b", "--port NODE_PORT"),
    (r"\$port\b", "8100"),
    (r"--host \$bind\b", "--host HOST"),
    (r"TLS=\$work/tls", "TLS=FOLDER"),
    (r'-c "\$settings out=[^"]*"', "-c SETTINGS"),
]


def commands(text: str, substitutions: list[tuple[str, str]]) -> list[str]:
    """Return the command lines of a shell text: continued ones joined, comments left out."""
    joined = re.sub(r"\s*\\\n\s*", " ", text)
    lines = [line.strip() for line in joined.splitlines()]
    for pattern, replacement in substitutions:
        lines = [re.sub(pattern, replacement, line) for line in lines]
    return [line for line in lines if line and not line.startswith("#")]


def guide_commands() -> list[str]:
    pages = [(ROOT / "docs" / guide).read_text() for guide in GUIDES]
    # The simulation has tests of its own.
    text = "".join(page.partition("# Flower's simulation")[0] for page in pages)
    blocks = re.findall(r"^ *```bash\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in commands(block, IN_GUIDES)]


def test_every_command_of_the_guide_is_in_the_script() -> None:
    written, found = commands(SCRIPT.read_text(), IN_SCRIPT), guide_commands()
    for line in found:
        assert line in written, line
    # A reader of Markdown that finds nothing would be content with every script.
    for line in (
        "export SUPERLINK=127.0.0.1:8100",
        'blsgd supernode --superlink $SUPERLINK --insecure --one-node-per-device --workers "1x '
        'cpu:0 fast; 1x cpu:1 slow slowdown=4"',
        "flwr supernode register $TLS/node-1.pub lab",
        'export SAN="DNS:localhost,IP:127.0.0.1"',
        "flwr run . lab --stream -c SETTINGS",
        "[superlink.lab]",
    ):
        assert line in found


# --- it works


def start(folder: Path, marker: str, parts: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [SCRIPT],
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "KEEP": str(folder),
            "RUN_CONFIG": "epochs=1 threads=1 local-steps-slow=8",
            "PARTS": parts,
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
            MARKER: marker,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.full
@pytest.mark.engines
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    not all(map(shutil.which, ("bash", "openssl", "ssh-keygen"))), reason="needs openssl and ssh"
)
def test_registered_supernodes_train_over_tls_and_a_stranger_is_refused(tmp_path: Path) -> None:
    marker = uuid.uuid4().hex
    script = start(tmp_path / "work", marker, "lab")
    output, _ = script.communicate(timeout=550)
    assert script.returncode == 0, output
    assert "=== all of it worked" in output
    refusal = "flwr supernode register {}.pub NAME".format(tmp_path / "work" / "tls" / "stranger")
    assert refusal in output
    assert (tmp_path / "work" / "results-lab" / "summary.json").exists()
    assert wait_until(lambda: not living(f"{MARKER}={marker}")), living(f"{MARKER}={marker}")


@pytest.mark.engines
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="this system has no /proc")
@pytest.mark.timeout(600)
def test_script_takes_everything_down_on_ctrl_c(tmp_path: Path) -> None:
    marker, work = uuid.uuid4().hex, tmp_path / "work"
    script = start(work, marker, "here")
    log = work / "superlink.log"
    assert wait_until(lambda: log.exists() and log.read_text(), 300), "no SuperLink"
    os.killpg(script.pid, signal.SIGINT)
    script.communicate(timeout=200)
    assert script.returncode == 130
    assert wait_until(lambda: not living(f"{MARKER}={marker}")), living(f"{MARKER}={marker}")
