"""The cost model, asked about a strategy and its workers."""

from collections.abc import Sequence

from ..algorithm.epoch_plan import RoundShape
from ..roster import Worker
from ..strategy import BiasedLocalSGD
from .cost_model import Prediction, Speed, predict


def predict_run(
    strategy: BiasedLocalSGD,
    workers: Sequence[Worker],
    overhead_seconds: float = 0.0,
    shape: RoundShape | None = None,
) -> Prediction | None:
    """Return what to expect of a run with these workers; None if a speed is not known.

    Workers that take turns in one process are not modelled: each counts as if it had its own.

    Parameters
    ----------
    strategy : BiasedLocalSGD
        Knows the settings.
    workers : sequence of Worker
        All of them, in worker order.
    overhead_seconds : float (default: 0)
        Of one round.
    shape : RoundShape, optional
        Of a round with them, if it is known already.

    Raises
    ------
    UsageError
        If a run could not begin with these workers.
    """
    planner = strategy.planner
    training = planner.training(workers)
    speeds = [Speed(w.profile.seconds_per_step, w.fast) for w in training]
    if not all(speed.seconds_per_step > 0 for speed in speeds):
        return None
    shape = shape or planner.check(workers)
    return predict(
        speeds,
        shape,
        strategy.aggregation.weighting,
        batch_size=planner.batch_size,
        rounds_per_epoch=planner.mean_rounds_per_epoch(shape),
        overhead_seconds=overhead_seconds,
    )


def predicted_figures(prediction: Prediction, clock: str) -> dict[str, float | str | None]:
    """Return what a summary shows beside the same figures as measured."""
    return {
        "clock": clock,
        "round_seconds": prediction.round_seconds,
        "epoch_seconds": prediction.epoch_seconds,
        "fast_waiting_share": prediction.fast_waiting_share,
        "slow_waiting_share": prediction.slow_waiting_share,
    }
