"""The keeper alone: a program that does not want to end, and what it leaves behind."""

import os
import subprocess
import sys
import time

import pytest

from flower_blsgd.supernode import keeper
from tests.runtime.processes import is_alive

pytestmark = pytest.mark.processes
GRACE_SECONDS = 0.4

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(
    [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
)
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""
LEAVING = STUBBORN.replace("time.sleep(600)\n", "sys.exit(7)\n")


class Kept:
    """A keeper with a program."""

    def __init__(self, code: str) -> None:
        end, self.lifeline = os.pipe()
        program = [sys.executable, "-c", code]
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", keeper.__file__, str(end), str(GRACE_SECONDS), *program],
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[end],
            start_new_session=True,
        )
        os.close(end)
        assert self.process.stdout is not None
        self.pids = [int(word) for word in self.process.stdout.readline().split()]

    def wait(self) -> int:
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait(60)


def test_lifeline_that_closes_ends_what_does_not_want_to() -> None:
    kept = Kept(STUBBORN)
    assert len(kept.pids) == 2
    assert all(map(is_alive, kept.pids))
    start = time.monotonic()
    os.close(kept.lifeline)
    assert kept.wait() == 0
    assert time.monotonic() - start >= GRACE_SECONDS
    assert not any(map(is_alive, kept.pids))


@pytest.mark.skipif(sys.platform != "linux", reason="orphans have a parent on Linux only")
def test_program_that_ends_takes_along_what_it_started() -> None:
    """Also what is in a session of its own by now."""
    kept = Kept(LEAVING)
    assert kept.wait() == 7
    assert not any(map(is_alive, kept.pids))
    os.close(kept.lifeline)


def test_program_that_is_killed_is_told_as_a_shell_does() -> None:
    kept = Kept("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    os.kill(kept.pids[0], 9)
    assert kept.wait() == 128 + 9
    os.close(kept.lifeline)


def test_keeper_needs_the_standard_library_alone() -> None:
    """It is started without site-packages, which makes it small and quick."""
    found = subprocess.run(
        [sys.executable, "-I", "-S", "-X", "importtime", keeper.__file__],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "site-packages" not in found.stderr
    assert "IndexError" in found.stderr  # it began, and had no arguments


def test_programs_can_be_ended_with_ctrl_c_also_from_a_shells_background() -> None:
    """Flower's programs end themselves with SIGINT, and would inherit that it is ignored."""
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    end, lifeline = os.pipe()
    keep = f"{sys.executable} -I -S {keeper.__file__} {end} 1 {sys.executable}"
    done = subprocess.run(
        ["sh", "-c", f"trap '' INT; exec {keep} -c '{code}'"],
        capture_output=True,
        text=True,
        pass_fds=[end],
        check=True,
    )
    os.close(end)
    os.close(lifeline)
    assert done.stdout == "True\n"
