"""``blsgd compare`` with real workers: interrupted in the second run, then going on."""

import json
import os
import signal
import threading
import tomllib
from pathlib import Path

import pytest

from flower_blsgd.cli.main import main
from flower_blsgd.devices.machine import usable_cores
from flower_blsgd.devices.worker_spec import parse_workers
from flower_blsgd.experiments import calibration

from ..command import Command, changes_undone
from ..grids.processes import processes_below, wait_until

FIRST, LAST = usable_cores()[0], usable_cores()[-1]
NAMES = ("biased-local-sgd", "weighted-local-sgd")
COMMAND = (
    *("compare", "-c", "digits", "--seeds", "0", "--budget", "1s"),
    *("--algorithms", ",".join(NAMES)),
    *("--workers", f"1x cpu:{FIRST} fast; 1x cpu:{LAST} slow slowdown=2"),
)


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return what every file holds and when it was written."""
    files = (path for path in sorted(folder.iterdir()) if path.is_file())
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_compare_goes_on_after_ctrl_c_in_its_second_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    blsgd: Command,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in (("_REPEATS", 2), ("_ALONE_SECONDS", 0.05), ("_ROUND_SECONDS", 0.05)):
        monkeypatch.setattr(calibration, name, value)
    below, before = Path("runs/compare-digits"), processes_below()
    first, second = (below / f"{name}-seed0" for name in NAMES)

    def interrupt() -> None:
        assert wait_until((second / "rounds.jsonl").exists, 200)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with changes_undone():
        assert main(COMMAND) == 130
    thread.join()
    assert wait_until(lambda: processes_below() <= before)
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [
        "blsgd: interrupted; all workers have ended",
        "repeat the command to continue; finished runs are kept",
    ]
    lines = printed.out.splitlines()
    assert lines[2:4] == ["all 2 workers together", f"[1/2] {NAMES[0]}, seed 0: training"]
    assert json.loads((second / "summary.json").read_text())["interrupted"] is True
    assert not (below / "comparison.md").exists()
    finished, speeds = contents(first), (below / "workers.toml").read_bytes()

    lines = blsgd(*COMMAND).splitlines()
    assert wait_until(lambda: processes_below() <= before)
    assert "finished before" in lines[0]
    assert any(line.startswith(f"[2/2] {NAMES[1]}, seed 0: done, accuracy ") for line in lines)
    assert lines[-1] == "in runs/compare-digits: comparison.md, comparison.csv, comparison.png"
    assert contents(first) == finished
    assert (below / "workers.toml").read_bytes() == speeds
    workers = parse_workers(tomllib.loads(speeds.decode())["workers"])
    alone = [worker.seconds_per_step_alone for worker in workers]
    summaries = [json.loads((run / "summary.json").read_text()) for run in (first, second)]
    for summary in summaries:
        assert summary["interrupted"] is False
        assert summary["training_seconds"] >= 1
        # The speeds alone make simulated devices known, with clock = "wall" too.
        assert summary["device_seconds"] > 0
        assert [worker["seconds_per_step_alone"] for worker in summary["workers"]] == alone
        assert summary["predicted"]["round_seconds"] > 0
    assert not Path("runs/latest").exists()
