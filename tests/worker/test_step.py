"""One step: restored, in micro-batches, compiled, in other precisions and memory formats."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from torch import Tensor, nn

from flower_blsgd import LocalSGD
from flower_blsgd.devices.machine import Accelerator
from flower_blsgd.devices.worker_spec import PRECISIONS, Precision
from flower_blsgd.flower.array_records import view_record
from flower_blsgd.tasks.images import random_crop_and_flip
from flower_blsgd.worker import local_step, step
from flower_blsgd.worker.local_step import compile_mode
from flower_blsgd.worker.losses import cross_entropy
from flower_blsgd.worker.step import (
    SampleLoss,
    batch_dependent_module,
    check_micro_batches,
    check_precision,
    preserve_training_state,
    use_precision,
)

from ..refusal import refusal
from .helpers import (
    SECOND_CARD,
    close,
    data,
    independent_model,
    independent_order,
    order_of,
    overflowing_loss,
    same,
    small_model,
    warnings_in,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def sgd_of(micro_batch_size: int, **settings: Any) -> LocalSGD:
    return LocalSGD(independent_model(), data(), micro_batch_size=micro_batch_size, **settings)


# --- restored


@pytest.mark.parametrize("device", ["cpu", SECOND_CARD])
def test_training_state_is_restored_in_place(device: str) -> None:
    model = small_model(dropout=True).to(device)
    model.register_buffer("replaced", torch.zeros(2, device=device))
    inputs = data()[0].to(device)
    cards = [device] if device != "cpu" else []
    optimizer = torch.optim.SGD(model[:6].parameters(), lr=0.1, momentum=0.9)
    model(inputs).sum().backward()
    optimizer.step()

    def state() -> list[Any]:
        tensors = [*model.state_dict().values(), *optimizer.state[model[0].weight].values()]
        randomness = random.getstate(), np.random.get_state()[1].tolist()
        return [[t.data_ptr(), t.tolist()] for t in tensors] + [
            randomness,
            torch.rand(1, device=device),
        ]

    with torch.random.fork_rng(cards):
        before = state()
    with preserve_training_state(model, optimizer):
        optimizer.add_param_group({"params": model[6].parameters()})
        (model(inputs) * random.random() * np.random.random()).sum().backward()
        optimizer.step()
        model.replaced = torch.ones(2, device=device)
        with torch.random.fork_rng(cards):
            assert all(now != then for now, then in zip(state(), before, strict=True))
    assert state() == before
    assert model[6].weight not in optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


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
    line = refusal(LocalSGD, model, data(), micro_batch_size=4)
    assert line.startswith(f"micro-batch-size = 4: {told} of the model computes its ")
    assert "set it to 0 and use a smaller batch-size" in line


# --- compiled


def by_outputs(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the outputs themselves as losses."""
    return outputs[:, 0]


@pytest.mark.parametrize(("mode", "warm_up"), [(None, 1), ("reduce-overhead", 3)])
@pytest.mark.parametrize("loss", [cross_entropy, by_outputs])
def test_compiled_model_computes_every_step_and_may_reuse_its_memory(
    monkeypatch: pytest.MonkeyPatch, mode: str | None, warm_up: int, loss: SampleLoss
) -> None:
    """Like a replayed CUDA graph, each call overwrites the outputs of the one before."""
    calls: list[tuple[str | None, int]] = []

    def compile(model: nn.Module, mode: str | None) -> Any:
        outputs: list[Tensor] = []

        def forward(inputs: Tensor) -> Tensor:
            assert all(parameter.grad is None for parameter in model.parameters())
            for used in outputs:
                used.data.fill_(torch.nan)
            calls.append((mode, len(inputs)))
            outputs[:] = [model(inputs)]
            return outputs[0]

        return forward

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(local_step, "compile_mode", lambda device, micro_batch_size: mode)
    sgd, plain = sgd_of(0, compile=True, loss=loss), sgd_of(0, loss=loss)
    for server_round, size in ((1, 4), (2, 4), (3, 6)):
        order = independent_order(server_round, batch_size=size)
        assert same(sgd.run(order), plain.run(order))
    assert calls == [(mode, 4)] * (warm_up + 6) + [(mode, 6)] * (warm_up + 3)


