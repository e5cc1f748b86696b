"""One step: restored, in micro-batches, compiled, in other precisions and memory formats."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from torch import Tensor, nn

from flower_blsgd import LocalSGD
from flower_blsgd.errors import UsageError
from flower_blsgd.grids.array_records import view_record
from flower_blsgd.grids.worker_spec import PRECISIONS, Precision
from flower_blsgd.tasks.images import random_crop_and_flip
from flower_blsgd.worker.local_sgd import compiled, cross_entropy
from flower_blsgd.worker.step import (
    batch_dependent_module,
    check_micro_batches,
    check_precision,
    host_randomness,
    preserve_training_state,
    use_precision,
)

from .helpers import (
    close,
    data,
    independent_model,
    independent_order,
    order_of,
    same,
    small_model,
    warnings_in,
)


def test_random_numbers_of_the_host_are_seen_and_come_back() -> None:
    model, before = small_model(), host_randomness()
    for draw in (random.random, np.random.random, lambda: torch.rand(1)):
        with preserve_training_state(model, torch.optim.SGD(model.parameters(), lr=0.1)):
            draw()
            assert host_randomness() != before
        assert host_randomness() == before


pytestmark = pytest.mark.usefixtures("one_thread")


def sgd_of(micro_batch_size: int, **settings: Any) -> LocalSGD:
    return LocalSGD(independent_model(), data(), micro_batch_size=micro_batch_size, **settings)


# --- micro-batches


@pytest.mark.parametrize(
    ("micro", "size", "settings"),
    [
        (1, 5, {}),
        (5, 8, {}),
        (7, 8, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (3, 8, {"augment": random_crop_and_flip}),
        (3, 8, {"channels_last": True}),
    ],
)
def test_agrees_with_the_whole_batch(micro: int, size: int, settings: dict[str, Any]) -> None:
    cut, whole = sgd_of(micro, **settings), sgd_of(0, **settings)
    for server_round in (1, 2):
        order = independent_order(server_round, batch_size=size)
        assert close(cut.run(order), whole.run(order))
    order = independent_order(batch_size=size)
    assert same(sgd_of(size, **settings).run(order), sgd_of(0, **settings).run(order))


# --- models that need the whole batch


@pytest.mark.parametrize(
    ("module", "told"),
    [
        (nn.BatchNorm2d(2, track_running_stats=False), "BatchNorm2d (1)"),
        (nn.SyncBatchNorm(2), "SyncBatchNorm (1)"),
        (nn.InstanceNorm1d(2, track_running_stats=True), "InstanceNorm1d (1)"),
        (nn.Sequential(nn.ReLU(), nn.LazyBatchNorm1d()), "LazyBatchNorm1d (1.1)"),
        (nn.InstanceNorm1d(2), ""),
        (nn.GroupNorm(1, 2), ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_module_that_uses_the_batch_is_refused(module: nn.Module, told: str) -> None:
    model = nn.Sequential(nn.ReLU(), module)
    assert batch_dependent_module(model) == told
    check_micro_batches(model, 0)
    if not told:
        check_micro_batches(model, 4)
        return
    with pytest.raises(UsageError) as refused:
        LocalSGD(model, data(), micro_batch_size=4)
    assert str(refused.value).startswith(f"micro-batch-size = 4: {told} of the model takes its ")
    assert "set it to 0 and use a smaller batch-size" in str(refused.value)


# --- compiled


@pytest.mark.parametrize("micro", [0, 3])
def test_compiled_model_computes_every_step(monkeypatch: pytest.MonkeyPatch, micro: int) -> None:
    sizes: list[int] = []

    def compile(model: nn.Module) -> Any:
        return lambda inputs: (sizes.append(len(inputs)), model(inputs))[1]

    monkeypatch.setattr(torch, "compile", compile)
    sgd, plain = sgd_of(micro, compile=True), sgd_of(micro)
    for server_round, size in ((1, 4), (2, 4), (3, 6)):
        order = independent_order(server_round, batch_size=size)
        assert same(sgd.run(order), plain.run(order))
    each = {4: [2, 2], 6: [3, 3]} if micro else {4: [4], 6: [6]}
    # One more step for each batch size to see whether it works.
    assert sizes == each[4] * (1 + 6) + each[6] * (1 + 3)


@pytest.mark.parametrize(("device", "mode"), [("cpu", {}), ("cuda", {"mode": "reduce-overhead"})])
def test_compiling_uses_cuda_graphs_on_cuda(
    monkeypatch: pytest.MonkeyPatch, device: str, mode: dict[str, str]
) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, **settings: settings)
    assert compiled(small_model(), torch.device(device)) == mode


def test_compiling_that_fails_costs_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(inputs: Tensor) -> Any:
        raise RuntimeError("no C++ compiler was found\nSet CXX ...")

    monkeypatch.setattr(torch, "compile", lambda model: fails)
    sgd = LocalSGD(small_model(), data(), compile=True, name="slow-1")
    plain = LocalSGD(small_model(), data())
    for server_round in (1, 2):
        assert same(sgd.run(order_of(server_round)), plain.run(order_of(server_round)))
    (line,) = warnings_in(caplog)
    assert line == (
        "worker slow-1: torch.compile failed; running eagerly: "
        "RuntimeError: no C++ compiler was found"
    )


# --- precision

CUDA = torch.device("cuda")


@pytest.mark.parametrize("chosen", PRECISIONS)
def test_tf32_is_what_float32_becomes_only_where_it_is_asked_for(chosen: Precision) -> None:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    try:
        matmul.allow_tf32 = cudnn.allow_tf32 = chosen != "tf32"
        use_precision(chosen, "cpu")  # leaves the switches alone
        assert matmul.allow_tf32 == cudnn.allow_tf32 == (chosen != "tf32")
        use_precision(chosen, CUDA)
        assert matmul.allow_tf32 == cudnn.allow_tf32 == (chosen == "tf32")
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@pytest.mark.parametrize(
    ("chosen", "device", "told"),
    [
        ("bfloat16", "meta", 'precision = "bfloat16" does not work on meta; use "float32" there'),
        (
            "fp8",
            "cpu",
            "precision = 'fp8' must be one of 'float32', 'tf32', 'bfloat16', 'float16'",
        ),
    ],
)
def test_precision_that_is_not_there_is_refused(chosen: str, device: str, told: str) -> None:
    with pytest.raises(UsageError, match=f"^{told}$"):
        check_precision(chosen, torch.device(device))


@pytest.mark.parametrize("micro", [0, 3])
def test_bfloat16_is_near_float32_and_keeps_weights_and_losses_in_it(micro: int) -> None:
    seen: list[torch.dtype] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(outputs.dtype)
        return cross_entropy(outputs, targets)

    order = independent_order(batch_size=8)
    exact = sgd_of(micro).run(order)
    rounded, again = (sgd_of(micro, loss=loss, precision="bfloat16").run(order) for _ in range(2))
    assert set(seen) == {torch.bfloat16}
    assert rounded.losses.dtype == np.float32
    assert {a.numpy().dtype for a in rounded.arrays.values()} == {np.dtype(np.float32)}
    assert same(rounded, again)
    assert not same(rounded, exact)
    assert rounded.losses == pytest.approx(exact.losses, rel=0.05)


# --- channels last


def test_channels_last_agrees_and_sends_plain_arrays() -> None:
    """The state is made anew in between, as in shared memory: each array in the plain order."""
    plain, last = sgd_of(0), sgd_of(0, channels_last=True)
    assert last.model[0].weight.is_contiguous(memory_format=torch.channels_last)
    state = RecordDict()
    for server_round in (1, 2, 3):
        order = independent_order(server_round)
        expected, found = plain.run(order), last.run(order, state)
        assert found.losses == pytest.approx(expected.losses, rel=1e-4)
        for name, array in found.arrays.items():
            assert array.numpy().flags.c_contiguous
            assert array.numpy() == pytest.approx(expected.arrays[name].numpy(), abs=1e-4)
        kept = state.array_records["momentum"]
        moved = {name: np.ascontiguousarray(array.numpy()) for name, array in kept.items()}
        state["momentum"] = view_record(moved)
    report = last.run(independent_order(momentum_policy="average"))
    assert report.momentum is not None
    assert all(array.numpy().flags.c_contiguous for array in report.momentum.values())


# --- float16


@pytest.mark.parametrize("micro", [0, 3])
def test_float16_is_near_float32(micro: int) -> None:
    order = independent_order(batch_size=8)
    exact, rounded = sgd_of(micro).run(order), sgd_of(micro, precision="float16").run(order)
    assert rounded.skipped_steps == 0
    assert not same(rounded, exact)
    assert close(rounded, exact, rtol=0.02, atol=0.01)


def test_step_that_overflows_is_counted_and_repeated_with_half_the_scale() -> None:
    """The backward pass overflows above 60, as a type with less range than float16 would."""

    class Overflowing(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, outputs: Tensor) -> Tensor:
            return outputs.clone()

        @staticmethod
        def backward(_: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return torch.where(gradient.abs().amax() > 60.0, torch.inf, gradient)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(Overflowing.apply(outputs.float()), targets)  # type: ignore[no-untyped-call]

    order, context = independent_order(batch_size=8), RecordDict()
    first = sgd_of(0, precision="float16", loss=loss)
    report = first.run(order, context)
    # A sample's largest gradient is 1/2 to 1 of an eighth of the scale. It begins with 2^16; with
    # 2^9, that is 32 to 64.
    assert report.skipped_steps in (7, 8)
    assert report.completed_steps == order.local_steps
    assert close(report, sgd_of(0).run(order), rtol=0.02, atol=0.01)
    scale = context["momentum"]["grad-scaler"].numpy()
    assert scale.tolist() == [2.0 ** (16 - report.skipped_steps), order.local_steps]
    # Another process continues with this scale.
    again = sgd_of(0, precision="float16", loss=loss).run(
        independent_order(2, batch_size=8), context
    )
    assert again.skipped_steps == 0


def test_overflow_at_every_scale_fails_the_order() -> None:
    def infinite(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets) * torch.inf

    sgd = sgd_of(0, precision="float16", loss=infinite)
    with pytest.raises(ValueError, match="the gradients overflow in float16 also with a loss"):
        sgd.run(independent_order(batch_size=8))
