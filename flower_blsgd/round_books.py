"""Turn the replies of a round into its record: who did what, and how long it took."""

import time
from collections.abc import Sequence

from .planner import Planner
from .roster import Worker
from .round_log import RoundRecord, TimeShare, WorkerRound, split_times
from .round_replies import Outcome


def round_record(
    planner: Planner,
    outcomes: Sequence[Outcome],
    weights: Sequence[float],
    *,
    sent_at: float,
    received_at: float,
    planning_seconds: float,
    model_bytes: int,
    summing: Sequence[tuple[Worker, tuple[float, float]]] = (),
) -> RoundRecord:
    """Return the record of the round that just ended.

    Parameters
    ----------
    planner : Planner
        Knows the epoch; the round is counted as over already.
    outcomes : sequence of Outcome
        In worker order, at least one with a load.
    weights : sequence of float
        Of each, in the average.
    sent_at, received_at : float
        Unix time in seconds of the first order and of the last reply.
    planning_seconds : float
        Before the first order.
    model_bytes : int
        Of one model.
    summing : sequence of (Worker, (float, float))
        Those that added up models: Unix time of the start and the end.
    """
    workers = worker_rounds(outcomes, weights, sent_at, received_at, planner.batch_size)
    samples = sum(row.num_examples for row in workers)
    loss = sum(row.loss * row.num_examples for row in workers if row.num_examples) / samples
    sent = {outcome.worker.node_id for outcome in outcomes}  # one model for all behind a node
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
    now = time.time()
    return RoundRecord(
        round=outcomes[0].order.round,
        epoch=planner.epoch,
        rounds_in_epoch=planner.plan.rounds,
        round_in_epoch=planner.rounds_done,
        learning_rate=outcomes[0].order.learning_rate,
        planning_seconds=planning_seconds,
        round_seconds=now - sent_at,
        averaging_seconds=now - received_at,
        bytes_moved=model_bytes * (len(sent) + len(answered)),
        train_loss=loss,
        workers=tuple(sorted([*workers, *sums], key=lambda row: row.worker)),
    )


def worker_rounds(
    outcomes: Sequence[Outcome],
    weights: Sequence[float],
    sent_at: float,
    received_at: float,
    batch_size: int,
) -> tuple[WorkerRound, ...]:
    """Return each worker's part of the round: what it did, its weight, and its times."""
    computing = {
        o.worker.index: (o.report.started_at, o.report.ended_at)
        for o in outcomes
        if o.report is not None and o.report.ended_at > 0
    }
    times = split_times(sent_at, received_at, computing)
    rows = []
    for outcome, weight in zip(outcomes, weights, strict=True):
        worker, report = outcome.worker, outcome.report
        time = times.get(worker.index, TimeShare())
        rows.append(
            WorkerRound(
                worker=worker.index,
                label=worker.label,
                fast=worker.fast,
                local_steps=outcome.order.local_steps,
                completed_steps=report.completed_steps if report else 0,
                batch_scale=outcome.order.batch_size / batch_size,
                num_examples=report.num_examples if report else 0,
                weight=weight,
                loss=report.mean_loss if report else float("nan"),
                start_seconds=time.start,
                compute_seconds=time.compute,
                waiting_seconds=time.waiting,
                transfer_seconds=time.transfer,
                failure=outcome.failure,
            )
        )
    return tuple(rows)
