"""Whole runs whose batches are cut."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from torch.func import vmap

from clients import blsgd_client
from flower_blsgd.errors import UsageError
from flower_blsgd.protocol import TrainOrder
from flower_blsgd.tasks import load_task
from flower_blsgd.worker.model_state import state_record

from .test_run import config_of, grid_of, run


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_run_in_pieces_gives_what_it_gives_without() -> None:
    """One epoch of four rounds: rounding has no time to grow."""
    whole = config_of(epochs=1, learning_rate=0.01, out="whole", sampler="uniform")
    for config in (whole, dataclasses.replace(whole, micro_batch_size=5, out="cut")):
        run(config)
    one, other = (load_file(Path(name) / "model.safetensors") for name in ("whole", "cut"))
    assert any(not np.array_equal(tensor, other[name]) for name, tensor in one.items())
    for name, tensor in one.items():
        assert np.allclose(tensor, other[name], rtol=1e-4, atol=1e-5), name


def test_model_that_needs_its_whole_batch_is_refused_before_the_first_message() -> None:
    config = config_of(model="cnn-batchnorm", micro_batch_size=8)
    grid = grid_of(config)
    told = r"^micro-batch-size = 8: BatchNorm2d \(1\) of the model"
    with pytest.raises(UsageError, match=told):
        run(config, grid)
    assert grid.sent == []
    assert list(Path.cwd().iterdir()) == []


def test_workers_that_share_an_accelerator_cut_theirs_too() -> None:
    config = config_of(micro_batch_size=5, replicas="batched", processes_per_device=1)
    sgd = blsgd_client._team.__wrapped__(config, "cpu").sgd
    order = TrainOrder(
        round=1,
        epoch=1,
        local_steps=1,
        batch_size=12,
        learning_rate=0.1,
        seed=0,
        deadline_seconds=0.0,
        momentum_policy="reset",
        indices=np.arange(12, dtype=np.int32),
        arrays=state_record(load_task("digits").initial_model(0)),
    )
    sizes: list[int] = []
    losses_of = sgd._losses_of_one

    def noting(*arguments: Any) -> Any:
        sizes.append(len(arguments[2]))
        return losses_of(*arguments)

    sgd._losses = vmap(noting, randomness="different")
    sgd.run([(order, None)] * 2)
    assert sizes == [4, 4, 4]
