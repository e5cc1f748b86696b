"""Workers that fail in any way: counted, logged once, left out of the average, asked again."""

import logging
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.serverapp.exception import AggregationError

from flower_blsgd.algorithm.catalog import TrainOn
from flower_blsgd.algorithm.sampling import UniformSampler
from flower_blsgd.config import RunConfig
from flower_blsgd.devices.worker_spec import WorkerSpec
from flower_blsgd.errors import UsageError
from flower_blsgd.flower.app_call import error_of
from flower_blsgd.flower.internals import NOT_LOADED
from flower_blsgd.protocol import Failure, HostReply
from flower_blsgd.results.round_totals import RunMetrics
from flower_blsgd.results.summary import summary_of
from flower_blsgd.strategy.budget import Budget
from flower_blsgd.strategy.round_metrics import RoundRecord

from ..hosts.host_nodes import HostNode
from ..in_process_grid import (
    BROKEN_REPLIES,
    TRACEBACK,
    InProcessGrid,
    ToyWorker,
    fast_profile,
    slow_profile,
    toy_arrays,
    train_rounds,
)
from ..log_capture import captured_log
from ..refusal import refusal
from .orders import strategy_of, three

NUM_SAMPLES = 60
"""Six rounds an epoch, of 4, 4 and 2 samples."""

KINDS = {
    "raises": ("raised", "RuntimeError: the fan stands still"),
    "out of memory": ("out of memory", "CUDA out of memory"),
    "dies": ("died", "the process was killed"),
    "gone": ("gone", "its connection broke"),
    "missing": ("late", "did not answer in time"),
    "of another round": ("late", "did not answer in time"),
    "non-finite": ("not finite", "tensor 'weight' is not finite"),
    "mis-shaped": ("unusable reply", "tensor 'weight' is float32 of shape (1, 2, 1)"),
    "no number": ("unusable reply", "no number 'num-examples'"),
    "no weight": ("unusable reply", "'num-examples' = 0"),
    "weight not finite": ("unusable reply", "'num-examples' = inf"),
    "no such time": ("unusable reply", "compute_seconds are 1e+308"),
}


def test_every_broken_reply_is_in_the_table() -> None:
    assert set(BROKEN_REPLIES) < set(KINDS)


class Run:
    """A run of three workers, with the rounds' records and what was logged."""

    def __init__(self, grid: InProcessGrid, **changes: Any) -> None:
        arguments = {"min_available_nodes": 3, "sampler": UniformSampler()} | changes
        self.grid, self.strategy = grid, strategy_of(NUM_SAMPLES, **arguments)
        self.records: list[RoundRecord] = []
        self.models: list[float] = []

    def play(
        self, epochs: int, handle: Callable[[], object] = lambda: None, timeout: float = 3600
    ) -> "Run":
        """Train, and call `handle` after every round."""
        with captured_log() as self.log:
            budget = Budget(epochs=epochs)
            for end in self.strategy.rounds(self.grid, toy_arrays(), budget, timeout=timeout):
                self.records.append(end.record)
                self.models.append(float(end.arrays["weight"].numpy()[0, 0]))
                handle()
        return self

    @property
    def failures(self) -> list[dict[str, int]]:
        return [dict(Counter(worker.failures)) for worker in self.strategy.registry.workers]

    def weights_of(self, worker: int) -> list[float]:
        """Its weight in each round; nan where it had no order."""
        found = [{row.worker: row.weight for row in record.workers} for record in self.records]
        return [round(weights.get(worker, float("nan")), 3) for weights in found]


