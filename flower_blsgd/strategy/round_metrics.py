"""Record of a round: the work, weight and times of each worker."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .round import Outcome, Round


@dataclass(frozen=True)
class WorkerRound:
    """One worker's part of a round.

    Parameters
    ----------
    worker : int
        Worker index.
    label : str
        Name, such as ``fast-0 (cpu:0)``.
    fast : bool
        Tier.
    local_steps, completed_steps : int
        Ordered and completed steps.
    batch_scale : float
        b_i over the batch size of the worker's ``seconds_per_step``.
    num_examples : int
        Samples trained on.
    weight : float
        Weight in the average, by load if the weighting does not differ. If it scales updates, the
        parameters move by other factors.
    loss : float
        Mean training loss; nan without a step.
    start_seconds : float
        Time from the first order sent to the start of computing.
    summing_seconds : float
        Duration of summing the models of other workers, from `start_seconds` on.
    compute_seconds, waiting_seconds, transfer_seconds : float
        Parts of the time from the first order sent to the last reply received. Waiting ends when
        the last worker has finished computing.
    momentum_zeroed : bool
        Whether the optimizer's state was not finite and was set to zero.
    skipped_steps : int
        Steps in float16 that were repeated with a smaller loss scale.
    failure, failure_kind : str
        Reason of a failed order, and its kind, such as ``"died"`` or ``"late"``; else empty.
    """

    worker: int
    label: str
    fast: bool
    local_steps: int
    completed_steps: int = 0
    batch_scale: float = 1.0
    num_examples: int = 0
    weight: float = 0.0
    loss: float = float("nan")
    start_seconds: float = 0.0
    compute_seconds: float = 0.0
    waiting_seconds: float = 0.0
    transfer_seconds: float = 0.0
    summing_seconds: float = 0.0
    momentum_zeroed: bool = False
    skipped_steps: int = 0
    failure: str = ""
    failure_kind: str = ""

    @property
    def trained(self) -> bool:
        """Whether the worker had an order to train, even if it failed."""
        return self.local_steps > 0


@dataclass(frozen=True)
class RoundRecord:
    """One round.

    Parameters
    ----------
    round, epoch : int
        Both counted from 1.
    rounds_in_epoch, round_in_epoch : int
        Number of rounds in the epoch, and position of this round, counted from 1.
    learning_rate : float
        Learning rate of the first worker that succeeded; nan if none did.
    planning_seconds : float
        Seconds that the workers waited before the first order: for the plan, or since the average
        of the round before.
    round_seconds : float
        Time from the first order sent to the new global model.
    averaging_seconds : float
        Last part of `round_seconds`, from the last reply received.
    bytes_moved : int
        Size of the model tensors sent and received, in bytes.
    train_loss : float
        Mean training loss over the samples of all workers.
    workers : tuple of WorkerRound
        In worker order.
    """

    round: int
    epoch: int
    rounds_in_epoch: int
    round_in_epoch: int
    learning_rate: float
    planning_seconds: float
    round_seconds: float
    averaging_seconds: float
    bytes_moved: int
    train_loss: float
    workers: tuple[WorkerRound, ...]

    @property
    def epochs_done(self) -> float:
        """Number of epochs until the end of this round."""
        return self.epoch - 1 + self.round_in_epoch / self.rounds_in_epoch


def waiting_share(
    rounds: Iterable[tuple[float, Iterable[WorkerRound]]], fast: bool
) -> float | None:
    """Return the share of time that the workers of a tier waited; None without any.

    A round is given as its duration in seconds and its rows. A worker may change its tier between
    rounds.
    """
    waited = available = 0.0
    for round_seconds, rows in rounds:
        its = [row.waiting_seconds for row in rows if row.trained and row.fast is fast]
        waited += sum(its)
        available += len(its) * round_seconds
    return waited / available if available else None


def split_times(
    seconds: float, computing: Mapping[int, tuple[float, float]]
) -> dict[int, dict[str, float]]:
    """Split the time between orders and replies for each worker.

    `seconds` is the time from the first order sent to the last reply received. `computing` has the
    start of computing after the first order, and its duration, by worker. Clocks of other hosts may
    be wrong, so the start is moved until computing lies within `seconds`. The result has seconds by
    the names of `WorkerRound`; compute, waiting and transfer add up to `seconds`.
    """
    clamped = {}
    for worker, (said_start, said_seconds) in computing.items():
        duration = min(said_seconds, seconds)
        start = min(max(said_start, 0.0), seconds - duration)
        clamped[worker] = start, duration, start + duration
    last_end = max((end for _, _, end in clamped.values()), default=seconds)
    return {
        worker: {
            "start_seconds": start,
            "compute_seconds": duration,
            "waiting_seconds": last_end - end,
            "transfer_seconds": start + (seconds - last_end),
        }
        for worker, (start, duration, end) in clamped.items()
    }


def round_record(
    round: Round, outcomes: Sequence[Outcome], weights: Sequence[float]
) -> RoundRecord:
    """Return the record of a round that ends now, given outcomes and weights in worker order."""
    sent_at, reply_seconds, round_seconds = round.sent_at, round.reply_seconds, round.seconds
    summing = round.slow_reduce.summing if round.slow_reduce else ()
    computing = {
        o.worker.index: (o.report.started_at - sent_at, o.report.compute_seconds)
        for o in outcomes
        if o.report is not None and o.report.started_at > 0
    }
    times = split_times(reply_seconds, computing)
    workers = [
        WorkerRound(
            worker=outcome.worker.index,
            label=outcome.worker.label,
            fast=outcome.worker.fast,
            local_steps=outcome.order.local_steps,
            completed_steps=outcome.report.completed_steps if outcome.report else 0,
            batch_scale=outcome.order.batch_size / outcome.worker.own_batch(round.batch_size),
            num_examples=outcome.report.num_examples if outcome.report else 0,
            weight=weight,
            loss=outcome.report.mean_loss if outcome.report else float("nan"),
            momentum_zeroed=outcome.momentum_zeroed,
            skipped_steps=outcome.report.skipped_steps if outcome.report else 0,
            failure=outcome.failure.brief if outcome.failure else "",
            failure_kind=outcome.failure.kind if outcome.failure else "",
            **times.get(outcome.worker.index, {}),
        )
        for outcome, weight in zip(outcomes, weights, strict=True)
    ]
    samples = sum(row.num_examples for row in workers)
    loss = sum(row.loss * row.num_examples for row in workers if row.num_examples)
    sent = {outcome.worker.node_id for outcome in outcomes}  # one model per node
    answered = {outcome.worker.node_id for outcome in outcomes if not outcome.failure}
    sums = [
        WorkerRound(
            worker=worker.index,
            label=worker.label,
            fast=worker.fast,
            local_steps=0,
            start_seconds=max(0.0, started - sent_at),
            summing_seconds=ended - started,
        )
        for worker, (started, ended) in summing
    ]
    return RoundRecord(
        round=outcomes[0].order.round,
        epoch=round.epoch,
        rounds_in_epoch=round.rounds_in_epoch,
        round_in_epoch=round.round_in_epoch,
        learning_rate=next((o.report.learning_rate for o in outcomes if o.report), float("nan")),
        planning_seconds=round.planning_seconds,
        round_seconds=round_seconds,
        averaging_seconds=round_seconds - reply_seconds,
        bytes_moved=round.model_shape.num_bytes * (len(sent) + len(answered)),
        train_loss=loss / samples if samples else float("nan"),
        workers=tuple(sorted([*workers, *sums], key=lambda row: row.worker)),
    )
