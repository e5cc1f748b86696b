"""A session without processes: a script's steps, and the orders that it answers."""

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from flower_blsgd.algorithm.sampling import permutation_stream
from flower_blsgd.config import RunConfig
from flower_blsgd.devices.worker_spec import WorkerSpec
from flower_blsgd.errors import UsageError
from flower_blsgd.protocol import EvaluateOrder, EvaluateReport, TrainOrder, TrainReport
from flower_blsgd.session.counting import StepCounting
from flower_blsgd.session.exchange import HERE, Exchange
from flower_blsgd.session.session import Session, join
from flower_blsgd.worker.model_io import state_record

from ..log_capture import captured_log
from ..refusal import refusal
from . import orders
from .orders import BATCH

NUM_SAMPLES = 20
EVALUATES = WorkerSpec("cpu", role="evaluate")


def model_of(value: float = 0.0) -> nn.Module:
    model = nn.utils.skip_init(nn.Linear, 1, 1, bias=False)  # draws no random numbers
    nn.init.constant_(model.weight, value)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def order_of(
    round: int = 1, steps: int = 2, *, value: float = 0.0, **changes: object
) -> TrainOrder:
    arrays = changes.pop("arrays", None) or state_record(model_of(value))
    return orders.order_of(round, steps, arrays, **({"stream_stride": 3 * BATCH} | changes))


def loader_of(
    session: Session, by_loss: bool = False, batch_size: int = BATCH, workers: int = 0
) -> DataLoader[int]:
    """Return a loader whose samples are their own numbers."""
    numbers: Any = list(range(NUM_SAMPLES))
    sampler = session.sampler(numbers, by_loss=by_loss)
    return DataLoader(numbers, batch_size, sampler=sampler, num_workers=workers)


Does = Callable[[nn.Module, Session], object]


def script_of(
    step: Does = lambda *_: None,
    before: Does = lambda *_: None,
    model: Callable[[], nn.Module] = model_of,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
) -> Callable[[], None]:
    """Return a script that joins, calls `before`, and calls `step` until the run is over."""

    def main() -> None:
        own = model()
        session = join(own, optimizer(own))
        before(own, session)
        while not session.done:
            step(own, session)
            session.step(samples=BATCH)

    return main


def first_order(_: nn.Module, session: Session) -> None:
    session.average()


class Script:
    """A script in a thread, and the server's side of its exchange."""

    def __init__(self, main: Callable[[], None], worker: WorkerSpec | None = None) -> None:
        spec = worker or WorkerSpec("cpu")
        self.exchange = Exchange(spec, 1, seed=3, batch_size=BATCH, is_main=False)
        HERE.exchange = self.exchange
        self.error: BaseException | None = None

        def run() -> None:
            try:
                main()
            except BaseException as error:
                self.error = error
            self.exchange.end(self.error)

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def train(self, order: TrainOrder) -> TrainReport:
        return self.exchange.train(order)

    def evaluate(self, value: float = 0.0) -> EvaluateReport:
        return self.exchange.evaluate(EvaluateOrder(1, 0, 1, state_record(model_of(value))))

    def finish(self, value: float = 0.0) -> None:
        self.exchange.finish(state_record(model_of(value)))
        self.thread.join(10)
        if self.error is not None:
            raise self.error


def told(function: Callable[[Any], None], done: threading.Event) -> Callable[[Any], None]:
    """Return a method that sets an event at its end."""

    def method(self: Any) -> None:
        function(self)
        done.set()

    return method


