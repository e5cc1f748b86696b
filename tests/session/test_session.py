"""A session without processes: a script's steps, and the orders that it answers."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
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
from flower_blsgd.protocol import EvaluateOrder, TrainOrder, TrainReport
from flower_blsgd.session.exchange import HERE, Exchange
from flower_blsgd.session.session import Session, join
from flower_blsgd.worker.model_io import state_record

from ..log_capture import captured_log
from ..refusal import refusal

NUM_SAMPLES, BATCH = 20, 4


@pytest.fixture(autouse=True)
def _no_session() -> Iterator[None]:
    HERE.exchange, HERE.has_joined = None, False
    yield
    HERE.exchange, HERE.has_joined = None, False


def model_of(value: float = 0.0) -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(value)
    return model


def order_of(
    round: int = 1, steps: int = 2, *, value: float = 0.0, **changes: object
) -> TrainOrder:
    defaults: dict[str, object] = {
        "epoch": 1,
        "batch_size": BATCH,
        "learning_rate": 0.1,
        "seed": 0,
        "deadline_seconds": 0.0,
        "momentum_policy": "keep",
        "indices": np.arange(steps * BATCH, dtype=np.int32),
        "arrays": state_record(model_of(value)),
        "stream_start": 0,
        "stream_stride": 3 * BATCH,
    }
    return TrainOrder(round=round, local_steps=steps, **{**defaults, **changes})  # type: ignore[arg-type]


class Script:
    """A script in a thread, and the server's side of its exchange."""

    def __init__(self, main: Callable[[], None], worker: WorkerSpec | None = None) -> None:
        self.exchange = Exchange(
            worker or WorkerSpec("cpu"), 1, seed=3, batch_size=BATCH, is_main=False
        )
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

    def finish(self, value: float = 0.0) -> None:
        self.exchange.finish(state_record(model_of(value)))
        self.thread.join(10)
        if self.error is not None:
            raise self.error


def weight_of(report: TrainReport) -> float:
    return float(next(iter(report.arrays.values())).numpy().item())


