"""A worker that computes together with the others of its process, where their orders fit."""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from flwr.app import RecordDict

from ..protocol import TrainOrder, TrainReport
from .gate import LOOK_SECONDS
from .local_sgd import LocalSGD
from .replica_group import WAIT_SECONDS, ReplicaGroup
from .replica_sgd import CannotBatchError, ReplicaSGD, Work

_LOG = logging.getLogger(__name__)


class ReplicaTeam:
    """The workers of a process on one device, and what computes for all of them.

    Parameters
    ----------
    sgd : ReplicaSGD
        Computes several orders at once.
    wait_seconds : float
        How long the first of a round waits for others.
    """

    def __init__(self, sgd: ReplicaSGD, wait_seconds: float = WAIT_SECONDS) -> None:
        self.sgd = sgd
        self.batches = True
        """Whether orders are computed together; not any more once the model refused it."""
        self.group: ReplicaGroup[Work, TrainReport] = ReplicaGroup(self._together, wait_seconds)
        self._alone = threading.Lock()  # torch's random numbers are of the process
        self._stream = _stream(sgd.device)

    def member(self, number: int) -> "Callable[..., Replica]":
        """Return what makes a member with this number, from the arguments of `LocalSGD`."""
        return functools.partial(Replica, self, number)

    def _together(self, works: Sequence[Work]) -> list[TrainReport]:
        with self._one_at_a_time():
            if not self.batches:
                raise CannotBatchError
            try:
                # Whichever thread computes: memory that one stream freed is not another's to use.
                with _on(self._stream):
                    return self.sgd.run(works)
            except CannotBatchError as refusal:
                self.batches = False
                _LOG.warning(
                    'replicas = "batched": this model cannot be computed for several workers at '
                    'once, so they compute side by side, as with "threads" (%s)',
                    refusal,
                )
                raise

    @contextlib.contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        while not self._alone.acquire(timeout=LOOK_SECONDS):
            pass
        try:
            yield
        finally:
            self._alone.release()


class Replica(LocalSGD):
    """A `LocalSGD` whose orders are computed together with those of its team, where they fit.

    What does not fit (other steps, another batch size, a deadline, a slowdown, momentum that is
    kept in the object) is computed by this one alone. All that is computed together reports the
    same times.

    Parameters
    ----------
    team : ReplicaTeam
        Those that it computes with.
    member : int
        Its number, different from theirs.
    arguments, settings
        As of `LocalSGD`.
    """

    def __init__(self, team: ReplicaTeam, member: int, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._team, self._member = team, member
        self._slowed_on_purpose = settings.get("slowdown", 1.0) != 1.0
        team.group.join(member)

    def run(self, order: TrainOrder, state: RecordDict | None = None) -> TrainReport:
        """Do the steps of an order; see `LocalSGD.run`."""
        team = self._team
        if not team.batches:
            return super().run(order, state)
        if self._slowed_on_purpose or not team.sgd.fits(order, state):
            team.group.leave(self._member)
            return super().run(order, state)
        alone = super().run
        shape = order.local_steps, order.batch_size
        calibrates = order.round == 0
        with contextlib.suppress(CannotBatchError):
            return team.group.run(
                self._member, shape, (order, state), lambda: alone(order, state), calibrates
            )
        return alone(order, state)  # only now: the error would keep what it holds of the step


def _stream(device: torch.device) -> "torch.cuda.Stream | None":
    if device.type != "cuda":
        return None
    torch.accelerator.synchronize(device)  # the data are there before another stream reads them
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def _on(stream: "torch.cuda.Stream | None") -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