@pytest.mark.parametrize("fault", KINDS)
def test_failure_is_counted_logged_once_and_left_out_of_the_average(fault: str) -> None:
    kind, reason = KINDS[fault]
    grid = InProcessGrid(three(), "reversed")
    for server_round in (2, 4):
        grid.fail_at(1, server_round, fault)
    run = Run(grid).play(epochs=1)
    without = (2 * 1.0 + 1 * 6.0) / 3
    assert run.models == pytest.approx([2.4, without, 2.4, without, 2.4, 2.4])
    assert run.weights_of(0) == [0.4, 0.667, 0.4, 0.667, 0.4, 0.4]
    assert run.weights_of(1) == [0.4, 0.0, 0.4, 0.0, 0.4, 0.4]
    rows = [row for record in run.records for row in record.workers if row.failure]
    assert [(row.worker, row.failure_kind) for row in rows] == [(1, kind)] * 2
    assert all(reason in row.failure for row in rows)
    assert run.strategy.planner.samples_given_up == 2 * 4
    extra = {"reply of another round": 2} if fault == "of another round" else {}
    assert run.failures == [{}, {kind: 2} | extra, {}]
    lines = run.log.lines(logging.WARNING)
    assert len(lines) == 1 + len(extra)
    assert all("fast-1 (cpu:1)" in line and "round 2" in line for line in lines)
    assert reason in lines[-1]
    assert (TRACEBACK.strip() in lines[-1]) is (fault in ("raises", "out of memory"))


def test_reply_that_comes_twice_counts_once() -> None:
    grid = InProcessGrid(three())
    grid.fail_at(1, 2, "twice")
    run = Run(grid).play(epochs=1)
    assert run.models == pytest.approx([2.4] * 6)
    assert run.failures == [{}, {"second reply": 1}, {}]
    assert run.strategy.planner.samples_given_up == 0
    (line,) = run.log.warnings
    assert "fast-1 (cpu:1)" in line
    assert "second reply" in line


def test_process_that_died_between_two_orders_is_counted_and_costs_none() -> None:
    grid = InProcessGrid(three())
    deaths = iter([[], [20], [30, 20]])
    grid.take_deaths = lambda: next(deaths, [])  # type: ignore[method-assign]
    run = Run(grid).play(epochs=1)
    assert run.models == pytest.approx([2.4] * 6)
    kind = "died between orders"
    assert run.failures == [{}, {kind: 2}, {kind: 1}]


# --- again and again


@pytest.mark.parametrize("fault", ["raises", "dies", "missing", "non-finite"])
def test_three_failures_in_a_row_leave_a_worker_out_until_the_next_epoch(fault: str) -> None:
    grid = InProcessGrid(three())
    for server_round in (1, 3, 4, 5, 7):  # the first is not in a row with the others
        grid.fail_at(1, server_round, fault)
    run = Run(grid).play(epochs=3)
    nan, left_out = float("nan"), [6, 8, 9, 10, 11, 12]
    expected = [0.0, 0.4, 0.0, 0.0, 0.0, nan, 0.0, *[nan] * 5, *[0.4] * 6]
    assert run.weights_of(1) == pytest.approx(expected, nan_ok=True)
    assert run.failures == [{}, {KINDS[fault][0]: 5}, {}]
    assert run.strategy.planner.samples_given_up == 4 * (5 + len(left_out))
    queried = [m.metadata.dst_node_id for m in grid.sent_of_type("query.profile")]
    assert queried == [10, 20, 30, 20, 20]  # once for each epoch that began without it
    assert sum("is left out" in line for line in run.log.errors) == 1
    assert len(run.log.lines(logging.WARNING)) == 2


