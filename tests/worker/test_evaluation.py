"""Exact means of loss and metric over a test set."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset, TensorDataset

from flower_blsgd.tasks.task import correct
from flower_blsgd.worker.batches import batch_source
from flower_blsgd.worker.evaluation import _between, evaluate, evaluate_sums
from flower_blsgd.worker.local_sgd import cross_entropy
from flower_blsgd.worker.samples import HostSamples, IndexedSamples, tensor_parts


def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.squeeze(1) - targets).abs()


def above_one(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.squeeze(1) > 1).float()


class Halve(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs / 2


def test_evaluate_by_hand() -> None:
    inputs = torch.tensor([[2.0], [4.0], [6.0], [1.0]])
    targets = torch.tensor([1.0, 1.0, 1.0, 1.0])  # errors 0, 1, 2, 1/2
    loss, metric = evaluate(Halve(), (inputs, targets), absolute, above_one)
    assert loss == 3.5 / 4
    assert metric == 0.5


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, 2050])
def test_evaluate_means_over_samples_not_over_batches(count: int) -> None:
    inputs = torch.arange(float(count)).reshape(-1, 1) * 2
    loss, _ = evaluate(Halve(), (inputs, torch.zeros(count)), absolute, above_one)
    assert loss == (count - 1) / 2


def test_evaluate_reads_data_sets_of_any_kind() -> None:
    inputs, targets = torch.arange(5.0).reshape(-1, 1), torch.ones(5)

    class Pairs(Dataset):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return inputs[index], targets[index]

    expected = evaluate(Halve(), (inputs, targets), absolute, above_one)
    for samples in (TensorDataset(inputs, targets), Pairs()):
        assert evaluate(Halve(), samples, absolute, above_one) == expected


def test_evaluate_is_in_eval_mode_and_changes_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    samples = (torch.randn(10, 3), torch.arange(10) % 2)
    first = evaluate(model, samples, cross_entropy, correct)
    second = evaluate(model, samples, cross_entropy, correct)
    assert first == second
    assert not model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


# --- slices


def test_slice_by_hand() -> None:
    inputs = torch.tensor([[2.0], [4.0], [6.0], [1.0]])
    targets = torch.ones(4)  # errors 0, 1, 2, 1/2
    report = evaluate_sums(Halve(), (inputs, targets), absolute, above_one, first=1, last=4)
    assert (report.first, report.last, report.num_examples) == (1, 4, 3)
    assert (report.loss_sum, report.metric_sum) == (3.5, 2.0)
    assert evaluate(Halve(), (inputs, targets), absolute, above_one, first=1, last=3) == (1.5, 1.0)


class Pairs(Dataset):
    def __init__(self, count: int) -> None:
        self.read: list[int] = []
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read.append(index)
        return torch.tensor([2.0 * index]), torch.tensor(0.0)


def whole(kind: str, count: int) -> Any:
    inputs, targets = torch.arange(float(count)).reshape(-1, 1) * 2, torch.zeros(count)
    backwards = np.arange(count)[::-1].copy()
    return {
        "tensors": (inputs, targets),
        "arrays": (inputs.numpy(), targets.numpy()),
        "TensorDataset": TensorDataset(inputs, targets),
        "Dataset": Pairs(count),
        "indexed tensors": IndexedSamples((inputs.flip(0), targets), backwards),
        "indexed Dataset": IndexedSamples(Pairs(count), np.arange(count)),
    }[kind]


KINDS = [
    "tensors",
    "arrays",
    "TensorDataset",
    "Dataset",
    "indexed tensors",
    "indexed Dataset",
]


@pytest.mark.parametrize("kind", KINDS)
def test_slice_of_any_kind_of_data(kind: str) -> None:
    report = evaluate_sums(Halve(), whole(kind, 9), absolute, above_one, first=2, last=5)
    assert (report.loss_sum, report.metric_sum) == (2 + 3 + 4, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_slices_add_up_to_the_whole(kind: str) -> None:
    samples, count = whole(kind, 2500), 2500
    bounds = [0, 1, 1024, 1025, 2500]
    parts = [
        evaluate_sums(Halve(), samples, absolute, above_one, first=first, last=last)
        for first, last in itertools.pairwise(bounds)
    ]
    assert sum(part.loss_sum for part in parts) == count * (count - 1) / 2
    assert sum(part.metric_sum for part in parts) == count - 2
    assert sum(part.num_examples for part in parts) == count


def test_slice_reads_no_other_sample() -> None:
    samples = Pairs(9)
    evaluate_sums(Halve(), samples, absolute, above_one, first=7, last=9)
    assert samples.read == [7, 8]


# --- batches


@pytest.mark.parametrize(("size", "expected"), [(4, [4, 4, 1]), (9, [9]), (1024, [9]), (None, [9])])
def test_batches_are_as_large_as_asked(size: int | None, expected: list[int]) -> None:
    sizes: list[int] = []

    def counted(outputs: Tensor, targets: Tensor) -> Tensor:
        sizes.append(len(targets))
        return absolute(outputs, targets)

    settings = {} if size is None else {"batch_size": size}
    report = evaluate_sums(Halve(), whole("tensors", 9), counted, above_one, **settings)
    assert sizes == expected
    assert (report.loss_sum, report.metric_sum) == (36.0, 7)
    assert evaluate(Halve(), whole("tensors", 9), absolute, above_one, **settings) == (4.0, 7 / 9)


# --- data that do not fit on the device


@pytest.mark.parametrize("kind", ["tensors", "arrays", "TensorDataset"])
def test_host_samples_give_the_same(kind: str) -> None:
    parts = tensor_parts(whole(kind, 9))
    assert parts is not None
    for samples in (HostSamples(parts), IndexedSamples(HostSamples(parts), np.arange(9))):
        report = evaluate_sums(Halve(), samples, absolute, above_one, first=2, last=5, batch_size=2)
        assert (report.loss_sum, report.metric_sum) == (2 + 3 + 4, 3)


@pytest.mark.parametrize("indexed", [True, False])
def test_host_samples_stay_on_the_host(monkeypatch: pytest.MonkeyPatch, indexed: bool) -> None:
    """Also where there is room for them: nobody is asked."""
    asked: list[int] = []
    monkeypatch.setattr("flower_blsgd.worker.evaluation.stays_on_host", lambda *a: asked.append(1))
    host = HostSamples([torch.arange(9.0).reshape(9, 1), torch.zeros(9)])
    samples = IndexedSamples(host, np.arange(9)) if indexed else host
    source = batch_source(_between(samples, 3, 5, torch.device("meta")), torch.device("meta"))
    assert not source.on_device
    assert len(source) == 2
    assert not asked


class LargestMade(TorchDispatchMode):
    """Notes how many float32 bytes the largest tensor has that an operation makes."""

    num_bytes = 0

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dtype == torch.float32:
            self.num_bytes = max(self.num_bytes, made.nbytes)
        return made


def test_chosen_part_is_never_copied_as_a_whole_on_a_cpu() -> None:
    """A validation share of 300 rows of 8 bytes is read 50 rows at a time."""
    inputs, targets = torch.arange(800.0).reshape(400, 2), torch.zeros(400)
    indices = np.random.default_rng(0).permutation(400)[:300]
    row_sum, large = inputs.sum(dim=1), inputs[:, 0] > 1

    def total(outputs: Tensor, _: Tensor) -> Tensor:
        return outputs.sum(dim=1)

    def is_large(outputs: Tensor, _: Tensor) -> Tensor:
        return (outputs[:, 0] > 0.5).float()

    with LargestMade() as largest:
        report = evaluate_sums(
            Halve(), IndexedSamples((inputs, targets), indices), total, is_large, batch_size=50
        )
    assert largest.num_bytes == 50 * 2 * 4
    assert report.loss_sum == float(row_sum[indices].sum()) / 2
    assert report.metric_sum == float(large[indices].sum())


@pytest.mark.parametrize("room", [True, False])
def test_chosen_slice_is_gathered_only_if_it_fits(
    monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    """Of 9 samples 2 are asked for; on the meta device each takes 4 + 4 bytes."""
    asked: list[int] = []

    def stays(num_bytes: int, device: torch.device) -> bool:
        asked.append(num_bytes)
        return not room

    monkeypatch.setattr("flower_blsgd.worker.evaluation.stays_on_host", stays)
    samples = IndexedSamples(
        (torch.arange(9.0).reshape(9, 1), torch.zeros(9)), np.arange(9)[::-1].copy()
    )
    placed = _between(samples, 3, 5, torch.device("meta"))
    assert asked == [16]
    if room:
        assert [part.tolist() for part in placed] == [[[5.0], [4.0]], [0.0, 0.0]]
    else:
        assert isinstance(placed, IndexedSamples)
        assert isinstance(placed.samples, HostSamples)
        assert placed.indices.tolist() == [5, 4]
