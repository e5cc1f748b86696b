"""The calls on a machine with a GPU: limits, outcomes of checks, and the page of their results."""

import importlib
import inspect
import json
import sys
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.lines import Lines


@pytest.mark.parametrize("call", gpu.CALLS)
def test_limits_of_the_checks_fit_into_their_call(call: str) -> None:
    checks = gpu.CALLS[call]
    longest = gpu.SETUP_SECONDS + sum(check.seconds + gpu.KILL_SECONDS for check in checks)
    assert longest <= gpu.LIMITS[call]
    for check in checks:
        module = importlib.import_module(f"benchmarks.gpu.{check.module}")
        assert list(inspect.signature(getattr(module, check.name)).parameters) == ["lines"]


def test_outcome_of_a_check_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "OUT", tmp_path)

    def outcome(script: str, seconds: float) -> str:
        return gpu.outcome_of([sys.executable, "-c", script], seconds, {})

    assert outcome("", 60) == ""
    assert outcome("raise SystemExit('no card here')", 60) == "no card here"
    assert outcome("import time; time.sleep(60)", 2.5) == "took longer than 2 s"
    assert outcome("", 1) == "not run: no time was left"


def test_page_has_the_results_of_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.lines.OUT", tmp_path)
    lines = Lines("memory")
    lines.fact("conditions", torch="2", card="H100, 580.1")
    lines.expect("a message", False, said="long", code=1)
    lines.rows([{"name": "peak", "value": 3.0, "unit": "models", "ratio": None, "count": 1}])
    assert lines.failed == ["a message"]
    (tmp_path / "checks.jsonl").rename(tmp_path / "gpu_works.jsonl")
    text = report.page(report.read_results(tmp_path))
    assert '| a message | failed | {"code": 1} |' in text
    assert "| peak | 3 | models | n = 1 |  |" in text
    assert "(results/gpu_works.jsonl)): torch = 2; card = H100, 580.1." in text
    assert "How fast is a GPU? (`gpu_speed`)\n\nNot measured" in text
    assert json.loads((tmp_path / "gpu_works.jsonl").read_text().splitlines()[1])["ok"] is False
