import pytest
from matplotlib.figure import Figure


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Return a list to which every figure is appended instead of being saved, which is slow."""
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: saved.append(self))
    return saved
