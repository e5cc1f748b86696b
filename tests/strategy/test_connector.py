"""Speeds measured before the first round: whose, when, and what follows from them."""

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord

from flower_blsgd import BiasedLocalSGD
from flower_blsgd.algorithm.local_steps import SystemAwareSteps
from flower_blsgd.algorithm.sampling import UniformSampler, permutation_stream
from flower_blsgd.errors import UsageError
from flower_blsgd.protocol import ProfileQuery, TrainOrder, TrainReport, WorkerProfile
from flower_blsgd.strategy import connector as module
from flower_blsgd.strategy import round as rounds
from flower_blsgd.strategy.connector import Connector, assume_speeds
from flower_blsgd.strategy.round_metrics import RoundRecord

from ..in_process_grid import (
    InProcessGrid,
    ToyWorker,
    fast_profile,
    same_bits,
    slow_profile,
    toy_arrays,
    train_rounds,
    unnamed_profile,
)
from ..log_capture import captured_log
from .orders import Clocked, connected, play_round


class Batches(InProcessGrid):
    """Notes which nodes measure together."""

    def __init__(self, *nodes: Any) -> None:
        super().__init__({50 + i: node for i, node in enumerate(nodes)})
        self.together: list[list[int]] = []

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        messages = list(messages)
        queried = [
            m.metadata.dst_node_id
            for m in messages
            if m.metadata.message_type == "query.profile" and ProfileQuery.from_message(m).calibrate
        ]
        if queried:
            self.together.append(queried)
        return super().send_and_receive(messages, timeout=timeout)


def connected_to(grid: InProcessGrid, auto: bool = True, clock: Any = "wall") -> Connector:
    policy = SystemAwareSteps(8, None if auto else 1)
    return connected(grid, None, clock, batch_size=16, num_samples=200, step_policy=policy)


# --- when


@pytest.mark.parametrize(
    ("profiles", "auto", "clock", "queried"),
    [
        ([fast_profile(0), slow_profile(1)], True, "wall", True),
        ([fast_profile(0), slow_profile(1)], False, "wall", False),
        ([fast_profile(0), slow_profile(1)], False, "device", True),
        ([fast_profile(0), slow_profile(1, steps=3)], True, "wall", True),
        ([fast_profile(0), fast_profile(1)], True, "wall", True),
        ([fast_profile(0), fast_profile(1)], False, "wall", False),
        ([fast_profile(0, steps=3), fast_profile(1, steps=2)], True, "wall", False),
        ([fast_profile(0), unnamed_profile(1)], False, "wall", True),
        ([unnamed_profile(0), unnamed_profile(1, steps=4)], False, "wall", True),
        ([slow_profile(0)], True, "wall", True),
    ],
    ids=str,
)
def test_speeds_are_measured_only_where_something_comes_from_them(
    profiles: Sequence[WorkerProfile], auto: bool, clock: Any, queried: bool
) -> None:
    nodes = [Clocked(profile, 0.5) for profile in profiles]
    registry = connected_to(Batches(*nodes), auto, clock).registry
    assert [node.measured for node in nodes] == [int(queried)] * len(nodes)
    assert [worker.measured for worker in registry.workers] == [queried] * len(nodes)
    if queried:
        assert {q.batch_size for node in nodes for q in node.queries if q.calibrate} == {16}


@pytest.mark.parametrize(
    ("clock", "together"), [("wall", [[50, 51, 52]]), ("device", [[50], [51], [52]])]
)
def test_speeds_are_measured_at_once_or_one_by_one(clock: Any, together: list[list[int]]) -> None:
    nodes = [Clocked(fast_profile(0), 0.021), Clocked(fast_profile(1), 0.021)]
    grid = Batches(*nodes, Clocked(slow_profile(2), 0.084))
    registry = connected_to(grid, clock=clock).registry
    assert grid.together == together
    assert [worker.speed for worker in registry.workers] == [
        "0.021 s a step measured, gamma 1.00",
        "0.021 s a step measured, gamma 1.00",
        "0.084 s a step measured, gamma 0.25",
    ]


# --- as many steps as cost little


class InRounds(Clocked):
    """Computes as long for a step of a round as for one that it measured, or so many times."""

    times = 1.0

    def report(self, order: TrainOrder) -> TrainReport:
        seconds = order.local_steps * (self.seconds or 0.0) * self.times
        return dataclasses.replace(super().report(order), compute_seconds=seconds)


