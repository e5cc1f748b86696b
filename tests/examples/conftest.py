"""What the examples leave in this process is taken away after each test."""

import sys
from collections.abc import Iterator

import pytest

PACKAGES = ("own_digits", "mixed_digits", "my_app")


@pytest.fixture(autouse=True)
def _examples_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in PACKAGES]:
        del sys.modules[name]
