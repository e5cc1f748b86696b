"""What happened in one round, and who waited for whom (ALGORITHM section 7)."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerRound:
    """One worker's part of one round.

    Parameters
    ----------
    worker : int
        Worker index.
    label : str
        Such as ``fast-0 (cpu:0)``.
    fast : bool
        Its tier.
    local_steps, completed_steps : int
        Ordered and done.
    batch_scale : float
        b_i / B.
    num_examples : int
        Samples that it trained on.
    weight : float
        Its share of the average.
    loss : float
        Mean training loss; nan without a step.
    start_seconds : float
        First order sent to the start of its computing.
    summing_seconds : float
        How long it added up models of others, instead of training; from `start_seconds` on.
    compute_seconds, waiting_seconds, transfer_seconds : float
        They add up to the time from the first order sent to the last reply received. Waiting
        is the last worker's end of computing minus the own one.
    failure : str
        Why it counts 0; empty if it does not.
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
    failure: str = ""

    @property
    def completed_load(self) -> float:
        """Completed work in steps of the common batch size."""
        return self.completed_steps * self.batch_scale

    @property
    def trained(self) -> bool:
        """Whether it had an order to train, also one that failed."""
        return self.local_steps > 0


@dataclass(frozen=True)
class RoundRecord:
    """One round.

    Parameters
    ----------
    round, epoch : int
        Both counted from 1.
    rounds_in_epoch, round_in_epoch : int
        How many there are, and which one this is, counted from 1.
    learning_rate : float
        That all workers used.
    planning_seconds : float
        How long the workers waited for the choice of samples, before the first order.
    round_seconds : float
        First order sent to new global model ready.
    averaging_seconds : float
        The last part of it: replies received to new global model ready.
    bytes_moved : int
        Bytes of model tensors sent and received.
    train_loss : float
        Mean over the samples of all workers.
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


@dataclass(frozen=True)
class TimeShare:
    """How one worker spent a round, in seconds; see `WorkerRound`."""

    start: float = 0.0
    compute: float = 0.0
    waiting: float = 0.0
    transfer: float = 0.0


def split_times(
    sent_at: float,
    received_at: float,
    computing: Mapping[int, tuple[float, float]],
) -> dict[int, TimeShare]:
    """Split the time between orders and replies for each worker.

    Parameters
    ----------
    sent_at, received_at : float
        Unix time in seconds of the first order and of the last reply.
    computing : mapping of int to (float, float)
        Each worker's start and end of computing. Clocks of other hosts may be off: both are
        moved into [sent_at, received_at].

    Returns
    -------
    dict of int to TimeShare
        Compute, waiting and transfer add up to received_at - sent_at.

    Examples
    --------
    >>> split_times(0.0, 10.0, {0: (1.0, 9.0), 1: (2.0, 5.0)})[1]
    TimeShare(start=2.0, compute=3.0, waiting=4.0, transfer=3.0)
    """
    clamped = {
        worker: (
            min(max(start, sent_at), received_at),
            min(max(end, start, sent_at), received_at),
        )
        for worker, (start, end) in computing.items()
    }
    last_end = max((end for _, end in clamped.values()), default=received_at)
    return {
        worker: TimeShare(
            start=start - sent_at,
            compute=end - start,
            waiting=last_end - end,
            transfer=(start - sent_at) + (received_at - last_end),
        )
        for worker, (start, end) in clamped.items()
    }