def adding(step: float, seen: list[float] | None = None) -> Callable[[], None]:
    """Return a script that adds `step` to the weight in every step, and notes it in the end."""

    def main() -> None:
        model = model_of(100.0)
        session = join(model, torch.optim.SGD(model.parameters(), lr=0.1))
        while not session.done:
            with torch.no_grad():
                model.weight += step
            session.step(samples=BATCH)
        if seen is not None:
            seen.append(model.weight.item())

    return main


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_state_of_a_restored_optimizer_moves_with_the_model() -> None:
    """And the figures of a script may draw random numbers on the card."""
    seen: list[object] = []

    def main() -> None:
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def take_step(device: torch.device) -> None:
            model(torch.ones(BATCH, 1, device=device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        take_step(torch.device("cpu"))
        session = join(model, optimizer)
        (state,) = optimizer.state.values()
        seen.extend([state["exp_avg"].device, state["exp_avg"].item(), state["step"].device])
        session.evaluate(lambda model: {"accuracy": torch.rand((), device=session.device).item()})
        while not session.done:
            take_step(session.device)
            session.step(samples=BATCH)

    script = Script(main, WorkerSpec("cuda:0"))
    before = torch.cuda.get_rng_state(0)
    script.exchange.evaluate(EvaluateOrder(0, 0, 1, state_record(model_of())))
    assert torch.equal(torch.cuda.get_rng_state(0), before)
    assert script.train(order_of()).completed_steps == 2
    script.finish()
    assert seen == [torch.device("cuda:0"), pytest.approx(0.1 * BATCH), torch.device("cpu")]


def test_each_order_begins_with_its_model_and_has_its_number_of_steps() -> None:
    seen: list[float] = []
    script = Script(adding(1.0, seen))
    report = script.train(order_of(1, steps=3, value=5.0))
    # The step before the first order began with the script's own model, and does not count.
    assert (weight_of(report), report.completed_steps, report.num_examples) == (8.0, 3, 12)
    assert weight_of(script.train(order_of(2, steps=1, value=7.0))) == 8.0
    script.finish(value=42.0)
    assert seen == [42.0]


def test_samples_of_the_steps_are_reported_whatever_the_batch_size_of_the_order() -> None:
    def main() -> None:
        model = model_of()
        session = join(model, torch.optim.SGD(model.parameters(), lr=0.1))
        sizes = iter([9, 5, 7, 1])
        while not session.done:
            session.step(samples=next(sizes))

    script = Script(main)
    report = script.train(order_of(steps=2))
    assert (report.num_examples, report.completed_steps, len(report.losses)) == (12, 2, 0)
    script.finish()


@pytest.mark.parametrize("workers", [0, 2])
def test_sampler_follows_the_stream_ahead_of_the_orders(workers: int) -> None:
    drawn: list[int] = []

    def main() -> None:
        model = model_of()
        session = join(model, torch.optim.SGD(model.parameters(), lr=0.1))
        sampler = session.sampler(range(NUM_SAMPLES))
        loader = DataLoader(
            list(range(NUM_SAMPLES)),  # type: ignore[arg-type]
            batch_size=session.batch_size,
            sampler=sampler,
            num_workers=workers,
        )
        for batch in loader:
            if session.done:
                break
            drawn.extend(batch.tolist())
            session.step(samples=len(batch))

    script = Script(main)
    for number in range(3):  # of each round's 12 samples, this worker has the last 8
        order = order_of(number + 1, stream_start=4 + 12 * number)
        script.train(order)
    script.finish()
    stream = permutation_stream(3, NUM_SAMPLES, 0, 36).reshape(3, 12)
    assert drawn[:24] == stream[:, 4:].ravel().tolist()


def train_by_loss() -> None:
    """A script whose losses are the numbers of its samples."""
    model = model_of()
    session = join(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sampler = session.sampler(range(NUM_SAMPLES), by_loss=True)
    loader = DataLoader(list(range(NUM_SAMPLES)), batch_size=BATCH, sampler=sampler)  # type: ignore[arg-type]
    while not session.done:
        for batch in loader:
            session.step(samples=len(batch), losses=batch.float())


def test_sampler_by_loss_follows_the_orders_and_losses_are_reported() -> None:
    script = Script(train_by_loss)
    for number in range(2):
        indices = np.arange(8, dtype=np.int32)[::-1] + number
        report = script.train(order_of(number + 1, indices=indices, stream_stride=0))
        assert report.losses.tolist() == indices.tolist()
    script.finish()


def test_losses_belong_to_the_samples_of_the_order_also_after_a_deadline() -> None:
    """The deadline ends the first order after one of two steps; the rest of it is not drawn."""
    script = Script(train_by_loss)
    first = script.train(order_of(1, stream_stride=0, deadline_seconds=1e-9))
    indices = np.arange(8, dtype=np.int32) + 10
    second = script.train(order_of(2, indices=indices, stream_stride=0))
    script.finish()
    assert (first.completed_steps, first.losses.tolist()) == (1, [0, 1, 2, 3])
    assert second.losses.tolist() == indices.tolist()


@pytest.mark.parametrize("has_sampler", [False, True])
def test_uniform_samples_are_refused_if_the_run_chooses_by_loss(has_sampler: bool) -> None:
    def main() -> None:
        model = model_of()
        session = join(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if has_sampler:
            next(iter(session.sampler(range(NUM_SAMPLES))))
        session.average()

    script = Script(main)
    with pytest.raises(UsageError, match="by_loss=True"):
        script.train(order_of(stream_stride=0))


def test_weights_of_samples_are_refused() -> None:
    def main() -> None:
        model = model_of()
        session = join(model, torch.optim.SGD(model.parameters(), lr=0.1))
        next(iter(session.sampler(range(NUM_SAMPLES), by_loss=True)))

    script = Script(main)
    with pytest.raises(UsageError, match="this run weighs samples, which scripts do not"):
        script.train(order_of(stream_stride=0, sample_weights=np.ones(8, np.float32)))


def test_optimizer_keeps_its_state_but_not_that_of_steps_before_the_run() -> None:
    states: list[float] = []

    def main() -> None:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        session = join(model, optimizer)
        while not session.done:
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
            if optimizer.state[model.weight]:
                states.append(optimizer.state[model.weight]["momentum_buffer"].item())
            session.step(samples=BATCH)

    script = Script(main)
    script.train(order_of(1, steps=2))
    script.train(order_of(2, steps=1))
    script.finish()
    assert states[:4] == [1.0, 1.0, 1.5, 1.75]  # the first step is before the run


def test_numbers_in_the_optimizers_state_travel_and_return() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    state["calls"] = state.get("calls", 0) + 1
                    state["mean"] = 0.5 * state.get("mean", 0.0) + 1.0

    states: list[object] = []

    def main() -> None:
        model = model_of()
        optimizer = Counting(model.parameters(), lr=0.1)
        session = join(model, optimizer)
        while not session.done:
            optimizer.step()
            session.step(samples=BATCH)
            states.append(dict(optimizer.state[model.weight]))

    script = Script(main)
    script.train(order_of(1, steps=3))
    kept = script.exchange.joined.result().optimizer_state()
    script.train(order_of(2, steps=1))
    script.train(order_of(3, steps=1, momentum=kept))
    script.finish()
    assert states[-1] == {"calls": 4, "mean": 1.875}


@pytest.mark.parametrize("policy", ["keep", "average", "reset"])
def test_momentum_that_is_not_finite_is_removed_and_reported(policy: str) -> None:
    kept: list[int] = []

    def main() -> None:
        model = model_of()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        session = join(model, optimizer)
        session.average()
        while not session.done:
            kept.append(len(optimizer.state))
            model.weight.grad = torch.full_like(model.weight, 1e25)  # its square overflows
            optimizer.step()
            session.step(samples=BATCH)

    script = Script(main)
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
        session = join(model, torch.optim.SGD(model.parameters(), lr=0.1))
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
    def main() -> None:
        model = model_of()
        session = join(model, torch.optim.SGD(model.parameters(), lr=0.1))
        while not session.done:
            with session.paused():
                threading.Event().wait(0.05)
            session.step(samples=BATCH)

    script = Script(main)
    script.train(order_of(1, steps=1))
    began = time.perf_counter()
    report = script.train(order_of(2, steps=3))
    assert report.compute_seconds <= time.perf_counter() - began - 3 * 0.05
    script.finish()


def test_a_slowdown_makes_steps_longer() -> None:
    def main() -> None:
        model = model_of()
        session = join(model, torch.optim.SGD(model.parameters(), lr=0.1))
        while not session.done:
            threading.Event().wait(0.02)
            session.step(samples=BATCH)

    script = Script(main, WorkerSpec("cpu", slowdown=5.0))
    assert script.train(order_of(steps=2)).compute_seconds >= 0.2
    script.finish()


def test_average_ends_the_workers_part_of_the_round() -> None:
    def main() -> None:
        model = model_of()
        session = join(model, torch.optim.SGD(model.parameters(), lr=0.1))
        session.average()
        session.step(samples=BATCH)
        session.average()
        while not session.done:
            session.step(samples=BATCH)

    script = Script(main)
    assert script.train(order_of(steps=8)).completed_steps == 1
    script.finish()


def test_scheduler_follows_the_progress_of_the_run() -> None:
    rates: list[float] = []

    def main() -> None:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        session = join(model, optimizer)
        session.scheduler(optimizer, lambda progress: 1 - progress)
        session.average()
        while not session.done:
            rates.append(optimizer.param_groups[0]["lr"])
            session.step(samples=BATCH)

    script = Script(main)
    reports = [
        script.train(order_of(1, steps=1, progress=0.0)),
        script.train(order_of(2, steps=2, progress=0.4)),
    ]
    script.finish()
    assert rates == pytest.approx([0.5, 0.3, 0.3])
    assert [report.learning_rate for report in reports] == pytest.approx([0.5, 0.3])


def test_a_model_is_evaluated_without_changing_the_training() -> None:
    def main() -> None:
        model = model_of()
        session = join(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def figures(given: nn.Module) -> dict[str, torch.Tensor]:
            torch.rand(3)
            assert not given.training
            return {"loss": given.weight.detach()[0], "rmse": given.weight.detach()[0] + 1}

        session.evaluate(figures, metric="rmse", mode="min")
        torch.manual_seed(1)
        while not session.done:
            assert model.training
            with torch.no_grad():
                model.weight += torch.rand(1)
            session.step(samples=BATCH)

    order, then = EvaluateOrder(1, 0, 1, state_record(model_of(2.0))), order_of(steps=1)
    end = state_record(model_of())
    script = Script(main)
    script.exchange.joined.result(10)
    report = script.exchange.evaluate(order)
    assert dict(report.metrics()) == {"loss": 2.0, "rmse": 3.0}
    info = script.exchange.joined.result().info
    assert (info.metric_name, info.metric_mode, info.evaluate_every) == ("rmse", "min", 0)
    after = weight_of(script.train(then))
    script.exchange.finish(end)
    torch.manual_seed(1)
    torch.rand(1)
    assert after == torch.rand(1).item()


def evaluating(returned: Any) -> Callable[[], None]:
    """Return a script whose function for evaluating returns this."""

    def main() -> None:
        model = model_of()
        session = join(model, torch.optim.SGD(model.parameters(), lr=0.1))
        session.evaluate(lambda given: returned)
        while not session.done:
            session.step(samples=BATCH)

    return main


def test_a_worker_that_evaluates_stays_in_the_call_until_the_run_is_over() -> None:
    steps: list[int] = []

    def main() -> None:
        model = model_of()
        session = join(model, torch.optim.SGD(model.parameters(), lr=0.1))
        session.evaluate(lambda given: {"accuracy": given.weight.item()})
        for _ in session.sampler(range(NUM_SAMPLES)):
            steps.append(1)

    script = Script(main, WorkerSpec("cpu", role="evaluate"))
    for value in (0.25, 0.5):
        order = EvaluateOrder(1, 0, 1, state_record(model_of(value)))
        assert script.exchange.evaluate(order).metrics()["accuracy"] == value
    script.finish()
    assert steps == []


def test_work_fails_when_the_script_raises_or_ends_early() -> None:
    def raising() -> None:
        raise RuntimeError("no data\nhere")

    with pytest.raises(UsageError, match="the script raised RuntimeError: no data"):
        Script(raising).exchange.joined.result(10)
    script = Script(lambda: None)
    with pytest.raises(UsageError, match=r"until session\.done"):
        script.train(order_of())


def test_a_session_alone_changes_nothing() -> None:
    model = model_of(1.0)
    session = join(model, torch.optim.SGD(model.parameters(), lr=0.1))
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
        sessions.append(join(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    assert [session.batch_size for session in sessions] == [BATCH, 7, BATCH]
    assert len({session.seed for session in sessions}) == 3


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
    def main() -> None:
        model, number = model_of(), 0
        model.register_buffer("counts", torch.zeros(2, dtype=torch.int64))
        session = join(model, torch.optim.SGD(model.parameters(), lr=0.1))
        session.average()
        while not session.done:
            number += 1
            if number >= begins:
                change(model.counts)  # type: ignore[arg-type]
            session.step(samples=BATCH)

    script = Script(main)
    for number in range(1, min(found, 6)):
        script.train(order_of(number, steps=1))
    said = refusal(script.finish) if found > 5 else refusal(script.train, order_of(found, steps=1))
    assert said.startswith("model: training changed 'counts' (int64), which is neither averaged")


def test_what_a_session_refuses() -> None:
    model, other = model_of(), model_of()
    message = refusal(join, model, torch.optim.SGD(other.parameters(), lr=0.1))
    assert "1 of its 1 parameters are not the model's" in message
    message = refusal(join, model, torch.optim.LBFGS(model.parameters()))
    assert message.startswith("optimizer: LBFGS computes curvature from its last steps")
    session = join(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "join was called twice" in refusal(join, model, torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match="samples = 0"):
        session.step(samples=0)
    for number in (4.0, "4", None, torch.tensor(4.0)):
        with pytest.raises(ValueError, match=r"samples = .* must be an integer"):
            session.step(samples=number)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"shape \(2,\), not \(4,\)"):
        session.step(samples=4, losses=torch.zeros(2))
    with pytest.raises(ValueError, match="empty"):
        session.sampler([])
    with pytest.raises(ValueError, match="mode"):
        session.evaluate(lambda given: {}, mode="up")
    with pytest.raises(ValueError, match=r"evaluate: every = 10000\.0 must be an integer"):
        session.evaluate(lambda given: {}, every=1e4)  # type: ignore[arg-type]


def frozen_meanwhile(model: nn.Module, session: Session) -> None:
    model.requires_grad_(False)
    session.step(samples=BATCH)


def too_large_for_the_sampler(model: nn.Module, session: Session) -> None:
    next(iter(session.sampler(range(NUM_SAMPLES))))
    session.step(samples=BATCH + 1)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (frozen_meanwhile, "requires_grad of 'weight' has changed since join"),
        (too_large_for_the_sampler, "5 samples, but session.batch_size is 4"),
    ],
)
def test_misuse_during_the_run_is_refused(
    bad: Callable[[nn.Module, Session], None], message: str
) -> None:
    def main() -> None:
        model = model_of()
        session = join(model, torch.optim.SGD(model.parameters(), lr=0.1))
        session.average()
        bad(model, session)

    script = Script(main)
    with pytest.raises(UsageError, match=message.replace(".", r"\.")):
        script.train(order_of(steps=1))


def test_evaluating_worker_needs_a_function() -> None:
    script = Script(adding(1.0), WorkerSpec("cpu", role="evaluate"))
    with pytest.raises(UsageError, match=r"does not call session\.evaluate"):
        script.exchange.joined.result(10)


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
    script = Script(evaluating({**good, **bad, "two": torch.ones(2)}))
    order = EvaluateOrder(1, 0, 1, state_record(model_of()))
    with captured_log() as log:
        reports = [script.exchange.evaluate(order) for _ in range(2)]
    script.finish()
    found = reports[1].totals
    assert math.isnan(found.pop("nan"))
    assert found == {"loss": 0.5, "f1": 0.25, "rank": 1.0}
    said = [line.split("'")[1] for line in log.lines(logging.WARNING)]
    assert said == [*bad, "two"]


@pytest.mark.parametrize("returned", [None, 0.5, "good", {}])
def test_a_function_without_named_numbers_does_not_end_the_script(returned: object) -> None:
    script = Script(evaluating(returned))
    order = EvaluateOrder(1, 0, 1, state_record(model_of()))
    assert script.exchange.evaluate(order).totals == {}
    script.finish()
