"""Workers with role=score: what they get, when it counts, and that nobody waits for them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message

from flower_blsgd import BiasedLocalSGD
from flower_blsgd.algorithm.sampling import (
    EpochRequest,
    LossTable,
    SampleList,
    Sampler,
    UniformSampler,
)
from flower_blsgd.errors import UsageError
from flower_blsgd.protocol import ProfileQuery, ScoreOrder, WorkerProfile
from flower_blsgd.strategy import scoring as scoring_module
from flower_blsgd.strategy.evaluation import WorkerEvaluation
from flower_blsgd.strategy.workers import WorkerRegistry

from ..in_process_grid import InProcessGrid, ToyWorker, fast_profile, same_bits, toy_arrays
from ..log_capture import captured_log

N, PER_EPOCH = 24, 6
"""One worker does 2 steps of 2 samples: an epoch has 6 rounds of 4 samples."""


class HalfLater(Sampler):
    """All samples in their order in the first epoch, and only the first half from then on."""

    def sample_lists(self, request: EpochRequest, table: LossTable) -> list[SampleList]:
        members = tuple(range(len(request.participants)))
        used = len(table) if request.epoch == 1 else len(table) // 2
        return [
            SampleList(np.resize(np.arange(used, dtype=np.int32), self._size(request)), members)
        ]

    def _size(self, request: EpochRequest) -> int:
        return request.set_size(range(len(request.participants)))


def strategy_of(sampler: Sampler | None = None, **changes: Any) -> BiasedLocalSGD:
    arguments = {"batch_size": 2, "local_steps": 2, "local_steps_slow": 1, "min_available_nodes": 1}
    arguments |= changes
    return BiasedLocalSGD(N, sampler=sampler or HalfLater(), **arguments)


def scores(place: int = 1, seconds: float = 8.0) -> ToyWorker:
    """Return a worker that scores: every loss is 100."""
    profile = WorkerProfile(
        f"cpu:{place}", "slow", partition_id=place, role="score", seconds_per_step=seconds
    )
    return ToyWorker(profile, losses=lambda indices: np.full(len(indices), 100.0, np.float32))


def grid_of(*scorers: ToyWorker, place: int = 0) -> InProcessGrid:
    trains = ToyWorker(
        fast_profile(place, seconds_per_step=1.0),
        losses=lambda indices: np.full(len(indices), 1.0, np.float32),
    )
    return InProcessGrid(dict(enumerate((trains, *scorers), 10)))


def play(strategy: BiasedLocalSGD, grid: InProcessGrid, first: int, last: int) -> list[ArrayRecord]:
    """Return the models that these rounds began with: all weights are the round's number."""
    models = []
    for server_round in range(first, last + 1):
        models.append(toy_arrays(server_round))
        orders = strategy.configure_train(server_round, models[-1], ConfigRecord(), grid)
        strategy.aggregate_train(server_round, grid.send_and_receive(orders))
    return models


def sent_scores(grid: InProcessGrid) -> list[ScoreOrder]:
    return [ScoreOrder.from_message(message) for message in grid.sent_of_type("query.score")]


# --- which samples, when


def test_oldest_losses_left_out_are_scored_and_count_at_the_next_plan() -> None:
    """In 12 s of an epoch 2 x 2 x 12 / 8 = 6 samples; nothing in the first one."""
    strategy, grid = strategy_of(), grid_of(scores())
    play(strategy, grid, 1, PER_EPOCH)
    table = strategy.planner.table
    assert sent_scores(grid) == []
    models = play(strategy, grid, 7, 12)
    (order,) = sent_scores(grid)
    assert (order.round, order.indices.tolist()) == (6, [*range(12, 18)])
    assert same_bits(order.arrays, models[0])
    assert table.losses[12:].tolist() == [1.0] * 12  # it is back, but the epoch goes on
    play(strategy, grid, 13, 13)
    assert table.losses[12:].tolist() == [100.0] * 6 + [1.0] * 6
    assert table.rounds[12:].tolist() == [6] * 6 + [5, 5, 6, 6, 6, 6]
    assert sent_scores(grid)[1].indices.tolist() == [18, 19, *range(12, 16)]
    assert strategy.scoring.num_used == 6
    assert (strategy.planner.samples_trained, strategy.planner.samples_given_up) == (13 * 4, 0)


