"""The launch guides: every command line of theirs is in a script, and the script works."""

import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.runtime.processes import is_alive, wait_until

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "deployment" / "run_all.sh"
GUIDES = (ROOT / "clients" / "README.md", ROOT / "server" / "README.md")
ELSEWHERE = "Flower's simulation by hand"  # scripts/flower_engine.py runs those lines
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


def guide_commands(guide: Path) -> list[str]:
    sections = re.split(r"^##+ ", guide.read_text(), flags=re.MULTILINE)
    found = []
    for section in sections:
        if not section.startswith(ELSEWHERE):
            for block in re.findall(r"^ *```bash\n(.*?)^ *```", section, re.MULTILINE | re.DOTALL):
                found += commands(block, IN_GUIDES)
    return found


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.parent.name)
def test_every_command_of_the_guides_is_in_the_script(guide: Path) -> None:
    written = commands(SCRIPT.read_text(), IN_SCRIPT)
    for line in guide_commands(guide):
        assert line in written, line


def test_commands_of_the_guides_are_found() -> None:
    """A reader of Markdown that finds nothing would be content with every script."""
    clients, server = (guide_commands(guide) for guide in GUIDES)
    for line in (
        "export SUPERLINK=127.0.0.1:8100",
        'blsgd supernode --superlink $SUPERLINK --insecure --one-node-per-device --workers "1x '
        'cpu:0 fast; 1x cpu:1 slow slowdown=4"',
    ):
        assert line in clients
    for line in (
        "flwr supernode register $TLS/node-1.pub lab",
        'export SAN="DNS:localhost,IP:127.0.0.1"',
        "flwr run . lab --stream -c SETTINGS",
        "[superlink.lab]",
    ):
        assert line in server


def test_anchors_between_the_guides_lead_somewhere() -> None:
    pages = [*GUIDES, SCRIPT.with_name("README.md")]
    for page in pages:
        for path, anchor in re.findall(r"\]\(([\w./]+\.md)#?([\w-]*)\)", page.read_text()):
            target = (page.parent / path).resolve()
            assert target.exists(), (page, path)
            headings = re.findall(r"^##+ (.*)$", target.read_text(), re.MULTILINE)
            names = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
            assert not anchor or anchor in names, (page, path, anchor)


# --- it works


def living(marker: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARKER}={marker}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return [pid for pid in found if is_alive(pid)]


def start(folder: Path, marker: str, settings: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [SCRIPT],
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "KEEP": str(folder),
            "RUN_CONFIG": settings,
            MARKER: marker,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.engines
@pytest.mark.timeout(500)
@pytest.mark.skipif(
    not all(map(shutil.which, ("bash", "openssl", "ssh-keygen"))), reason="needs openssl and ssh"
)
def test_registered_supernodes_train_over_tls_and_a_stranger_is_refused(tmp_path: Path) -> None:
    marker = uuid.uuid4().hex
    script = start(tmp_path / "work", marker, "epochs=1 threads=1")
    output, _ = script.communicate(timeout=450)
    assert script.returncode == 0, output
    assert "=== all of it worked" in output
    refusal = "flwr supernode register {}.pub NAME".format(tmp_path / "work" / "tls" / "stranger")
    assert refusal in output
    for name in ("here", "lab"):
        assert (tmp_path / "work" / f"results-{name}" / "summary.json").exists()
    assert wait_until(lambda: not living(marker)), living(marker)


@pytest.mark.engines
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="this system has no /proc")
def test_script_takes_everything_down_on_ctrl_c(tmp_path: Path) -> None:
    marker, work = uuid.uuid4().hex, tmp_path / "work"
    script = start(work, marker, "epochs=1")
    log = work / "supernodes.log"
    assert wait_until(lambda: log.exists() and log.read_text().count("is connected") == 2, 150)
    os.killpg(script.pid, signal.SIGINT)
    script.communicate(timeout=100)
    assert script.returncode == 130
    assert wait_until(lambda: not living(marker)), living(marker)
