"""What all tests of data share."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache, a folder of the test's own that is not there yet."""
    monkeypatch.setenv("BLSGD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return tmp_path / "cache"
