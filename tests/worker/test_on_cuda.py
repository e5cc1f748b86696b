"""Recorded steps on a real GPU; skipped where there is none."""

import dataclasses
import logging
import threading
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from flower_blsgd import LocalSGD, TrainReport
from flower_blsgd.array_view import view_record
from flower_blsgd.tasks.augmentation import random_crop_and_flip
from flower_blsgd.worker.device_memory import free_bytes_on
from flower_blsgd.worker.samples import HostSamples

from .stand_in import small_model
from .test_cuda_graph import STEPS, data, order_of
from .test_micro_batches import image_order, independent_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = "cuda:0"


def sgd_of(cuda_graph: bool, dropout: bool = True, **settings: Any) -> LocalSGD:
    settings = {"augment": random_crop_and_flip} | settings
    return LocalSGD(small_model(dropout), data(), device=DEVICE, cuda_graph=cuda_graph, **settings)


def close(one: TrainReport, other: TrainReport) -> bool:
    return np.allclose(one.losses, other.losses, rtol=1e-3, atol=1e-4) and all(
        np.allclose(a.numpy(), other.arrays[name].numpy(), rtol=1e-3, atol=1e-4)
        for name, a in one.arrays.items()
    )


def inner_arrays() -> ArrayRecord:
    """Return the model of an order for a module that has ours inside."""
    return view_record({f"inner.{n}": a.numpy() for n, a in order_of(1).arrays.items()})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer": "adamw"},
        {"channels_last": True},
        {"precision": "bfloat16"},
        {"precision": "tf32"},
    ],
    ids=["sgd", "adamw", "channels last", "bfloat16", "tf32"],
)
def test_graph_agrees_with_eager(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    graphed, eager = sgd_of(True, **settings), sgd_of(False, **settings)
    tolerant = "precision" in settings
    for server_round, size in ((1, 4), (2, 4), (3, 6), (1, 4)):
        order = order_of(server_round, batch_size=size)
        ours, expected = graphed.run(order), eager.run(order)
        assert close(ours, expected) or (
            tolerant and np.allclose(ours.losses, expected.losses, rtol=0.1, atol=0.05)
        )
    assert graphed._steps.batch_sizes == (6, 4)  # type: ignore[attr-defined]
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_graph_draws_what_the_seed_says() -> None:
    graphed = sgd_of(True)
    first = graphed.run(order_of(1, momentum_policy="reset"))
    torch.rand(3, device=DEVICE)
    graphed.run(order_of(2, momentum_policy="reset"))
    again = graphed.run(order_of(1, momentum_policy="reset"))
    assert close(again, first)
    other = graphed.run(order_of(1, momentum_policy="reset", seed=99))
    assert not close(other, first)


def test_default_generator_is_left_alone() -> None:
    torch.cuda.manual_seed(5)
    expected = torch.rand(4, device=DEVICE)
    torch.cuda.manual_seed(5)
    sgd_of(True).run(order_of(1))
    assert torch.equal(torch.rand(4, device=DEVICE), expected)


def test_step_that_reads_a_number_is_done_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_model(True)

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.inner(inputs)
            return outputs if float(outputs.sum()) < 1e9 else -outputs

    arrays = inner_arrays()
    order = order_of(1, arrays=arrays)
    graphed, eager = (
        LocalSGD(Reads(), data(), device=DEVICE, cuda_graph=graph) for graph in (True, False)
    )
    for _ in range(2):  # a recording that failed hurts no generator
        assert close(graphed.run(order), eager.run(order))
    assert len([r for r in caplog.records if "cannot be recorded" in r.getMessage()]) == 1


def test_workers_side_by_side_get_what_they_get_alone() -> None:
    orders = [order_of(n, local_steps=20, momentum_policy="reset") for n in (1, 2, 3)]
    expected = [sgd_of(True).run(order) for order in orders]
    found: list[TrainReport | None] = [None] * 3

    def work(place: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            sgd = sgd_of(True)
            for _ in range(3):
                found[place] = sgd.run(orders[place])

    threads = [threading.Thread(target=work, args=(place,)) for place in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ours, alone in zip(found, expected, strict=True):
        assert ours is not None
        assert close(ours, alone)


def test_out_of_memory_names_a_batch_size_that_fits() -> None:
    class Hungry(nn.Module):
        """Needs an eighth of the GPU for every sample."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = small_model()
            total = torch.cuda.get_device_properties(DEVICE).total_memory
            self.bytes_per_sample = total // 8

        def forward(self, inputs: Tensor) -> Tensor:
            size = len(inputs) * self.bytes_per_sample
            torch.empty(size, dtype=torch.uint8, device=inputs.device)
            outputs: Tensor = self.inner(inputs)
            return outputs

    arrays = inner_arrays()
    sgd = LocalSGD(Hungry(), data(), device=DEVICE, name="fast-0")
    with pytest.raises(ValueError, match=r"worker fast-0: .* of 16; a batch of [24] fits"):
        sgd.run(order_of(1, batch_size=16, arrays=arrays))
    assert sgd.run(order_of(1, batch_size=1, arrays=arrays)).completed_steps == STEPS


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_pieces_agree_with_the_whole_batch(
    optimizer: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole, cut, recorded = (
        LocalSGD(
            independent_model(),
            data(),
            device=DEVICE,
            optimizer=optimizer,
            augment=random_crop_and_flip,
            cuda_graph=cuda_graph,
            micro_batch_size=micro,
        )
        for micro, cuda_graph in ((0, False), (3, False), (3, True))
    )
    for server_round, size in ((1, 8), (2, 8), (3, 5)):
        order = image_order(server_round, batch_size=size, learning_rate=1e-3)
        expected = whole.run(order)
        assert close(cut.run(order), expected)
        assert close(recorded.run(order), expected)
    assert recorded._steps.batch_sizes == (8, 5)  # type: ignore[attr-defined]
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_pieces_are_computed_in_bfloat16() -> None:
    for cuda_graph in (False, True):
        cut, whole = (
            LocalSGD(
                independent_model(),
                data(),
                device=DEVICE,
                precision="bfloat16",
                channels_last=True,
                cuda_graph=cuda_graph,
                micro_batch_size=micro,
            ).run(image_order(batch_size=8))
            for micro in (3, 0)
        )
        assert np.allclose(cut.losses, whole.losses, rtol=0.1, atol=0.05)


def test_out_of_memory_names_pieces_that_fit() -> None:
    class Hungry(nn.Module):
        """Needs an eighth of the GPU for every sample."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = independent_model()
            total = torch.cuda.get_device_properties(DEVICE).total_memory
            self.bytes_per_sample = total // 8

        def forward(self, inputs: Tensor) -> Tensor:
            size = len(inputs) * self.bytes_per_sample
            torch.empty(size, dtype=torch.uint8, device=inputs.device)
            outputs: Tensor = self.inner(inputs)
            return outputs

    order = image_order(batch_size=16)
    arrays = view_record({f"inner.{n}": a.numpy() for n, a in order.arrays.items()})
    order = dataclasses.replace(order, arrays=arrays)
    with pytest.raises(ValueError, match=r"of 16; pieces of [24] fit: set micro-batch-size = "):
        LocalSGD(Hungry(), data(), device=DEVICE).run(order)
    sgd = LocalSGD(Hungry(), data(), device=DEVICE, micro_batch_size=2)
    assert sgd.run(order).completed_steps == STEPS


def test_data_that_stay_on_the_host_are_copied_batch_by_batch() -> None:
    on_host = LocalSGD(small_model(), HostSamples(data()), device=DEVICE, cuda_graph=False)
    there = LocalSGD(small_model(), data(), device=DEVICE, cuda_graph=False)
    for server_round in (1, 2, 3):
        order = order_of(server_round, local_steps=20)
        assert close(on_host.run(order), there.run(order))


def test_free_memory_is_told() -> None:
    free = free_bytes_on(torch.device(DEVICE))
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    assert free is not None
    assert 0 < free <= total