class FailsAtFirst(InRounds):
    """Fails in round 0, which only measures."""

    def report(self, order: TrainOrder) -> TrainReport:
        if order.round == 0:
            raise RuntimeError("no memory left")
        return super().report(order)


class SlowerInRounds(InRounds):
    """Takes twice as long for a step when caches are cold and everybody computes."""

    times = 2.0


class Uneven(InRounds):
    """Takes 0.9 times as long for a step, or 3 times, in turns."""

    @property
    def times(self) -> float:  # type: ignore[override]
        return 3.0 if len(self.orders) % 2 else 0.9


class Costly(Batches):
    """A round takes so many seconds of a made-up clock in addition to the longest computing.

    Each worker takes the seconds of `reach` in addition to its own computing.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, overhead: float, *nodes: Any) -> None:
        super().__init__(*nodes)
        self.overhead, self.now, self.reach = overhead, 0.0, [0.0] * len(nodes)
        monkeypatch.setattr(
            module,
            "time",
            SimpleNamespace(perf_counter=lambda: self.now, monotonic=lambda: self.now),
        )

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        replies = list(super().send_and_receive(messages, timeout=timeout))
        contents = [reply.content for reply in replies if reply.has_content()]
        metrics = [content["metrics"] for content in contents if "metrics" in content]
        seconds = [m["compute-seconds"] + far for m, far in zip(metrics, self.reach, strict=False)]
        self.now += self.overhead + max(seconds, default=0.0)
        return replies


@pytest.mark.parametrize(
    ("overhead", "slow_worker", "steps", "said"),
    [
        # a twentieth of a step, which is 4 % of 1.25
        (0.05, InRounds, [2, 1], "2; a round takes 0.05 s in addition to computing, 2.4% of the"),
        (0.1, InRounds, [4, 2], "4; a round takes 0.1 s"),  # of 2.5
        (0.25, InRounds, [8, 4], "8; a round takes 0.25 s"),  # of 6.25
        # 99 / 611; of at most 1000 samples (333 and 166 steps): 999 / 1332
        (99.0, InRounds, [512, 256], "512; a round takes 99 s in addition to computing, 16.2% of"),
        (999.0, InRounds, [333, 166], "512; a round takes 999 s in addition to computing, 75.0%"),
        # the overhead is not known
        (0.05, FailsAtFirst, [32, 16], "32; a round takes an unknown time in addition to comput"),
        # the speeds that count are those in rounds
        (0.05, SlowerInRounds, [4, 1], "4; a round takes 0.05 s"),
    ],
)
def test_local_steps_auto_are_the_fewest_that_cost_little(
    monkeypatch: pytest.MonkeyPatch,
    overhead: float,
    slow_worker: type[Clocked],
    steps: list[int],
    said: str,
) -> None:
    nodes = [InRounds(fast_profile(0), 1.0), slow_worker(slow_profile(1), 2.0)]
    grid = Costly(monkeypatch, overhead, *nodes)
    strategy = BiasedLocalSGD(1000 if steps[0] == 333 else 2000, 2, "auto")
    before = toy_arrays(0.3)
    with captured_log():
        messages = strategy.configure_train(1, before, ConfigRecord(), grid)
    assert [TrainOrder.from_message(message).local_steps for message in messages] == steps
    assert strategy.connector.steps_chosen.startswith(f"local-steps-fast = auto: {said}")
    if steps == [2, 1]:  # 6 of 3 x 2.05 samples, or 2 + 2, the smallest batches, of 3 x 2.05
        said = '98% of all samples per second, 65% with average = "gradients"'
        assert strategy.connector.steps_chosen.endswith(said)
    measuring = [[(o.round, o.local_steps, o.learning_rate) for o in n.orders] for n in nodes]
    rounds = 1 if slow_worker is FailsAtFirst else 5  # one to warm up, and four of 2 s and more
    assert measuring == [[(0, 2, 0.0)] * rounds, [(0, 1, 0.0)] * rounds]
    assert same_bits(before, toy_arrays(0.3))
    strategy.aggregate_train(1, grid.send_and_receive(messages))
    orders, _ = play_round(strategy, grid, 2)
    assert [order.local_steps for order in orders] == steps  # it is chosen once


@pytest.mark.parametrize(("overhead", "steps"), [(0.25, 64), (3.0, 128)])  # 6.25, 75
def test_local_steps_auto_of_one_worker_are_64_or_more_if_rounds_cost_much(
    monkeypatch: pytest.MonkeyPatch, overhead: float, steps: int
) -> None:
    node = InRounds(unnamed_profile(0), 1.0)
    strategy = BiasedLocalSGD(1000, 2, "auto", sampler=UniformSampler(), min_available_nodes=1)
    grid = Costly(monkeypatch, overhead, node)
    with captured_log():
        ((order,), _) = play_round(strategy, grid)
    assert order.local_steps == steps
    assert {order.local_steps for order in node.orders[:-1]} == {1}  # the shortest rounds measure


@pytest.mark.parametrize(
    ("rounds", "overhead"),
    [
        # worker 0 computes longer in most rounds, and hides the slow network of worker 1
        ([(0, 0.0173), (0, 0.0225), (1, 0.0857), (0, 0.0143), (1, 0.0888), (0, 0.0344)], 0.0857),
        ([(0, 0.003), (1, 0.5), (0, 0.002), (0, 0.004), (0, 0.005)], 0.003),  # a disturbed round
        ([(0, 0.3), (1, 0.1), (2, 0.2), (3, 0.4)], 0.2),
    ],
)
def test_overhead_is_that_of_the_worker_that_costs_most_to_reach(
    rounds: list[tuple[int, float]], overhead: float
) -> None:
    longest, overheads = zip(*rounds, strict=True)
    assert module.overhead_of(longest, overheads) == overhead


@pytest.mark.parametrize("is_script", [False, True])
def test_workers_that_compute_longer_do_not_hide_one_that_is_far(
    monkeypatch: pytest.MonkeyPatch, is_script: bool
) -> None:
    nodes = Uneven(fast_profile(0), 1.0), InRounds(slow_profile(1), 2.0)
    grid = Costly(monkeypatch, 0.0, *nodes)
    if is_script:
        nodes = Uneven(unnamed_profile(0), 1.0), InRounds(unnamed_profile(1), 2.0)
        grid, strategy = scripts(monkeypatch, *nodes, overhead=0.0)
    else:
        strategy = BiasedLocalSGD(2000, 2, "auto")
    grid.reach[1] = 0.6
    with captured_log():
        train_rounds(strategy, grid, epochs=1)
    assert "; a round takes 0.6 s in addition to computing" in strategy.connector.steps_chosen


def test_local_steps_auto_without_any_speed_are_the_usual_ones() -> None:
    nodes = [ToyWorker(None), ToyWorker(None)]
    with captured_log():
        BiasedLocalSGD(200, 2, "auto").fit(Batches(*nodes), toy_arrays(), epochs=1)
    assert [len(node.orders) for node in nodes] == [1, 1]
    assert [node.orders[0].local_steps for node in nodes] == [32, 32]


# --- scripts: rounds of training measure


def scripts(
    monkeypatch: pytest.MonkeyPatch, *nodes: Any, overhead: float = 0.002, **changes: Any
) -> tuple[Costly, BiasedLocalSGD]:
    """Return workers that are scripts and their strategy, and let `overhead` be that of a round."""
    grid = Costly(monkeypatch, overhead, *nodes)
    monkeypatch.setattr(rounds, "time", SimpleNamespace(perf_counter=lambda: grid.now, time=float))
    arguments = {"local_steps": "auto", "sampler": UniformSampler(), "momentum_buffers": "keep"}
    strategy = BiasedLocalSGD(**{"num_samples": 2000, "batch_size": 2, **arguments, **changes})
    strategy.planner.measures_in_rounds = True
    return grid, strategy


def steps_of(*nodes: ToyWorker) -> list[tuple[int, ...]]:
    """Return the steps of the nodes' orders, by round."""
    return list(zip(*([order.local_steps for order in node.orders] for node in nodes), strict=True))


