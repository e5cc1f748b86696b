"""The end of a process is noticed; the signals of forks are tested with the engines."""

import os
import subprocess
import sys
import threading

import pytest

from flower_blsgd.processes import end_with


@pytest.mark.parametrize("has_pidfd", [True, False])
@pytest.mark.parametrize("ended_before", [False, True])
def test_end_of_a_process_is_noticed(
    monkeypatch: pytest.MonkeyPatch, has_pidfd: bool, ended_before: bool
) -> None:
    if not has_pidfd:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    noticed = threading.Event()
    if ended_before:
        process.communicate(b"\n")
    end_with([os.getpid(), process.pid], noticed.set)
    if not ended_before:
        assert not noticed.wait(0.4)
        process.communicate(b"\n")
    assert noticed.wait(60)


def test_file_that_becomes_readable_is_noticed() -> None:
    readable, writable = os.pipe()
    noticed = threading.Event()
    end_with([os.getpid()], noticed.set, [readable])
    assert not noticed.wait(0.1)
    os.close(writable)
    assert noticed.wait(60)
    os.close(readable)
