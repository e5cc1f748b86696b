"""Who the workers are: ranking, tiers, and nodes that come and go (DESIGN section 3.0)."""

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from flower_blsgd.errors import UsageError
from flower_blsgd.protocol import WorkerProfile
from flower_blsgd.roster import Roster, rank_key

from .in_process_grid import (
    InProcessGrid,
    ToyWorker,
    fast_profile,
    slow_profile,
)
from .log_capture import captured_log


def named(name: str, tier: str = "fast", **values: object) -> WorkerProfile:
    return WorkerProfile("cpu", tier, name, **values)  # type: ignore[arg-type]


def roster_on(grid: InProcessGrid, min_workers: int | None = None) -> Roster:
    roster = Roster(min_workers or len(list(grid.get_node_ids())))
    roster.update(grid)
    return roster


def grid_of(*profiles: WorkerProfile | None) -> InProcessGrid:
    return InProcessGrid({100 + i: ToyWorker(profile) for i, profile in enumerate(profiles)})


# --- worker index


def test_rank_named_slow_last_then_partition_id_then_name_then_device() -> None:
    in_order = [
        WorkerProfile("cuda:9", "fast", partition_id=2),
        WorkerProfile("cuda:8", "", partition_id=9),
        WorkerProfile("cuda:7", "fast", partition_id=10),
        WorkerProfile("cuda:6", "fast", "anna"),
        WorkerProfile("cuda:5", "", "berta"),
        WorkerProfile("cuda:3", "fast"),
        WorkerProfile("cuda:4", ""),
        WorkerProfile("cpu:0", "slow", partition_id=0),
        WorkerProfile("cpu:1", "slow", "adam"),
        WorkerProfile("cpu:2", "slow"),
    ]
    assert sorted(set(in_order), key=rank_key) == in_order
    roster = Roster.of_profiles(in_order[::-1])
    assert [worker.profile for worker in roster.workers] == in_order
    assert [worker.index for worker in roster.workers] == list(range(10))


def test_rank_measured_speed_never_changes_the_index() -> None:
    unnamed = [
        WorkerProfile("cpu:0", partition_id=0, seconds_per_step=9.0),  # slow, as measured
        WorkerProfile("cpu:1", partition_id=1, seconds_per_step=1.0),
    ]
    roster = Roster.of_profiles(unnamed)
    assert [worker.profile.partition_id for worker in roster.workers] == [0, 1]
    assert [worker.fast for worker in roster.workers] == [False, True]


def test_rank_does_not_depend_on_node_ids_or_the_order_of_replies() -> None:
    profiles = [fast_profile(0), fast_profile(1), slow_profile(2)]
    forward = InProcessGrid({10 + i: ToyWorker(p) for i, p in enumerate(profiles)})
    backward = InProcessGrid({90 - i: ToyWorker(p) for i, p in enumerate(profiles)}, "reversed")
    for grid in (forward, backward):
        assert [worker.profile for worker in roster_on(grid).workers] == profiles


# --- tiers


def test_tier_named_ones_stand_whatever_the_speed() -> None:
    roster = Roster.of_profiles(
        [fast_profile(0, seconds_per_step=8.0), slow_profile(1, seconds_per_step=1.0)]
    )
    assert [worker.fast for worker in roster.workers] == [True, False]


@pytest.mark.parametrize(("seconds", "fast"), [(1.25, True), (1.5, False)])
def test_tier_unnamed_is_fast_above_a_speed_ratio_of_seven_tenths(
    seconds: float, fast: bool
) -> None:
    roster = Roster.of_profiles(
        [
            WorkerProfile("cpu:0", partition_id=0, seconds_per_step=1.0),
            WorkerProfile("cpu:1", partition_id=1, seconds_per_step=seconds),  # 0.8 and 2/3
        ]
    )
    assert roster.workers[1].fast is fast
    assert roster.workers[1].speed_ratio == pytest.approx(1 / seconds)


def test_tier_a_speed_ratio_of_exactly_seven_tenths_is_slow() -> None:
    roster = Roster.of_profiles(
        [
            WorkerProfile("cpu:0", partition_id=0, seconds_per_step=7.0),
            WorkerProfile("cpu:1", partition_id=1, seconds_per_step=10.0),
        ]
    )
    assert [worker.fast for worker in roster.workers] == [True, False]


def test_tier_unnamed_without_a_speed_is_fast() -> None:
    roster = Roster.of_profiles([WorkerProfile("cpu:0"), WorkerProfile("cpu:1")])
    assert [worker.fast for worker in roster.workers] == [True, True]
    assert [worker.speed_ratio for worker in roster.workers] == [None, None]


def test_label_names_worker_and_device() -> None:
    roster = Roster.of_profiles([fast_profile(0), slow_profile(1), named("attic", "slow")])
    labels = [worker.label for worker in roster.workers]
    assert labels == ["fast-0 (cpu:0)", "slow-1 (cpu:1)", "attic (cpu)"]


