"""The command line: every mistake is refused in one line, before anything starts or is written."""

import argparse
import errno
import logging
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from flwr.serverapp.exception import AggregationError

from flower_blsgd.cli import main as cli
from flower_blsgd.cli.options import (
    HUNG_UP,
    TERMINATED,
    add_settings,
    own_settings,
    terminated_like_interrupted,
)
from flower_blsgd.config import RunConfig
from flower_blsgd.devices.machine import Accelerator, usable_cores
from flower_blsgd.engines.local.grid import LocalGrid
from flower_blsgd.results.folder import read_config

from .conftest import LOAD_SERVER_APP, Printed, Refused

CORE = usable_cores()[0]
BOTH = f"1x cpu:{CORE} fast; 1x cpu:{CORE} slow"
ROOT = Path(cli.__file__).parents[2]
FOREIGN = ROOT / "tests" / "foreign_app"


# --- mistakes in settings: key, value and way out ----------------------------------------------


@pytest.mark.parametrize(
    ("setting", "key_and_value", "way_out"),
    [
        ("task=no_such_module:task", "task = 'no_such_module:task'", "PYTHONPATH"),
        ("model=cnm", "model = 'cnm'", "did you mean cnn"),
        ("data=/some/where", "data = '/some/where'", "leave data empty"),
        ("batch-size=1438", "batch-size = 1438", "1437 samples; use a smaller batch"),
        ("batch-size=719", "batch-size = 719", "batch-size = 718"),  # the largest that fits
        ("min-workers=5", "min-workers = 5: workers names 2", "use at most 2"),
        ("out=old", "out = 'old' exists", "name a folder that does not"),
    ],
)
def test_bad_setting_is_refused_in_one_line(
    refused: Refused, folder: Path, setting: str, key_and_value: str, way_out: str
) -> None:
    (folder / "old").mkdir()
    line = refused("run", "-s", setting, "--workers", BOTH)
    assert key_and_value in line
    assert way_out in line


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ("1x cuda:7 fast; 1x cpu slow", "device cuda:7 is not available; this machine has cpu"),
        (f"2x cpu:{CORE} slow", "no fast worker"),
        (" ; ", '"auto"'),
    ],
)
def test_bad_workers_are_refused_wherever_they_are_named(
    refused: Refused, folder: Path, workers: str, expected: str
) -> None:
    (folder / "mine.toml").write_text(f'workers = """{workers}"""\n')
    for arguments in (["--workers", workers], ["-s", f"workers={workers}"], ["-c", "mine.toml"]):
        line = refused("run", "-s", "algorithm=biased-local-sgd", *arguments)
        assert line.startswith("workers")
        assert expected in line


# --- mistakes in commands ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["rum"], "unknown command rum, see blsgd --help; did you mean run?"),
        (["--versoin"], "unknown option --versoin, see blsgd --help; did you mean --version?"),
        (["run", "--worker-count=2"], "see blsgd run --help; did you mean --workers?"),
        (["devices", "cpu"], "unexpected argument cpu"),
        (["run", "-s"], "expected one argument"),
        (["evaluate"], "run"),
        (["evaluate", "runs/latest", "-s", "epochs=1"], "-s"),
        (["prepare", "--workers", "cpu"], "--workers"),
        (["plan", "--num-samples", "many"], "invalid int value: 'many'"),
        (["supernode"], "--superlink"),
    ],
)
def test_wrong_command_is_one_line_that_points_at_the_help(
    refused: Refused, arguments: list[str], expected: str
) -> None:
    line = refused(*arguments)
    assert expected in line
    assert "--help" in line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "elsewhere"], "no pyproject.toml"),
        (["run", "mine"], "is not a Flower app"),
        (["run", str(FOREIGN), "--workers", BOTH, "--trace"], "plain-app has no setting trace"),
        (["run", str(FOREIGN), "--workers", BOTH, "--resume"], "plain-app has no setting resume"),
        (["run", "--resume"], "runs/latest is not a run: it has no config.toml"),
        (["run", "-s", "task=train.py"], "launch train.py ..."),
        (["run", "-s", "resume=mine"], "mine is not a run: it has no config.toml"),
        (["run", str(FOREIGN), "-s", "epochs=3"], "epochs = 3: unknown key"),
        (["devices", "--workers", "cuda:7"], "cuda:7 is not available"),
        (["evaluate", "nowhere"], "nowhere is not a run: it has no config.toml"),
        (["prepare", "-s", "task=digit"], "did you mean digits"),
    ],
)
def test_what_is_not_there_is_refused(
    refused: Refused, folder: Path, arguments: list[str], expected: str
) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert expected in refused(*arguments)


