"""A run on a grid of others: a profile is for the local grid only."""

from pathlib import Path

import pytest

from ..test_run import config_of, run
from .profiles import made_profile


@pytest.mark.parametrize("text", ["not there", "{}", "[" * 100_000, "good"])
def test_profile_is_neither_needed_nor_believed(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.json"
    if text == "good":
        made_profile(overhead=1000.0).write(path)
    elif text != "not there":
        path.write_text(text)
    report = run(config_of(epochs=1, clock="device", profile=str(path)))
    assert f'profile = "{path}" is ignored' in capsys.readouterr().out
    assert report.summary["interrupted"] is False
    assert 0 < report.summary["predicted"]["round_seconds"] < 500  # no overhead of elsewhere
