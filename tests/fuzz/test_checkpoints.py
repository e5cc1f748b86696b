"""Checkpoints that are damaged: the one before is read, or the run is refused."""

import copy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.checkpoint.state import capture
from flower_blsgd.checkpoint.store import FOLDER, Checkpoint, CheckpointStore
from flower_blsgd.errors import UsageError
from flower_blsgd.grids.flower_internals import become_server

from ..checkpoint.test_state import config_of, first_model, grid_of, play, strategy_of
from .mutations import changed_bytes, thoroughly

CONFIG = config_of(outer_optimizer="nesterov")


@pytest.fixture(scope="module")
def captured() -> list[Checkpoint]:
    """Return what a run holds after rounds 2 and 3."""
    become_server(1)
    strategy, grid = strategy_of(CONFIG), grid_of()
    second = play(strategy, grid, first_model(), 1, 2)[-1]
    found = [copy.deepcopy(capture(strategy, grid, 2, second))]
    third = play(strategy, grid, second, 3, 3)[-1]
    return [*found, capture(strategy, grid, 3, third)]


@pytest.fixture(scope="module")
def written(
    tmp_path_factory: pytest.TempPathFactory, captured: list[Checkpoint]
) -> dict[Path, bytes]:
    """Return the files of these two checkpoints."""
    folder = tmp_path_factory.mktemp("run")
    for server_round, checkpoint in enumerate(captured, start=2):
        store = CheckpointStore(folder, 2)  # a newer checkpoint would replace one that waits
        store.save(checkpoint, server_round)
        store.close()
    return {path: path.read_bytes() for path in sorted((folder / FOLDER).iterdir())}


@thoroughly(2)
@given(st.data())
def test_files(written: dict[Path, bytes], captured: list[Checkpoint], data: st.DataObject) -> None:
    """What is read is one of those that were written; if it cannot be, that is said."""
    older, newer = sorted(written)
    changed = data.draw(st.sampled_from([[older], [newer], [older, newer]]))
    for path in changed:
        path.write_bytes(data.draw(changed_bytes(written[path])))
    try:
        found = CheckpointStore(next(iter(written)).parents[1], 2).newest()
    except UsageError:
        assert changed
    else:
        assert found is not None
        (same,) = (c for c in captured if c.values["round"] == found.values["round"])
        assert found.values == same.values
        np.testing.assert_equal(found.tensors, same.tensors)  # there are statistics that are nan
    finally:
        for path in changed:
            path.write_bytes(written[path])
