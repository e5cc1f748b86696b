"""Evaluation beside the training: in order, bounded, and never lost with its process."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from types import SimpleNamespace

import pytest
from flwr.app import ArrayRecord, Error, Message, MetricRecord

from flower_blsgd import run_evaluation
from flower_blsgd.aside_evaluation import AsideEvaluation, Metrics
from flower_blsgd.protocol import EvaluateOrder, EvaluateReport, WorkerProfile
from flower_blsgd.run_evaluation import RunEvaluation
from flower_blsgd.runtime.flower_internals import CRASHED, RAISED, give_message_id
from flower_blsgd.training_loop import LateMetrics
from flower_blsgd.worker_evaluation import WorkerEvaluation

from .in_process_grid import InProcessGrid, toy_arrays
from .log_capture import captured_log
from .test_worker_evaluation import sums_of

NODE = 100
WAIT_SECONDS = 60.0


class HeldGrid(InProcessGrid):
    """A grid of one node that answers when the test says so."""

    def __init__(self) -> None:
        super().__init__({NODE: lambda message, node_id: message})
        self.waiting: list[Message] = []
        self.arrived = threading.Semaphore(0)
        self._replies: list[Message] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            give_message_id(message)
            ids.append(message.metadata.message_id)
            self.waiting.append(message)
            self.arrived.release()
        del message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        ids = set(message_ids)
        found = [r for r in self._replies if r.metadata.reply_to_message_id in ids]
        self._replies = [r for r in self._replies if r not in found]
        return found

    def answer(self, error: Error | None = None) -> EvaluateOrder:
        """Answer the oldest message, once it is there."""
        assert self.arrived.acquire(timeout=WAIT_SECONDS)
        message = self.waiting.pop(0)
        order = EvaluateOrder.from_message(message, 10)
        report = sums_of(order.arrays, order.first, order.last)
        reply = Message(error, reply_to=message) if error else report.to_reply(message)
        self._replies.append(reply)
        return order


class Setup:
    def __init__(self) -> None:
        self.grid = HeldGrid()
        self.here: list[float] = []
        profile = WorkerProfile("cpu:3", name="evaluation")
        self.aside = AsideEvaluation(self.grid, profile, 10, self._here)

    def _here(self, arrays: ArrayRecord, first: int, last: int) -> EvaluateReport:
        self.here.append(float(arrays["bias"].numpy()[0]))
        return sums_of(arrays, first, last)


@pytest.fixture
def setup() -> Iterator[Setup]:
    setup = Setup()
    yield setup
    setup.aside.close()


def right(value: float) -> MetricRecord:
    """What the test set of `sums_of` says of a model with this bias."""
    return MetricRecord({"accuracy": 0.5, "loss": 4.5 * value})


def told(metrics: Metrics) -> MetricRecord:
    return metrics.result(timeout=WAIT_SECONDS)


def test_metrics_come_late_and_each_to_its_own_model(setup: Setup) -> None:
    first = setup.aside.begin(4, toy_arrays(1.0))
    second = setup.aside.begin(8, toy_arrays(2.0))
    assert not first.done()
    assert [setup.grid.answer().round, setup.grid.answer().round] == [4, 8]
    assert (told(first), told(second)) == (right(1.0), right(2.0))
    assert setup.here == []


def test_third_model_waits_until_the_first_is_evaluated(setup: Setup) -> None:
    metrics = [setup.aside.begin(place, toy_arrays(place)) for place in (1, 2)]
    assert setup.aside.behind
    third: list[Metrics] = []
    trains = threading.Thread(
        target=lambda: third.append(setup.aside.begin(3, toy_arrays(3.0))), daemon=True
    )
    trains.start()
    time.sleep(0.1)
    assert third == []
    setup.grid.answer()
    trains.join(WAIT_SECONDS)
    assert metrics[0].done()
    for _ in range(2):
        setup.grid.answer()
    assert [told(m) for m in (*metrics, *third)] == [right(1), right(2), right(3)]
    assert not setup.aside.behind


@pytest.mark.parametrize("code", [CRASHED, RAISED])
def test_model_that_its_process_fails_is_evaluated_here_with_a_warning(
    setup: Setup, code: int
) -> None:
    with captured_log() as log:
        metrics = setup.aside.begin(4, toy_arrays(3.0))
        setup.grid.answer(Error(code, "the fan stands still"))
        assert told(metrics) == right(3.0)
    assert setup.here == [3.0]
    (warning,) = log.warnings
    assert "evaluation (cpu:3) did not evaluate after round 4" in warning
    assert "the fan stands still" in warning


def test_what_this_process_raises_is_raised_by_who_asks(setup: Setup) -> None:
    def broken(arrays: ArrayRecord, first: int, last: int) -> EvaluateReport:
        raise LookupError("no test set")

    setup.aside._here = broken  # type: ignore[method-assign]
    metrics = setup.aside.begin(4, toy_arrays(3.0))
    setup.grid.answer(Error(CRASHED, "died"))
    with pytest.raises(LookupError, match="no test set"):
        told(metrics)


def test_models_are_let_go_when_they_are_evaluated(setup: Setup) -> None:
    def begin() -> tuple[Metrics, "weakref.ref[ArrayRecord]"]:
        arrays = toy_arrays(1.0)
        return setup.aside.begin(1, arrays), weakref.ref(arrays)

    metrics, model = begin()
    setup.grid.answer()
    told(metrics)
    deadline = time.monotonic() + WAIT_SECONDS
    while model() is not None and time.monotonic() < deadline:
        gc.collect()  # this grid's messages are Flower's own, which refer to themselves
        time.sleep(0.01)
    assert model() is None


def test_close_gives_up_at_once_what_is_not_evaluated(setup: Setup) -> None:
    running = setup.aside.begin(1, toy_arrays(1.0))
    waiting = setup.aside.begin(2, toy_arrays(2.0))
    assert setup.grid.arrived.acquire(timeout=WAIT_SECONDS)
    began = time.monotonic()
    setup.aside.close()
    with pytest.raises(CancelledError):
        told(waiting)
    with pytest.raises(Exception, match="the run ended"):
        told(running)
    assert time.monotonic() - began < WAIT_SECONDS / 2
    assert setup.here == []


def test_ready_when_its_process_has_answered(setup: Setup) -> None:
    assert not setup.aside.ready
    setup.aside.warm_up(toy_arrays())
    order = setup.grid.answer()
    assert (order.first, order.last) == (0, 1)
    wait_until(lambda: setup.aside.ready)
    assert setup.here == []
    setup.grid.disconnect(NODE)
    assert not setup.aside.ready


def test_not_ready_when_its_process_cannot_start(setup: Setup) -> None:
    with captured_log() as log:
        setup.aside.warm_up(toy_arrays())
        setup.grid.answer(Error(CRASHED, "no memory"))
        wait_until(lambda: bool(log.warnings))
    assert not setup.aside.ready
    assert setup.here == []


def test_not_ready_after_it_raised(setup: Setup) -> None:
    setup.aside.warm_up(toy_arrays())
    setup.grid.answer()
    wait_until(lambda: setup.aside.ready)
    metrics = setup.aside.begin(1, toy_arrays(1.0))
    setup.grid.answer(Error(RAISED, "no memory"))
    assert told(metrics) == right(1.0)
    assert not setup.aside.ready


def wait_until(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not there() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert there()


# --- who evaluates in a run


class ByWorkers(WorkerEvaluation):
    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, server_round: int, arrays: ArrayRecord) -> MetricRecord:
        self.asked.append(server_round)
        return right(float(arrays["bias"].numpy()[0]))


class _Told:
    """Metrics that say when they are waited for."""

    def __init__(self, metrics: Metrics, waits: threading.Event) -> None:
        self._metrics, self._waits = metrics, waits

    def result(self) -> MetricRecord:
        self._waits.set()
        return self._metrics.result()


class Choice:
    def __init__(self, where: str, setup: Setup) -> None:
        self.by_workers = ByWorkers()
        self.seconds: list[float] = []
        self.evaluate = RunEvaluation(
            where, self.by_workers, setup._here, 10, self.seconds.append, setup.aside
        )
        self.waits = threading.Event()
        wait_for = self.evaluate.wait_for

        def told(metrics: Metrics) -> MetricRecord:
            return wait_for(_Told(metrics, self.waits))  # type: ignore[arg-type]

        self.evaluate.wait_for = told  # type: ignore[method-assign]

    def late(self, server_round: int, value: float = 1.0) -> LateMetrics:
        metrics = self.evaluate(server_round, toy_arrays(value))
        assert not isinstance(metrics, MetricRecord)
        return metrics


def test_auto_asks_the_workers_until_the_process_is_ready_and_while_it_is_behind(
    setup: Setup,
) -> None:
    choice = Choice("auto", setup)
    assert choice.evaluate(1, toy_arrays(1.0)) == right(1.0)
    setup.aside.warm_up(toy_arrays())
    setup.grid.answer()
    wait_until(lambda: setup.aside.ready)
    late = [choice.late(place, place) for place in (2, 3)]
    assert choice.evaluate(4, toy_arrays(4.0)) == right(4.0)
    setup.grid.answer()
    wait_until(late[0].done)
    late.append(choice.late(5, 5.0))
    for _ in range(2):
        setup.grid.answer()
    assert [metrics.result() for metrics in late] == [right(2.0), right(3.0), right(5.0)]
    assert choice.by_workers.asked == [1, 4]


def test_aside_does_not_ask_the_workers(setup: Setup) -> None:
    choice = Choice("aside", setup)
    late = choice.late(1)
    setup.grid.answer()
    assert late.result() == right(1.0)
    assert choice.by_workers.asked == []


def test_only_what_training_waits_for_counts(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(run_evaluation, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    choice = Choice("aside", setup)
    late = choice.late(1)
    now[0] = 5.0
    assert sum(choice.seconds) == 0.0

    def answer() -> None:
        assert choice.waits.wait(WAIT_SECONDS)
        now[0] = 7.0
        setup.grid.answer()

    threading.Thread(target=answer, daemon=True).start()
    assert late.result() == right(1.0)
    assert sum(choice.seconds) == 2.0
    assert late.done()
    now[0] = 9.0
    late.result()
    assert sum(choice.seconds) == 2.0


def test_server_evaluates_all_itself() -> None:
    setup = Setup()
    choice = Choice("server", setup)
    choice.evaluate._aside = None
    assert choice.evaluate(1, toy_arrays(2.0)) == right(2.0)
    assert setup.here == [2.0]
    assert choice.by_workers.asked == []
    setup.aside.close()
