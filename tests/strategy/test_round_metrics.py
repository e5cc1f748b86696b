"""The record of a round: who waited for whom, and each worker's row."""

import math

import numpy as np
import pytest

from flower_blsgd.protocol import Keys
from flower_blsgd.strategy.round import Outcome, Round
from flower_blsgd.strategy.round_metrics import WorkerRound, round_record, split_times

from ..in_process_grid import ToyWorker, toy_arrays
from .orders import orders_of_two, outcomes_of, sent


def times(*seconds: float) -> dict[str, float]:
    """Return start, compute, waiting and transfer by their names."""
    names = ("start_seconds", "compute_seconds", "waiting_seconds", "transfer_seconds")
    return dict(zip(names, seconds, strict=True))


def rows_of(outcomes: list[Outcome], weights: list[float]) -> tuple[WorkerRound, ...]:
    """Return the rows of a round with orders sent at 0 and the last reply at 4."""
    round = Round([(o.worker, o.order) for o in outcomes], toy_arrays(), Keys(), 2, 1, 1, 4)
    round.reply_seconds = 4.0
    return round_record(round, outcomes, weights).workers


def test_split_times_hand_worked() -> None:
    """The last reply comes after 10 s; the last worker computes from 1 s to 9 s."""
    computing = {0: (1.0, 8.0), 1: (2.0, 3.0), 2: (0.5, 6.5), 3: (1.0, 0.0)}
    assert split_times(10.0, computing) == {
        # start, compute, waiting for the end at 9, transfer = start + (10 - 9)
        0: times(1.0, 8.0, 0.0, 2.0),
        1: times(2.0, 3.0, 4.0, 3.0),
        2: times(0.5, 6.5, 2.0, 1.5),
        3: times(1.0, 0.0, 8.0, 2.0),
    }
    assert split_times(4.0, {7: (1.0, 2.5)}) == {7: times(1.0, 2.5, 0.0, 1.5)}
    assert split_times(4.0, {}) == {}


@pytest.mark.parametrize(
    ("computing", "expected"),
    [
        # a clock that is slow: it seems to begin before the order
        ((-5.0, 6.0), times(0.0, 6.0, 0.0, 4.0)),
        ((-3600.0, 6.0), times(0.0, 6.0, 0.0, 4.0)),
        # a clock that is fast: it seems to end after the reply
        ((3.0, 9.0), times(1.0, 9.0, 0.0, 1.0)),
        ((3600.0, 6.0), times(4.0, 6.0, 0.0, 4.0)),
        # more than there is time for
        ((3.0, 12.0), times(0.0, 10.0, 0.0, 0.0)),
    ],
)
def test_split_times_moves_other_clocks_into_the_round(
    computing: tuple[float, float], expected: dict[str, float]
) -> None:
    assert split_times(10.0, {0: computing}) == {0: expected}
    both = split_times(10.0, {0: (1.0, 7.0), 1: (3600.0, 7.0)})
    assert both[0]["waiting_seconds"] == 2.0  # no longer than until the last reply


def test_rows_hold_steps_weight_loss_times_and_failure() -> None:
    orders = orders_of_two()
    lazy = ToyWorker(steps=1, losses=lambda i: np.array([1.0, 2.0], np.float32))
    outcomes = outcomes_of(orders, lazy(sent(orders, 0), 0))
    first, second = rows_of(outcomes, [1.0, 0.0])
    assert (first.worker, first.label, first.fast) == (0, "fast-0 (cpu:0)", True)
    assert (first.local_steps, first.completed_steps, first.num_examples) == (2, 1, 2)
    assert (first.weight, first.loss, first.failure) == (1.0, 1.5, "")
    assert (first.start_seconds, first.compute_seconds) == (1.0, 0.5)  # 1.0 to 1.5 of 4
    assert first.transfer_seconds == 3.5
    assert (second.completed_steps, second.num_examples, second.weight) == (0, 0, 0.0)
    assert math.isnan(second.loss)
    assert "did not answer" in second.failure
