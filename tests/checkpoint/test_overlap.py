"""Rounds that begin on the workers' own models: what is ordered, and what goes on to the bit."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, Message

from flower_blsgd import BiasedLocalSGD
from flower_blsgd.checkpoint.state import capture, expanded, restore
from flower_blsgd.config import RunConfig
from flower_blsgd.protocol import OWN_MODEL
from flower_blsgd.strategy.budget import Budget
from flower_blsgd.strategy.rounds import RoundEnd

from ..hosts.host_nodes import HostNode
from ..in_process_grid import MailGrid, TorchWorker, same_bits
from ..log_capture import captured_log
from ..refusal import refusal
from .test_state import (
    Worker,
    config_of,
    first_model,
    grid_of,
    over_the_disk,
    strategy_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")


class Ahead(Worker):
    """Does the first step of the next round before the next message, or with the next order."""

    is_late = False

    def __call__(self, message: Message, node_id: int) -> Message:
        reply = super().__call__(message, node_id)
        if message.metadata.message_type == "query.momentum" and self.is_asked(message):
            reply.content[OWN_MODEL] = self.sgd.own_model()  # type: ignore[attr-defined]
        elif message.metadata.message_type == "train" and not self.is_late:
            self.sgd.work_ahead(self.state)  # type: ignore[attr-defined]
        return reply

    @staticmethod
    def is_asked(message: Message) -> bool:
        return bool(message.content.config_records["config"].get(OWN_MODEL))


class Late(Ahead):
    is_late = True


def workers(kind: type[Ahead] = Ahead, optimizer: str = "sgd") -> dict[int, Any]:
    of: Mapping[int, Any] = grid_of(optimizer).handlers
    return {node_id: kind(worker.profile, worker.sgd) for node_id, worker in of.items()}


def host(kind: type[Ahead], optimizer: str) -> dict[int, Any]:
    return {10: HostNode(*workers(kind, optimizer).values(), partition_id=0)}


def overlapping(**changes: Any) -> RunConfig:
    """Return settings of epochs of 4, 5 and 5 rounds: 2 + 2 + 1 steps of 2 samples of 48."""
    settings = {"algorithm": "weighted-local-sgd", "overlap": True, "rounds": 11}
    settings["local_steps_fast"] = 2
    return config_of(**(settings | changes))


def play(
    strategy: BiasedLocalSGD, grid: MailGrid, arrays: ArrayRecord, first: int = 1, stop: int = 0
) -> list[RoundEnd]:
    """Return the ends of the rounds; with `stop`, a pause is asked for after this round."""
    ends = []
    budget = strategy.planner.budget
    for end in strategy.rounds(grid, arrays, budget, start_round=first - 1):
        ends.append(end)
        if stop and end.round >= stop:
            strategy.pause()
            if end.idle:
                break
    return ends


def orders_of(grid: MailGrid) -> list[Any]:
    worker = next(iter(grid.handlers.values()))
    assert isinstance(worker, TorchWorker)
    return worker.orders


def models(ends: list[RoundEnd]) -> list[ArrayRecord]:
    return [end.arrays for end in ends]


def test_orders_of_an_epoch_follow_each_other_and_no_others() -> None:
    """The last round of an epoch waits, and the first one begins from the average."""
    grid = MailGrid(workers())
    ends = play(strategy_of(overlapping(rounds=7)), grid, first_model())
    orders = orders_of(grid)
    assert [order.epoch for order in orders] == [1, 1, 1, 1, 2, 2, 2]
    assert [order.overlap for order in orders] == [False, True, True, True, False, True, True]
    ahead = [order.next_indices is not None for order in orders]
    assert ahead == [True, True, True, False, True, True, False]  # the budget ends with round 7
    assert [end.idle for end in ends] == [not each for each in ahead]
    for order, after in itertools.pairwise(orders):
        if order.next_indices is not None:
            assert order.next_indices.tolist() == after.indices[: after.batch_size].tolist()
            assert order.next_seed == after.seed
            assert after.last_learning_rate == order.learning_rate
            assert after.last_progress == order.progress


def test_weights_of_a_selection_are_those_of_the_next_step() -> None:
    grid = MailGrid(workers())
    config = overlapping(rounds=16, selection="importance-sampling", sampler="separated")
    play(strategy_of(config), grid, first_model())
    pairs = list(itertools.pairwise(orders_of(grid)))
    weighted = [(o, after) for o, after in pairs if o.next_weights is not None]
    assert weighted
    for order, after in weighted:
        assert order.next_weights.tolist() == after.sample_weights[:2].tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": "adamw", "weights": "per-sample", "schedule": "cosine"},
        {"algorithm": "biased-local-sgd", "momentum_buffers": "reset", "selection": "infobatch"},
        {"outer_optimizer": "nesterov", "local_steps_fast": 1, "rounds": 15},
    ],
    ids=["sgd", "adamw", "biased", "one step"],
)
@pytest.mark.parametrize("at_host", [False, True])
def test_neither_timing_nor_a_resume_changes_a_bit(
    tmp_path: Path, changes: dict[str, Any], at_host: bool
) -> None:
    config = overlapping(**changes, min_workers=1 if at_host else 3)

    def grid(kind: type[Ahead] = Ahead) -> MailGrid:
        return MailGrid((host if at_host else workers)(kind, config.optimizer))

    whole = models(play(strategy_of(config), grid(), first_model()))
    late = models(play(strategy_of(config), grid(Late), first_model()))
    assert all(map(same_bits, whole, late))
    paused, its_grid = strategy_of(config), grid()
    ends = play(paused, its_grid, first_model(), stop=5)
    k = len(ends)
    assert k == 7  # round 6 was under way at the pause, and its workers begin round 7 by themselves
    assert all(map(same_bits, whole, models(ends)))
    checkpoint = over_the_disk(capture(paused, its_grid, k, ends[-1].arrays), tmp_path)
    assert len(expanded(checkpoint)["own-models"]) == 3
    assert all(map(same_bits, whole[k:], models(play(paused, its_grid, whole[k - 1], k + 1))))
    resumed = strategy_of(config)
    with captured_log() as log:
        arrays, last = restore(resumed, checkpoint, first_model())
    assert (last, log.lines(30)) == (k, [])
    again = capture(resumed, grid(), k, arrays)  # before any worker is back
    assert again.values == checkpoint.values
    resumed.planner.budget = Budget.of_run(config)
    found = models(play(resumed, grid(Late), arrays, k + 1))
    assert len(found) == config.rounds - k
    assert all(map(same_bits, whole[k:], found))
    plain = play(strategy_of(replace(config, overlap=False)), grid(), first_model())
    assert not same_bits(plain[1].arrays, whole[1])


def test_end_of_an_epoch_needs_no_own_models() -> None:
    strategy, grid = strategy_of(overlapping()), MailGrid(workers())
    ends = play(strategy, grid, first_model(), stop=3)
    assert len(ends) == 4
    assert expanded(capture(strategy, grid, 4, ends[-1].arrays))["own-models"] == {}
    assert not any(Ahead.is_asked(message) for message in grid.sent_of_type("query.momentum"))


def test_workers_that_are_a_step_ahead_have_no_state_of_the_round() -> None:
    strategy, grid = strategy_of(overlapping()), MailGrid(workers())
    loop = strategy.rounds(grid, first_model(), Budget(rounds=9))
    end = next(loop)
    assert not end.idle
    checkpoint = expanded(capture(strategy, grid, 1, end.arrays))
    assert (checkpoint["momentum"], checkpoint["own-models"]) == ({}, {})
    assert grid.sent_of_type("query.momentum") == []


def test_worker_that_fails_begins_its_next_round_from_the_average() -> None:
    """And the others go on from their own models."""
    grid = MailGrid(workers())
    grid.fail_at(1, 2, "raises")
    with captured_log():
        ends = play(strategy_of(overlapping(rounds=4)), grid, first_model())
    assert [row.failure_kind for row in ends[1].record.workers] == ["", "raised", ""]
    assert [row.failure for row in ends[2].record.workers] == [""] * 3
    assert len({round(row.loss, 6) for row in ends[2].record.workers}) == 3


def test_worker_whose_model_is_not_finite_begins_its_next_round_from_the_average() -> None:
    """Otherwise the change of its first step, and its momentum, would not be finite either."""
    its = workers()
    diverges = [0.0] * 4 + [float("nan")] * 2  # two steps in each round of fast workers
    its[11].sgd.model.register_forward_hook(
        lambda *call: call[-1] + (diverges.pop(0) if diverges else 0.0)
    )
    with captured_log():
        ends = play(strategy_of(overlapping(rounds=4)), MailGrid(its), first_model())
    kinds = [[row.failure_kind for row in end.record.workers] for end in ends]
    assert [kind for kind in kinds if any(kind)] == [["", "not finite", ""]]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"momentum_buffers": "average"},
            'overlap = true does not work with momentum-buffers = "average", which waits for the '
            'momentum of all workers; use "keep"',
        ),
        *(
            (
                changes,
                f"overlap = true does not work with {what}, which synchronizes every step; {fix}",
            )
            for changes, what, fix in (
                ({"algorithm": "sync-sgd"}, "SameSteps", 'use steps = "system-aware"'),
                (
                    {"algorithm": "dlb", "average": "models"},
                    "BalancedBatches",
                    'use steps = "system-aware"',
                ),
                ({"algorithm": "dlb"}, 'average = "gradients"', "leave one of them out"),
            )
        ),
    ],
)
def test_refuses_what_waits_for_all_workers(changes: dict[str, Any], line: str) -> None:
    assert refusal(lambda: strategy_of(overlapping(**changes))) == line


def test_refuses_grids_whose_workers_do_not_stay() -> None:
    strategy = strategy_of(overlapping())
    assert refusal(lambda: strategy.prepare(grid_of(), first_model())) == (
        "overlap = true needs workers that stay between rounds: use blsgd run or blsgd launch, or "
        'SuperNodes with transport = "stream"'
    )
