"""The command line: every mistake is told in one line, before anything starts or is written."""

import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401  # loaded before `subprocess.Popen` is taken away below
from flwr.serverapp.exception import AggregationError

from flower_blsgd import cli
from flower_blsgd.runtime.local_grid import LocalGrid
from flower_blsgd.runtime.machine import Machine, usable_cores

CORE = usable_cores()[0]
BOTH = f"1x cpu:{CORE} fast; 1x cpu:{CORE} slow"
LOGGERS = ("flower_blsgd", "flwr")

Main = Callable[..., int]


@pytest.fixture(autouse=True)
def _leave_the_process_as_it_was() -> Iterator[None]:
    at_sigterm = signal.getsignal(signal.SIGTERM)
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(log, log.handlers, log.propagate, log.level) for log in loggers]
    yield
    for log, handlers, propagate, level in before:
        log.handlers, log.propagate = handlers, propagate
        log.setLevel(level)
    signal.signal(signal.SIGTERM, at_sigterm)


@pytest.fixture(autouse=True)
def _no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError(f"a process was started: {arguments}")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(os, "fork", refuse)


@pytest.fixture(autouse=True)
def _cpu_only_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a machine with many GPUs refuse cuda:7 as well."""
    machine = Machine(usable_cores(), given_accelerators=())
    for module in ("cli", "runtime.devices", "run_evaluation"):
        monkeypatch.setattr(f"flower_blsgd.{module}.this_machine", lambda: machine)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty working folder that is no Flower app."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # `blsgd run` adds the folder
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs `blsgd run`, and hands back the one line that it refuses with."""

    def run(*arguments: str) -> str:
        before = _contents(folder)
        code = cli.main(["run", *arguments])
        told = capsys.readouterr().err
        assert code == 2, told
        assert told.startswith("blsgd: ")
        assert told.endswith("\n")
        assert told.count("\n") == 1, told
        assert _contents(folder) == before, "something was written"
        return told.removeprefix("blsgd: ").rstrip("\n")

    return run


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }


Refused = Callable[..., str]


# --- bad input (issue 2): key, value and way out


@pytest.mark.parametrize(
    ("setting", "key_and_value", "way_out"),
    [
        # unknown key, the nearest offered
        ("epocs=5", "epocs = 5", "did you mean epochs"),
        ("batchsize=5", "batchsize = 5", "did you mean batch-size"),
        # wrong type
        ("epochs=five", "epochs = 'five'", "a whole number"),
        ("epochs=2.5", "epochs = 2.5", "a whole number"),
        ("learning-rate=high", "learning-rate = 'high'", "a number"),
        ("nesterov=1", "nesterov = 1", "true or false"),
        ("threads=true", "threads = True", "a whole number"),
        # lambda
        ("high-loss-ratio=1.5", "high-loss-ratio = 1.5", "in [0, 1]"),
        ("high-loss-ratio=-0.5", "high-loss-ratio = -0.5", "in [0, 1]"),
        ("high-loss-ratio=nan", "high-loss-ratio = nan", "in [0, 1]"),
        # epochs = 0
        ("epochs=0", "epochs = 0", "at least 1"),
        # more of the same kind
        ("algorithm=biased", "algorithm = 'biased'", "biased-local-sgd"),
        ("task=digit", "task = 'digit'", "did you mean digits"),
        ("model=cnm", "model = 'cnm'", "did you mean cnn"),
        ("data=/some/where", "data = '/some/where'", "leave data empty"),
        ("decay-epochs=60%%", "decay-epochs = '60%%'", "60%, 80%"),
        ("local-steps-slow=some", "local-steps-slow = 'some'", '"auto"'),
    ],
)
def test_bad_setting_is_refused_in_one_line(
    refused: Refused, setting: str, key_and_value: str, way_out: str
) -> None:
    line = refused("-s", setting, "--workers", BOTH)
    assert key_and_value in line
    assert way_out in line


