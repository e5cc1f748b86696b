"""The command line of ``blsgd launch``."""

import sys
from pathlib import Path

import pytest

from flower_blsgd.config import RunConfig
from flower_blsgd.devices.machine import usable_cores
from flower_blsgd.results.folder import RunFolder
from flower_blsgd.strategy.budget import NO_LIMIT

from .conftest import Printed, Refused

CORE = usable_cores()[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["script.py"], "give the length of the run: --samples, --seconds or --rounds"),
        (["--rounds", "3"], "the script is missing; blsgd launch [OPTIONS] SCRIPT"),
        (["--rounds", "3", "none.py"], "script 'none.py' is not a file"),
        (["--rounds", "3", "train"], "script 'train' must have a name that ends in .py"),
        (["--rounds", "3", "x.ipynb"], "is a notebook; convert it first: jupyter nbconvert --to "),
        (["--rounds", "3", "-m", "none.train"], "-m none.train: Python finds no such module from"),
        (["--rounds", "3", "-m"], "the script is missing"),
        (["--rounds", "-3", "script.py"], "rounds = -3 must be at least 0"),
        (
            ["--rounds", "3", "--workers", f"1x cpu:{CORE} role=evaluate", "script.py"],
            "workers: all have role=evaluate; name one that trains",
        ),
        (
            ["--rounds", "3", "-s", "trace=true", "script.py"],
            "trace = true: a script of blsgd launch decides this itself; leave the setting out",
        ),
        (["--rounds", "3", "-c", "task='images'", "script.py"], 'task = "images": a script of'),
        (
            ["--rounds", "3", "--workers", f"1x cpu:{CORE} precision=bfloat16", "script.py"],
            "workers: precision=bfloat16: a script decides this itself",
        ),
    ],
)
def test_mistake_is_refused_in_one_line(
    refused: Refused, folder: Path, arguments: list[str], message: str
) -> None:
    (folder / "script.py").touch()
    (folder / "x.ipynb").touch()
    (folder / "train").touch()
    assert message in refused("launch", *arguments)


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        (["--samples", "500"], {"samples": 500, "epochs": NO_LIMIT}),
        (["--seconds", "1.5"], {"seconds": 1.5, "epochs": NO_LIMIT}),
        (["--rounds", "7", "-s", "epochs=2"], {"rounds": 7, "epochs": 2}),
        (["--resume", "runs/old", "--samples", "900"], {"samples": 900, "rounds": 5}),
        # A setting with its default value, as after a run that patience has ended.
        (["--resume", "runs/old", "-s", "patience=0"], {"patience": 0, "rounds": 5}),
    ],
)
def test_length_of_the_run_and_the_scripts_arguments(
    printed: Printed,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: list[str],
    limits: dict[str, float],
) -> None:
    (folder / "runs").mkdir()
    old = RunFolder.new("runs/old", "old")
    old.write_config(
        RunConfig(task="train.py", rounds=5, epochs=NO_LIMIT, patience=3).to_run_config()
    )
    commands = {
        "train.py": ("train.py", "--rounds", "9", "x"),
        "-m": ("-m", "package.train", "--rounds", "9", "-m"),
    }
    calls: list[tuple[str, list[str], RunConfig]] = []
    monkeypatch.setattr("flower_blsgd.launch.launch", lambda *given: calls.append(given))
    for script, command in commands.items():
        printed("launch", "--workers", f"1x cpu:{CORE}", *given, *command)
        *line, config = calls.pop()
        assert line == [script, list(command[1:])]
        assert {name: getattr(config, name) for name in limits} == limits
        assert str(folder) in sys.path  # for -s weights=my_module:MyWeighting