def test_path_that_may_not_be_read_is_refused(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stat(path: Path) -> None:  # root may read everything
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", stat)
    assert refused("evaluate", "locked/run") == "locked/run/config.toml: Permission denied"


# --- runs that begin ---------------------------------------------------------------------------


@pytest.fixture
def server_app(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace the ServerApp by one that only keeps what it is called with."""
    calls: list[Any] = []
    monkeypatch.setattr(
        LOAD_SERVER_APP, lambda *_: lambda grid, context: calls.append((grid, context))
    )
    return calls


def test_run_hands_grid_and_settings_to_the_server_app(
    folder: Path, server_app: list[Any], printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [path for path in sys.path if path != str(folder)]
    monkeypatch.setattr(sys, "path", list(before))
    settings = ["-s", "epochs=2", "-s", "threads=3"]
    lines = printed("run", "-c", "digits", *settings, "--workers", BOTH)
    ((grid, context),) = server_app
    assert [worker.tier for worker in grid.workers] == ["fast", "slow"]
    found = context.run_config
    assert (found["epochs"], found["threads"], found["workers"]) == (2, 3, BOTH)
    assert {node._job.threads for node in grid._nodes.values()} == {3}
    assert found["name"] == "digits"  # runs/<config>-<n>
    assert found["trace"] is False
    assert lines[0].startswith("running flower-blsgd from the built-in app")
    assert sys.path == [*before, str(folder)]  # behind the libraries'
    assert list(folder.iterdir()) == []
    shutil.copy(ROOT / "pyproject.toml", folder)
    lines = printed("run", "-s", "name=mine", "--trace", "--workers", BOTH)
    assert lines[0] == f"running flower-blsgd from {folder.resolve()}"
    found = server_app[1][1].run_config
    assert (found["name"], found["trace"]) == ("mine", True)


@pytest.mark.parametrize(
    ("arguments", "ours", "flowers"),
    [
        ([], logging.WARNING, logging.WARNING),
        (["-v"], logging.INFO, logging.INFO),
        ([str(FOREIGN)], logging.WARNING, logging.INFO),  # as `flwr run` shows it
    ],
)
def test_run_shows_flowers_log_of_another_app_and_where_it_is_verbose(
    server_app: list[Any], printed: Printed, arguments: list[str], ours: int, flowers: int
) -> None:
    printed("run", *arguments, "--workers", BOTH)
    assert logging.getLogger("flwr").level == flowers
    assert logging.getLogger("flower_blsgd").level == ours


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (AggregationError("round 3: no worker succeeded"), 1, "round 3: no worker succeeded"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (SystemExit(143), 143, "terminated"),
        (SystemExit(129), 129, "terminated"),
        (ZeroDivisionError(), None, ""),  # a bug of ours is not hidden
    ],
    ids=["failed", "interrupted", "terminated", "hung up", "bug"],
)
def test_run_that_fails_ends_with_one_line_and_its_own_code(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int | None,
    expected: str,
) -> None:
    closed = []

    def fails(grid: LocalGrid, context: Any) -> None:
        close = grid._finalizer
        monkeypatch.setattr(grid, "close", lambda: (closed.append(True), close())[1])
        error.add_note("blsgd run --resume runs/it")
        try:
            raise error
        finally:
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt  # Ctrl-C comes again

    monkeypatch.setattr(LOAD_SERVER_APP, lambda *_: fails)
    if code is None:
        with pytest.raises(type(error)):
            cli.main(["run", "--workers", BOTH])
    else:
        assert cli.main(["run", "--workers", BOTH]) == code
        line, *last = capsys.readouterr().err.splitlines()
        assert expected in line
        assert last == ["blsgd run --resume runs/it"]
    assert closed == [True]


# --- the small commands ------------------------------------------------------------------------


def test_devices_shows_the_workers(printed: Printed) -> None:
    workers = f"1x cpu:{CORE} fast name=quick; 1x cpu:{CORE} slow steps=3 slowdown=2.5"
    text = "\n".join(printed("devices", "--workers", workers))
    for fragment in (f"cpu:{CORE}", "quick", "fast", "slow", "3", "2.5", f"share CPU core {CORE}"):
        assert fragment in text
    assert 'workers of "auto"' in "\n".join(printed("devices"))
    assert " evaluate " in "\n".join(printed("devices", "--workers", f"cpu:{CORE} role=evaluate"))


def test_devices_describes_the_accelerators(
    printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = {
        "cuda:0": Accelerator("H100", 85_000_000_000, (9, 0)),
        "cuda:1": Accelerator("GTX 1080 Ti", 11_700_000_000, (6, 1), "cuda:1 is not supported"),
        "xpu:0": Accelerator("xpu:0"),
    }
    monkeypatch.setattr("flower_blsgd.devices.machine._accelerators", lambda: tuple(cards))
    monkeypatch.setattr("flower_blsgd.devices.machine.accelerator_of", cards.__getitem__)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    lines = printed("devices")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if ":0 " in line]
    assert rows[:2] == [
        ["cuda:0", "H100", "85.0 GB", "9.0", "yes", "yes"],
        ["xpu:0", "xpu:0", "-", "-", "-", "yes"],
    ]
    assert any("11.7 GB │ 6.1        │ no       │ no " in line for line in lines)
    assert "note: cuda:1 is not supported" in lines
    order = "CUDA_DEVICE_ORDER=PCI_BUS_ID"
    assert any(order in line for line in lines)
    monkeypatch.setenv(*order.split("="))
    assert not any(order in line for line in printed("devices"))


# --- what the commands have in common ----------------------------------------------------------


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


def test_byte_order_mark_is_no_character(tmp_path: Path) -> None:
    """As editors on Windows write it, in each file that is read as text."""
    text = '\ufeffname = "größe"\nepochs = 7\n'
    (tmp_path / "config.toml").write_text(text, encoding="utf-8")
    for config in (settings("-c", str(tmp_path / "config.toml")), read_config(tmp_path)):
        assert (config.name, config.epochs) == ("größe", 7)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, TERMINATED), (signal.SIGHUP, HUNG_UP)]
)
def test_sigterm_and_sighup_end_what_goes_on_and_then_are_as_before(number: int, code: int) -> None:
    def end_twice() -> None:
        try:
            signal.raise_signal(number)
        finally:
            if number == signal.SIGHUP:  # a shell repeats that of the kernel
                signal.raise_signal(number)

    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as end, terminated_like_interrupted():
        end_twice()
    assert end.value.code == code == 128 + number
    assert signal.getsignal(number) is before
    if number == signal.SIGHUP:
        signal.signal(number, signal.SIG_IGN)
        with terminated_like_interrupted():
            signal.raise_signal(number)  # as after nohup
        assert signal.signal(number, before) is signal.SIG_IGN