@pytest.mark.parametrize("how", ["file", "pairs"])
def test_bad_setting_in_a_config_is_refused_likewise(
    refused: Refused, folder: Path, how: str
) -> None:
    (folder / "mine.toml").write_text("epochs = 0\n")
    source = "mine.toml" if how == "file" else "epochs=0"
    assert "epochs = 0 must be at least 1" in refused("-c", source, "--workers", BOTH)


def test_bad_batch_larger_than_the_data(refused: Refused) -> None:
    line = refused("-s", "batch-size=1438", "--workers", BOTH)
    assert "batch-size = 1438" in line
    assert "1437" in line
    assert "smaller batch" in line


def test_bad_batch_that_does_not_fit_all_workers_names_the_largest_that_does(
    refused: Refused,
) -> None:
    line = refused("-s", "batch-size=719", "--workers", BOTH)
    assert "batch-size = 719" in line
    assert "batch-size = 718" in line


@pytest.mark.parametrize(
    ("workers", "tier"), [(f"2x cpu:{CORE} slow", "fast"), (f"2x cpu:{CORE} fast", "slow")]
)
def test_bad_no_worker_of_a_tier(refused: Refused, workers: str, tier: str) -> None:
    line = refused("--workers", workers)
    assert line.startswith(f"workers: no {tier} worker")
    assert f"name one {tier}" in line
    assert "uniform" in line


@pytest.mark.parametrize(
    ("workers", "token", "character", "expected"),
    [
        (f"1x cpu:{CORE} quick", "quick", 10 + len(str(CORE)) - 1, "fast, slow, steps=N"),
        ("2x 4x cpu", "4x", 4, "a device"),
        ("twox cpu", "two", 1, "a number of workers"),
        ("0x cpu", "0", 1, "a number of workers"),
        ("1x cpu fast; 1x cpu slow steps=none", "steps=none", 26, "steps=N"),
        ("cpu slowdown=0.5", "slowdown=0.5", 5, "slowdown=X (X >= 1)"),
        ("cpu:a-b", "a-b", 5, "numbers, such as"),
        ("CPU:0", "CPU:0", 1, "a device, such as cpu"),
    ],
)
def test_bad_worker_spec_points_at_the_place(
    refused: Refused, workers: str, token: str, character: int, expected: str
) -> None:
    for arguments in (("--workers", workers), ("-s", f"workers={workers}")):
        line = refused(*arguments)
        assert line.startswith("workers: ")
        assert f'"{token}" at character {character} ' in line
        assert f'"{workers}"' in line
        assert expected in line
        assert workers[character - 1 :].startswith(token)


@pytest.mark.parametrize("workers", ["", " ; "])
def test_bad_no_worker_at_all(refused: Refused, workers: str) -> None:
    line = refused("--workers", workers)
    assert "names no worker" in line
    assert '"auto"' in line


def test_bad_worker_spec_over_several_lines_is_told_in_one(refused: Refused, folder: Path) -> None:
    (folder / "mine.toml").write_text('workers = """\n1x cpu fast;\n1x cpu quick\n"""\n')
    line = refused("-c", "mine.toml")
    assert '"quick"' in line


def test_bad_device_that_is_not_there(refused: Refused) -> None:
    line = refused("--workers", "1x cuda:7 fast; 1x cpu slow")
    assert line == "workers: device cuda:7 is not there; this machine has cpu"
    line = refused("--workers", "1x cpu:4095 fast; 1x cpu slow")
    assert "core 4095" in line
    assert "this process may use cores" in line


def test_bad_out_that_exists(refused: Refused, folder: Path) -> None:
    (folder / "old").mkdir()
    (folder / "old" / "summary.json").write_text("{}")
    line = refused("-s", "out=old", "--workers", BOTH)
    assert line.startswith("out = 'old' exists")
    assert "name a folder that does not" in line


