"""examples/mix_strategies: Flower's server optimizers behind our average, and a sampler."""

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.serverapp.strategy import FedAvg, FedAvgM

from flower_blsgd import BiasedLocalSGD
from flower_blsgd.algorithm.local_steps import Participant
from flower_blsgd.algorithm.loss_table import LossTable
from flower_blsgd.algorithm.outer_optimizer import OuterSGD
from flower_blsgd.algorithm.sampling import EpochRequest, UniformSampler

from ..in_process_grid import (
    InProcessGrid,
    ToyWorker,
    fast_profile,
    same_bits,
    slow_profile,
    tensors_of,
)
from .commands import EXAMPLES, train_in_this_process

EXAMPLE = EXAMPLES / "mix_strategies"
ARGUMENTS: dict[str, Any] = {
    "batch_size": 2,
    "local_steps": 2,
    "local_steps_slow": 1,
    "fraction_evaluate": 0.0,
}
"""Loads 4 and 2: weights 2/3 and 1/3; an epoch of 24 samples has 4 rounds."""


@pytest.fixture(autouse=True)
def _example_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))


def server_optimized(optimizer: FedAvg, **changes: Any) -> BiasedLocalSGD:
    from mixed_digits.server_optimizer import ServerOptimized

    return ServerOptimized(24, optimizer, ["weight", "bias"], **(ARGUMENTS | changes))


def model() -> ArrayRecord:
    """Return parameters 1.0, and two buffers: a variance and a counter."""
    return ArrayRecord(
        {
            "weight": Array(np.full((2, 1), 1.0, np.float32)),
            "bias": Array(np.full(1, 1.0, np.float64)),
            "running_var": Array(np.full(1, 1.0, np.float32)),
            "counter": Array(np.array(7, np.int64)),
        }
    )


def grid() -> InProcessGrid:
    """Workers that set every floating tensor to 1.5 and 3.0: the average is 2.0."""
    fast, slow = ToyWorker(fast_profile(0), 1.5), ToyWorker(slow_profile(1), 3.0)
    return InProcessGrid({10: fast, 20: slow})


def after(strategy: BiasedLocalSGD, rounds: int = 1) -> dict[str, np.ndarray]:
    """Return the model after so many rounds, checked to have kept its form."""
    result = strategy.start(grid(), model(), num_rounds=rounds)
    found = tensors_of(result.arrays)
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {
        name: (t.dtype, t.shape) for name, t in tensors_of(model()).items()
    }
    assert found["running_var"] == pytest.approx(2.0)  # averaged, whatever the optimizer does
    assert int(found["counter"]) == 7
    return found


def test_fedavgm_is_our_outer_sgd() -> None:
    """Two implementations of one formula; both are pulled towards 2.0.

    By hand: updates 1, 0.3, -0.54; velocities 1, 1.2, 0.54; weights 1.7, 2.54, 2.918.
    """
    theirs = server_optimized(FedAvgM(server_learning_rate=0.7, server_momentum=0.9))
    ours = BiasedLocalSGD(24, outer_optimizer=OuterSGD(0.7, 0.9), **ARGUMENTS)
    expected, found = after(ours, 3), after(theirs, 3)
    for name, tensor in expected.items():
        assert found[name] == pytest.approx(tensor, rel=1e-5), name
    assert float(found["bias"][0]) == pytest.approx(2.918)


@pytest.mark.parametrize("optimizer", [FedAvg, FedAvgM])
def test_a_strategy_without_a_server_step_changes_no_bit(optimizer: type[FedAvg]) -> None:
    plain = BiasedLocalSGD(24, **ARGUMENTS).start(grid(), model(), num_rounds=3)
    mixed = server_optimized(optimizer()).start(grid(), model(), num_rounds=3)
    assert same_bits(plain.arrays, mixed.arrays)


def test_no_node_is_waited_for_but_ours() -> None:
    """One node is there, and FedAvgM by itself would wait for two, for ever."""
    nodes = InProcessGrid({10: ToyWorker(fast_profile(0), 1.5)})
    strategy = server_optimized(
        FedAvgM(min_available_nodes=2), min_available_nodes=1, sampler=UniformSampler()
    )
    config = ConfigRecord()
    orders = list(strategy.configure_train(1, model(), config, nodes))
    assert [order.metadata.dst_node_id for order in orders] == [10]
    assert dict(config) == {}


def request(rounds: int) -> EpochRequest:
    workers = Participant(fast=True, batch_size=2), Participant(fast=False, batch_size=2)
    return EpochRequest(3, 2, rounds, workers, (8, 4), 0)


@pytest.mark.parametrize(
    ("floor", "losses", "expected"),
    [
        (0.5, [0, 1, 2, 5], [0.05, 0.15, 0.25, 0.55]),  # (0.5, 1.5, 2.5, 5.5) / 10
        (0.1, [0, 0.9, None], [1 / 21, 10 / 21, 10 / 21]),  # never seen: as the hardest
        (0.1, [None, None], [0.5, 0.5]),  # nothing is known yet
    ],
)
def test_sampler_draws_by_loss_for_fast_workers_and_evenly_for_slow_ones(
    floor: float, losses: list[float | None], expected: list[float]
) -> None:
    from mixed_digits.loss_sampler import LossProportionalSampler

    table = LossTable(len(losses))
    seen = {i: loss for i, loss in enumerate(losses) if loss is not None}
    table.record(np.array(list(seen), np.int32), np.array(list(seen.values()), np.float32), 1)
    sampler = LossProportionalSampler(floor=floor)
    fast, slow = sampler.sample_lists(request(1_000), table)
    assert (fast.members, slow.members) == ((0,), (1,))
    assert (len(fast.indices), len(slow.indices)) == (8_000, 4_000)
    assert np.bincount(fast.indices) / 8_000 == pytest.approx(expected, abs=0.02)
    assert np.bincount(slow.indices) / 4_000 == pytest.approx(1 / len(losses), abs=0.03)
    assert fast.indices.tolist() == sampler.sample_lists(request(1_000), table)[0].indices.tolist()


def test_app_trains_every_mixture(capsys: pytest.CaptureFixture[str]) -> None:
    found = train_in_this_process(EXAMPLE, capsys, epochs=2)
    readme = (EXAMPLE / "README.md").read_text()
    assert len(found) == 6
    for name, percent in found.items():
        assert percent > 80, name
        assert name in readme