def weight_of(report: TrainReport) -> float:
    return float(next(iter(report.arrays.values())).numpy().item())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_state_of_a_restored_optimizer_moves_with_the_model() -> None:
    """And the figures of a script may draw random numbers on the card."""
    seen: list[object] = []
    made: list[torch.optim.Optimizer] = []

    def take_step(model: nn.Module, device: torch.device) -> None:
        model(torch.ones(BATCH, 1, device=device)).sum().backward()
        made[0].step()
        made[0].zero_grad()

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made.append(torch.optim.AdamW(model.parameters(), lr=0.1))
        take_step(model, torch.device("cpu"))
        return made[0]

    def before(model: nn.Module, session: Session) -> None:
        (state,) = made[0].state.values()
        seen.extend([state["exp_avg"].device, state["exp_avg"].item(), state["step"].device])
        session.evaluate(lambda model: {"accuracy": torch.rand((), device=session.device).item()})

    main = script_of(
        lambda model, session: take_step(model, session.device), before, model_of, optimizer
    )
    script = Script(main, WorkerSpec("cuda:0"))
    random = torch.cuda.get_rng_state(0)
    script.evaluate()
    assert torch.equal(torch.cuda.get_rng_state(0), random)
    assert script.train(order_of()).completed_steps == 2
    script.finish()
    assert seen == [torch.device("cuda:0"), pytest.approx(0.1 * BATCH), torch.device("cpu")]


def test_each_order_begins_with_its_model_and_has_its_number_of_steps() -> None:
    models: list[nn.Module] = []

    def add(model: nn.Module, session: Session) -> None:
        models.append(model)
        model.weight.data += 1.0

    script = Script(script_of(add, model=lambda: model_of(100.0)))
    report = script.train(order_of(1, steps=3, value=5.0))
    # The step before the first order began with the script's own model, and does not count.
    assert (weight_of(report), report.completed_steps, report.num_examples) == (8.0, 3, 12)
    assert weight_of(script.train(order_of(2, steps=1, value=7.0))) == 8.0
    script.finish(value=42.0)
    assert models[0].weight.item() == 42.0  # type: ignore[union-attr,operator]


def test_compiled_model_computes_with_the_weights_of_the_order() -> None:
    outputs: list[float] = []

    def compiled(value: float = 1.0) -> Any:
        return torch.compile(model_of(value), backend="eager")

    def compute(model: nn.Module, session: Session) -> None:
        outputs.append(model(torch.ones(1, 1)).item())

    script = Script(script_of(compute, model=compiled))
    for number, value in ((1, 2.0), (2, 3.0)):
        script.train(order_of(number, steps=1, arrays=state_record(compiled(value))))
    script.exchange.finish(state_record(compiled(4.0)))
    script.thread.join(10)
    assert outputs == [1.0, 2.0, 3.0]


def test_samples_of_the_steps_are_reported_whatever_the_batch_size_of_the_order() -> None:
    def main() -> None:
        model = model_of()
        session = join(model, sgd(model))
        for size in (9, 5, 7, 1):
            session.step(samples=size)

    script = Script(main)
    report = script.train(order_of(steps=2))
    assert (report.num_examples, report.completed_steps, len(report.losses)) == (12, 2, 0)
    script.finish()


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a step of -0.1."""
    optimizer.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()


def test_a_script_that_calls_nothing_trains() -> None:
    def main() -> None:
        model = model_of(100.0)
        session = join(model, optimizer := sgd(model))
        while not session.done:
            take_step(model, optimizer)

    script = Script(main)
    report = script.train(order_of(1, steps=3, value=5.0))
    # The two steps before the first order began with the script's own model, and do not count.
    assert weight_of(report) == pytest.approx(4.7)
    assert (report.completed_steps, report.num_examples) == (3, 3 * BATCH)
    assert weight_of(script.train(order_of(2, steps=1, value=7.0))) == pytest.approx(6.9)
    script.finish(value=42.0)


def test_a_step_whose_gradients_are_dropped_does_not_count() -> None:
    """They are those of the last round's model, if that turns out at the next step."""

    def main() -> None:
        model = model_of()
        session = join(model, optimizer := sgd(model))
        session.average()  # the first order
        while not session.done:
            take_step(model, optimizer)

    script = Script(main)
    assert weight_of(script.train(order_of(1, steps=1, value=5.0))) == pytest.approx(4.9)
    assert weight_of(script.train(order_of(2, steps=1, value=7.0))) == pytest.approx(6.9)
    script.finish()