@pytest.mark.parametrize("fault", ["missing", "dies", "gone", "raises"])
def test_round_that_nobody_completed_is_given_up_and_the_third_in_a_row_ends_the_run(
    fault: str,
) -> None:
    """Such as when the machine swaps, or all draw a sample that cannot be read."""

    def stalled(*rounds: int) -> Run:
        grid = InProcessGrid(three())
        for server_round in rounds:
            for worker in range(3):
                grid.fail_at(worker, server_round, fault)
        return Run(grid)

    run = stalled(2, 3, 5).play(epochs=2)
    assert run.models == pytest.approx([2.4] * 12)
    assert run.strategy.planner.samples_given_up == 3 * 10
    assert [record.round for record in run.records] == list(range(1, 13))
    assert run.grid.timeouts[1:7] == [3600.0, 30.0, 120.0, 120.0, 30.0, 120.0]
    assert run.strategy.fit(run.grid, toy_arrays(), epochs=2).arrays is not None
    run = stalled(2, 3, 4)
    with pytest.raises(AggregationError, match="round 4: no worker succeeded") as stopped:
        run.play(epochs=2)
    line = str(stopped.value)
    assert "\n" not in line
    for worker in ("fast-0 (cpu:0)", "fast-1 (cpu:1)", "slow-2 (cpu:2)"):
        assert f"{worker}: " in line
    assert line.count(KINDS[fault][1]) == 3


