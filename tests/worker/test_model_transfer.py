"""A model into a worker and out again: tensor by tensor, and in one piece as on accelerators."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from torch import nn

from flower_blsgd.array_view import view_record
from flower_blsgd.flat_record import flat_like, flat_of
from flower_blsgd.runtime.shared_arrays import Packer
from flower_blsgd.runtime.shared_block import Lease
from flower_blsgd.runtime.shared_pool import Pool
from flower_blsgd.worker.model_state import state_record
from flower_blsgd.worker.model_transfer import ModelTransfer

CPU = torch.device("cpu")


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 40, 3), nn.BatchNorm2d(40), nn.Flatten(), nn.Linear(160, 2))
    model[1].num_batches_tracked.fill_(seed)
    return model


def state_of(model: nn.Module) -> dict[str, list[float]]:
    return {name: tensor.flatten().tolist() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("staged", [False, True], ids=["by tensor", "in one piece"])
def test_there_and_back(staged: bool) -> None:
    order, own = state_record(make_model(1)), make_model(2)
    transfer = ModelTransfer(own, CPU, staged)
    for _ in range(2):
        transfer.load(order)
        assert state_of(own) == state_of(make_model(1))
        with torch.no_grad():
            own[3].weight += 1
        reply = transfer.record(order)
        assert {n: a.numpy().flatten().tolist() for n, a in reply.items()} == state_of(own)
        assert {n: (a.dtype, a.shape) for n, a in reply.items()} == {
            n: (a.dtype, a.shape) for n, a in order.items()
        }


@pytest.mark.parametrize("staged", [False, True], ids=["by tensor", "in one piece"])
def test_the_reply_is_a_copy(staged: bool) -> None:
    own = make_model(1)
    transfer = ModelTransfer(own, CPU, staged)
    reply = transfer.record(state_record(own))
    before = reply["3.bias"].numpy().copy()
    with torch.no_grad():
        own[3].bias += 1
    transfer.record(state_record(own))
    assert (reply["3.bias"].numpy() == before).all()


@pytest.mark.parametrize("staged", [False, True], ids=["by tensor", "in one piece"])
def test_the_reply_is_written_where_the_order_lies(staged: bool) -> None:
    pool, own = Pool(), make_model(1)
    order = state_record(own)
    Packer(pool).pack(order)  # the grid sends it: from now on more of its kind is made there
    transfer = ModelTransfer(own, CPU, staged)
    reply = transfer.record(flat_like(order))
    flat = flat_of(reply)
    assert flat is not None
    assert isinstance(flat.memory, Lease)
    size = pool.num_bytes
    parcel = Packer(pool).pack(reply)
    assert pool.num_bytes == size  # sent from where it is
    assert np.shares_memory(parcel.placements[0].lease, reply["3.weight"].numpy())


@pytest.mark.parametrize("kind", ["plain", "other order", "other dtype"])
def test_an_order_that_lies_otherwise_is_loaded_all_the_same(kind: str) -> None:
    arrays = {name: tensor.numpy() for name, tensor in make_model(1).state_dict().items()}
    own = make_model(2)
    if kind == "plain":
        order = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    elif kind == "other order":
        order = view_record(dict(reversed(arrays.items())))
    else:
        order = flat_like(view_record({n: a.astype(np.float64) for n, a in arrays.items()}))
        for name, array in order.items():
            array.numpy()[...] = arrays[name]
    ModelTransfer(own, CPU, staged=True).load(order)
    assert state_of(own) == state_of(make_model(1))


def test_another_model_is_refused_by_the_name_of_its_tensor() -> None:
    with pytest.raises(ValueError, match="weight"):
        ModelTransfer(nn.Linear(3, 2), CPU, staged=True).load(state_record(nn.Linear(4, 2)))


def test_channels_last_weights() -> None:
    own = make_model(2).to(memory_format=torch.channels_last)
    transfer = ModelTransfer(own, CPU, staged=True)
    transfer.load(state_record(make_model(1)))
    assert own[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert state_of(own) == state_of(make_model(1))
    reply = transfer.record(state_record(own))
    assert (reply["0.weight"].numpy() == make_model(1)[0].weight.detach().numpy()).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_there_and_back_on_cuda() -> None:
    device = torch.device("cuda")
    own = make_model(2).to(device)
    order = state_record(make_model(1))
    transfer = ModelTransfer(own, device)
    transfer.load(order)
    reply = transfer.record(order)
    assert {n: a.numpy().flatten().tolist() for n, a in reply.items()} == state_of(make_model(1))
