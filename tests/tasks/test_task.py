"""Data, model, loss and metric in one object: made, tried, and split for validation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from flower_blsgd import Task
from flower_blsgd.errors import UsageError
from flower_blsgd.tasks.task import check_task, checked_initial_model, correct, with_validation

INPUTS, TARGETS = torch.arange(12.0).reshape(6, 2), torch.tensor([0, 1, 2, 0, 1, 2])


class Pairs(Dataset):
    def __init__(self, count: int = 6) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        assert isinstance(index, int)
        return INPUTS[index], int(TARGETS[index])


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout())


def task_of(train: object = (INPUTS, TARGETS), **settings: Any) -> Task:
    test = (INPUTS[:2], TARGETS[:2])
    return Task(**{"model": network, "train": train, "test": test} | settings)


def test_correct_by_hand() -> None:
    outputs = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 5.0]])
    assert correct(outputs, torch.tensor([1, 1, 1])).tolist() == [1.0, 0.0, 1.0]


def states_differ(one: nn.Module, other: nn.Module) -> bool:
    theirs = other.state_dict()
    return any(not torch.equal(tensor, theirs[n]) for n, tensor in one.state_dict().items())


@pytest.mark.parametrize("pretrained", [False, True])
def test_initial_model_is_a_function_of_the_seed(pretrained: bool) -> None:
    calls: list[nn.Module] = []

    def begin(model: nn.Module) -> None:
        calls.append(model)
        nn.init.normal_(model[0].weight)  # as for a last layer that is new
        nn.init.constant_(model[0].bias, 7.0)

    task = task_of(pretrained=begin if pretrained else None)
    fresh = task.fresh_model(3)
    assert calls == []
    state = torch.get_rng_state()
    first = task.initial_model(3)
    assert torch.equal(torch.get_rng_state(), state)
    assert calls == ([first] if pretrained else [])
    assert states_differ(first, fresh) == pretrained
    torch.rand(5)
    assert not states_differ(first, task.initial_model(3))
    assert states_differ(first, task.initial_model(4))
    part = with_validation(replace(task, evaluation_batch_size=3), 0.5, 0)
    assert not states_differ(first, part.initial_model(3))
    assert part.evaluation_batch_size == 3


def test_fingerprint_is_equal_for_equal_data() -> None:
    """Of a map-style Dataset, for equal lengths."""
    expected = task_of().fingerprint()
    assert len(expected) == 16
    assert int(expected, 16) >= 0
    assert task_of((INPUTS.clone(), TARGETS.clone())).fingerprint() == expected
    assert task_of(TensorDataset(INPUTS, TARGETS)).fingerprint() == expected
    transposed = INPUTS.t().contiguous().t()  # the same numbers, laid out otherwise
    assert task_of((transposed, TARGETS)).fingerprint() == expected
    assert task_of(Pairs(9)).fingerprint() == task_of(Pairs(9)).fingerprint()
    assert task_of(Pairs(9)).fingerprint() != task_of(Pairs(8)).fingerprint()
    assert task_of(data_fingerprint="abc").fingerprint() == "abc"
    halves = task_of((INPUTS.bfloat16(), TARGETS))  # a type that numpy lacks
    assert halves.fingerprint() != expected


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
def test_fingerprint_differs_for_other_data(parts: tuple[Tensor, Tensor]) -> None:
    assert task_of(parts).fingerprint() != task_of().fingerprint()


def test_arrays_and_memory_maps_count_as_tensors(tmp_path: Path) -> None:
    np.save(tmp_path / "inputs.npy", INPUTS.numpy())
    mapped = np.load(tmp_path / "inputs.npy", mmap_mode="c")
    for inputs in (INPUTS.numpy(), mapped):
        for targets in (TARGETS, TARGETS.numpy()):
            task = task_of((inputs, targets))
            assert task.num_train == 6
            assert task.fingerprint() == task_of().fingerprint()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ((INPUTS, TARGETS[:5]), "has 6 inputs, but 5 targets"),
        (Pairs(0), "is empty"),
        ((INPUTS,), "has 1 parts"),
        ((INPUTS, TARGETS, TARGETS), "has 3 parts"),
        (iter([]), "has no length"),
        ((torch.tensor(1.0), TARGETS), "has no length"),
    ],
)
@pytest.mark.parametrize("name", ["train", "test"])
def test_task_refuses_wrong_data(name: str, part: object, message: str) -> None:
    data = {"train": (INPUTS, TARGETS), "test": (INPUTS, TARGETS)} | {name: part}
    with pytest.raises(UsageError) as refused:
        Task(model=nn.Identity, **data)
    assert str(refused.value).startswith(f"task: {name} {message}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": nn.Linear(2, 3)}, "model is a Linear, but must be a function that makes"),
        ({"metric": None}, "metric is a NoneType"),
        ({"augment": 3}, "augment is a int"),
        ({"evaluation_batch_size": 0}, "evaluation_batch_size is 0"),
        *(
            ({"assets": {name: Path("tokenizer.json")}}, "assets names .* plain name of a file")
            for name in ("", "..", "a/b")
        ),
    ],
)
def test_task_refuses_wrong_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=f"^task: {message}"):
        task_of(**settings)


# trying a task


def raising(*_: object) -> Tensor:
    raise TypeError("first line\nsecond   line")


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
    """Without its pretrained weights; data and torch's random numbers stay as they are."""
    state = torch.get_rng_state()
    check_task(task_of(train, augment=lambda inputs, generator: inputs.add_(1), pretrained=raising))
    assert torch.equal(INPUTS, torch.arange(12.0).reshape(6, 2))
    assert torch.equal(torch.get_rng_state(), state)


