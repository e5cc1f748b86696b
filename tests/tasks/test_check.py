"""A task is tried on two samples before a run starts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from flower_blsgd import Task
from flower_blsgd.errors import UsageError
from flower_blsgd.tasks.check import check_task
from flower_blsgd.tasks.validation import with_validation

INPUTS, TARGETS = torch.arange(12.0).reshape(6, 2), torch.tensor([0, 1, 2, 0, 1, 2])


class Pairs(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        assert isinstance(index, int)
        return INPUTS[index], int(TARGETS[index])


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout())


def task_of(train: object = (INPUTS, TARGETS), **settings: object) -> Task:
    return Task(**{"model": network, "train": train, "test": (INPUTS, TARGETS)} | settings)


@pytest.mark.parametrize(
    "train",
    [
        (INPUTS, TARGETS),
        (INPUTS.numpy(), TARGETS),
        Pairs(),
        (INPUTS[:1], TARGETS[:1]),
    ],
    ids=["tensors", "arrays", "Dataset", "single"],
)
def test_check_lets_a_good_task_pass(train: object) -> None:
    task = task_of(train, augment=lambda inputs, generator: inputs.add_(1))
    check_task(task)
    assert torch.equal(INPUTS, torch.arange(12.0).reshape(6, 2))


@pytest.mark.parametrize("train", [(INPUTS, TARGETS), Pairs()])
def test_check_of_a_part_reads_that_part(train: object) -> None:
    seen = []

    def keep(inputs: Tensor, generator: torch.Generator) -> Tensor:
        seen.append(inputs)
        return inputs

    task = with_validation(task_of(train, augment=keep), 0.5, seed=0)
    check_task(task)
    assert torch.equal(seen[0], INPUTS[task.train.indices[:2]])


def test_check_leaves_the_generator_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    check_task(task_of(augment=lambda x, generator: x + torch.rand(2, generator=generator)))
    assert torch.equal(torch.rand(3), expected)


def raising(*_: object) -> Tensor:
    raise TypeError("first line\nsecond   line")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"loss": nn.functional.cross_entropy},
            "loss(outputs, targets) returned shape () for 2 samples, expected shape (2,): one "
            'value per sample; a torch loss does with reduction="none"',
        ),
        ({"loss": lambda o, t: o}, "loss(outputs, targets) returned shape (2, 3) for 2 samples"),
        ({"loss": lambda o, t: 0.5}, "loss(outputs, targets) returned a float"),
        ({"metric": lambda o, t: o.mean()}, "metric(outputs, targets) returned shape ()"),
        ({"augment": lambda x, g: x[:1]}, "augment(inputs, generator) returned shape (1, 2), exp"),
        ({"augment": lambda x, g: x.numpy()}, "augment(inputs, generator) returned a ndarray"),
        (
            {"augment": lambda x, g: x[:, :1]},
            "model(augment(inputs, generator)) raised RuntimeError: mat1 and mat2",
        ),
        ({"augment": raising}, "augment(inputs, generator) raised TypeError: first line second"),
        ({"model": lambda: nn.Linear(3, 3)}, "model(inputs) raised RuntimeError"),
        ({"model": lambda: "net"}, "model() returned a str, expected a torch.nn.Module"),
        ({"model": raising}, "model() raised TypeError: first line second line"),
        ({"loss": raising}, "loss(outputs, targets) raised TypeError: first line second line"),
        ({"metric": raising}, "metric(outputs, targets) raised TypeError"),
        ({"train": [(1, 2, 3)] * 4}, "reading train raised ValueError"),
    ],
)
def test_check_names_the_function(settings: dict[str, object], told: str) -> None:
    for name, title in (("", "task"), ("own:task", "task = 'own:task'")):
        with pytest.raises(UsageError) as refused:
            check_task(task_of(**settings), name)
        assert str(refused.value).startswith(f"{title}: {told}")
        assert "\n" not in str(refused.value)


def test_check_catches_a_wrong_kind_of_inputs() -> None:
    whole_numbers = (np.arange(12).reshape(6, 2), TARGETS.numpy())
    with pytest.raises(UsageError, match=r"model\(inputs\) raised RuntimeError"):
        check_task(replace(task_of(), train=whole_numbers))