@pytest.mark.parametrize("out", ["note", "note/below", "link"])
def test_bad_out_that_is_a_file_or_a_dangling_link(
    refused: Refused, folder: Path, out: str
) -> None:
    (folder / "note").write_text("x")
    (folder / "link").symlink_to("nowhere")
    assert f"out = {out!r}" in refused("-s", f"out={out}", "--workers", BOTH)


@pytest.mark.parametrize(
    "task", [":digits", "no_such_module:task", "math:no_such_task", "math:pi", ".digits:digits"]
)
def test_bad_task_reference_is_refused_in_one_line(refused: Refused, task: str) -> None:
    line = refused("-s", f"task={task}", "--workers", BOTH)
    assert f"task = {task!r}" in line


def test_bad_twice_is_still_one_line(refused: Refused) -> None:
    assert "epochs" in refused("-s", "epochs=0", "-s", "out=.", "--workers", BOTH)


# --- bad commands


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "COMMAND"),
        (["rum"], "rum"),
        (["run", "--worker-count", "2"], "--worker-count"),
        (["run", "a", "b"], "b"),
        (["run", "-s"], "expected one argument"),
        (["evaluate"], "run"),
        (["evaluate", "runs/latest", "-s", "epochs=1"], "-s"),
        (["prepare", "digits"], "digits"),
        (["prepare", "--workers", "cpu"], "--workers"),
    ],
)
def test_wrong_command_is_one_line_that_points_at_the_help(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert cli.main(arguments) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert told in line
    assert "--help" in line


def test_folder_that_is_no_app_is_refused(refused: Refused, folder: Path) -> None:
    assert "no pyproject.toml" in refused("elsewhere")
    (folder / "mine").mkdir()
    (folder / "mine" / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert "is not a Flower app" in refused("mine")


def test_config_that_is_not_there_offers_the_nearest(refused: Refused) -> None:
    assert "did you mean digits" in refused("-c", "digit")


# --- what happens when all is well, or goes wrong later


@pytest.fixture
def server_app(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Put a ServerApp that only notes what it was given in the real one's place."""
    calls: list[Any] = []
    monkeypatch.setattr(
        cli, "load_server_app", lambda *_: lambda grid, context: calls.append((grid, context))
    )
    return calls


def test_run_hands_grid_and_settings_to_the_server_app(
    folder: Path, server_app: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(["run", "-c", "digits", "-s", "epochs=2", "-s", "threads=1", "--workers", BOTH])
    assert code == 0
    ((grid, context),) = server_app
    assert isinstance(grid, LocalGrid)
    assert [worker.tier for worker in grid.workers] == ["fast", "slow"]
    assert context.run_config["epochs"] == 2
    assert context.run_config["workers"] == BOTH
    assert context.run_config["name"] == "digits"  # runs/<config>-<n>
    assert capsys.readouterr().out.startswith("running flower-blsgd from the built-in app")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "epoch"),
    [
        ([], 0),
        (["--profile"], 2),
        (["--profile=7"], 7),
        (["--profile", "7"], 7),
        (["--profile", "-s", "epochs=1"], 1),
        (["--profile", "-s", "trace-epoch=3"], 3),
        (["--profile=4", "-s", "trace-epoch=3"], 4),
        (["-s", "trace-epoch=3"], 3),
    ],
)
def test_run_profile_names_the_epoch_that_is_traced(
    folder: Path, server_app: list[Any], arguments: list[str], epoch: int
) -> None:
    assert cli.main(["run", "--workers", BOTH, *arguments]) == 0
    settings = server_app[0][1].run_config
    assert (settings["trace-epoch"], settings["profile"]) == (epoch, "")


def test_bad_epoch_to_profile_is_refused_in_one_line(refused: Refused) -> None:
    line = refused("--workers", BOTH, "--profile=6", "-s", "epochs=5")
    assert line == ("trace-epoch = 6 is beyond epochs = 5; name one from 1 to 5, or 0 for no trace")
    for text in ("0", "-1", "two", "."):
        line = refused("--workers", BOTH, f"--profile={text}")
        assert f"'{text}' is no epoch" in line
        assert "--profile=N" in line


def test_bad_profile_of_an_app_that_writes_no_trace(refused: Refused) -> None:
    app = Path(__file__).parent / "foreign_app"
    line = refused(str(app), "--workers", BOTH, "--profile")
    assert line.startswith("--profile: plain-app has no setting trace-epoch")


def test_run_name_of_ones_own_is_kept(folder: Path, server_app: list[Any]) -> None:
    assert cli.main(["run", "-c", "digits", "-s", "name=mine", "--workers", BOTH]) == 0
    assert server_app[0][1].run_config["name"] == "mine"


def test_run_first_line_names_the_app_of_the_current_folder(
    folder: Path, server_app: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(cli.__file__).parents[1]
    shutil.copy(root / "pyproject.toml", folder)
    assert cli.main(["run", "--workers", BOTH]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == f"running flower-blsgd from {folder.resolve()}"


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (AggregationError("round 3: no worker succeeded"), 1, "round 3: no worker succeeded"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=["failed", "interrupted"],
)
def test_run_that_fails_ends_with_one_line_and_its_own_code(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    told: str,
) -> None:
    closed = []

    def fails(grid: LocalGrid, context: Any) -> None:
        close = grid._finalizer
        monkeypatch.setattr(grid, "close", lambda: (closed.append(True), close())[1])
        raise error

    monkeypatch.setattr(cli, "load_server_app", lambda *_: fails)
    assert cli.main(["run", "--workers", BOTH]) == code
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert told in line
    assert closed == [True]


def test_run_error_that_nobody_expected_is_not_hidden(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(grid: LocalGrid, context: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "load_server_app", lambda *_: fails)
    with pytest.raises(ZeroDivisionError):
        cli.main(["run", "--workers", BOTH])


@pytest.mark.parametrize(("flags", "level"), [([], logging.WARNING), (["-v"], logging.INFO)])
def test_run_is_quiet_unless_verbose(
    folder: Path, server_app: list[Any], flags: list[str], level: int
) -> None:
    assert cli.main(["run", "--workers", BOTH, *flags]) == 0
    assert logging.getLogger("flwr").level == level
    assert logging.getLogger("flower_blsgd").level == level


def test_run_finds_modules_of_the_current_folder_behind_the_libraries(
    folder: Path, server_app: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [path for path in sys.path if path != str(folder)]
    monkeypatch.setattr(sys, "path", list(before))
    assert cli.main(["run", "--workers", BOTH]) == 0
    assert sys.path == [*before, str(folder)]


def test_run_hands_processes_per_device_to_the_grid(
    folder: Path, server_app: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    class Noting(LocalGrid):
        def __init__(self, *arguments: Any) -> None:
            given.extend(arguments[4:])
            super().__init__(*arguments)

    monkeypatch.setattr(cli, "LocalGrid", Noting)
    arguments = ["-s", "threads=3", "-s", "processes-per-device=2", "--workers", BOTH]
    assert cli.main(["run", *arguments]) == 0
    assert given == [3, 2]
    assert server_app[0][1].run_config["processes-per-device"] == 2


def test_devices_shows_the_workers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workers = f"1x cpu:{CORE} fast name=quick; 1x cpu:{CORE} slow steps=3 slowdown=2.5"
    assert cli.main(["devices", "--workers", workers]) == 0
    told = capsys.readouterr().out
    for fragment in (f"cpu:{CORE}", "quick", "fast", "slow", "3", "2.5x", "share CPU core 0"):
        assert fragment in told


def test_devices_without_a_spec_shows_auto(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["devices"]) == 0
    told = capsys.readouterr().out
    assert 'workers of "auto"' in told
    assert "4x" in told  # the slow one's slowdown


def test_devices_bad_spec_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["devices", "--workers", "cuda:7"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_end_well(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([flag])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip()