@pytest.mark.parametrize(
    ("device", "micro", "mode"),
    [("cpu", 0, None), ("mps", 0, None), ("cuda:1", 0, "reduce-overhead"), ("cuda:1", 4, None)],
)
def test_cuda_graphs_only_on_cuda_and_without_micro_batches(
    device: str, micro: int, mode: str | None
) -> None:
    assert compile_mode(torch.device(device), micro) == mode


@pytest.mark.parametrize("good_calls", [0, 2])
def test_compiling_that_fails_costs_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, good_calls: int
) -> None:
    def compile(model: nn.Module, mode: str | None) -> Any:
        calls: list[int] = []

        def fails(inputs: Tensor) -> Any:
            calls.append(len(inputs))
            if len(calls) > good_calls:
                raise RuntimeError("no C++ compiler was found\nSet CXX ...")
            return model(inputs)

        return fails

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(local_step, "compile_mode", lambda device, micro_batch_size: "any")
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
def test_only_tf32_and_ieee_set_the_flags_of_torch(chosen: Precision) -> None:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    expected = {"tf32": (True, True), "ieee": (False, False)}
    try:
        for flags in ((False, True), (True, False)):
            matmul.allow_tf32, cudnn.allow_tf32 = flags
            use_precision(chosen, "cpu")
            assert (matmul.allow_tf32, cudnn.allow_tf32) == flags
            use_precision(chosen, CUDA)
            assert (matmul.allow_tf32, cudnn.allow_tf32) == expected.get(chosen, flags)
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@pytest.mark.parametrize(
    ("chosen", "device", "told"),
    [
        ("bfloat16", "meta", 'precision = "bfloat16" does not work on meta; use "float32" there'),
        (
            "fp8",
            "cpu",
            "precision = 'fp8' must be one of 'float32', 'ieee', 'tf32', 'bfloat16', 'float16'",
        ),
    ],
)
def test_precision_that_is_not_there_is_refused(chosen: str, device: str, told: str) -> None:
    assert refusal(check_precision, chosen, torch.device(device)) == told


def test_bfloat16_is_refused_on_cards_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda:1")
    for capability in ((9, 0), (8, 0), (), (7, 5)):
        card = Accelerator("Tesla T4", capability=capability)
        monkeypatch.setattr(step, "accelerator_of", {"cuda:1": card}.__getitem__)
        assert check_precision("float16", device) == "float16"
        if capability != (7, 5):
            assert check_precision("bfloat16", device) == "bfloat16"
    line = refusal(check_precision, "bfloat16", device)
    assert "cuda:1 (Tesla T4, 7.5) does " in line
    assert line.endswith("; use float16")


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
    order, context = independent_order(batch_size=8), RecordDict()
    first = sgd_of(0, precision="float16", loss=overflowing_loss(60.0))
    report = first.run(order, context)
    # A sample's largest gradient is 1/2 to 1 of an eighth of the scale. It begins with 2^16; with
    # 2^9, that is 32 to 64.
    assert report.skipped_steps in (7, 8)
    assert report.completed_steps == order.local_steps
    assert close(report, sgd_of(0).run(order), rtol=0.02, atol=0.01)
    scale = context["momentum"]["grad-scaler"].numpy()
    assert scale.tolist() == [2.0 ** (16 - report.skipped_steps), order.local_steps]
    # Another process continues with this scale, and so does the same one.
    for sgd in (sgd_of(0, precision="float16", loss=overflowing_loss(60.0)), first):
        assert sgd.run(independent_order(2, batch_size=8), context).skipped_steps == 0
    scale = context["momentum"]["grad-scaler"].numpy()
    assert scale.tolist() == [2.0 ** (16 - report.skipped_steps), 3 * order.local_steps]


def test_overflow_at_every_scale_fails_the_order() -> None:
    def infinite(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets) * torch.inf

    sgd = sgd_of(0, precision="float16", loss=infinite)
    with pytest.raises(ValueError, match="the gradients overflow in float16 even with a loss"):
        sgd.run(independent_order(batch_size=8))
