import pytest
from matplotlib.figure import Figure

from .drawings import saved_figures


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Return a list to which every figure is appended instead of being saved."""
    return saved_figures(monkeypatch)
