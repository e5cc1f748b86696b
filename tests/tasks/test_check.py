"""A task is tried on two samples before a run starts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from flower_blsgd import Task
from flower_blsgd.errors import UsageError
from flower_blsgd.tasks.check import check_task, checked_initial_model
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


# --- what a task's functions refuse themselves


def refusing(*_: object) -> Tensor:
    raise UsageError("data = '/nowhere': no such folder; name another")


@pytest.mark.parametrize("name", ["model", "augment", "loss", "metric"])
def test_check_lets_refusals_through_as_they_are(name: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_task(task_of(**{name: refusing}), "own:task")
    assert str(refused.value) == "data = '/nowhere': no such folder; name another"


def test_check_lets_refusals_of_a_data_set_through() -> None:
    class Refuses(Pairs):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            raise UsageError("row 3 cannot be read; skip-bad = true leaves it out")

    with pytest.raises(UsageError, match=r"^row 3 cannot be read"):
        check_task(task_of(Refuses()))


# --- pretrained weights


def test_check_needs_no_pretrained_weights() -> None:
    check_task(task_of(pretrained=raising))


def test_pretrained_weights_that_raise_are_told_in_one_line() -> None:
    with pytest.raises(UsageError) as refused:
        checked_initial_model(task_of(pretrained=raising), "own:task", 0)
    assert str(refused.value) == (
        "task = 'own:task': pretrained(model) raised TypeError: first line second line"
    )
    with pytest.raises(UsageError, match=r"^data = '/nowhere': no such folder"):
        checked_initial_model(task_of(pretrained=refusing), "own:task", 0)


def test_initial_model_is_that_of_the_task() -> None:
    task = task_of(pretrained=lambda model: nn.init.constant_(model[0].weight, 3.0))
    model = checked_initial_model(task, "own:task", 5)
    expected = task.initial_model(5).state_dict()
    assert all(torch.equal(t, expected[name]) for name, t in model.state_dict().items())
    assert model[0].weight.unique().tolist() == [3.0]


# --- batches in pieces


def test_check_refuses_pieces_for_models_that_need_the_whole_batch() -> None:
    check_task(task_of(), micro_batch_size=0)
    with pytest.raises(UsageError, match=r"^micro-batch-size = 4: BatchNorm1d \(1\) of the model"):
        check_task(task_of(), micro_batch_size=4)
    check_task(task_of(model=lambda: nn.Linear(2, 3)), micro_batch_size=4)
