"""The program between ``blsgd supernode`` and a SuperNode: what it starts does not outlive it.

``python -I -S keeper.py LIFELINE_FD GRACE_SECONDS PROGRAM ARGUMENT...``

It starts the program and ends with its exit code. When the lifeline closes, which the kernel does
even if the command is killed, it asks the program to end; what is left after the grace time is
killed. A SuperNode has processes below it that may be in the middle of a step, so the keeper
adopts what its ended program leaves behind. It needs nothing but the standard library.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_SECONDS = 0.05
_ON_LINUX = sys.platform == "linux"
_PRCTL = ctypes.CDLL(None).prctl if _ON_LINUX else None


def main() -> int:
    """Keep one program; return its exit code, or 0 if the lifeline closed first."""
    lifeline, grace_seconds = int(sys.argv[1]), float(sys.argv[2])
    # A shell starts what it puts into the background with Ctrl-C ignored. Flower's programs end
    # themselves with that signal, and would inherit it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if _PRCTL is not None:
        _PRCTL(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child_ended = _wake_up_when_a_child_ends()
    keeper = os.getpid()

    def end_with_the_keeper() -> None:
        if _PRCTL is not None:
            _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != keeper:
                os._exit(1)

    # Safe: this process has one thread.
    program = subprocess.Popen(
        sys.argv[3:],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=end_with_the_keeper,  # noqa: PLW1509
    )
    code = 0
    while program.poll() is None:
        readable, _, _ = select.select([lifeline, child_ended], [], [])
        if lifeline in readable:
            program.terminate()
            break
        os.read(child_ended, 512)
    else:
        code = program.returncode
    _see_the_end(program, grace_seconds)
    return code if code >= 0 else 128 - code


def _wake_up_when_a_child_ends() -> int:
    """Return a descriptor that is readable when a child has ended."""
    wake_up, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    return wake_up


def _see_the_end(program: "subprocess.Popen[bytes]", grace_seconds: float) -> None:
    """Wait until the program and all that it started are gone; kill what does not go."""
    deadline = time.monotonic() + grace_seconds
    while _some_left(program):
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(program.pid, signal.SIGKILL)
            for child in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)


def _some_left(program: "subprocess.Popen[bytes]") -> bool:
    if program.poll() is None:
        return True
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:  # what the program left to us
            pass
        return True
    if _ON_LINUX:
        return False  # who has no child has no grandchild either: they would have come to us
    try:
        os.killpg(program.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _children() -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(stat.parent.name))
    return found


if __name__ == "__main__":
    sys.exit(main())
