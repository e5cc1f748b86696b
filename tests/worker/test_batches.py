"""Samples by index, from tensors and from data sets."""

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from flower_blsgd.worker.batches import (
    DatasetBatches,
    TensorBatches,
    batch_source,
    num_samples,
)

CPU = torch.device("cpu")
INPUTS = torch.arange(12.0).reshape(6, 2)
TARGETS = torch.arange(6) * 10


class Pairs(Dataset):
    """A map-style data set that does not give tensors away."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not isinstance(index, int):
            raise TypeError("a data set may rely on plain numbers")
        return INPUTS[index], int(TARGETS[index])


@pytest.mark.parametrize(
    ("samples", "kind"),
    [
        ((INPUTS, TARGETS), TensorBatches),
        ([INPUTS, TARGETS], TensorBatches),
        (TensorDataset(INPUTS, TARGETS), TensorBatches),
        (Pairs(), DatasetBatches),
    ],
    ids=["tuple", "list", "TensorDataset", "Dataset"],
)
def test_batch_source_fetches_by_index(samples: object, kind: type) -> None:
    source = batch_source(samples, CPU)
    assert isinstance(source, kind)
    assert len(source) == num_samples(samples) == 6
    inputs, targets = source.batch(torch.tensor([4, 0, 4]))
    assert inputs.tolist() == [[8.0, 9.0], [0.0, 1.0], [8.0, 9.0]]
    assert targets.tolist() == [40, 0, 40]
    assert targets.dtype == torch.int64


def test_batch_source_of_other_than_two_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match="got 3 tensors"):
        batch_source((INPUTS, TARGETS, TARGETS), CPU)
    with pytest.raises(ValueError, match="got 1 tensors"):
        batch_source(TensorDataset(INPUTS), CPU)


def test_batch_source_of_unequal_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match="6 inputs, but 5 targets"):
        batch_source((INPUTS, TARGETS[:5]), CPU)
