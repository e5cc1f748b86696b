"""What sessions in a test's process need."""

import pytest

from flower_blsgd.engines.stream import client


@pytest.fixture(autouse=True)
def _survives_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session in a test's process must not end that process."""
    monkeypatch.setattr(client, "end_with_supernode", lambda: None)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give connections the time that a busy machine needs to make them again.

    Tests of these very times set their own.
    """
    monkeypatch.setattr(client, "_CONNECT_SECONDS", 60.0)
