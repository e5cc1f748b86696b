"""Checkpoints that are damaged, or whose sums were made anew: the one before, or a refusal."""

import contextlib
import copy
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd.checkpoint.state import capture, restore
from flower_blsgd.checkpoint.store import FOLDER, Checkpoint, CheckpointStore
from flower_blsgd.errors import UsageError
from flower_blsgd.runtime.flower_internals import become_server

from ..checkpoint.signed import write_signed
from ..checkpoint.test_state import config_of, first_model, grid_of, play, strategy_of
from ..in_process_grid import tensors_of
from .mutations import changed_bytes, thoroughly
from .test_files import one_line

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


@thoroughly(2)
@given(st.integers(0, 2**63), st.integers(1, 3))
def test_values_with_a_right_sum(
    written: dict[Path, bytes], captured: list[Checkpoint], seed: int, changes: int
) -> None:
    values, draws = copy.deepcopy(captured[1].values), random.Random(seed)
    for _ in range(changes):
        change(values, draws)
    folder = min(written).parents[1]
    path = write_signed(folder, 4, captured[1].tensors, json.dumps(values))
    try:
        with contextlib.suppress(UsageError):
            found = CheckpointStore(path.parents[1], 2).newest()
            assert found is not None
            check_restored(found)
    finally:
        path.unlink()


VALUES = (
    *(None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, 10**400, 0.5, -0.5, 1e308, float("nan")),
    *(float("inf"), "", "x", "fast", "a\nb", [], [0], [[0]], {}, {"a": 1}),
)


def change(document: Any, draws: random.Random) -> None:
    """Change one value, anywhere in it, or take it away."""
    while document:
        key = draws.choice(list(document) if isinstance(document, dict) else range(len(document)))
        if isinstance(document[key], dict | list) and document[key] and draws.random() < 0.8:
            document = document[key]
        elif draws.random() < 0.2:
            del document[key]
            return
        else:
            document[key] = copy.deepcopy(draws.choice(VALUES))
            return


WRONG = (
    *(lambda t: t[1:] if t.ndim else t[None], lambda t: t[None], lambda t: t.astype(np.float16)),
    *(lambda t: np.zeros_like(t) - t.dtype.type(1), lambda t: t + t.dtype.type(100), np.zeros_like),
    lambda t: t + np.nan,
    lambda t: (t + np.inf).astype(t.dtype) if t.dtype.kind == "f" else t[None],
)


@thoroughly(2)
@given(st.data())
def test_tensors(captured: list[Checkpoint], data: st.DataObject) -> None:
    tensors = dict(captured[1].tensors)
    name = data.draw(st.sampled_from(sorted(tensors)))
    tensors[name] = data.draw(st.sampled_from(WRONG))(tensors[name])
    check_restored(Checkpoint(copy.deepcopy(captured[1].values), tensors))


def check_restored(checkpoint: Checkpoint) -> None:
    """Restore it: refused and nothing has changed, or the next round can be ordered."""
    strategy = strategy_of(CONFIG)
    try:
        arrays, server_round = restore(strategy, checkpoint, first_model())
    except UsageError as error:
        one_line(error)
        assert strategy.registry.workers == []
        return
    assert server_round >= 1
    assert all(np.isfinite(tensor).all() for tensor in tensors_of(arrays).values())
    planner = strategy.planner
    assert 1 <= planner.epoch <= server_round
    assert 0 <= planner.rounds_done <= planner.plan.rounds
    for samples in planner.plan.sample_lists:
        assert samples.indices.min() >= 0
        assert samples.indices.max() < planner.num_samples
    for worker in strategy.registry.workers:
        assert 0 <= worker.profile.seconds_per_step < math.inf
