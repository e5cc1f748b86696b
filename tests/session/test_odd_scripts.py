"""Scripts that do odd things under ``blsgd launch``: one clear line, or they simply work."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flower_blsgd.config import RunConfig
from flower_blsgd.launch import ScriptFailedError, launch
from flower_blsgd.results.recorder import RunRecorder

from ..grids.processes import is_alive
from ..log_capture import captured_log
from ..refusal import refusal
from . import odd

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def launched(
    oddities: str, workers: int = 2, script: str = odd.__file__, **settings: Any
) -> RunRecorder:
    """Launch the script for 30 short rounds, with workers whose speeds are given."""
    speed = "batch=8 seconds-per-step=0.001"
    slow = f"; 1x cpu slow {speed}" if settings else ""
    config = RunConfig(
        workers=f"{workers}x cpu {speed}{slow}",
        local_steps_fast="2",
        rounds=30,
        epochs=10**6,
        threads=1,
        **settings,
    )
    return launch(script, oddities.split(), config)


def test_a_loss_alone_is_the_metric_and_smaller_is_better(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """That its exit code is unknown, because the fork server was killed, is no failure."""
    run = launched("loss orphan", 1)
    names = ("metric_name", "metric_mode", "metric", "best_metric", "loss", "accuracy")
    assert [run.summary[name] for name in names] == ["loss", "min", 2.0, 1.0, 2.0, None]
    assert (run.folder.path / "best_model.safetensors").is_file()
    assert run.summary["failures_by_worker"] == {}
    assert [worker["precision"] for worker in run.summary["workers"]] == [None]
    shown = capsys.readouterr().out
    assert "warning: loss is not a number, so best_model" in shown
    assert "done: test loss 2 after" in shown


def test_a_folder_that_cannot_be_made_is_refused_before_the_script_begins() -> None:
    Path("there").mkdir()
    Path("begins.py").write_text("open('begun', 'w')")
    assert "out = 'there' exists" in refusal(launched, "", script="begins.py", out="there")
    assert not Path("begun").exists()


def test_only_the_work_of_odd_workers_is_lost_and_they_end_as_with_python() -> None:
    """All spawn a process, and leave much for their end. The second has a NaN once, the third ends
    too early, and the first two fail after the run.
    """
    link, folder = Path("link.py"), Path("runs/latest")
    link.symlink_to(odd.__file__)
    with captured_log() as log, pytest.raises(ScriptFailedError) as failed:
        launched("spawn nan early leave fail", 3, "link.py")
    first = r"the script raised SystemExit: 3"
    second = r"the script raised OSError: \[Errno 28\] No space left on device"
    line = rf"link.py failed after the run, in worker fast-0 \S+: {first}; in worker fast-1 \S+: "
    assert re.fullmatch(line + second, str(failed.value))
    assert failed.value.code == 3
    assert (folder / "run.log").read_text().endswith(f"error: {failed.value}\n")
    assert not [warning for warning in log.warnings if "starts again" in warning]

    summary = json.loads((folder / "summary.json").read_text())
    failures = [(one["worker"][:6], one["kind"]) for one in summary["failures"]]
    assert failures[-2:] == [("fast-0", "raised"), ("fast-1", "raised")]
    assert Counter(failures[:-2]) == {("fast-1", "not finite"): 1, ("fast-2", "raised"): 3}
    assert "the script ended before the run was" in str(summary["failures"])
    assert summary["rounds"] == 30
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    assert {json.loads(line)["learning_rate"] for line in lines} == {odd.LEARNING_RATE}

    begun = Path("first").read_text().splitlines()
    assert begun[0] == "0 of 3"
    assert sorted(begun) == ["0 of 3", "1 of 3", "2 of 3"]
    real = Path(odd.__file__).parent
    for rank in range(3):
        for what in ("unclosed", "finalize", "atexit", "thread"):
            assert Path(f"{what}-{rank}").read_text() == "written"
        assert not Path(Path(f"folder-{rank}").read_text()).exists()
        assert not is_alive(int(Path(f"child-{rank}").read_text()))
        names = Path(f"names-{rank}").read_text()
        assert names == f"{link.absolute()} link.py {real} __main__"
    shown = Path(folder, "worker-1.log").read_text()
    assert "OSError: [Errno 28] No space left on device" in shown
    assert "at exit 1" in shown


def test_a_worker_whose_script_fails_before_its_first_order_is_a_failure() -> None:
    run = launched("begin", min_workers=1)
    assert run.summary["rounds"] == 30
    first = run.summary["failures"][0]
    assert (first["round"], first["kind"]) == (0, "raised, starting")
    assert first["worker"].startswith("fast-2 ")
    assert "no such card" in first["reason"]


def test_a_module_runs_as_with_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second worker dies after the run, the first ends quickly; both may."""
    Path("package").mkdir()
    Path("package/train.py").write_text(Path(odd.__file__).read_text())
    with pytest.raises(ScriptFailedError, match=r"-m package.train failed .* \(exit code 1\)"):
        launched("package.train quit", script="-m")
    assert Path("runs/train-1/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("oddity", "settings", "message"),
    [
        ("freeze", {}, r"worker fast-1 \S+ has a different model or different frozen weights than"),
        ("raise", {}, "failed in the main worker: the script raised ValueError: no data"),
        ("", {"algorithm": "byteps"}, r"^train-on = .* \(byteps\): slow workers sum models"),
    ],
)
def test_what_cannot_train_is_refused_in_one_line(
    oddity: str, settings: dict[str, Any], message: str
) -> None:
    """`test_join.py` has what the settings and the main worker's answer refuse."""
    line = refusal(launched, oddity, **settings)
    assert re.search(message, line), line
    assert not list(Path().rglob("*")), "something was written"
