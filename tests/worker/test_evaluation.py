"""Exact means of loss and metric over a test set."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from flower_blsgd.tasks.task import correct
from flower_blsgd.worker.evaluation import evaluate
from flower_blsgd.worker.local_sgd import cross_entropy


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