def test_amounts_follow_speeds_and_scorers_share_the_samples() -> None:
    strategy, grid = strategy_of(), grid_of(scores(1, 16.0), scores(2, 12.0), scores(3, 1.0))
    play(strategy, grid, 1, 7)
    orders = [order.indices.tolist() for order in sent_scores(grid)]
    assert orders == [[12, 13, 14], [15, 16, 17, 18], [19, 20, 21, 22, 23]]  # the rest
    unknown, grid = strategy_of(clock="device"), grid_of(scores(1, 0.0))
    with captured_log() as log:  # its ClientApp does not measure
        play(unknown, grid, 1, 7)
    assert [len(order.indices) for order in sent_scores(grid)] == [2]  # a tenth
    assert any("no speed is known of score-1 (cpu:1)" in line for line in log.warnings)


def test_amounts_follow_samples_per_second_where_batches_differ() -> None:
    """A round is 2 steps of 1 s; with steps of 2 s and 4 samples 2 x 4 x 12 / 16 in an epoch."""
    scorer = scores(1, 16.0)
    scorer.profile = replace(scorer.profile, batch_size=4)  # type: ignore[type-var]
    strategy, grid = strategy_of(), grid_of(scorer)
    play(strategy, grid, 1, 7)
    assert [len(order.indices) for order in sent_scores(grid)] == [6]


def test_refresh_of_a_loss_is_not_used_where_training_recorded_one_since() -> None:
    table, scored = LossTable(5), LossTable(5)
    table.record(np.array([0, 1, 2], np.int32), np.array([1, 2, 3], np.float32), 4)
    table.record(np.array([1], np.int32), np.array([9], np.float32), 6)
    scored.record(np.array([0, 1, 2], np.int32), np.full(3, 5, np.float32), 5)
    assert table.refresh(scored) == 2
    assert table.losses[:3].tolist() == [5.0, 9.0, 5.0]
    assert table.rounds.tolist() == [5, 6, 5, 0, 0]


def test_workers_that_score_move_no_bit_of_training() -> None:
    def orders_of(*scorers: ToyWorker) -> list[tuple[int, bytes]]:
        strategy, grid = strategy_of(UniformSampler(), seed=3), grid_of(*scorers, place=5)
        play(strategy, grid, 1, 13)
        trains = grid.handlers[10]
        assert isinstance(trains, ToyWorker)
        return [(order.seed, order.indices.tobytes()) for order in trains.orders]

    with captured_log() as log:
        assert orders_of(scores(0)) == orders_of()  # also where its number is the lower one
    (line,) = log.warnings
    assert line.startswith("score-1 (cpu:0): role=score is of no use")


# --- nobody waits


def test_scores_that_are_late_for_a_plan_count_at_a_later_one() -> None:
    strategy, grid = strategy_of(), grid_of(scores())
    play(strategy, grid, 1, 7)
    grid.held = {11}
    play(strategy, grid, 8, 18)
    assert len(sent_scores(grid)) == 1  # no other meanwhile
    assert strategy.scoring.num_used == 0
    grid.held = set()
    play(strategy, grid, 19, 19)
    assert strategy.scoring.num_used == 6
    assert len(sent_scores(grid)) == 2
    assert len(grid.timeouts) == 1 + 19  # the query for profiles, and the rounds


def test_worker_that_scores_gets_nothing_else() -> None:
    worker = scores()
    strategy, grid = strategy_of(fraction_evaluate=1.0), grid_of(worker)
    play(strategy, grid, 1, 6)
    messages = strategy.configure_evaluate(6, toy_arrays(), ConfigRecord(), grid)
    assert [message.metadata.dst_node_id for message in messages] == [10]
    evaluation = WorkerEvaluation(grid, strategy.registry, 10, lambda *_: pytest.fail("server"))
    assert [worker.index for worker, _ in evaluation._orders(6, toy_arrays())] == [0]
    assert {m.metadata.message_type for m in worker.messages} == {"query.profile"}
    assert [w.label for w in strategy.registry.scoring] == ["score-1 (cpu:1)"]


