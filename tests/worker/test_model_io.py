"""Weights to and from Flower records."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from torch import nn

from flower_blsgd.flower.array_records import Layout, flat_like, flat_of, flat_record, view_record
from flower_blsgd.worker import model_io, transfer
from flower_blsgd.worker.model_io import SentTensors, load_state, share_frozen, state_record


@pytest.fixture(params=[None, 1 << 25, 300, 1], autouse=True)
def _piece_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy also as on an accelerator: in one piece, in several, and each tensor by itself."""
    if request.param:
        monkeypatch.setattr(model_io, "moves_in_pieces", lambda own: True)
        monkeypatch.setattr(transfer, "PIECE_BYTES", request.param)


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 40, 3), nn.BatchNorm2d(40), nn.Flatten(), nn.Linear(160, 2))
    model[1].num_batches_tracked.fill_(seed)
    return model


def state_of(model: nn.Module) -> dict[str, list[float]]:
    return {name: tensor.flatten().tolist() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("channels_last", [False, True])
def test_there_and_back(channels_last: bool) -> None:
    order, own = state_record(make_model(1)), make_model(2)
    if channels_last:
        own = own.to(memory_format=torch.channels_last)
    replies = []
    for _ in range(2):
        load_state(own, order)
        assert state_of(own) == state_of(make_model(1))
        assert own[0].weight.is_contiguous(memory_format=torch.channels_last) == channels_last
        with torch.no_grad():
            own[3].weight += 1
        replies.append(state_record(own, like=order))
        with torch.no_grad():
            own[3].weight += 1  # the reply is a copy
    expected = make_model(1).state_dict()
    expected["3.weight"] += 1
    for reply in replies:
        for name, array in reply.items():
            assert array.numpy().tolist() == expected[name].tolist(), name
            assert (array.dtype, array.shape) == (order[name].dtype, order[name].shape)
    assert state_of(make_model(1)) == {n: a.numpy().flatten().tolist() for n, a in order.items()}


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model[1], "running_mean", torch.ones(40)),
        lambda model: setattr(model[3].weight, "data", torch.ones(2, 160)),
        lambda model: setattr(model[0].weight, "data", model[0].weight.data.transpose(2, 3)),
        lambda model: setattr(model[3], "bias", nn.Parameter(torch.ones(2))),
        lambda model: setattr(model, "3", nn.Linear(160, 2)),
        lambda model: model[3].bias.requires_grad_(False),
        lambda model: model.append(nn.Linear(2, 2)),
        lambda model: setattr(model[3].bias, "data", model[3].bias.data[:1]),
        lambda model: model.to(torch.float64),
    ],
)
def test_tensors_of_a_model_that_has_changed_are_found_again(
    change: Callable[[nn.Sequential], object],
) -> None:
    own, fresh = make_model(1), make_model(1)
    sent = SentTensors(own)
    sent.load(state_record(make_model(2)))
    load_state(fresh, state_record(make_model(2)))
    for model in (own, fresh):
        torch.manual_seed(0)
        change(model)
    record = state_record(fresh)
    assert {n: (a.dtype, a.numpy().tolist()) for n, a in sent.record().items()} == {
        n: (a.dtype, a.numpy().tolist()) for n, a in record.items()
    }
    for array in record.values():
        array.numpy()[...] += 1
    sent.load(record)
    load_state(fresh, record)
    assert state_of(own) == state_of(fresh)


