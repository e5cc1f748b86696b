"""Average the models of a round: weights, FedNova's scales, the outer optimizer, flat buffers."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import MetricRecord

from flower_blsgd.algorithm.averaging import (
    AnyArray,
    EqualWeighting,
    NormalizedWeighting,
)
from flower_blsgd.algorithm.outer_optimizer import OuterSGD
from flower_blsgd.array_records import tensors_of, view_record
from flower_blsgd.strategy.aggregation import Aggregation
from flower_blsgd.strategy.replies import CheckedReply, Outcome


def model(weight: float, buffer: float = 0.0, counter: int = 0) -> dict[str, AnyArray]:
    return {
        "weight": np.full(2, weight, np.float32),
        "norm.running_mean": np.full(1, buffer, np.float32),
        "norm.num_batches_tracked": np.array(counter, np.int64),
    }


def outcome(tensors: dict[str, AnyArray], steps: int, batch_size: int = 2) -> Outcome:
    report = SimpleNamespace(num_examples=steps * batch_size, completed_steps=steps)
    reply = CheckedReply(report, MetricRecord(), tensors, {}, {})  # type: ignore[arg-type]
    return Outcome(SimpleNamespace(), SimpleNamespace(), reply)  # type: ignore[arg-type]


def following(
    aggregation: Aggregation, before: dict[str, AnyArray], outcomes: list[Outcome]
) -> tuple[dict[str, AnyArray], list[float]]:
    record, weights = aggregation.next_model(view_record(before), outcomes)
    return tensors_of(record), weights


FAILED = Outcome(SimpleNamespace(), SimpleNamespace(), failure="died")  # type: ignore[arg-type]


def test_fednova_moves_parameters_by_scales_and_averages_buffers() -> None:
    """Without momentum, steps 3 and 1 from 10: scales (3 + 1) / 2 / 2 / 3 = 1/3 and 1.

    10 + (4 - 10) / 3 + (12 - 10) = 10. The plain mean would be 8, the one by load 6.
    """
    aggregation = Aggregation(NormalizedWeighting(0.0))
    found, weights = following(
        aggregation,
        model(10.0),
        [outcome(model(4.0, 2.0, 3), 3), FAILED, outcome(model(12.0, 4.0, 1), 1)],
    )
    assert weights == [0.5, 0.0, 0.5]
    assert found["weight"] == pytest.approx([10.0, 10.0])
    assert found["norm.running_mean"].tolist() == [3.0]
    assert found["norm.num_batches_tracked"] == 3
    assert list(found) == list(model(0.0))
    # Completed steps count, not ordered ones.
    found, _ = following(aggregation, model(0.0), [outcome(model(2.0), 1), outcome(model(4.0), 1)])
    assert found["weight"].tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("names", "moved"),
    [(None, {"weight"}), (["norm.running_mean"], {"norm.running_mean"}), ([], set())],
)
def test_outer_optimizer_moves_parameters_only(names: Any, moved: set[str]) -> None:
    """Half the way with a rate of 0.5; without names BatchNorm's statistics are known."""
    aggregation = Aggregation(EqualWeighting(), OuterSGD(0.5), names)
    found, _ = following(aggregation, model(0.0, 0.0), [outcome(model(4.0, 4.0, 2), 1)])
    for name in ("weight", "norm.running_mean"):
        assert set(found[name].tolist()) == {2.0 if name in moved else 4.0}
    assert found["norm.num_batches_tracked"] == 2
