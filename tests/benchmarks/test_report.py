"""The page of results: tables from JSON files."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.rows import not_run, row, with_goal


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(report, "PAGE", tmp_path / "RESULTS.md")
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    return tmp_path


def put(place: Path, name: str, rows: list[dict[str, Any]], **conditions: Any) -> None:
    content = {"rows": rows, "conditions": conditions}
    (place / "results" / f"{name}.json").write_text(json.dumps(content))


def test_table_has_rows_reasons_goals_and_conditions(place: Path) -> None:
    local = row("4 x 0.27 M: engine, local grid", [0.002, 0.004, 0.0025], "s per round")
    rows = [with_goal(local, at_most=0.003), not_run("big | cell", "needs 12 GB", "s per round")]
    put(place, "rounds", rows, cores=2, engines={"a": 1})
    report.main([])
    text = (place / "RESULTS.md").read_text()
    said = "0.0025 | s per round | 0.002 to 0.004, n = 3 |  | <= 0.003 s per round: met |"
    assert f"| 4 x 0.27 M: engine, local grid | {said}" in text
    assert "| big \\| cell | not run | s per round | needs 12 GB |  |  |" in text
    assert 'Conditions ([rounds.json](results/rounds.json)): cores = 2; engines = {"a": 1}.' in text
    goal = next(line for line in text.splitlines() if "local grid, 4 workers" in line)
    assert goal.endswith("0.0025 s per round, <= 0.003 s per round: met |")
    assert report.main(["--check"]) == 0
    (place / "results" / "rounds.json").unlink()
    assert report.main(["--check"]) == 1