def test_a_script_with_the_sampler_that_calls_nothing_trains() -> None:
    def main() -> None:
        model = model_of(100.0)
        session = join(model, optimizer := sgd(model))
        for _ in loader_of(session):  # waits for the first order
            take_step(model, optimizer)
            if session.done:
                break

    script = Script(main)
    report = script.train(order_of(1, steps=2, value=5.0))
    assert weight_of(report) == pytest.approx(4.8)
    assert weight_of(script.train(order_of(2, steps=2, value=7.0))) == pytest.approx(6.8)
    script.finish()


def test_losses_that_choose_samples_are_demanded() -> None:
    def main() -> None:
        model = model_of()
        session = join(model, optimizer := sgd(model))
        for _ in loader_of(session, by_loss=True):
            take_step(model, optimizer)

    line = refusal(Script(main).train, order_of(steps=3, stream_stride=0))
    assert line.startswith("session.sampler(dataset, by_loss=True) needs the losses")


def test_a_step_within_a_step_counts_once() -> None:
    class Inner(torch.optim.SGD):
        """Its parent's step is hooked, too, once there has been one of the parent's."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)

    def main() -> None:
        model = model_of()
        sgd(model)
        session = join(model, optimizer := Inner(model.parameters(), lr=0.1))
        while not session.done:
            take_step(model, optimizer)
            session.step(samples=BATCH)

    script = Script(main)
    report = script.train(order_of(1, steps=2, value=5.0))
    assert (weight_of(report), report.completed_steps) == (pytest.approx(4.8), 2)
    script.finish()


def test_steps_are_counted_or_called_not_both() -> None:
    def main() -> None:
        model = model_of()
        session = join(model, optimizer := sgd(model))
        take_step(model, optimizer)
        take_step(model, optimizer)
        session.step(samples=BATCH)

    line = refusal(Script(main).train, order_of(steps=2))
    assert line.startswith("session.step: the optimizer took two steps without it")


def test_a_script_whose_steps_are_not_counted_is_reminded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("flower_blsgd.session.counting._REMINDER_SECONDS", 0.01)
    monkeypatch.setattr("flower_blsgd.session.counting.Timer", threading.Timer)
    reminded = threading.Event()
    monkeypatch.setattr(StepCounting, "_remind", told(StepCounting._remind, reminded))

    def main() -> None:
        model = model_of()
        session = join(model, sgd(model))
        assert reminded.wait(30)
        session.step(samples=BATCH)
        session.step(samples=BATCH)

    script = Script(main)
    script.train(order_of(steps=1))
    script.finish()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("worker 1: no step was counted in 0 s since flower_blsgd.join")


@pytest.mark.parametrize("workers", [0, 2])
def test_sampler_follows_the_stream_ahead_of_the_orders(workers: int) -> None:
    drawn: list[int] = []

    def main() -> None:
        model = model_of()
        session = join(model, sgd(model))
        for batch in loader_of(session, batch_size=session.batch_size, workers=workers):
            if session.done:
                break
            drawn.extend(batch.tolist())
            session.step(samples=len(batch))

    script = Script(main)
    for number in range(3):  # of each round's 12 samples, this worker has the last 8
        script.train(order_of(number + 1, stream_start=4 + 12 * number))
    script.finish()
    stream = permutation_stream(3, NUM_SAMPLES, 0, 36).reshape(3, 12)
    assert drawn[:24] == stream[:, 4:].ravel().tolist()


def test_losses_belong_to_the_samples_of_the_order_also_after_a_deadline() -> None:
    """The deadline ends the first order after one of two steps; the rest of it is not drawn."""

    def main() -> None:  # its losses are the numbers of its samples
        model = model_of()
        session = join(model, sgd(model))
        loader = loader_of(session, by_loss=True)
        while not session.done:
            for batch in loader:
                session.step(samples=len(batch), losses=batch.float())

    script = Script(main)
    first = script.train(order_of(1, stream_stride=0, deadline_seconds=1e-9))
    assert (first.completed_steps, first.losses.tolist()) == (1, [0, 1, 2, 3])
    for number in (2, 3):
        indices = np.arange(8, dtype=np.int32)[::-1] + 2 * number
        report = script.train(order_of(number, indices=indices, stream_stride=0))
        assert report.losses.tolist() == indices.tolist()
    script.finish()


@pytest.mark.parametrize("by_loss", [False, True])
def test_a_loader_that_begins_anew_goes_on_with_the_samples(by_loss: bool) -> None:
    drawn: list[int] = []

    def main() -> None:
        model = model_of()
        session = join(model, sgd(model))
        loader = loader_of(session, by_loss)
        while not session.done:
            batch = next(iter(loader))
            drawn.extend(batch.tolist())
            session.step(samples=len(batch), losses=batch.float() if by_loss else None)

    script = Script(main)
    stream = permutation_stream(3, NUM_SAMPLES, 0, 24)
    for number in range(2):  # of each round's 12 samples, this worker has the last 8
        start = 4 + 12 * number
        indices = stream[start : start + 8]
        place = {"stream_stride": 0} if by_loss else {"stream_start": start}
        report = script.train(order_of(number + 1, indices=indices, **place))
        assert drawn[8 * number : 8 * number + 8] == indices.tolist()
        assert not by_loss or report.losses.tolist() == indices.tolist()
    script.finish()


def test_optimizer_keeps_its_state_but_not_that_of_steps_before_the_run() -> None:
    """Tensors and numbers; both travel, as for a checkpoint, and return with an order."""

    class Counting(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    state["calls"] = state.get("calls", 0) + 1
                    state["mean"] = 0.5 * state.get("mean", 0.0) + 1.0
                    state["sum"] = state.get("sum", torch.zeros(1)) + 1
                    states.append((state["calls"], state["mean"], state["sum"].item()))

    states: list[object] = []
    made: list[Counting] = []

    def optimizer(model: nn.Module) -> Counting:
        made.append(Counting(model.parameters(), lr=0.1))
        return made[0]

    script = Script(script_of(lambda *_: made[0].step(), optimizer=optimizer))
    script.train(order_of(1, steps=2))
    kept = script.exchange.joined.result().optimizer_state()
    script.train(order_of(2, steps=1))
    script.train(order_of(3, steps=1, momentum=kept))
    script.finish()
    first, second, third = (1, 1.0, 1.0), (2, 1.5, 2.0), (3, 1.75, 3.0)
    assert states[:5] == [first, first, second, third, third]


@pytest.mark.parametrize("policy", ["keep", "average", "reset"])
def test_momentum_that_is_not_finite_is_removed_and_reported(policy: str) -> None:
    kept: list[int] = []
    made: list[torch.optim.Optimizer] = []

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made.append(torch.optim.Adam(model.parameters(), lr=0.1))
        return made[0]

    def overflow(model: nn.Module, session: Session) -> None:
        kept.append(len(made[0].state))
        model.weight.grad = torch.full((1, 1), 1e25)  # its square overflows
        made[0].step()

    script = Script(script_of(overflow, first_order, optimizer=optimizer))
    reports = [script.train(order_of(n, 1, momentum_policy=policy)) for n in (1, 2)]
    script.finish()
    was_reported = int(policy != "reset")  # which keeps nothing
    assert [report.momentum_zeroed for report in reports] == [was_reported] * 2
    assert [report.momentum for report in reports] == [None] * 2
    assert kept == [0, 0]


@pytest.mark.parametrize(
    "whole", [np.int64, np.uint8, np.array, torch.tensor, lambda n: torch.tensor([n])]
)
def test_integers_of_numpy_and_torch_are_integers(whole: Callable[[int], int]) -> None:
    def main() -> None:
        model = model_of()
        session = join(model, sgd(model))
        session.evaluate(lambda given: {"accuracy": 1.0}, every=whole(50))
        session.wait_for_first_order(whole(BATCH))
        while not session.done:
            session.step(samples=whole(BATCH), losses=torch.ones(BATCH))

    script = Script(main)
    report = script.train(order_of(steps=2))
    info = script.exchange.joined.result().info
    script.finish()
    found = report.samples, info.evaluate_every, info.batch_size
    assert (found, {type(number) for number in found}) == ((2 * BATCH, 50, BATCH), {int})


def test_a_paused_block_does_not_count_as_computing() -> None:
    def pause(model: nn.Module, session: Session) -> None:
        with session.paused():
            time.sleep(0.05)

    script = Script(script_of(pause))
    script.train(order_of(1, steps=1))
    began = time.perf_counter()
    report = script.train(order_of(2, steps=3))
    assert report.compute_seconds <= time.perf_counter() - began - 3 * 0.05
    script.finish()


def test_a_pause_around_an_average_leaves_out_its_part_in_the_next_steps() -> None:
    """Before that, the device waits for the others."""

    def main() -> None:
        model = model_of()
        session = join(model, sgd(model))
        session.average()  # the first order
        session.step(samples=BATCH)
        with session.paused():
            session.average()
            time.sleep(0.05)
        while not session.done:
            session.step(samples=BATCH)

    script = Script(main)
    assert script.train(order_of(1, steps=8)).completed_steps == 1
    time.sleep(0.1)
    began = time.perf_counter()
    report = script.train(order_of(2, steps=1))
    assert 0.0 <= report.compute_seconds <= time.perf_counter() - began - 0.05
    script.finish()


def test_a_slowdown_makes_steps_longer() -> None:
    script = Script(script_of(lambda *_: time.sleep(0.02)), WorkerSpec("cpu", slowdown=5.0))
    assert script.train(order_of(steps=2)).compute_seconds >= 0.2
    script.finish()


def test_average_ends_the_workers_part_of_the_round() -> None:
    def one_step(model: nn.Module, session: Session) -> None:
        session.average()
        session.step(samples=BATCH)
        session.average()

    script = Script(script_of(before=one_step))
    assert script.train(order_of(steps=8)).completed_steps == 1
    script.finish()


def test_scheduler_follows_the_progress_of_the_run() -> None:
    rates: list[float] = []
    made: list[torch.optim.Optimizer] = []

    def before(model: nn.Module, session: Session) -> None:
        session.scheduler(made[0], lambda progress: 1 - progress)
        session.average()

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(model.parameters(), lr=0.5))
        return made[0]

    def note(model: nn.Module, session: Session) -> None:
        rates.append(made[0].param_groups[0]["lr"])

    script = Script(script_of(note, before, optimizer=optimizer))
    orders = order_of(1, steps=1, progress=0.0), order_of(2, steps=2, progress=0.4)
    reports = [script.train(order) for order in orders]
    script.finish()
    assert rates == pytest.approx([0.5, 0.3, 0.3])
    assert [report.learning_rate for report in reports] == pytest.approx([0.5, 0.3])


def test_a_model_is_evaluated_without_changing_the_training() -> None:
    def before(model: nn.Module, session: Session) -> None:
        def figures(given: nn.Module) -> dict[str, torch.Tensor]:
            torch.rand(3)
            assert not given.training
            return {"loss": given.weight.detach()[0], "rmse": given.weight.detach()[0] + 1}

        session.evaluate(figures, metric="rmse", mode="min")
        torch.manual_seed(1)

    def add(model: nn.Module, session: Session) -> None:
        assert model.training
        model.weight.data += torch.rand(1)

    script = Script(script_of(add, before))
    script.exchange.joined.result(10)
    assert dict(script.evaluate(2.0).metrics()) == {"loss": 2.0, "rmse": 3.0}
    info = script.exchange.joined.result().info
    assert (info.metric_name, info.metric_mode, info.evaluate_every) == ("rmse", "min", 0)
    after = weight_of(script.train(order_of(steps=1)))
    script.finish()
    torch.manual_seed(1)
    torch.rand(1)
    assert after == torch.rand(1).item()


def test_a_part_in_eval_mode_stays_so_after_an_evaluation() -> None:
    def model() -> nn.Module:
        own = model_of()
        own.frozen = nn.Dropout().eval()
        return own

    def before(model: nn.Module, session: Session) -> None:
        session.evaluate(lambda given: {"accuracy": float(given.training)})

    def check(model: nn.Module, session: Session) -> None:
        modes.append((model.training, model.frozen.training))  # type: ignore[union-attr]

    modes: list[tuple[bool, bool]] = []
    script = Script(script_of(check, before, model))
    script.exchange.joined.result(10)
    assert script.evaluate().metrics()["accuracy"] == 0.0
    script.train(order_of(steps=1))
    script.finish()
    assert set(modes) == {(True, False)}


def evaluating(figures: Callable[[nn.Module], Any]) -> Callable[[], None]:
    return script_of(before=lambda model, session: session.evaluate(figures))


def test_a_worker_that_evaluates_stays_in_the_call_until_the_run_is_over() -> None:
    steps: list[int] = []

    def main() -> None:
        model = model_of()
        session = join(model, sgd(model))
        session.evaluate(lambda given: {"accuracy": given.weight.item()})
        for _ in session.sampler(range(NUM_SAMPLES)):
            steps.append(1)

    script = Script(main, EVALUATES)
    for value in (0.25, 0.5):
        assert script.evaluate(value).metrics()["accuracy"] == value
    script.finish()
    assert steps == []


def test_work_fails_when_the_script_raises_or_ends_early() -> None:
    def raising() -> None:
        raise RuntimeError("no data\nhere")

    with pytest.raises(UsageError, match="the script raised RuntimeError: no data"):
        Script(raising).exchange.joined.result(10)
    with pytest.raises(UsageError, match=r"until session\.done"):
        Script(lambda: None).train(order_of())
    with pytest.raises(UsageError, match=r"does not call session\.evaluate"):
        Script(script_of(), EVALUATES).exchange.joined.result(10)


def test_a_session_alone_changes_nothing() -> None:
    model = model_of(1.0)
    session = join(model, sgd(model))
    session.evaluate(lambda given: {"accuracy": 1.0})
    assert sorted(session.sampler(range(NUM_SAMPLES))) == list(range(NUM_SAMPLES))
    for _ in range(3):
        session.step(samples=BATCH)
    session.average()
    assert (session.is_main, session.is_alone, session.done) == (True, True, False)
    assert session.batch_size == RunConfig.batch_size  # the default
    assert model.weight.item() == 1.0  # type: ignore[union-attr,operator]
    session.close()
    assert session.done


def test_each_worker_has_its_own_seed_and_batch_size() -> None:
    workers = [WorkerSpec("cpu"), WorkerSpec("cpu", batch_size=7), WorkerSpec("cpu")]
    sessions = []
    for rank, worker in enumerate(workers):
        HERE.exchange, HERE.has_joined = Exchange(worker, rank, 3, BATCH, rank == 0), False
        model = model_of()
        sessions.append(join(model, sgd(model)))
    assert [session.batch_size for session in sessions] == [BATCH, 7, BATCH]
    assert len({session.seed for session in sessions}) == 3
    assert max(session.seed for session in sessions) < 2**32  # the most that numpy takes


@pytest.mark.parametrize(
    ("change", "begins", "found"),
    [
        (lambda counts: counts.add_(1), 1, 1),
        (lambda counts: counts.add_(1), 3, 3),  # at once
        (lambda counts: counts.data.add_(1), 3, 4),  # by its values, after rounds 1, 2, 4, ...
        (lambda counts: counts.data.add_(1), 5, 6),  # and at the end
    ],
)
def test_change_of_what_is_not_sent_ends_the_script_with_the_name(
    change: Callable[[torch.Tensor], object], begins: int, found: int
) -> None:
    steps: list[int] = []

    def model() -> nn.Module:
        own = model_of()
        own.register_buffer("counts", torch.zeros(2, dtype=torch.int64))
        return own

    def step(own: nn.Module, session: Session) -> None:
        steps.append(1)
        if len(steps) >= begins:
            change(own.counts)  # type: ignore[arg-type]

    script = Script(script_of(step, first_order, model))
    for number in range(1, min(found, 6)):
        script.train(order_of(number, steps=1))
    said = refusal(script.finish) if found > 5 else refusal(script.train, order_of(found, steps=1))
    assert said.startswith("model: training changed 'counts' (int64), which is neither averaged")


def test_what_a_session_refuses() -> None:
    model, other = model_of(), model_of()
    assert "1 of its 1 parameters are not the model's" in refusal(join, model, sgd(other))
    message = refusal(join, model, torch.optim.LBFGS(model.parameters()))
    assert message.startswith("optimizer: LBFGS computes curvature from its last steps")
    session = join(model, sgd(model))
    assert "join was called twice" in refusal(join, model, sgd(model))
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: session.step(samples=0), "samples = 0"),
        (lambda: session.step(samples=4, losses=torch.zeros(2)), r"shape \(2,\), not \(4,\)"),
        (lambda: session.sampler([]), "empty"),
        (lambda: session.evaluate(lambda given: {}, mode="up"), "mode"),
        (lambda: session.evaluate(lambda given: {}, every=1e4), r"every = 10000\.0 must be an int"),  # type: ignore[arg-type]
    ]
    for number in (4.0, "4", None, torch.tensor(4.0)):
        calls.append((lambda n=number: session.step(samples=n), "samples = .* must be an integer"))  # type: ignore[misc]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()


def frozen_meanwhile(model: nn.Module, session: Session) -> None:
    session.average()
    model.requires_grad_(False)
    session.step(samples=BATCH)


def too_large_for_the_sampler(model: nn.Module, session: Session) -> None:
    next(iter(session.sampler(range(NUM_SAMPLES))))
    session.step(samples=BATCH + 1)


def draws(by_loss: bool = False) -> Does:
    return lambda _, session: next(iter(session.sampler(range(NUM_SAMPLES), by_loss=by_loss)))


WEIGHTS = {"stream_stride": 0, "sample_weights": np.ones(8, np.float32)}


def test_model_that_is_not_finite_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="model: 'weight' has values that are not finite"):
        Script(script_of(model=lambda: model_of(math.inf))).train(order_of())


@pytest.mark.parametrize(
    ("bad", "order", "message"),
    [
        (frozen_meanwhile, {}, "requires_grad of 'weight' has changed since join"),
        (too_large_for_the_sampler, {}, r"5 samples, but session\.batch_size is 4"),
        # the run chooses by loss
        (lambda *_: None, {"stream_stride": 0}, "by_loss=True"),
        (draws(), {"stream_stride": 0}, "by_loss=True"),
        (draws(by_loss=True), WEIGHTS, "this run weighs samples, which scripts do not"),
    ],
)
def test_misuse_during_the_run_is_refused(bad: Does, order: dict[str, Any], message: str) -> None:
    script = Script(script_of(before=bad))
    with pytest.raises(UsageError, match=message):
        script.train(order_of(**order))


def test_figures_that_are_no_numbers_are_left_out_with_one_warning_each() -> None:
    bad = {
        "text": "0.9",
        "bytes": b"1",
        "none": None,
        "nested": {"a": 1},
        "list": [1],
        "huge": 10**400,
    }
    good = {"loss": np.float32(0.5), "f1": torch.tensor(0.25), "rank": True, "nan": math.nan}
    script = Script(evaluating(lambda _: {**good, **bad, "two": torch.ones(2)}))
    with captured_log() as log:
        reports = [script.evaluate() for _ in range(2)]
    script.finish()
    found = reports[1].totals
    assert math.isnan(found.pop("nan"))
    assert found == {"loss": 0.5, "f1": 0.25, "rank": 1.0}
    said = [line.split("'")[1] for line in log.lines(logging.WARNING)]
    assert said == [*bad, "two"]


@pytest.mark.parametrize("returned", [None, 0.5, "good", {}])
def test_a_function_without_named_numbers_does_not_end_the_script(returned: object) -> None:
    script = Script(evaluating(lambda _: returned))
    assert script.evaluate().totals == {}
    script.finish()
