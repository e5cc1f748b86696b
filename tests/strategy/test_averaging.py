"""Average the models of a round: weights, FedNova's scales, the outer optimizer, flat buffers."""

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from torch import Tensor, nn

from flower_blsgd import LocalSGD
from flower_blsgd.algorithm.averaging import (
    EqualWeighting,
    LoadWeighting,
    NormalizedWeighting,
    PerSampleWeighting,
    Weighting,
)
from flower_blsgd.algorithm.outer_optimizer import OUTER_OPTIMIZERS, OuterOptimizer, OuterSGD
from flower_blsgd.algorithm.tensor_sum import AnyArray
from flower_blsgd.flower.array_records import tensors_of, view_record
from flower_blsgd.protocol import ARRAYS, HostOrders, Keys
from flower_blsgd.strategy.averaging import Averaging, average_on_node, once_per_node
from flower_blsgd.strategy.replies import CheckedReply
from flower_blsgd.strategy.round import Outcome, Round

from ..worker.helpers import order_for


def model(weight: float, buffer: float = 0.0, counter: int = 0) -> dict[str, AnyArray]:
    return {
        "weight": np.full(2, weight, np.float32),
        "norm.running_mean": np.full(1, buffer, np.float32),
        "norm.num_batches_tracked": np.array(counter, np.int64),
    }


NODE_IDS = itertools.count()


def outcome(
    tensors: dict[str, AnyArray], steps: int, batch_size: int = 2, node_id: int | None = None
) -> Outcome:
    """Return the outcome of a worker, which is the only one of its node by default."""
    report = SimpleNamespace(num_examples=steps * batch_size, completed_steps=steps)
    reply = CheckedReply(report, MetricRecord(), tensors, {})  # type: ignore[arg-type]
    order = SimpleNamespace(indices=range(steps * batch_size))
    worker = SimpleNamespace(node_id=next(NODE_IDS) if node_id is None else node_id)
    return Outcome(worker, order, reply)  # type: ignore[arg-type]


def round_from(arrays: ArrayRecord) -> Round:
    """Return a round without orders."""
    return Round((), arrays, Keys(), 2)


def following(
    averaging: Averaging, before: dict[str, AnyArray], outcomes: list[Outcome]
) -> tuple[dict[str, AnyArray], list[float]]:
    record, weights = averaging.next_model(round_from(view_record(before)), outcomes)
    return dict(tensors_of(record)), weights


FAILED = Outcome(SimpleNamespace(), SimpleNamespace(), failure="died")  # type: ignore[arg-type]


def test_fednova_moves_parameters_by_scales_and_averages_buffers() -> None:
    """Without momentum, steps 3 and 1 from 10: scales (3 + 1) / 2 / 2 / 3 = 1/3 and 1.

    10 + (4 - 10) / 3 + (12 - 10) = 10. The plain mean would be 8, the one by load 6.
    """
    averaging = Averaging(NormalizedWeighting(0.0))
    found, weights = following(
        averaging,
        model(10.0),
        [outcome(model(4.0, 2.0, 3), 3), FAILED, outcome(model(12.0, 4.0, 1), 1)],
    )
    assert weights == [0.5, 0.0, 0.5]
    assert found["weight"] == pytest.approx([10.0, 10.0])
    assert found["norm.running_mean"].tolist() == [3.0]
    assert found["norm.num_batches_tracked"] == 3
    assert list(found) == list(model(0.0))
    # Completed steps count, not ordered ones.
    found, _ = following(averaging, model(0.0), [outcome(model(2.0), 1), outcome(model(4.0), 1)])
    assert found["weight"].tolist() == [3.0, 3.0]


def test_per_sample_moves_parameters_by_samples_and_averages_buffers_by_load() -> None:
    """4 steps of 2, 2 of 2 and 3 of 1 samples, 15 in all: scales 8 / 15, 8 / 15 and 4 / 15.

    10 + (8 x (4 - 10) + 8 x (16 - 10) + 4 x (25 - 10)) / 15 = 14; buffers by 8, 4 and 3 of 15.
    """
    found, weights = following(
        Averaging(PerSampleWeighting()),
        model(10.0),
        [
            outcome(model(4.0, 15.0, 4), 4),
            FAILED,
            outcome(model(16.0, 30.0, 2), 2),
            outcome(model(25.0, 5.0, 3), 3, batch_size=1),
        ],
    )
    assert weights == pytest.approx([8 / 15, 0.0, 4 / 15, 3 / 15])
    assert found["weight"] == pytest.approx([14.0, 14.0])
    assert found["norm.running_mean"] == pytest.approx([17.0])
    assert found["norm.num_batches_tracked"] == 4


@pytest.mark.parametrize(
    ("names", "moved"),
    [(None, {"weight"}), (["norm.running_mean"], {"norm.running_mean"}), ([], set())],
)
def test_outer_optimizer_moves_parameters_only(names: Any, moved: set[str]) -> None:
    """Half the way with a rate of 0.5; without names BatchNorm's statistics are known."""
    averaging = Averaging(EqualWeighting(), OuterSGD(0.5), names)
    found, _ = following(averaging, model(0.0, 0.0), [outcome(model(4.0, 4.0, 2), 1)])
    for name in ("weight", "norm.running_mean"):
        assert set(found[name].tolist()) == {2.0 if name in moved else 4.0}
    assert found["norm.num_batches_tracked"] == 2


