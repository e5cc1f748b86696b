"""Several devices behind one SuperNode: a real session with worker processes of its own."""

from pathlib import Path

import numpy as np
import pytest

from .test_engines import cores, local_weights, run, settings, weights

__all__ = ["local_weights"]  # a fixture


@pytest.mark.engines
@pytest.mark.timeout(500)
def test_two_devices_behind_one_supernode_train_as_on_the_local_grid(
    tmp_path: Path, local_weights: dict[str, np.ndarray]
) -> None:
    """Equal up to the rounding of the host's average, over three rounds."""
    out = tmp_path / "run"
    first, last = cores()
    node = f"devices='1x cpu:{first} fast; 1x cpu:{last} slow' name='box'"
    own = f"{settings(out)} min-workers=1"
    told = run("scripts/flower_engine.py", "deployment", "--node", node, "-c", own)
    assert "box/0" in told
    found = weights(out)
    assert found.keys() == local_weights.keys()
    for name, tensor in found.items():
        assert np.abs(tensor - local_weights[name]).max() < 1e-5, name
