"""Flower's simulation: the same bits as on the local grid."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..examples.commands import ROOT
from .engine import DIGITS, Deployment, Weights, assert_bit_equal, weights

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    pytest.importorskip("ray")
    engine = Deployment(tmp_path_factory.mktemp("flwr-home"))
    try:
        engine.start_superlink(simulation=True)
        yield engine
    finally:
        engine.stop()


def test_same_bits_as_on_the_local_grid(
    simulation: Deployment, tmp_path: Path, local_weights: Weights
) -> None:
    out = tmp_path / "run"
    arguments = [*simulation.federation(2), "-c", f"{DIGITS} out='{out}'"]
    output = simulation.output_of("run", ROOT, "engine", "--stream", *arguments)
    assert (out / "summary.json").exists(), output
    assert_bit_equal(local_weights, weights(out))


def test_page_has_the_command_that_the_script_gives(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "deployment.md").read_text()
    option, config = Deployment(tmp_path).federation(10)
    assert f"{option} '{config}'" in page
