"""An empty working folder for the command, without processes and accelerators."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401  # loaded before `subprocess.Popen` is taken away below

from flower_blsgd.cli.main import main

from ..command import changes_undone

LOAD_SERVER_APP = "flower_blsgd.flower.internals.load_app"
Refused = Callable[..., str]
Printed = Callable[..., list[str]]


def contents(folder: Path) -> dict[str, bytes]:
    """Return everything in a folder by its path there."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return an empty working folder; a command in it can start no process and finds no GPU."""

    def refuse(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError(f"a process was started: {arguments}")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(os, "fork", refuse)
    for module in ("parts", "engines.local.grid", "engines.local.fork_server"):
        monkeypatch.setattr(f"flower_blsgd.{module}.start_fork_server", lambda modules=(): None)
    monkeypatch.setattr("flower_blsgd.devices.machine._accelerators", lambda: ())
    monkeypatch.chdir(tmp_path)
    with changes_undone():
        yield tmp_path


@pytest.fixture
def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Return a function that runs a command and returns the one line with which it refuses."""

    def run(*arguments: str) -> str:
        before = contents(folder)
        code = main(arguments)
        line = capsys.readouterr().err
        assert code == 2, line
        assert line.startswith("blsgd: ")
        assert line.endswith("\n")
        assert line.count("\n") == 1, line
        assert contents(folder) == before, "something was written"
        return line.removeprefix("blsgd: ").rstrip("\n")

    return run


@pytest.fixture
def printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> Printed:
    """Return a function that runs a command, which ends well, and returns the lines it prints."""

    def run(*arguments: str) -> list[str]:
        code = main(arguments)
        output = capsys.readouterr()
        assert code == 0, output.err
        assert output.err == ""
        return [line.rstrip() for line in output.out.splitlines()]

    return run
