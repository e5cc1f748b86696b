"""What the commands have in common: settings, names, and how they end."""

import argparse
import signal
from pathlib import Path

import pytest

from flower_blsgd.cli.options import (
    TERMINATED,
    add_settings,
    own_settings,
    terminated_like_interrupted,
)
from flower_blsgd.config import RunConfig


def settings(*arguments: str, workers: bool = True) -> RunConfig:
    parser = argparse.ArgumentParser()
    add_settings(parser, workers)
    return own_settings(parser.parse_args(arguments))


def test_defaults_have_the_name_of_the_task() -> None:
    assert settings() == RunConfig(name="digits")
    assert settings(workers=False) == RunConfig(name="digits")


def test_name_is_the_users_else_the_files_else_the_tasks(tmp_path: Path) -> None:
    mine = tmp_path / "my own.toml"
    mine.write_text('task = "digits"\n')
    assert settings("-c", "digits-five-speeds").name == "digits-five-speeds"
    assert settings("-c", "digits", "-s", "name=mine").name == "mine"
    assert settings("-c", str(mine)).name == "my-own"
    assert settings("-s", "task=package.module:my_task").name == "my_task"


def test_sigterm_ends_what_goes_on_and_then_is_as_before() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end, terminated_like_interrupted():
        signal.raise_signal(signal.SIGTERM)
    assert end.value.code == TERMINATED == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
