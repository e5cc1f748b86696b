"""A share of the training data held out."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flower_blsgd import Task
from flower_blsgd.errors import UsageError
from flower_blsgd.tasks.validation import with_validation


def task_of(count: int) -> Task:
    data = (torch.arange(float(count)), torch.arange(count))
    return Task(model=nn.Identity, train=data, test=(torch.zeros(1), torch.zeros(1)))


@given(st.integers(2, 60), st.floats(0.01, 0.99), st.integers(0, 2**40))
def test_both_parts_together_are_the_whole(count: int, share: float, seed: int) -> None:
    held_out = int(np.floor(share * count + 0.5))
    if not 0 < held_out < count:
        return
    task = with_validation(task_of(count), share, seed)
    assert (task.num_train, task.num_test) == (count - held_out, held_out)
    train, test = task.train.indices, task.test.indices
    assert sorted([*train, *test]) == list(range(count))
    assert list(train) == sorted(train)
    assert list(test) == sorted(test)
    assert train.dtype == test.dtype == np.int64


def test_nothing_is_copied() -> None:
    whole = task_of(10)
    task = with_validation(whole, 0.2, 0)
    assert task.train.samples is whole.train
    assert task.test.samples is whole.train


def test_parts_are_a_function_of_the_seed_alone() -> None:
    first, again = (with_validation(task_of(100), 0.2, 7) for _ in range(2))
    other = with_validation(task_of(100), 0.2, 8)
    assert np.array_equal(first.test.indices, again.test.indices)
    assert not np.array_equal(first.test.indices, other.test.indices)


def test_parts_stay_those_of_earlier_versions() -> None:
    assert list(with_validation(task_of(10), 0.3, 0).test.indices) == [1, 7, 8]


def test_fingerprint_depends_on_data_share_and_seed() -> None:
    made = [(10, 0.2, 0), (10, 0.3, 0), (10, 0.2, 1), (11, 0.2, 0)]
    found = {with_validation(task_of(n), share, seed).fingerprint() for n, share, seed in made}
    assert len(found | {task_of(10).fingerprint()}) == 5
    assert with_validation(task_of(10), 0.2, 0).fingerprint() in found


def test_a_part_of_a_part_is_flat() -> None:
    whole = task_of(20)
    once = with_validation(whole, 0.5, 0)
    twice = with_validation(once, 0.5, 0)
    assert twice.train.samples is whole.train
    assert sorted([*twice.train.indices, *twice.test.indices]) == list(once.train.indices)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_share_must_be_a_share(share: float) -> None:
    with pytest.raises(UsageError, match=f"^validation-share = {share} must be above 0"):
        with_validation(task_of(10), share, 0)


@pytest.mark.parametrize(("count", "share", "told"), [(10, 0.04, "0 for"), (10, 0.96, "10 for")])
def test_neither_part_may_be_empty(count: int, share: float, told: str) -> None:
    with pytest.raises(UsageError, match=f"^validation-share = {share} of 10 .* leaves {told}"):
        with_validation(task_of(count), share, 0)