def test_failures_are_counted_and_logged_once_and_three_in_a_row_leave_it_out_for_an_epoch() -> (
    None
):
    strategy, grid = strategy_of(), grid_of(scores())
    for last_round in (6, 12, 18, 24):
        grid.fail_at(1, last_round, "dies" if last_round < 24 else "raises")
    with captured_log() as log:
        play(strategy, grid, 1, 36)
    worker = strategy.registry.workers[1]
    assert worker.failures == ["died", "died", "died", "raised"]
    assert [line for line in log.warnings if "did not score" in line] == [
        "score-1 (cpu:1) did not score: the process was killed",
        "score-1 (cpu:1) did not score: RuntimeError: the fan stands still",
    ]
    assert sum("is left out" in line for line in log.errors) == 1
    assert [order.round for order in sent_scores(grid)] == [6, 12, 18, 24, 30]
    assert (worker.failures_in_a_row, worker.excluded) == (0, "")


@pytest.mark.parametrize("losses", [np.zeros(1), np.full(6, np.nan)])
def test_replies_that_cannot_be_used_cost_nothing_else(losses: np.ndarray) -> None:
    worker = scores()
    worker.losses = lambda indices: losses.astype(np.float32)
    strategy, grid = strategy_of(), grid_of(worker)
    with captured_log():
        play(strategy, grid, 1, 13)
    assert strategy.registry.workers[1].failures[0] in ("unusable reply", "not finite")
    assert strategy.planner.table.losses.tolist() == [1.0] * N


def test_worker_that_hangs_is_given_up_at_the_second_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long an epoch takes: an order may take as long."""
    given_up: list[dict[str, int]] = []
    strategy, grid = strategy_of(), grid_of(scores())
    grid.give_up = given_up.append  # type: ignore[attr-defined]
    grid.held = {11}
    monkeypatch.setattr(scoring_module, "_LEAST_LATE_SECONDS", -1.0)
    play(strategy, grid, 1, 18)
    assert strategy.registry.workers[1].failures == given_up == []
    with captured_log() as log:
        play(strategy, grid, 19, 19)
    assert strategy.registry.workers[1].failures == ["late"]
    assert [list(nodes.values()) for nodes in given_up] == [[11]]
    assert log.warnings == ["score-1 (cpu:1) did not score: it did not answer in time"]


def test_worker_that_leaves_is_not_missed() -> None:
    strategy, grid = strategy_of(min_available_nodes=2), grid_of(scores())
    play(strategy, grid, 1, 7)
    grid.disconnect(11)
    with captured_log() as log:
        play(strategy, grid, 8, 13)
    assert log.errors == []
    assert [worker.index for worker in strategy.registry.active] == [0]


# --- speeds and refusals


def test_speeds_are_measured_where_a_worker_scores() -> None:
    class Measures(ToyWorker):
        def __call__(self, message: Message, node_id: int) -> Message:
            if message.metadata.message_type == "query.profile":
                assert self.profile is not None
                query = ProfileQuery.from_message(message)
                own = (
                    self.profile
                    if query.calibrate
                    else WorkerProfile(
                        self.profile.device, "fast", partition_id=node_id, role=self.profile.role
                    )
                )
                return own.to_reply(message)
            return super().__call__(message, node_id)

    grid = InProcessGrid(
        {
            10: Measures(fast_profile(10, seconds_per_step=1.0)),
            11: Measures(scores(11, 8.0).profile),
        }
    )
    strategy = strategy_of()
    strategy.registry.update(grid)
    found = [(w.profile.seconds_per_step, w.speed_ratio) for w in strategy.registry.workers]
    assert found == [(1.0, 1.0), (8.0, None)]  # relative to those that train


def test_run_in_which_nobody_trains_is_refused() -> None:
    with pytest.raises(UsageError, match=r"all have role=score.*leave role=score out of one"):
        WorkerRegistry.of_profiles([scores(0).profile, scores(1).profile])  # type: ignore[list-item]
