"""No test sees the session of another one; and what is no test."""

from collections.abc import Iterator

import pytest

from flower_blsgd.session.exchange import HERE

collect_ignore = ["features.py"]  # it imports a module of its own folder, as scripts do


class _NoTimer:
    """Reminds nobody, so that sessions that never end leave no thread."""

    def __init__(self, *_: object) -> None:
        self.start = self.cancel = lambda: None


@pytest.fixture(autouse=True)
def _no_session(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("flower_blsgd.session.counting.Timer", _NoTimer)
    HERE.exchange, HERE.has_joined = None, False
    yield
    HERE.exchange, HERE.has_joined = None, False
