import pytest
from matplotlib.figure import Figure


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Keep the figures that are saved."""
    saved: list[Figure] = []
    save = Figure.savefig

    def keep(self: Figure, *arguments: object, **more: object) -> None:
        saved.append(self)
        save(self, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved
