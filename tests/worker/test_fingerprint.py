"""The fingerprint by which models and frozen weights of several nodes are compared."""

import pytest
import torch
from torch import Tensor, nn

from flower_blsgd.worker.model_io import model_fingerprint

from ..fake_cuda.log import recorded


class Frozen(nn.Module):
    """A layer, and frozen tensors: larger than the sample, not contiguous, not aligned, small."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        numbers = torch.arange(90_000, dtype=torch.float32).view(300, 300)
        frozen = {
            "large": numbers,
            "turned": numbers[:, :5].clone().t(),
            "shifted": torch.arange(50, dtype=torch.bfloat16)[3:],
            "single": torch.tensor(2.5),
            "empty": torch.empty(0),
            "ids": torch.arange(7, dtype=torch.int16),
        }
        for name, tensor in frozen.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def test_fingerprint_is_of_names_shapes_and_dtypes_and_not_of_trained_values() -> None:
    one, other = nn.Linear(2, 3), nn.Linear(2, 3)
    assert model_fingerprint(one) == model_fingerprint(other)
    assert len(model_fingerprint(one)) == 16
    different = [nn.Linear(3, 2), nn.Linear(2, 3, bias=False), nn.Linear(2, 3).double()]
    different.append(nn.Sequential(nn.Linear(2, 3)))
    assert len({model_fingerprint(model) for model in [one, *different]}) == 5


@pytest.mark.parametrize("name", ["large", "turned", "shifted", "single", "ids"])
def test_fingerprint_changes_with_one_frozen_element(name: str) -> None:
    """Also with the last one, which is not in the sample of a large tensor."""
    model = Frozen()
    tensor: Tensor = getattr(model, name)
    tensor[(-1,) * tensor.dim()] += 1
    assert model_fingerprint(model) != model_fingerprint(Frozen())


def test_fingerprint_changes_with_the_order_of_frozen_elements() -> None:
    model = Frozen()
    model.large.copy_(model.large.flip(0))
    assert model_fingerprint(model) != model_fingerprint(Frozen())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_fingerprint_on_a_card_is_that_on_the_cpu_and_little_is_copied() -> None:
    model = Frozen().to("cuda:0")
    with recorded() as events:
        found = model_fingerprint(model)
    assert found == model_fingerprint(Frozen())
    copied = sum(event.num_bytes for event in events if event.kind == "copy to host")
    assert 8 * 2048 < copied < 40_000 < model.large.nbytes == 360_000
