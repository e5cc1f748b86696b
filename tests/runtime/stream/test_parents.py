"""A process that dies with the SuperNode above it: real processes, killed without a word."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flower_blsgd.runtime.stream import parents

from ..processes import is_alive, wait_until

pytestmark = pytest.mark.processes

ANCESTORS = Path(__file__).with_name("ancestors.py")


class Tree:
    """The three processes; all of them are ended at last."""

    def __init__(self, folder: Path, top_name: str) -> None:
        self.folder = folder
        for name in (top_name, "executor.py"):
            shutil.copy(ANCESTORS, folder / name)
        root = str(Path(__file__).parents[3])
        self.top = subprocess.Popen(
            [sys.executable, folder / top_name, "top", folder],
            env={**os.environ, "PYTHONPATH": root},
        )

    def process_id(self, role: str) -> int:
        file = self.folder / f"{role}.pid"
        assert wait_until(lambda: file.exists() and file.read_text(), 60)
        return int(file.read_text())

    def close(self) -> None:
        for role in ("app", "executor"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process_id(role), signal.SIGKILL)
        self.top.kill()
        self.top.wait()


@pytest.fixture
def supernode(tmp_path: Path) -> Iterator[Tree]:
    tree = Tree(tmp_path, "flower-supernode")
    yield tree
    tree.close()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Tree]:
    tree = Tree(tmp_path, "somebodys-shell")
    yield tree
    tree.close()


def test_supernode_killed_and_the_process_is_gone(supernode: Tree) -> None:
    app, executor = supernode.process_id("app"), supernode.process_id("executor")
    assert not wait_until(lambda: not is_alive(app), 0.7), "it died while all were there"
    supernode.top.kill()
    supernode.top.wait()
    assert wait_until(lambda: not is_alive(app))
    assert is_alive(executor)  # so it was not that one's end


def test_parent_killed_and_the_process_is_gone(shell: Tree) -> None:
    app = shell.process_id("app")
    os.kill(shell.process_id("executor"), signal.SIGKILL)
    assert wait_until(lambda: not is_alive(app))


def test_what_started_the_parent_may_go_where_it_is_no_supernode(shell: Tree) -> None:
    """With ``--isolation process`` a shell starts the executor."""
    app = shell.process_id("app")
    shell.top.kill()
    shell.top.wait()
    time.sleep(0.8)
    assert is_alive(app)


def test_processes_look_often_enough_to_be_gone_within_a_second() -> None:
    assert parents._LOOK_SECONDS <= 0.5
