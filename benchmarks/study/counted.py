"""Train an arm of this project in one process, on a clock that counts instead of measuring.

The strategy, its planner, averaging and `LocalSGD` are those that ship. Only the grid differs: it
calls the workers one after the other. A round counts as the seconds of its slowest worker, from
given seconds per step, plus a fixed cost, so a result is a function of its settings alone: other
work on the machine does not change a bit of it.

``python -m benchmarks.study.counted SETTINGS`` writes ``result.json``.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from flower_blsgd.algorithm.randomness import derived_seed
from flower_blsgd.config import RunConfig
from flower_blsgd.flower.internals import become_server, empty_run, give_message_id
from flower_blsgd.parts import make_strategy
from flower_blsgd.protocol import TrainOrder, TrainReport, WorkerProfile
from flower_blsgd.strategy.budget import Budget
from flower_blsgd.strategy.round_metrics import RoundRecord
from flower_blsgd.strategy.run_clock import RunClock
from flower_blsgd.worker.batches import BatchSource
from flower_blsgd.worker.local_sgd import LocalSGD
from flower_blsgd.worker.model_io import load_state, state_record

from .arms import SHAPES, Shape
from .tasks import finished, loaded

ROUND_SECONDS = 0.010
"""Cost of a round next to computing. Half of what the first study measured, 17 to 26 ms."""

Handler = Callable[[Message], Message]


class CountedGrid(Grid):
    """A Flower grid whose workers are functions, called in order by node id."""

    def __init__(self, handlers: Mapping[int, Handler]) -> None:
        self._handlers = dict(handlers)
        self._run = empty_run(1)

    def set_run(self, run: Run) -> None:
        """Set the run."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a message."""
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all workers."""
        return list(self._handlers)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Refuse: every caller here waits for its replies."""
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Refuse, likewise."""
        raise NotImplementedError

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return the reply of each worker, computed in turn."""
        replies = []
        for message in messages:
            give_message_id(message)
            replies.append(self._handlers[message.metadata.dst_node_id](message))
        return replies


def _worker(profile: WorkerProfile, run: Callable[[TrainOrder], TrainReport]) -> Handler:
    def answer(message: Message) -> Message:
        if message.metadata.message_type == "query.profile":
            return profile.to_reply(message)
        return run(TrainOrder.from_message(message)).to_reply(message)

    return answer


def round_seconds(
    record: RoundRecord,
    shape: Shape,
    batch: int,
    step_seconds: tuple[float, float],
) -> float:
    """Return what a round counts as, without its fixed cost.

    Parameters
    ----------
    record : RoundRecord
        The round.
    shape : Shape
        The gap of its slow workers.
    batch : int
        Samples per step.
    step_seconds : pair of float
        Seconds per step of the fast device: a constant, and per sample.
    """
    longest = 0.0
    for row in record.workers:
        times = 1.0 if row.fast else shape.gap
        step = times * (step_seconds[0] + step_seconds[1] * batch)
        longest = max(longest, row.num_examples / batch * step)
    return longest


def train(given: Mapping[str, Any]) -> dict[str, Any]:
    """Train and evaluate.

    Parameters
    ----------
    given : mapping
        ``task`` (see `tasks.loaded`), ``run`` (run config), ``shape`` (key of `SHAPES`),
        ``step_seconds`` and ``seconds`` (the budget).

    Returns
    -------
    dict
        Counted seconds, rounds, samples, accuracy and loss.
    """
    config = RunConfig.from_run_config(given["run"])
    shape, seed = SHAPES[given["shape"]], config.seed
    step_seconds = given["step_seconds"][0], given["step_seconds"][1]
    task = loaded(given["task"], seed)
    model = task.initial_model(derived_seed(seed, "model"))
    source = BatchSource(task.train, torch.device("cpu"))
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    handlers = {}
    for rank, tier in enumerate(("fast", "slow")):
        profile = WorkerProfile(f"cpu:{rank}", tier=tier, partition_id=rank)
        sgd = LocalSGD(
            task.fresh_model(0),
            source,
            task.loss,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            augment=task.augment,
            channels_last=True,
            name=f"worker {rank}",
        )
        handlers[rank + 1] = _worker(profile, sgd.run)
    strategy = make_strategy(config, task.num_train, len(handlers), names)
    become_server(1)

    class CountedClock(RunClock):
        """Counts the seconds that each round would take."""

        def add(self, record: RoundRecord, seconds_per_step: Mapping[int, float]) -> RoundRecord:
            computing = round_seconds(record, shape, config.batch_size, step_seconds)
            self.budget_seconds += ROUND_SECONDS + computing
            return record

    strategy.planner.clock = CountedClock()
    counted = {"training_seconds": 0.0, "rounds": 0, "samples": 0}
    budget = Budget(seconds=given["seconds"])
    arrays = state_record(model)
    for end in strategy.rounds(CountedGrid(handlers), arrays, budget):
        arrays = end.arrays
        counted["rounds"] += 1
        counted["samples"] += sum(row.num_examples for row in end.record.workers)
    counted["training_seconds"] = strategy.planner.clock.budget_seconds
    load_state(model, arrays)
    return {**counted, **finished(task, model)}


def main(text: str) -> None:
    """Train on one core, and write the result."""
    given = json.loads(text)
    os.sched_setaffinity(0, {given["core"]})
    torch.set_num_threads(1)
    result = train(given)
    Path(given["folder"], "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