def test_participant_carries_what_the_mathematics_needs() -> None:
    roster = Roster.of_profiles(
        [fast_profile(0, seconds_per_step=1.0), slow_profile(1, seconds_per_step=4.0, steps=3)]
    )
    fast, slow = (worker.participant(16) for worker in roster.workers)
    assert (fast.fast, fast.batch_size, fast.speed_ratio, fast.given_steps) == (True, 16, 1, None)
    assert (slow.fast, slow.batch_size, slow.speed_ratio, slow.given_steps) == (False, 16, 0.25, 3)


# --- asking


def test_update_asks_every_node_once() -> None:
    grid = grid_of(fast_profile(0), slow_profile(1))
    roster = roster_on(grid)
    roster.update(grid)
    asked = [m.metadata.dst_node_id for m in grid.sent_of_type("query.profile")]
    assert sorted(asked) == [100, 101]
    assert [worker.node_id for worker in roster.active] == [100, 101]


def test_update_waits_for_enough_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = grid_of(fast_profile(0))
    slept = []

    def connect_another(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            grid.connect(200, ToyWorker(slow_profile(1)))

    monkeypatch.setattr("flower_blsgd.roster.time.sleep", connect_another)
    roster = roster_on(grid, min_workers=2)
    assert len(slept) == 2
    assert len(roster.active) == 2


def test_update_node_without_profile_handler_counts_as_one_fast_worker_with_a_warning() -> None:
    with captured_log() as log:
        roster = roster_on(grid_of(None))
    (worker,) = roster.active
    assert worker.fast
    assert worker.profile.steps == 0
    (warning,) = log.warnings
    assert "node 100" in warning
    assert "answer_profile" in warning  # the way out


def test_update_node_that_fails_to_answer_takes_no_part() -> None:
    def burns(message: Message, node_id: int) -> Message:
        raise OSError("no such disk")

    grid = InProcessGrid({100: ToyWorker(fast_profile(0)), 101: burns})
    with captured_log() as log:
        roster = roster_on(grid)
        roster.update(grid)
    assert [worker.node_id for worker in roster.active] == [100]
    (error,) = log.errors
    assert "node 101" in error
    assert "no such disk" in error
    assert len(grid.sent_of_type("query.profile")) == 2  # it is not asked again


def test_update_node_that_stays_silent_is_told_in_the_log() -> None:
    grid = grid_of(fast_profile(0), slow_profile(1))
    grid.fail_at(1, 0, "missing")
    with captured_log() as log:
        roster = roster_on(grid)
    assert [worker.node_id for worker in roster.active] == [100]
    assert any("101" in line for line in log.warnings + log.errors)


def test_update_answer_without_a_profile_takes_no_part() -> None:
    def mumbles(message: Message, node_id: int) -> Message:
        return Message(RecordDict({"config": ConfigRecord()}), reply_to=message)

    with captured_log() as log:
        roster = roster_on(InProcessGrid({100: ToyWorker(fast_profile(0)), 101: mumbles}))
    assert len(roster.active) == 1
    assert "no profile" in log.errors[0]


def test_update_node_with_two_devices_is_two_workers() -> None:
    def two(message: Message, node_id: int) -> Message:
        reply = fast_profile(0).to_reply(message)
        record = reply.content.config_records["profile"]
        return Message(RecordDict({"profile-0": record, "profile-1": record}), reply_to=message)

    with captured_log() as log:
        roster = roster_on(InProcessGrid({100: two}))
    assert [worker.address for worker in roster.active] == [(100, 0), (100, 1)]
    assert log.lines(30) == []  # equal devices of one node are told apart by their place


def test_update_two_nodes_with_the_same_devices_are_twins() -> None:
    def two(message: Message, node_id: int) -> Message:
        record = WorkerProfile("cpu", "fast").to_reply(message).content["profile"]
        return Message(RecordDict({"profile-0": record, "profile-1": record}), reply_to=message)

    with captured_log() as log:
        roster = roster_on(InProcessGrid({100: two, 101: two}))
    assert [w.address for w in roster.active] == [(100, 0), (101, 0), (100, 1), (101, 1)]
    assert len([line for line in log.warnings if "repeat" in line]) == 1


def test_update_profiles_of_two_kinds_are_refused() -> None:
    def both(message: Message, node_id: int) -> Message:
        record = fast_profile(0).to_reply(message).content.config_records["profile"]
        return Message(RecordDict({"profile": record, "profile-1": record}), reply_to=message)

    with captured_log() as log:
        roster = roster_on(InProcessGrid({100: both}))
    assert roster.active == []
    assert "two kinds" in log.errors[0]


def test_update_other_training_data_is_refused() -> None:
    grid = grid_of(fast_profile(0, data_fingerprint="aa"), slow_profile(1, data_fingerprint="bb"))
    with pytest.raises(UsageError, match="other training data") as told:
        roster_on(grid)
    assert "slow-1" in str(told.value)
    assert "fast-0" in str(told.value)


def test_update_other_model_is_refused() -> None:
    grid = grid_of(fast_profile(0, model_fingerprint="aa"), slow_profile(1, model_fingerprint="bb"))
    with pytest.raises(UsageError, match=r"slow-1 .* has another model than fast-0 .*; install"):
        roster_on(grid)


def test_update_unknown_fingerprints_are_not_compared() -> None:
    grid = grid_of(fast_profile(0), slow_profile(1, data_fingerprint="bb"), slow_profile(2))
    assert len(roster_on(grid).active) == 3


# --- workers that cannot be told apart


def test_twins_are_both_kept_with_one_warning_that_says_how_to_name_them() -> None:
    with captured_log() as log:
        roster = roster_on(grid_of(WorkerProfile("cpu", "fast"), WorkerProfile("cpu", "fast")))
    assert len(roster.active) == 2
    (warning,) = log.warnings
    assert "repeat" in warning
    assert "name=" in warning


def test_twins_three_of_them_make_one_warning() -> None:
    with captured_log() as log:
        roster = roster_on(grid_of(*[WorkerProfile("cpu", "fast")] * 3))
    assert len(roster.active) == 3
    assert len([line for line in log.warnings if "repeat" in line]) == 1


def test_twins_without_profile_handler_are_told_that_the_run_is_not_repeatable() -> None:
    with captured_log() as log:
        roster_on(grid_of(None, None))
    assert len([line for line in log.warnings if "repeat" in line]) == 1


def test_twins_of_different_name_or_partition_id_make_no_warning() -> None:
    with captured_log() as log:
        roster_on(grid_of(named("a"), named("b"), fast_profile(0), fast_profile(1)))
    assert log.warnings == []


# --- nodes that go and come


def test_node_that_is_gone_is_not_active() -> None:
    grid = grid_of(fast_profile(0), slow_profile(1))
    roster = roster_on(grid)
    grid.disconnect(101)
    roster.update(grid)
    assert [worker.index for worker in roster.active] == [0]
    assert len(roster.workers) == 2


def test_node_that_comes_back_under_its_old_id_is_not_asked_again() -> None:
    grid = grid_of(fast_profile(0), slow_profile(1))
    roster = roster_on(grid)
    handler = grid.disconnect(101)
    roster.update(grid)
    grid.connect(101, handler)
    roster.update(grid)
    assert [worker.index for worker in roster.active] == [0, 1]
    assert len(grid.sent_of_type("query.profile")) == 2


@pytest.mark.parametrize(
    "profile",
    [slow_profile(1), named("attic", "slow"), WorkerProfile("cpu:5", "slow", "b", partition_id=5)],
    ids=["partition id", "name", "both"],
)
def test_node_that_comes_back_under_a_new_id_takes_its_index(profile: WorkerProfile) -> None:
    grid = grid_of(fast_profile(0), profile, slow_profile(7))
    roster = roster_on(grid)
    (worker,) = [w for w in roster.workers if w.profile == profile]
    grid.disconnect(101)
    roster.update(grid)
    grid.connect(555, ToyWorker(profile))
    with captured_log() as log:
        roster.update(grid)
    assert worker.node_id == 555
    assert worker.present
    assert len(roster.workers) == 3
    assert log.warnings == []


def test_node_that_comes_back_with_another_speed_keeps_its_index() -> None:
    grid = grid_of(
        WorkerProfile("cpu:0", partition_id=0, seconds_per_step=1.0),
        WorkerProfile("cpu:1", partition_id=1, seconds_per_step=1.0),
    )
    roster = roster_on(grid)
    grid.disconnect(101)
    roster.update(grid)
    slower = WorkerProfile("cpu:1", partition_id=1, seconds_per_step=4.0)
    grid.connect(300, ToyWorker(slower))
    roster.update(grid)
    assert [worker.fast for worker in roster.workers] == [True, False]
    assert roster.workers[1].speed_ratio == 0.25


def test_node_that_is_new_gets_the_next_index() -> None:
    grid = grid_of(fast_profile(0), slow_profile(2))
    roster = roster_on(grid)
    grid.connect(300, ToyWorker(fast_profile(1)))
    roster.update(grid)
    assert [w.profile.partition_id for w in roster.workers] == [0, 2, 1]  # nobody moves
    assert len(roster.active) == 3


def test_node_that_was_left_out_takes_part_again_when_it_was_started_anew() -> None:
    grid = grid_of(fast_profile(0), slow_profile(1))
    roster = roster_on(grid)
    roster.workers[1].excluded = "RuntimeError: the fan stands still"
    grid.disconnect(101)
    roster.update(grid)
    grid.connect(300, ToyWorker(slow_profile(1)))
    roster.update(grid)
    assert [worker.index for worker in roster.active] == [0, 1]
    assert len(roster.workers) == 2
