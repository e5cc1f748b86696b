"""No test sees the session of another one; and what is no test."""

from collections.abc import Iterator

import pytest

from flower_blsgd.session.exchange import HERE

collect_ignore = ["features.py"]  # it imports a module of its own folder, as scripts do


@pytest.fixture(autouse=True)
def _no_session() -> Iterator[None]:
    HERE.exchange, HERE.has_joined = None, False
    yield
    HERE.exchange, HERE.has_joined = None, False
