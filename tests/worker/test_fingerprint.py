"""The fingerprint by which models and frozen weights of several nodes are compared."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor, nn

from flower_blsgd.worker import model_io
from flower_blsgd.worker.local_sgd import LocalSGD
from flower_blsgd.worker.model_io import FrozenTensors, model_fingerprint, state_record

from ..fake_cuda.log import recorded
from ..refusal import refusal
from .helpers import order_for

Change = Callable[[Any], object]


class Frozen(nn.Module):
    """A layer, and frozen tensors: larger than the sample, not contiguous, not aligned, small."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        numbers = torch.arange(90_000, dtype=torch.float32).view(300, 300)
        frozen = {
            "large": numbers,
            "turned": numbers[:, :5].clone().t(),
            "shifted": torch.arange(50, dtype=torch.bfloat16)[3:],
            "single": torch.tensor(2.5),
            "empty": torch.empty(0),
            "ids": torch.arange(7, dtype=torch.int16),
        }
        for name, tensor in frozen.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def test_fingerprint_is_of_names_shapes_and_dtypes_and_not_of_trained_values() -> None:
    one, other = nn.Linear(2, 3), nn.Linear(2, 3)
    assert model_fingerprint(one) == model_fingerprint(other)
    assert len(model_fingerprint(one)) == 16
    different = [nn.Linear(3, 2), nn.Linear(2, 3, bias=False), nn.Linear(2, 3).double()]
    different.append(nn.Sequential(nn.Linear(2, 3)))
    assert len({model_fingerprint(model) for model in [one, *different]}) == 5


@pytest.mark.parametrize("name", ["large", "turned", "shifted", "single", "ids"])
def test_fingerprint_changes_with_one_frozen_element(name: str) -> None:
    """Also with the last one, which is not in the sample of a large tensor."""
    model = Frozen()
    tensor: Tensor = getattr(model, name)
    tensor[(-1,) * tensor.dim()] += 1
    assert model_fingerprint(model) != model_fingerprint(Frozen())


def test_fingerprint_changes_with_the_order_of_frozen_elements() -> None:
    model = Frozen()
    model.large.copy_(model.large.flip(0))
    assert model_fingerprint(model) != model_fingerprint(Frozen())


# --- changes by training

SCRATCH = "use register_buffer(..., persistent=False)"


class Counting(nn.Module):
    """A layer, BatchNorm, and what `change` does to its tensors in every step that trains."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2, dtype=torch.int64), persistent=False)
        self.change = change

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.change(self)
        outputs: Tensor = self.layer(self.norm(inputs))
        return outputs


def put(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    """Return a change that puts a new tensor in the place of a buffer."""
    return lambda model: setattr(model, name, change(getattr(model, name)))


CHANGES: dict[str, tuple[Change, str]] = {
    "in place": (lambda m: m.counts.add_(1), "'counts' (int64)"),
    "new tensor": (put("counts", lambda counts: counts + 1), "'counts' (int64)"),
    "part": (lambda m: m.mask[1:].fill_(False), "'mask' (bool)"),
    "data": (lambda m: m.frozen.weight.data.mul_(0.9), "'frozen.weight' (no requires_grad)"),
    "moving average": (lambda m: m.frozen.bias.lerp_(m.layer.bias, 0.1), "'frozen.bias' (no re"),
    "larger": (put("counts", lambda counts: counts.repeat(2)), "'counts' (int64)"),
}


def sgd_of(change: Change, device: str = "cpu") -> LocalSGD:
    return LocalSGD(Counting(change), (torch.ones(4, 2), torch.arange(4) % 2), device=device)


@pytest.mark.parametrize("kind", CHANGES)
def test_change_of_what_is_not_sent_is_an_error_in_every_round(kind: str) -> None:
    change, named = CHANGES[kind]
    sgd = sgd_of(change)
    for server_round in range(1, 4):
        arrays = state_record(sgd.model)
        said = refusal(sgd.run, order_for(arrays, range(4), 2, round=server_round))
        assert said.startswith(f"model: training changed {named}")
        assert said.endswith(
            f"neither averaged nor saved; make it a floating-point buffer, or {SCRATCH}"
        )


def test_growing_buffer_that_is_sent_is_named_at_the_end_of_its_round_and_in_the_next() -> None:
    sgd = sgd_of(put("mean", lambda mean: mean.repeat(2)))
    order = order_for(state_record(sgd.model), range(4), 2)
    for size in (8, 8):
        assert refusal(sgd.run, order) == (
            f"model: tensor 'mean' has shape (2,) in the global model, ({size},) in this worker's; "
            f"if training changes it, make it as large from the start, or {SCRATCH}"
        )


def test_what_is_sent_or_scratch_or_equal_or_changed_between_orders_may_change() -> None:
    """Flower's own orders have the whole state dict, and so also the counts."""

    def change(model: nn.Module) -> None:
        model.mean += 1
        model.scratch += 1
        model.mask.fill_(True)
        model.frozen.weight = nn.Parameter(model.frozen.weight.clone(), requires_grad=False)

    sgd = sgd_of(change)
    arrays = state_record(sgd.model)
    for server_round in range(1, 3):
        arrays = sgd.run(order_for(arrays, range(4), 2, round=server_round)).arrays
        sgd.model.counts += 1  # as an app with layers of its own does
    assert arrays["norm.num_batches_tracked"].numpy() == 4
    assert arrays["mean"].numpy().tolist() == [4.0, 4.0]
    whole = sgd_of(CHANGES["in place"][0])
    state = {name: Array(tensor.numpy()) for name, tensor in whole.model.state_dict().items()}
    frozen = FrozenTensors(whole.model)
    frozen.begin()
    assert whole.run(order_for(ArrayRecord(state), range(4), 2)).arrays["counts"].numpy()[0] == 2
    frozen.begin(state)
    frozen.check(1)


def test_values_are_read_in_rounds_1_2_4_8_or_if_written_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads: list[int] = []
    digest = model_io._digest
    monkeypatch.setattr(model_io, "_digest", lambda t: reads.append(server_round) or digest(t))
    model = Counting(len)
    frozen, server_round = FrozenTensors(model), 0
    monkeypatch.setattr(model, "state_dict", None)  # which takes milliseconds
    for server_round in range(10):
        frozen.begin()
        if server_round == 5:
            model.mask.fill_(True)  # only this one is read again
        frozen.check(server_round)
    assert sorted(set(reads)) == [0, 1, 2, 4, 5, 8]
    assert (reads.count(4), reads.count(5)) == (4, 1)
    reads.clear()
    FrozenTensors(nn.BatchNorm1d(2)).begin()
    assert reads == []


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_fingerprint_on_a_card_is_that_on_the_cpu_and_little_is_copied() -> None:
    model = Frozen().to("cuda:0")
    with recorded() as events:
        found = model_fingerprint(model)
    assert found == model_fingerprint(Frozen())
    copied = sum(event.num_bytes for event in events if event.kind == "copy to host")
    assert 8 * 2048 < copied < 40_000 < model.large.nbytes == 360_000
