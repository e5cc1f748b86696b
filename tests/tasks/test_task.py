"""Data, model, loss and metric in one object."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from flower_blsgd import Task
from flower_blsgd.tasks.task import correct

INPUTS, TARGETS = torch.arange(12.0).reshape(6, 2), torch.arange(6)


def task_of(train: object = (INPUTS, TARGETS)) -> Task:
    return Task(model=lambda: nn.Linear(2, 3), train=train, test=(INPUTS[:2], TARGETS[:2]))


class Pairs(Dataset):
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(2), 0


def test_correct_by_hand() -> None:
    outputs = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 5.0]])
    assert correct(outputs, torch.tensor([1, 1, 1])).tolist() == [1.0, 0.0, 1.0]


def test_counts_of_training_and_test_samples() -> None:
    assert (task_of().num_train, task_of().num_test) == (6, 2)
    assert task_of(TensorDataset(INPUTS, TARGETS)).num_train == 6
    assert task_of(Pairs(9)).num_train == 9


def test_initial_model_is_a_function_of_the_seed() -> None:
    task = task_of()
    first = task.initial_model(3).state_dict()
    torch.rand(5)
    again, other = task.initial_model(3).state_dict(), task.initial_model(4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["weight"], other["weight"])


def test_initial_model_leaves_the_generator_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    task_of().initial_model(3)
    assert torch.equal(torch.rand(3), expected)


def test_fingerprint_is_equal_for_equal_data() -> None:
    expected = task_of().fingerprint()
    assert len(expected) == 16
    assert int(expected, 16) >= 0
    assert task_of((INPUTS.clone(), TARGETS.clone())).fingerprint() == expected
    assert task_of(TensorDataset(INPUTS, TARGETS)).fingerprint() == expected
    transposed = INPUTS.t().contiguous().t()  # the same numbers, laid out otherwise
    assert task_of((transposed, TARGETS)).fingerprint() == expected


@pytest.mark.parametrize("kind", [tuple, list, lambda parts: TensorDataset(*parts)])
@pytest.mark.parametrize(
    "parts",
    [
        (INPUTS + 1, TARGETS),
        (INPUTS, TARGETS.flip(0)),
        (INPUTS[:5], TARGETS[:5]),
        (INPUTS.double(), TARGETS),
        (INPUTS.reshape(6, 1, 2), TARGETS),
    ],
    ids=["inputs", "targets", "length", "dtype", "shape"],
)
def test_fingerprint_differs_for_other_data(kind: object, parts: tuple[Tensor, Tensor]) -> None:
    expected = task_of(kind((INPUTS, TARGETS))).fingerprint()  # type: ignore[operator]
    assert task_of(kind(parts)).fingerprint() != expected  # type: ignore[operator]


def test_fingerprint_of_a_map_style_dataset_is_its_length() -> None:
    assert task_of(Pairs(9)).fingerprint() == task_of(Pairs(9)).fingerprint()
    assert task_of(Pairs(9)).fingerprint() != task_of(Pairs(8)).fingerprint()