# --- tied weights: two names in a state dict, one in named_parameters


@pytest.mark.parametrize("on_one_node", [False, True])
@pytest.mark.parametrize(
    ("trained", "expected"), [((8.0, 12.0), 9.0), ((4.0, 12.0), 7.0)], ids=["copy", "tied"]
)
def test_copy_of_a_parameter_is_tied_if_it_is_trained_as_that(
    trained: tuple[float, float], expected: float, on_one_node: bool
) -> None:
    """3 steps and 1 with equal batches: the scales are 3 / 4 each, the weights 3 / 4 and 1 / 4.

    The parameter: 10 + 0.75 x (4 - 10) + 0.75 x (12 - 10) = 7. A buffer that is a copy of it before
    the round: 0.75 x 8 + 0.25 x 12 = 9. A tied tensor moves like the parameter.
    """
    before = {name: np.full(2, 10.0, np.float32) for name in ("weight", "copy")}
    models = [
        {"weight": np.full(2, weight, np.float32), "copy": np.full(2, copy, np.float32)}
        for weight, copy in zip((4.0, 12.0), trained, strict=True)
    ]
    averaging = Averaging(PerSampleWeighting(), parameter_names=["weight"])
    outcomes = [outcome(model, steps) for model, steps in zip(models, (3, 1), strict=True)]
    if on_one_node:
        content = RecordDict({ARRAYS: view_record(before)})
        rule = HostOrders({0: content}, **averaging.at_nodes(view_record(before), 3))
        replies = [o.reply for o in outcomes if o.reply]
        shared = tensors_of(average_on_node(replies, rule).array_records[ARRAYS])
        outcomes = [outcome(shared, steps, node_id=7) for steps in (3, 1)]
    found, _ = following(averaging, before, outcomes)
    assert found["weight"].tolist() == [7.0, 7.0]
    assert found["copy"].tolist() == [expected, expected]


def test_workers_of_a_node_count_together_and_those_of_two_nodes_do_not() -> None:
    """The node decides, not whether two replies share an object."""
    tensors = model(3.0)
    outcomes = [
        outcome(t, 3, node_id=n) for t, n in ((tensors, 1), (dict(tensors), 1), (tensors, 2))
    ]
    models, shares = once_per_node(outcomes, [0.25, 0.25, 0.5], lambda reply: reply.tensors)
    assert models == [tensors, tensors]
    assert shares == [0.5, 0.5]


class TwoLayers(nn.Module):
    """Two layers with one weight: tied, or one tensor used twice."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first, self.bias = nn.Linear(2, 2), nn.Parameter(torch.zeros(2))
        self.second = nn.Linear(2, 2, bias=False) if tied else None
        self.first.weight.data = torch.tensor([[0.5, -0.25], [0.75, 1.0]])
        self.first.bias.data = torch.zeros(2)
        if self.second:
            self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        weight = self.second.weight if self.second else self.first.weight
        return nn.functional.linear(self.first(inputs).tanh(), weight, self.bias)


def whole_state(model: nn.Module) -> ArrayRecord:
    """Return the model as a ServerApp of a user sends it, with both names."""
    return view_record({name: tensor.numpy() for name, tensor in model.state_dict().items()})


def trained(
    tied: bool, names: Any, weighting: Weighting, outer: OuterOptimizer | None
) -> dict[str, AnyArray]:
    """Return the model after three rounds of two workers with 3 steps and 1."""
    draw = torch.Generator().manual_seed(0)
    data = torch.randn(12, 2, generator=draw), torch.arange(12) % 2
    workers = [LocalSGD(TwoLayers(tied), data) for _ in range(2)]
    averaging, arrays = Averaging(weighting, outer, names), whole_state(workers[0].model)
    for server_round in range(3):
        outcomes = []
        for worker, indices in zip(workers, (range(6), range(server_round, 10, 6)), strict=True):
            order = order_for(arrays, indices, 2, momentum_policy="reset")
            report = worker.run(order)
            reply = CheckedReply(report, MetricRecord(), tensors_of(report.arrays), {})
            place = SimpleNamespace(node_id=len(outcomes))
            outcomes.append(Outcome(place, order, reply))  # type: ignore[arg-type]
        arrays = averaging.next_model(round_from(arrays), outcomes)[0]
    return dict(tensors_of(arrays))


RULES: dict[str, tuple[Weighting, Callable[[], OuterOptimizer | None]]] = {
    "fednova": (NormalizedWeighting(0.9), lambda: None),
    **{
        name: (LoadWeighting(), functools.partial(make, 0.7, 0.5))
        for name, make in OUTER_OPTIMIZERS.items()
        if make
    },
}


@pytest.mark.parametrize("rule", RULES)
def test_tied_weights_move_as_the_one_tensor_that_they_are(rule: str) -> None:
    weighting, outer = RULES[rule]
    expected = trained(False, None, weighting, outer())
    assert not np.array_equal(
        expected["first.weight"], trained(False, [], weighting, outer())["first.weight"]
    )
    parameters = [name for name, _ in TwoLayers(True).named_parameters()]
    assert "second.weight" not in parameters
    for names in (None, parameters, [*parameters, "second.weight"]):
        found = trained(True, names, weighting, outer())
        assert np.array_equal(found.pop("second.weight"), expected["first.weight"])
        for name, tensor in expected.items():
            assert np.array_equal(found[name], tensor), name