def test_check_of_a_part_reads_that_part() -> None:
    seen = []

    def keep(inputs: Tensor, generator: torch.Generator) -> Tensor:
        seen.append(inputs)
        return inputs

    task = with_validation(task_of(Pairs(), augment=keep), 0.5, seed=0)
    check_task(task)
    assert torch.equal(seen[0], INPUTS[task.train.indices[:2]])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"loss": nn.functional.cross_entropy},
            "loss(outputs, targets) returned shape () for 2 samples, expected shape (2,): one "
            'value per sample; a torch loss does with reduction="none"',
        ),
        ({"metric": lambda o, t: o.mean()}, "metric(outputs, targets) returned shape ()"),
        ({"augment": lambda x, g: x[:1]}, "augment(inputs, generator) returned shape (1, 2), exp"),
        ({"augment": lambda x, g: x[:, :1]}, "model(augment(inputs, generator)) raised Runtime"),
        ({"model": lambda: nn.Linear(3, 3)}, "model(inputs) raised RuntimeError"),
        ({"model": lambda: "net"}, "model() returned a str, expected a torch.nn.Module"),
        ({"loss": raising}, "loss(outputs, targets) raised TypeError: first line second line"),
        ({"train": [(1, 2, 3)] * 4}, "reading train raised ValueError"),
    ],
)
def test_check_names_the_function(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_task(task_of(**settings), "own:task")
    assert str(refused.value).startswith(f"task = 'own:task': {message}")
    assert "\n" not in str(refused.value)


def refusing(*_: object) -> Tensor:
    raise UsageError("data = '/nowhere': no such folder; name another")


def test_pretrained_weights_that_raise_are_told_in_one_line() -> None:
    with pytest.raises(UsageError) as refused:
        checked_initial_model(task_of(pretrained=raising), "own:task", 0)
    assert str(refused.value) == (
        "task = 'own:task': pretrained(model) raised TypeError: first line second line"
    )
    with pytest.raises(UsageError, match=r"^data = '/nowhere': no such folder"):
        check_task(task_of(loss=refusing), "own:task")


def test_check_refuses_micro_batches_for_models_that_need_the_whole_batch() -> None:
    with pytest.raises(UsageError, match=r"^micro-batch-size = 4: BatchNorm1d \(1\) of the model"):
        check_task(task_of(), micro_batch_size=4)
    check_task(task_of(model=lambda: nn.Linear(2, 3)), micro_batch_size=4)


# validation


def points(count: int) -> Task:
    data = (torch.arange(float(count)), torch.arange(count))
    return Task(model=nn.Identity, train=data, test=(torch.zeros(1), torch.zeros(1)))


@given(st.integers(2, 60), st.floats(0.01, 0.99), st.integers(0, 2**40))
def test_both_parts_together_are_the_whole(count: int, share: float, seed: int) -> None:
    held_out = int(np.floor(share * count + 0.5))
    if not 0 < held_out < count:
        return
    task = with_validation(points(count), share, seed)
    assert (task.num_train, task.num_test) == (count - held_out, held_out)
    train, test = task.train.indices, task.test.indices
    assert sorted([*train, *test]) == list(range(count))
    assert list(train) == sorted(train)
    assert list(test) == sorted(test)
    assert train.dtype == test.dtype == np.int64


def test_parts_are_a_function_of_the_seed_alone() -> None:
    first, again = (with_validation(points(100), 0.2, 7) for _ in range(2))
    other = with_validation(points(100), 0.2, 8)
    assert np.array_equal(first.test.indices, again.test.indices)
    assert not np.array_equal(first.test.indices, other.test.indices)
    prints = [(10, 0.2, 0), (10, 0.3, 0), (10, 0.2, 1), (11, 0.2, 0)]
    found = {with_validation(points(n), share, seed).fingerprint() for n, share, seed in prints}
    assert len(found | {points(10).fingerprint()}) == 5
    # As in earlier versions.
    assert list(with_validation(points(10), 0.3, 0).test.indices) == [1, 7, 8]


def test_a_part_of_a_part_is_flat_and_nothing_is_copied() -> None:
    whole = replace(points(20), assets={"tokenizer.json": Path("tokenizer.json")})
    once = with_validation(whole, 0.5, 0)
    assert once.train.samples is once.test.samples is whole.train
    assert once.assets == whole.assets
    twice = with_validation(once, 0.5, 0)
    assert twice.train.samples is whole.train
    assert sorted([*twice.train.indices, *twice.test.indices]) == list(once.train.indices)


@pytest.mark.parametrize(
    ("share", "message"),
    [
        *((share, "must be above 0") for share in (0.0, 1.0, -0.1, 1.5, float("nan"))),
        (0.04, "of 10 .* leaves 0 for"),
        (0.96, "of 10 .* leaves 10 for"),
    ],
)
def test_impossible_shares_are_refused(share: float, message: str) -> None:
    with pytest.raises(UsageError, match=f"^validation-share = {share} {message}"):
        with_validation(points(10), share, 0)
