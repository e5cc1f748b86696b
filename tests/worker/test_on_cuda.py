"""Training on a GPU, real or emulated."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from torch import Tensor, nn

from flower_blsgd import LocalSGD, TrainReport
from flower_blsgd.flower.array_records import view_record
from flower_blsgd.protocol import MOMENTUM
from flower_blsgd.tasks.images import random_crop_and_flip
from flower_blsgd.worker import batches
from flower_blsgd.worker.batches import free_bytes_on
from flower_blsgd.worker.model_io import state_record

from ..fake_cuda.environment import is_emulated
from .helpers import (
    NUM_SAMPLES,
    STEPS,
    data,
    independent_model,
    independent_order,
    order_of,
    small_model,
    warnings_in,
)
from .helpers import close as closely
from .helpers import closely as closely_equal

pytestmark = pytest.mark.cuda

DEVICE = "cuda:0"

compiles = pytest.mark.skipif(is_emulated(), reason="the emulation has no torch.compile")


def sgd_of(device: str = DEVICE, dropout: bool = False, **settings: Any) -> LocalSGD:
    model = independent_model if "micro_batch_size" in settings else small_model
    return LocalSGD(model(dropout), data(), device=device, **settings)


def close(one: TrainReport, other: TrainReport) -> bool:
    return closely(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("with_state", [False, True], ids=["", "state"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer": "adamw"},
        {"channels_last": True},
        {"optimizer": "adamw", "channels_last": True},
        {"micro_batch_size": 3},
        {"optimizer": "adamw", "micro_batch_size": 3, "channels_last": True},
        {"clip_norm": 0.5, "nesterov": True},
        {"momentum": 0.0},
        {"precision": "float32"},
        {"precision": "tf32"},
        {"precision": "bfloat16"},
        {"precision": "float16"},
        {"precision": "float16", "optimizer": "adamw", "channels_last": True},
        pytest.param({"compile": True}, marks=compiles),
        pytest.param({"compile": True, "micro_batch_size": 3}, marks=compiles),
    ],
    ids=lambda settings: " ".join(f"{k}={v}" for k, v in settings.items()) or "sgd",
)
def test_agrees_with_the_cpu(
    settings: dict[str, Any], with_state: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With micro-batches that differ in size, and layers whose state must keep their strides."""
    only_there = ("compile", "precision", "channels_last")
    on_cpu = {key: value for key, value in settings.items() if key not in only_there}
    there, here = sgd_of(**{"precision": "ieee", **settings}), sgd_of("cpu", **on_cpu)
    states = (RecordDict(), RecordDict()) if with_state else (None, None)
    make_order = independent_order if "micro_batch_size" in settings else order_of
    for server_round, size in ((1, 4), (2, 4), (3, 6), (1, 4)):
        order = make_order(server_round, batch_size=size)
        ours, expected = there.run(order, states[0]), here.run(order, states[1])
        if settings.get("precision", "ieee") != "ieee":
            np.testing.assert_allclose(ours.losses, expected.losses, rtol=0.1, atol=0.05)
            continue
        np.testing.assert_allclose(ours.losses, expected.losses, rtol=1e-4, atol=1e-4)
        assert closely_equal(ours.arrays, expected.arrays, rtol=1e-4, atol=1e-4)
        if states[0] is not None and states[1] is not None and MOMENTUM in states[1]:
            kept = [state.array_records[MOMENTUM] for state in states]
            assert closely_equal(*kept, rtol=1e-4, atol=1e-4)
    assert ours.skipped_steps == 0
    assert warnings_in(caplog) == []


def test_draws_what_the_seed_says() -> None:
    torch.cuda.manual_seed(5)
    expected = torch.rand(4, device=DEVICE)
    torch.cuda.manual_seed(5)
    sgd = sgd_of(dropout=True, augment=random_crop_and_flip)
    first = sgd.run(order_of(1, momentum_policy="reset"))
    assert torch.equal(torch.rand(4, device=DEVICE), expected)  # the default is left alone
    sgd.run(order_of(2, momentum_policy="reset"))
    again = sgd.run(order_of(1, momentum_policy="reset"))
    assert close(again, first)
    other = sgd.run(order_of(1, momentum_policy="reset", seed=99))
    assert not close(other, first)