def test_tensors_that_only_a_custom_state_dict_has_are_found_in_every_round() -> None:
    class Computed(nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
            return {"doubled": 2 * self.weight.detach()}

    model = Computed(1, 1)
    sent = SentTensors(model)
    for value in (1.0, 2.0):
        nn.init.constant_(model.weight, value)
        assert sent.record()["doubled"].numpy() == 2 * value


def test_backward_pass_through_weights_that_a_load_has_changed_is_an_error() -> None:
    model = make_model(1)
    loss = model(torch.ones(2, 3, 4, 4)).sum()
    load_state(model, state_record(make_model(2)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_another_model_is_refused_by_name() -> None:
    changes: dict[str, Callable[[ArrayRecord], object]] = {
        r"'3.bias' has shape none in the global model, \(2,\) in this": lambda a: a.pop("3.bias"),
        r"'more' has shape \(1,\) in the global model, none in this": lambda a: a.update(
            {"more": Array(np.zeros(1))}
        ),
        r"'3.bias' has shape \(1, 1\)": lambda a: a.update({"3.bias": Array(np.zeros((1, 1)))}),
    }
    for expected, change in changes.items():
        order = state_record(make_model(1))
        change(order)
        with pytest.raises(ValueError, match=expected):
            load_state(make_model(2), order)


def test_the_reply_is_written_where_the_order_lies() -> None:
    own, made = make_model(1), list[np.ndarray]()

    def shared_memory(layout: Layout) -> np.ndarray:
        made.append(np.zeros(layout.num_bytes, np.uint8))
        return made[-1]

    order = flat_record(flat_of(state_record(own)).layout, new_memory=shared_memory)  # type: ignore[union-attr]
    reply = state_record(own, like=order)
    assert len(made) == 2
    assert all(np.shares_memory(made[1], array.numpy()) for array in reply.values())


@pytest.mark.parametrize("kind", ["plain", "other order", "other dtype"])
def test_an_order_that_lies_otherwise_is_loaded_all_the_same(kind: str) -> None:
    arrays = {name: tensor.numpy() for name, tensor in make_model(1).state_dict().items()}
    own = make_model(2)
    if kind == "plain":
        order = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    elif kind == "other order":
        order = flat_like(view_record(dict(reversed(arrays.items()))))
    else:
        order = flat_like(view_record({n: a.astype(np.float64) for n, a in arrays.items()}))
    for name, array in order.items():
        if kind != "plain":
            array.numpy()[...] = arrays[name]
    load_state(own, order)
    assert state_of(own) == state_of(make_model(1))


# --- what is sent


class Adapted(nn.Module):
    """A frozen base in bfloat16 and int8, an adapter, and an output tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(4, 4).to(torch.bfloat16).requires_grad_(False)
        self.quantized = nn.Parameter(torch.arange(4, dtype=torch.int8), requires_grad=False)
        self.embedding = nn.Embedding(3, 4)
        self.adapter = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        self.output = nn.Linear(4, 3, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(6))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens).to(torch.bfloat16)
        logits: torch.Tensor = self.output((self.base(hidden) + self.adapter(hidden)).float())
        return logits


def test_only_what_is_trained_travels_and_in_a_type_that_numpy_has() -> None:
    record = state_record(Adapted())
    assert {name: array.dtype for name, array in record.items()} == {
        "embedding.weight": "float32",
        "adapter.weight": "float32",
        "steps": "int64",
    }
    model = Adapted()
    with torch.no_grad():
        model.adapter.weight.zero_()
        model.output.weight.zero_()
    load_state(model, record)
    assert state_of(model) == state_of(Adapted())
    assert model.output.weight is model.embedding.weight
    assert model.adapter.weight.dtype == torch.bfloat16


def test_frozen_tensors_are_shared_with_another_model() -> None:
    model, other = make_model(1), make_model(2)
    for one in (model, other):
        one[3].requires_grad_(False)
    before, expected = state_of(model), state_of(other)
    share_frozen(model, other)
    assert model[3].weight.data_ptr() == other[3].weight.data_ptr()
    assert model[0].weight.data_ptr() != other[0].weight.data_ptr()
    frozen = {"3.weight", "3.bias"}
    assert state_of(model) == before | {name: expected[name] for name in frozen}


def test_record_of_the_whole_state_dict_is_loaded_and_returned_whole() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    for one in (model, other):
        one.bias.requires_grad_(False)
    whole = ArrayRecord({name: Array(t.numpy()) for name, t in other.state_dict().items()})
    load_state(model, whole)
    assert state_of(model) == state_of(other)
    assert list(state_record(model, like=whole)) == ["weight", "bias"]
    assert list(state_record(model)) == ["weight"]
