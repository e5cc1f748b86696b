"""Averages of gradients: the workers keep the model, and return it when they have to wait."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from flwr.serverapp.exception import AggregationError

from ..engines.features import features_of
from ..errors import UsageError
from ..protocol import Brings, TrainOrder
from .averaging import Averaging, average_momentum
from .planner import Planner
from .round import Outcome, Round
from .workers import Worker


@dataclass(eq=False)
class KeptModel:
    """The model that the workers keep while gradients are averaged.

    The first orders bring it, with the state of its optimizer, and each further one the average of
    the last gradients. `model` is the last one that the server knows. `orders` are the last ones of
    the workers that have kept theirs since then, and wait for `average`. They do not step with it
    if the gradient of one overflowed; `skips` counts such rounds in a row.
    """

    planner: Planner
    averaging: Averaging
    model: ArrayRecord | None = None
    orders: Sequence[tuple[Worker, TrainOrder]] = ()
    average: ArrayRecord | None = None
    skips: int = 0

    def complete(self, round: Round, grid: Grid, seconds: float) -> None:
        """Let the orders of a round bring the average to workers that have kept the model, or it.

        If a worker has lost its model or is back, the others return theirs within `seconds`.
        UsageError if workers do not stay between two messages.
        """
        workers = [worker for worker, _ in round.orders]
        if self.orders and any(worker.fresh for worker in workers):
            round.arrays = self.collect(grid, seconds)
        brings, momentum = self._brings, None
        if brings == "model":
            if self.model is None:
                _refuse_plain_messages(grid, workers)
            self.model, momentum = round.arrays, self.planner.averaged_momentum
        its: dict[str, Any] = {"arrays": round.arrays, "momentum": momentum, "brings": brings}
        round.orders = [
            (worker, replace(order, returns="gradient", **its)) for worker, order in round.orders
        ]

    def note(self, round: Round, outcomes: Sequence[Outcome], average: ArrayRecord) -> bool:
        """Note the average of a round; return False if no worker has the model any more."""
        overflowed = any(o.report and not o.report.completed_steps for o in outcomes)
        self.skips = self.skips + 1 if overflowed else 0
        if all(outcome.failure for outcome in outcomes):
            return not self.orders
        self.orders, self.average = round.orders, average
        return True

    def collect(self, grid: Grid, seconds: float) -> ArrayRecord:
        """Let the workers step with the last average, and return the model that all have then.

        AggregationError if no worker returns it within `seconds`.
        """
        assert self.average is not None
        last: dict[str, Any] = {"arrays": self.average, "momentum": None, "brings": self._brings}
        last |= {"local_steps": 0, "indices": np.empty(0, np.int32), "sample_weights": None}
        orders = [
            (worker, replace(order, round=order.round + 1, returns="model", **last))
            for worker, order in self.orders
            if worker.present and not worker.fresh
        ]
        round = Round(orders, self.average, self.planner.settings.keys, 1, 1, 1, 1)
        messages = round.messages(self.averaging.at_nodes, None, seconds)
        outcomes = round.read(grid.send_and_receive(messages, timeout=seconds))
        # All models are equal, and so is their average.
        model, weights = self.averaging.next_model(round, outcomes)
        if not any(weights):
            raise AggregationError("no worker has kept the model; resume from the last checkpoint")
        self.planner.averaged_momentum = average_momentum(outcomes)
        self.model, self.orders = model, ()
        return model

    @property
    def _brings(self) -> Brings:
        if not self.orders:
            return "model"
        return "skip" if self.skips else "gradient"


def _refuse_plain_messages(grid: Grid, workers: Sequence[Worker]) -> None:
    plain = [w.label for w in workers if w.node_id not in features_of(grid).connected_nodes]
    if plain:
        raise UsageError(
            f'average = "gradients": {", ".join(plain)} cannot keep the model, because each of its '
            'messages may start a process; use blsgd run or streams, or average = "models"'
        )