@pytest.mark.parametrize("on_one_node", [False, True])
@pytest.mark.parametrize("refusing", [1, 3])
def test_round_in_which_all_workers_refuse_their_work_ends_the_run(
    refusing: int, on_one_node: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another round would end like it: a script's buffer changed, say."""
    error = error_of(UsageError("a buffer changed"))
    monkeypatch.setattr("tests.in_process_grid.RAISED", error.code)
    monkeypatch.setattr("tests.in_process_grid.TRACEBACK", error.reason)
    host = HostNode(*three().values())
    grid = InProcessGrid({10: host} if on_one_node else three())
    for worker in range(refusing):
        (host.grid if on_one_node else grid).fail_at(worker, 2, "raises")
    run = Run(grid, min_available_nodes=1 if on_one_node else 3)
    if refusing < 3:
        assert len(run.play(epochs=1).records) == 6
        return
    with pytest.raises(AggregationError, match=r"round 2: .*\(cpu:0\): .*a buffer changed; "):
        run.play(epochs=1)
    assert len(run.records) == 2


# --- too few workers


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.at: dict[float, Any] = {}
        monkeypatch.setattr("flower_blsgd.strategy.connector.time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for when in [when for when in self.at if when <= self.now]:
            self.at.pop(when)()


_NO_LICENSE = "RuntimeError: no license on this machine"


def _cannot_load(message: Message, node_id: int) -> Message:
    raise RuntimeError("no license on this machine")


@pytest.mark.parametrize(
    ("handler", "kind", "reason"),
    [
        (_cannot_load, "raised, starting", _NO_LICENSE),
        (lambda *_: None, "late, starting", "it did not answer in time"),
        (ToyWorker(None), "", ""),  # a foreign app without a profile takes part
    ],
)
def test_worker_that_fails_at_its_start_is_counted_and_taken_when_it_answers(
    handler: Any, kind: str, reason: str
) -> None:
    grid = InProcessGrid(three() | {20: handler})
    run = Run(grid, min_available_nodes=2)

    def repair() -> None:
        if len(run.records) == 2:
            grid.connect(20, ToyWorker(fast_profile(1), 2.0))

    run.play(2, repair)
    registry = run.strategy.registry
    summary = summary_of(RunConfig(), run.strategy, RunMetrics("wall"), [])
    if not kind:
        assert not summary["failures"]
        return
    label = "node 20 (unknown device)"
    assert summary["failures"] == [{"round": 0, "worker": label, "kind": kind, "reason": reason}]
    assert summary["failures_by_worker"] == {label: {kind: 1}}
    (error,) = run.log.errors
    assert error.startswith(f"{label} does not take part: ")
    assert [w.label for w in registry.active] == [
        "fast-0 (cpu:0)",
        "slow-1 (cpu:2)",
        "fast-3 (cpu:1)",
    ]
    assert [len(record.workers) for record in run.records] == [2] * 10 + [3] * 6
    state = registry.state_dict()
    registry.load_state_dict(state)  # a resumed run knows it
    assert registry.workers[2].start_failure == reason
    for row in state["workers"]:
        row.pop("start-failure", None)
    registry.load_state_dict(state)  # of an older version


def test_worker_that_never_starts_is_queried_less_and_less_often() -> None:
    """Each query starts its process again, and the others wait for the answer."""
    asked = []

    def fails(message: Message, node_id: int) -> Message:
        asked.append(run.records[-1].epoch if run.records else 0)
        raise UsageError("no license on this machine")

    run = Run(InProcessGrid(three() | {20: fails}), min_available_nodes=2)
    run.play(epochs=9)
    assert asked == [0, 1, 2, 4, 8]


class Named(InProcessGrid):
    """Knows the devices of its nodes, as the local grid does."""

    workers = (
        WorkerSpec("cpu", (0,), tier="fast"),
        WorkerSpec("cpu", (1,), tier="slow"),
        WorkerSpec("cpu", (2,), role="evaluate"),
    )


_OF_TWO = "of 2 workers can train, and min-workers ="


@pytest.mark.parametrize(
    ("failing", "needed", "reason"),
    [
        ({20}, 2, f"1 {_OF_TWO} 2 (slow-1 (cpu:1): {_NO_LICENSE}); repair it, or use min-workers"),
        ({10, 20}, 1, f"0 {_OF_TWO} 1 (fast-0 (cpu:0), slow-1 (cpu:1): {_NO_LICENSE})"),
        ({20}, 1, ""),
        ({30}, 2, ""),  # it would not train
        ({20, 30}, 2, f"1 {_OF_TWO} 2 (slow-1 (cpu:1): "),
    ],
)
def test_run_does_not_begin_with_fewer_workers_than_needed(
    failing: set[int], needed: int, reason: str
) -> None:
    workers = {10: ToyWorker(fast_profile(0)), 20: ToyWorker(slow_profile(1))}
    grid = Named(workers | {30: _cannot_load} | dict.fromkeys(failing, _cannot_load))
    if 30 not in failing:
        grid.disconnect(30)
    run = Run(grid, min_available_nodes=needed)
    if not reason:
        run.play(epochs=2)
        (failed,) = [w.label for w in run.strategy.registry.workers if w.failures]
        assert failed == {20: "slow-1 (cpu:1)", 30: "evaluate-2 (cpu:2)"}[min(failing)]
        return
    assert refusal(run.play, epochs=1).startswith(f"the run cannot begin: {reason}")
    assert run.records == []


@pytest.mark.parametrize(("needed", "goes_on"), [(2, True), (3, False)])
def test_min_workers_stops_the_run_when_an_epoch_begins(
    needed: int, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    grid = InProcessGrid(three())
    run = Run(grid, min_available_nodes=needed)

    def leave() -> None:
        if len(run.records) == 2:
            grid.disconnect(20)

    if goes_on:
        run.play(3, leave)
        assert len(run.records) > 12
        return
    with pytest.raises(AggregationError) as stopped:
        run.play(3, leave)
    assert len(run.records) == 6  # the epoch was finished without it
    assert 60 <= clock.now < 62
    for fragment in ("2 of 3 workers are left", "min-workers = 3", "fast-1 (cpu:1): its node is"):
        assert fragment in str(stopped.value)


def test_only_workers_that_train_count_and_an_idle_one_is_no_reason_to_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both fast nodes are gone for 20 s; later the slow one, which never trains, for good."""
    clock = Clock(monkeypatch)
    grid = InProcessGrid(three())
    run = Run(grid, train_on=TrainOn(fast_only=True))

    def leave() -> None:
        if len(run.records) == 2:
            back = {node_id: grid.disconnect(node_id) for node_id in (10, 20)}
            clock.at[20.0] = lambda: grid.handlers.update(back)
        if len(run.records) == 5:
            grid.disconnect(30)

    run.play(2, leave)
    assert 20 <= clock.now < 21
    assert [[row.worker for row in record.workers] for record in run.records] == [[0, 1]] * 15
    assert run.strategy.planner.samples_given_up == 0


# --- patience


def test_patience_is_a_multiple_of_what_rounds_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds take 8 s, then 2 s, of 4 samples each on the fast workers."""
    grid = InProcessGrid(three())
    grid.fail_at(1, 4, "missing")
    grid.fail_at(1, 5, "dies")
    took = iter([8.0, 2.0, 2.0, 999.0, 2.0, 2.0])
    now = [1000.0]
    clock = SimpleNamespace(time=lambda: 0.0, perf_counter=lambda: now[0])
    monkeypatch.setattr("flower_blsgd.strategy.round.time", clock)
    send_and_receive = grid.send_and_receive

    def slowly(messages: Any, *, timeout: float | None = None) -> Any:
        messages = list(messages)
        if messages[0].metadata.message_type == "train":
            now[0] += next(took)
        return send_and_receive(messages, timeout=timeout)

    monkeypatch.setattr(grid, "send_and_receive", slowly)
    Run(grid).play(epochs=1, timeout=777.0)
    # Of the moving average 8, then 0.6 x 8 + 0.4 x 2 = 5.6, then 4.16; what was late says nothing.
    # After a failure it is at least two minutes: a process may be starting.
    assert grid.timeouts[1:] == pytest.approx([777.0, 80.0, 56.0, 41.6, 120.0, 120.0])


def test_patience_is_long_for_what_is_new_and_never_below_a_deadline() -> None:
    grid = InProcessGrid(three())
    strategy = Run(grid, deadline_seconds=100.0).strategy

    def leave(record: RoundRecord) -> None:
        if record.round == 3:
            grid.connect(31, grid.disconnect(30))  # a new process: it may have to compile again

    train_rounds(strategy, grid, handle=leave, epochs=1)
    queries_and_rounds = [600.0, 3600.0, 200.0, 200.0, 60.0, 3600.0, 200.0, 200.0]
    assert grid.timeouts == queries_and_rounds


def test_patience_with_scripts_is_long() -> None:
    """They may validate, or save, between two rounds."""
    grid = InProcessGrid(three())
    run = Run(grid)
    run.strategy.planner.measures_in_rounds = True
    run.play(epochs=1)
    assert set(grid.timeouts[1:]) == {3600.0}


def test_patience_follows_what_starting_took_where_a_process_may_have_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loading took 100 s: a process that died idle, or in an order, has three times as long."""
    clock = Clock(monkeypatch)

    class Loads(ToyWorker):
        def __call__(self, message: Message, node_id: int) -> Message:
            if message.metadata.message_type == "query.profile":
                clock.now += 100.0
            return super().__call__(message, node_id)

    grid = InProcessGrid({**three(), 20: Loads(fast_profile(1), 2.0)})
    deaths = iter([[], [], [30]])
    grid.take_deaths = lambda: next(deaths, [])  # type: ignore[method-assign]
    for server_round in (4, 5, 6):
        grid.fail_at(1, server_round, "dies")
    Run(grid).play(epochs=2)
    epoch_1 = [600.0, 3600.0, 30.0, 300.0, 30.0, 300.0, 300.0]
    assert grid.timeouts == [*epoch_1, 300.0, 300.0, *[30.0] * 5]  # it was queried again


def test_app_that_does_not_load_is_one_that_raised() -> None:
    assert Failure.of(Error(NOT_LOADED, "ImportError: no such module")).kind == "raised"


def test_control_characters_of_a_node_do_not_reach_the_terminal() -> None:
    sent = "Traceback:\n\tline 1\nbad \x1b[2J\r\u202e"
    record = ConfigRecord({"kind": "raised", "reason": sent})
    of_host = HostReply.from_content(RecordDict({"host": ConfigRecord(), "1/failure": record}))
    for failure in (Failure.of(Error(NOT_LOADED, sent)), of_host.failures[1]):
        assert failure.reason == "Traceback:\n\tline 1\nbad \\x1b[2J\\r\\u202e"
        assert failure.brief == "bad \\x1b[2J\\r\\u202e"
