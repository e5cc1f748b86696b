"""Which precision, and where it is refused."""

import logging
from collections.abc import Iterator
from typing import get_args

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor, nn

from flower_blsgd import LocalSGD
from flower_blsgd.array_view import view_record
from flower_blsgd.config import RunConfig
from flower_blsgd.errors import UsageError
from flower_blsgd.worker import precision
from flower_blsgd.worker.model_state import state_record
from flower_blsgd.worker.precision import (
    PRECISIONS,
    autocast,
    check_precision,
    cpu_has_bfloat16,
    use_precision,
)

from .test_cuda_graph import data, order_of, same, small_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def switches() -> Iterator[None]:
    """Put torch's own switches back."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    yield
    matmul.allow_tf32, cudnn.allow_tf32 = before


@pytest.mark.parametrize("chosen", PRECISIONS)
def test_tf32_is_what_float32_becomes_only_where_it_is_asked_for(
    switches: None, chosen: precision.Precision
) -> None:
    use_precision("float32" if chosen == "tf32" else "tf32", CUDA)
    use_precision(chosen, CUDA)
    assert torch.backends.cuda.matmul.allow_tf32 == (chosen == "tf32")
    assert torch.backends.cudnn.allow_tf32 == (chosen == "tf32")


def test_a_cpu_leaves_the_switches_alone(switches: None) -> None:
    torch.backends.cudnn.allow_tf32 = True
    use_precision("float32", CPU)
    use_precision("float32", "cpu")
    assert torch.backends.cudnn.allow_tf32


def test_unknown_precision_is_refused_in_one_line() -> None:
    told = r"^precision = 'fp8' must be one of 'float32', 'tf32', 'bfloat16'$"
    with pytest.raises(UsageError, match=told):
        LocalSGD(small_model(), data(), precision="fp8")


def test_precisions_are_those_of_the_settings() -> None:
    for chosen in get_args(precision.Precision):
        assert RunConfig(precision=chosen).precision == chosen
    with pytest.raises(UsageError, match="precision = 'float64' is not known"):
        RunConfig(precision="float64")


def test_bfloat16_where_there_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match='does not work on meta; use "float32"'):
        check_precision("bfloat16", torch.device("meta"))


@pytest.mark.parametrize("has", [False, True])
def test_bfloat16_on_a_cpu_that_emulates_it_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, has: bool
) -> None:
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: has)
    assert check_precision("bfloat16", CPU) == "bfloat16"
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == (not has)


def test_bfloat16_of_the_processor_is_found_without_torch_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = cpu_has_bfloat16()
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)  # torch 2.11
    assert cpu_has_bfloat16() == found


def test_bfloat16_computes_in_it_and_keeps_weights_and_losses_in_float32() -> None:
    seen: list[torch.dtype] = []

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_model()

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.inner(inputs)
            seen.append(outputs.dtype)
            return outputs

    def in_bfloat16(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = outputs.gather(1, targets[:, None])[:, 0]
        seen.append(losses.dtype)
        return losses

    model = Looks()
    sgd = LocalSGD(model, data(), in_bfloat16, precision="bfloat16")
    report = sgd.run(order_of(1, arrays=state_record(model)))
    assert set(seen) == {torch.bfloat16}
    assert report.losses.dtype.name == "float32"
    assert {a.numpy().dtype.name for a in report.arrays.values()} == {"float32", "int64"}


def test_bfloat16_is_near_float32_and_not_the_same() -> None:
    exact = LocalSGD(small_model(), data()).run(order_of(1))
    rounded = LocalSGD(small_model(), data(), precision="bfloat16").run(order_of(1))
    again = LocalSGD(small_model(), data(), precision="bfloat16").run(order_of(1))
    assert same(rounded, again)
    assert not same(rounded, exact)
    assert rounded.losses == pytest.approx(exact.losses, rel=0.05)


def test_float32_needs_no_context() -> None:
    with autocast("float32", CPU), autocast("tf32", CPU):
        assert not torch.is_autocast_enabled("cpu")
    with autocast("bfloat16", CPU, keep_casts=False):
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_cache_enabled()


# --- channels last


def test_channels_last_agrees_and_sends_plain_arrays() -> None:
    plain, last = (
        LocalSGD(small_model(), data()),
        LocalSGD(small_model(), data(), channels_last=True),
    )
    assert last.model[0].weight.is_contiguous(memory_format=torch.channels_last)
    for server_round in (1, 2):
        order = order_of(server_round, momentum_policy="average")
        expected, found = plain.run(order), last.run(order)
        assert found.losses == pytest.approx(expected.losses, rel=1e-4)
        for name, array in found.arrays.items():
            assert array.numpy().flags.c_contiguous
            assert array.numpy() == pytest.approx(expected.arrays[name].numpy(), abs=1e-4)
        assert isinstance(found.momentum, ArrayRecord)
        assert all(array.numpy().flags.c_contiguous for array in found.momentum.values())


def test_channels_last_with_momentum_in_a_state_that_is_made_anew_in_between() -> None:
    """As in shared memory, where arrays are put one after the other, each in the plain order."""
    plain, last = (
        LocalSGD(small_model(), data(), channels_last=channels_last)
        for channels_last in (False, True)
    )
    state = RecordDict()
    for server_round in (1, 2, 3):
        order = order_of(server_round)
        expected, found = plain.run(order), last.run(order, state)
        kept = state.array_records["momentum"]
        moved = {name: np.ascontiguousarray(array.numpy()) for name, array in kept.items()}
        state["momentum"] = view_record(moved)
        for name, array in found.arrays.items():
            assert array.numpy() == pytest.approx(expected.arrays[name].numpy(), abs=1e-4)


def test_channels_last_leaves_other_inputs_alone() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 4))
    order = order_of(1, arrays=state_record(model))
    flat = data()[0].flatten(1), data()[1]
    assert same(
        LocalSGD(model, flat, channels_last=True).run(order), LocalSGD(model, flat).run(order)
    )
