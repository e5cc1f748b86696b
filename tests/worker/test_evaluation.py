"""Exact means of loss and metric over a test set."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from flower_blsgd.tasks.task import correct
from flower_blsgd.worker.evaluation import evaluate_sums
from flower_blsgd.worker.local_sgd import cross_entropy


def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.squeeze(1) - targets).abs()


def above_one(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.squeeze(1) > 1).float()


class Halve(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs / 2


def test_sums_and_means_by_hand() -> None:
    inputs = torch.tensor([[2.0], [4.0], [6.0], [1.0]])
    targets = torch.ones(4)  # errors 0, 1, 2, 1/2
    report = evaluate_sums(Halve(), (inputs, targets), absolute, above_one)
    assert (report.loss_sums, report.metric_sums) == ([3.5], [2.0])
    assert (report.loss, report.metric) == (3.5 / 4, 0.5)
    report = evaluate_sums(Halve(), (inputs, targets), absolute, above_one, first=1, last=3)
    assert (report.first, report.last, report.num_examples) == (1, 3, 2)
    assert (report.loss, report.metric) == (1.5, 1.0)
    assert report.metric_in_range


@pytest.mark.parametrize(
    ("value", "in_range"), [(0.0, True), (1.0, True), (1.5, False), (-0.5, False), (math.nan, True)]
)
def test_metric_with_a_value_outside_0_to_1_is_said(value: float, in_range: bool) -> None:
    """Their mean, 0.5 or so, does not tell."""

    def one_of_four(outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.where(outputs.squeeze(1) == 2.0, value, 0.5)

    inputs, targets = torch.tensor([[2.0], [4.0], [6.0], [1.0]]), torch.ones(4)
    report = evaluate_sums(Halve(), (inputs, targets), absolute, one_of_four, batch_size=2)
    assert report.metric_in_range is in_range


def test_evaluation_is_in_eval_mode_and_changes_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    samples = (torch.randn(10, 3), torch.arange(10) % 2)
    first, second = (evaluate_sums(model, samples, cross_entropy, correct) for _ in range(2))
    assert first == second
    assert not model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


# --- slices


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
        "Dataset": Pairs(count),
        "part of tensors": Subset((inputs.flip(0), targets), backwards),
        "part of a Dataset": Subset(Pairs(count), np.arange(count)),
    }[kind]


@pytest.mark.parametrize("kind", ["tensors", "Dataset", "part of tensors", "part of a Dataset"])
def test_slices_of_any_kind_of_data_add_up_to_the_whole(kind: str) -> None:
    samples, count = whole(kind, 2500), 2500
    bounds = [0, 1, 1024, 1025, 2500]
    parts = [
        evaluate_sums(Halve(), samples, absolute, above_one, first=first, last=last)
        for first, last in itertools.pairwise(bounds)
    ]
    assert sum(sum(part.loss_sums) for part in parts) == count * (count - 1) / 2
    assert sum(sum(part.metric_sums) for part in parts) == count - 2
    assert sum(part.num_examples for part in parts) == count
    few, sizes = whole(kind, 9), list[int]()

    def counted(outputs: Tensor, targets: Tensor) -> Tensor:
        sizes.append(len(targets))
        return absolute(outputs, targets)

    report = evaluate_sums(Halve(), few, counted, above_one, first=2, last=5, batch_size=2)
    assert sizes == [2, 1]
    assert (report.loss_sums, report.metric_sums) == ([2 + 3, 4], [2, 1])
    if isinstance(few, Pairs):
        assert few.read == [2, 3, 4]
