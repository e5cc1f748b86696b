"""Exact means of loss and metric over a test set."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

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
    assert (report.loss, report.totals) == (3.5 / 4, {"accuracy": 2.0})
    report = evaluate_sums(Halve(), (inputs, targets), absolute, above_one, first=1, last=3)
    assert (report.first, report.last, report.num_examples) == (1, 3, 2)
    assert (report.loss, report.totals) == (1.5, {"accuracy": 2.0})


def test_named_values_and_a_loss_of_the_whole_batch() -> None:
    """Errors 0, 1, 2 and 1/2, in batches of two."""

    def of_batch(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return absolute(model(batch[0]), batch[1])

    def named(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        errors = absolute(outputs, targets)
        return {"absolute": errors, "squared": errors.square()}

    inputs = torch.tensor([[2.0], [4.0], [6.0], [1.0]])
    report = evaluate_sums(Halve(), (inputs, torch.ones(4)), of_batch, named, batch_size=2)
    assert (report.loss_sums, report.metric_names) == ([1.0, 2.5], ["absolute", "squared"])
    assert report.metric_sums == [1.0, 1.0, 2.5, 4.25]
    assert report.totals == {"absolute": 3.5, "squared": 5.25}
    assert dict(report.metrics()) == {"absolute": 0.875, "squared": 1.3125, "loss": 0.875}


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


class Counted(Dataset):
    """Notes the samples that are read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read.append(index)
        return torch.tensor([2.0 * index]), torch.tensor(0.0)


def test_slice_is_read_in_batches_and_nothing_else_is() -> None:
    samples, sizes = Counted(), list[int]()

    def counted(outputs: Tensor, targets: Tensor) -> Tensor:
        sizes.append(len(targets))
        return absolute(outputs, targets)

    report = evaluate_sums(Halve(), samples, counted, above_one, first=2, last=5, batch_size=2)
    assert sizes == [2, 1]
    assert (report.loss_sums, report.metric_sums) == ([2 + 3, 4], [2, 1])
    assert samples.read == [2, 3, 4]
