"""What a run was like in the figures that the cost model predicts, and the line with both."""

from flower_blsgd.algorithm.local_steps import Clock
from flower_blsgd.results.metrics import RunMetrics
from flower_blsgd.results.summary import measured_figures, plan_line
from flower_blsgd.strategy.round_metrics import RoundRecord

from .records import record, row, two_rounds


def metrics_of(*records: RoundRecord, clock: Clock = "wall") -> RunMetrics:
    metrics = RunMetrics(clock)
    for one in records:
        metrics.add(one)
    return metrics


def test_measured_worked() -> None:
    """Two rounds of 10 s and 6 s and 0.75 s of planning make one epoch."""
    assert measured_figures(metrics_of(*two_rounds())) == {
        "clock": "wall",
        "round_seconds": 16.75 / 2,
        "epoch_seconds": 16.75,
        "fast_waiting_share": 8.0 / 32,
        "slow_waiting_share": 1.0 / 16,
    }


def test_measured_counts_a_part_of_an_epoch_as_that() -> None:
    """One round of two in the third epoch: 2.5 epochs."""
    found = measured_figures(
        metrics_of(record(row(0), epoch=3, round_in_epoch=1, rounds_in_epoch=2))
    )
    assert found is not None
    assert found["epoch_seconds"] == 10.0 / 2.5


def test_measured_is_not_known_without_a_round_or_a_speed() -> None:
    assert measured_figures(RunMetrics()) is None
    assert measured_figures(metrics_of(*two_rounds(), clock="device")) is None


def test_plan_line_tells_both_and_the_difference() -> None:
    expected = {"epoch_seconds": 4.0, "fast_waiting_share": 0.125}
    took = {"epoch_seconds": 3.0, "fast_waiting_share": 0.25}
    assert plan_line(expected, took) == (  # type: ignore[arg-type]
        "plan: 4 s an epoch, fast waits 12%; measured: 3 s (-25%), fast waits 25%"
    )
    nobody = {"epoch_seconds": 4.0, "fast_waiting_share": None}
    assert plan_line(nobody, nobody) == "plan: 4 s an epoch; measured: 4 s (+0%)"  # type: ignore[arg-type]