class Averages(nn.Module):
    """Keeps a moving average in a new tensor after each step, which CUDA graphs overwrite."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model()
        self.register_buffer("average", torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(inputs)
        self.average = 0.9 * self.average + 0.1 * outputs.detach().mean(dim=0)
        return outputs - self.average


class Reads(nn.Module):
    """Reads a value, which ends a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(inputs)
        return outputs if float(outputs.sum()) < 1e9 else -outputs


@compiles
@pytest.mark.parametrize("kind", [Averages, Reads])
def test_unusual_model_is_compiled_or_runs_eagerly(kind: type[nn.Module]) -> None:
    order = order_of(1, arrays=state_record(kind()))
    compiled, eager = (
        LocalSGD(kind(), data(), device=DEVICE, compile=compile) for compile in (True, False)
    )
    for _ in range(2):
        assert close(compiled.run(order), eager.run(order))


class Hungry(nn.Module):
    """Needs an eighth of the GPU for every sample."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.bytes_per_sample = torch.cuda.get_device_properties(DEVICE).total_memory // 8

    def forward(self, inputs: Tensor) -> Tensor:
        torch.empty(len(inputs) * self.bytes_per_sample, dtype=torch.uint8, device=inputs.device)
        outputs: Tensor = self.inner(inputs)
        return outputs


@pytest.mark.parametrize("cut", [False, True])
def test_out_of_memory_names_what_fits(cut: bool) -> None:
    model, order = (
        (independent_model, independent_order(1, batch_size=16))
        if cut
        else (small_model, order_of(1, batch_size=16))
    )
    arrays = view_record({f"inner.{n}": a.numpy() for n, a in order.arrays.items()})
    advice = (
        r"micro-batches of [24] fit: set micro-batch-size = " if cut else r"a batch of [24] fits"
    )
    sgd = LocalSGD(Hungry(model()), data(), device=DEVICE, name="fast-0")
    with pytest.raises(ValueError, match=rf"worker fast-0: .* of 16; {advice}"):
        sgd.run(dataclasses.replace(order, arrays=arrays))
    if cut:
        sgd = LocalSGD(Hungry(model()), data(), device=DEVICE, micro_batch_size=2)
        assert sgd.run(dataclasses.replace(order, arrays=arrays)).completed_steps == STEPS
    assert sgd.run(order_of(1, batch_size=1, arrays=arrays)).completed_steps == STEPS
    free = free_bytes_on(torch.device(DEVICE))
    assert free is not None
    assert 0 < free <= torch.cuda.get_device_properties(DEVICE).total_memory


@pytest.mark.parametrize(("optimizer", "models"), [("sgd", 3.1), ("adamw", 4.1)])
def test_transfers_need_no_more_memory_than_steps(optimizer: str, models: float) -> None:
    """Weights, gradients and the optimizer's state; gradients are freed before copies."""
    layers = [nn.Linear(512, 512) for _ in range(16)]
    model = nn.Sequential(*layers, nn.Linear(512, 4))
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    samples = torch.randn(NUM_SAMPLES, 512), torch.arange(NUM_SAMPLES) % 4
    order, state = order_of(1, arrays=state_record(model)), RecordDict()
    before = torch.cuda.memory_allocated(DEVICE)
    sgd = LocalSGD(model, samples, device=DEVICE, optimizer=optimizer)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    for _ in range(2):
        sgd.run(order, state)
    assert torch.cuda.max_memory_allocated(DEVICE) - before <= models * num_bytes


def test_data_that_stay_on_the_host_are_copied_batch_by_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = LocalSGD(small_model(), data(), device=DEVICE)
    monkeypatch.setattr(batches, "DATA_SHARE", 0.0)
    on_host = LocalSGD(small_model(), data(), device=DEVICE)
    for server_round in (1, 2, 3):
        order = order_of(server_round, local_steps=20)
        assert close(on_host.run(order), there.run(order))
