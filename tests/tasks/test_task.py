"""Data, model, loss and metric in one object."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from flower_blsgd import Task
from flower_blsgd.errors import UsageError
from flower_blsgd.tasks.task import correct
from flower_blsgd.tasks.validation import with_validation

INPUTS, TARGETS = torch.arange(12.0).reshape(6, 2), torch.arange(6)


def task_of(train: object = (INPUTS, TARGETS), **settings: Any) -> Task:
    test = (INPUTS[:2], TARGETS[:2])
    return Task(model=lambda: nn.Linear(2, 3), train=train, test=test, **settings)


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


def test_initial_model_takes_pretrained_weights_once_and_fresh_ones_never() -> None:
    calls: list[nn.Module] = []

    def pretrained(model: nn.Module) -> None:
        calls.append(model)
        nn.init.normal_(model.weight)  # as for a last layer that is new
        nn.init.constant_(model.bias, 7.0)

    task = task_of(pretrained=pretrained)
    task.fresh_model(3)
    assert calls == []
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first = task.initial_model(3)
    assert torch.equal(torch.rand(3), expected)
    assert calls == [first]
    assert first.bias.unique().tolist() == [7.0]
    again, other = task.initial_model(3), task.initial_model(4)
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, other.weight)
    assert not torch.equal(first.weight, task.fresh_model(3).weight)


def test_pretrained_weights_stay_with_a_validation_share() -> None:
    def pretrained(model: nn.Module) -> None:
        nn.init.constant_(model.weight, 7.0)

    task = with_validation(task_of(pretrained=pretrained, evaluation_batch_size=3), 0.5, 0)
    assert task.initial_model(0).weight.unique().tolist() == [7.0]
    assert task.evaluation_batch_size == 3


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


def test_arrays_and_memory_maps_count_as_tensors(tmp_path: Path) -> None:
    np.save(tmp_path / "inputs.npy", INPUTS.numpy())
    mapped = np.load(tmp_path / "inputs.npy", mmap_mode="c")
    for inputs in (INPUTS.numpy(), mapped):
        for targets in (TARGETS, TARGETS.numpy()):
            task = task_of((inputs, targets))
            assert task.num_train == 6
            assert task.fingerprint() == task_of().fingerprint()


def test_fingerprint_that_is_given_is_taken() -> None:
    task = Task(
        model=nn.Identity, train=(INPUTS, TARGETS), test=(INPUTS, TARGETS), data_fingerprint="abc"
    )
    assert task.fingerprint() == "abc"


def test_fingerprint_of_types_that_numpy_lacks() -> None:
    task = task_of((INPUTS.bfloat16(), TARGETS))
    assert len({task.fingerprint(), task_of().fingerprint()}) == 2


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ((INPUTS, TARGETS[:5]), "has 6 inputs, but 5 targets"),
        ((INPUTS.numpy(), TARGETS[:5].numpy()), "has 6 inputs, but 5 targets"),
        ((INPUTS[:0], TARGETS[:0]), "is empty"),
        (Pairs(0), "is empty"),
        ((INPUTS,), "has 1 parts"),
        ((INPUTS, TARGETS, TARGETS), "has 3 parts"),
        (TensorDataset(INPUTS), "has 1 parts"),
        (iter([]), "has no length"),
        ((torch.tensor(1.0), TARGETS), "has no length"),
    ],
)
@pytest.mark.parametrize("name", ["train", "test"])
def test_task_refuses_wrong_data(name: str, part: object, told: str) -> None:
    data = {"train": (INPUTS, TARGETS), "test": (INPUTS, TARGETS)} | {name: part}
    with pytest.raises(UsageError) as refused:
        Task(model=nn.Identity, **data)
    assert str(refused.value).startswith(f"task: {name} {told}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"model": nn.Linear(2, 3)}, "model is a Linear, but must be a function that makes"),
        ({"model": "resnet"}, "model is a str"),
        ({"loss": "mse"}, "loss is a str"),
        ({"metric": None}, "metric is a NoneType"),
        ({"augment": 3}, "augment is a int"),
    ],
)
def test_task_refuses_what_is_no_function(settings: dict[str, object], told: str) -> None:
    arguments = {"model": nn.Identity, "train": (INPUTS, TARGETS), "test": (INPUTS, TARGETS)}
    with pytest.raises(UsageError, match=f"^task: {told}"):
        Task(**arguments | settings)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\\b"])
def test_assets_have_plain_names(name: str) -> None:
    with pytest.raises(UsageError, match=r"task: assets names .* plain name of a file"):
        task_of(assets={name: Path("tokenizer.json")})


def test_assets_stay_with_a_validation_share() -> None:
    assets = {"tokenizer.json": Path("tokenizer.json")}
    assert with_validation(task_of(assets=assets), 0.5, 0).assets == assets
    assert task_of().assets == {}