def test_scripts_are_measured_by_rounds_of_training_whose_work_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step to warm up, then 0.3 s a round: 30 and 10 steps, of which three rounds suffice.

    These are 4 + 4 x 80 samples. A round takes 0.2 steps in addition to computing: 4 % of 4.8, so 3
    steps, with which nobody waits, are doubled. Of epoch 1 there are 676 / 16 = 42 rounds left, and
    epoch 2 has (2000 - 996) / 16 = 62.
    """
    nodes = InRounds(unnamed_profile(0), 0.01), InRounds(unnamed_profile(1), 0.03)
    grid, strategy = scripts(monkeypatch, *nodes, num_samples=1000)
    planner, records, progress = strategy.planner, list[RoundRecord](), list[float]()

    def note(record: RoundRecord) -> None:
        records.append(record)
        progress.append(planner.epochs_done)

    with captured_log() as log:
        train_rounds(strategy, grid, handle=note, epochs=2)
    assert steps_of(*nodes) == [(1, 1)] + [(30, 10)] * 4 + [(6, 2)] * (42 + 62)
    assert strategy.connector.steps_chosen.startswith(
        "local-steps-fast = auto: 6; a round takes 0.0"
    )
    # 16 of 0.062 x 267 samples, or one batch of 2 of each, 4 of 0.032 x 267
    said = '97% of all samples per second, 47% with average = "gradients"'
    assert strategy.connector.steps_chosen.endswith(said)
    assert [worker.speed for worker in strategy.registry.workers] == [
        "0.01 s a step measured, gamma 1.00",
        "0.03 s a step measured, gamma 0.33",
    ]
    assert [node.measured for node in nodes] == [0, 0]  # nothing before the first round
    assert not log.warnings
    # Every order is of the next samples of the stream, and trains.
    drawn = np.concatenate(
        [order.indices for pair in zip(*(n.orders for n in nodes), strict=True) for order in pair]
    )
    assert drawn.tolist() == permutation_stream(0, 1000, 0, len(drawn)).tolist()
    starts = [(order.stream_start, order.stream_stride) for order in nodes[1].orders[:6]]
    assert starts == [(2, 4), *((4 + 80 * i + 60, 80) for i in range(4)), (324 + 12, 16)]
    assert {order.learning_rate for node in nodes for order in node.orders} == {0.1}
    samples = (
        planner.progress.samples_planned,
        planner.progress.samples_trained,
        planner.progress.samples_cut_off,
    )
    assert samples == (1988, 1988, 0)
    positions = [(r.epoch, r.round_in_epoch, r.rounds_in_epoch) for r in records]
    assert positions[:5] == [(1, 1, 250), *((1, 2 + i, 13) for i in range(4))]
    assert positions[5:7] == [(1, 6, 47), (1, 7, 47)]
    assert positions[46:48] == [(1, 47, 47), (2, 1, 62)]
    assert progress == sorted(progress)
    assert (progress[46], progress[-1]) == (1, 2)


def test_scripts_that_fail_or_join_late_or_are_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = InRounds(unnamed_profile(0), 0.01), InRounds(unnamed_profile(1), 0.04)
    grid, strategy = scripts(monkeypatch, *nodes, local_steps=8)

    def play(strategy: BiasedLocalSGD, first: int, last: int) -> None:
        for number in range(first, last + 1):
            play_round(strategy, grid, number)

    play(strategy, 1, 3)  # of at most 8 steps
    assert steps_of(*nodes) == [(1, 1), (8, 2), (8, 2)]
    _, resumed = scripts(monkeypatch, *nodes, local_steps=8)
    resumed.load_state_dict(strategy.state_dict())
    play(resumed, 4, 5)
    assert steps_of(*nodes)[3:] == [(1, 1), (8, 2)]  # the measurement begins again
    grid.fail_at(1, 6, "raises")
    with captured_log():
        play(resumed, 6, 7)
    assert [node.orders[-1].local_steps for node in nodes] == [8, 2]
    assert resumed.planner.measured is not None  # rounds of 0.08 s: ten are measured
    play(resumed, 8, 15)
    planner = resumed.planner
    assert planner.measured is None
    while not planner.epoch_ended:
        play(resumed, planner.progress.rounds_total + 1, planner.progress.rounds_total + 1)
    assert (planner.progress.epoch, 0 <= 2000 - planner.samples_planned_so_far < 20) == (1, True)
    late = InRounds(unnamed_profile(2), 0.02)
    grid.connect(99, late)
    with captured_log():
        first = planner.progress.rounds_total + 1
        play(resumed, first, first + 14)
    assert steps_of(late) == [(1,)] + [(4,)] * 14
    assert [node.orders[-1].local_steps for node in nodes] == [8, 2]
    assert planner.measured is None
    assert [worker.speed_ratio for worker in resumed.registry.workers] == [1.0, 0.25, 0.5]


@pytest.mark.parametrize(
    ("profiles", "changes", "steps"),
    [
        # known, or not needed: no round measures
        ([fast_profile(0, seconds_per_step=1.0), slow_profile(1, seconds_per_step=2.0)],
         {"local_steps": 4}, (4, 2)),
        ([fast_profile(0), slow_profile(1)], {"local_steps": 4, "local_steps_slow": 3}, (4, 3)),
        ([fast_profile(0, steps=5), slow_profile(1, steps=3)], {"local_steps": 4}, (5, 3)),
        # measured for the tiers only
        ([unnamed_profile(0), slow_profile(1)], {"local_steps": 5, "local_steps_slow": 3}, (5, 3)),
        ([unnamed_profile(0, steps=6), unnamed_profile(1, steps=7)], {"local_steps": 4}, (6, 7)),
        # the overhead is not known
        ([fast_profile(0, seconds_per_step=0.1), slow_profile(1, seconds_per_step=0.15)],
         {"local_steps": "auto"}, (3, 2)),
        # of one worker only
        ([fast_profile(0, seconds_per_step=0.1), slow_profile(1)], {"local_steps": 4}, (3, 1)),
    ],
)  # fmt: skip
def test_given_speeds_of_scripts_are_not_measured(
    monkeypatch: pytest.MonkeyPatch,
    profiles: Sequence[WorkerProfile],
    changes: dict[str, Any],
    steps: tuple[int, int],
) -> None:
    nodes = [InRounds(profile, 0.1) for profile in profiles]
    grid, strategy = scripts(monkeypatch, *nodes, **changes)
    orders, _ = play_round(strategy, grid)
    assert tuple(order.local_steps for order in orders) == steps
    unnamed = any(not profile.tier for profile in profiles)
    assert (strategy.planner.measured is not None) == (unnamed or steps in ((3, 2), (3, 1)))


def test_scripts_without_a_step_count_as_the_fastest_and_one_clock_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = InRounds(fast_profile(0), 0.5), InRounds(unnamed_profile(1), 0.5)
    nodes[1].steps = 0
    grid, strategy = scripts(monkeypatch, *nodes, local_steps=4)
    with captured_log():
        strategy.fit(grid, toy_arrays(), rounds=6)
    assert steps_of(*nodes) == [(1, 1)] * 5 + [(4, 4)]
    assert [worker.measured for worker in strategy.registry.workers] == [True, False]
    grid, strategy = scripts(monkeypatch, *nodes, clock="device")
    with pytest.raises(
        UsageError, match=r'clock = "device" needs .* give every worker seconds-per'
    ):
        strategy.prepare(grid, toy_arrays())


# --- speeds that cannot be measured


def test_workers_whose_speed_is_not_known_count_as_the_fastest_with_one_warning() -> None:
    known, raises = Clocked(fast_profile(0), 1.0), Clocked(slow_profile(1), None)
    nodes = known, raises, ToyWorker(slow_profile(2))  # the last one does not measure
    with captured_log() as log:
        BiasedLocalSGD(100, 2, local_steps=8).fit(Batches(*nodes), toy_arrays(), epochs=1)
    assert [node.orders[0].local_steps for node in nodes] == [8, 8, 8]
    (warning,) = log.lines(30)
    for text in (
        "(gamma 1)",
        "slow-1 (cpu:1): RuntimeError: out of memory",
        "slow-2 (cpu:2): its ClientApp does not",
    ):
        assert text in warning


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_speed_that_is_no_speed_is_not_taken(seconds: float) -> None:
    with captured_log() as log:
        registry = connected_to(
            Batches(Clocked(fast_profile(0), 1.0), Clocked(unnamed_profile(1), seconds)), auto=False
        ).registry
    assert registry.workers[1].speed_ratio is None
    assert registry.workers[1].fast
    assert "seconds-per-step" in log.warnings[0]


# --- before anything is measured


def tiers(*profiles: WorkerProfile) -> list[str]:
    filled = assume_speeds(profiles)
    assert all(profile.seconds_per_step > 0 for profile in filled)
    return [profile.tier for profile in filled]


def test_assume_speeds_unnamed_workers_may_be_of_either_tier() -> None:
    assert tiers(unnamed_profile(0), unnamed_profile(1), unnamed_profile(2)) == [
        "fast",
        "slow",
        "fast",
    ]
    assert tiers(fast_profile(0), unnamed_profile(1)) == ["fast", "slow"]
    assert tiers(unnamed_profile(0), slow_profile(1)) == ["fast", "slow"]
    assert tiers(slow_profile(0), slow_profile(1)) == ["slow", "slow"]
    assert tiers(unnamed_profile(0)) == ["fast"]  # the fastest of all
    (profile,) = assume_speeds([fast_profile(0, seconds_per_step=0.25)])
    assert profile.seconds_per_step == 0.25
