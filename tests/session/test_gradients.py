"""Sessions that average gradients: two scripts against one process with all batches."""

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from flower_blsgd.algorithm.averaging import weighted_average
from flower_blsgd.devices.worker_spec import WorkerSpec
from flower_blsgd.errors import UsageError
from flower_blsgd.flower.array_records import tensors_of, view_record
from flower_blsgd.protocol import TrainReport
from flower_blsgd.session.exchange import Exchange, Work
from flower_blsgd.session.session import Session
from flower_blsgd.worker.model_io import state_record

from ..small_training import data, make_model
from .orders import order_of

STEPS, CLIP, RATE = 5, 0.3, 0.1
BATCHES = (4, 2)
_FIRST = make_model()  # threads would seed the same generator


def first_model() -> nn.Module:
    return copy.deepcopy(_FIRST)


Do = Callable[[Session, nn.Module, torch.optim.Optimizer, Tensor], None]
"""Does one step on these samples of the data."""


def loss_of(model: nn.Module, chosen: Tensor) -> Tensor:
    inputs, targets = data()
    return nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen])


def samples_of(step: int, rank: int) -> Tensor:
    first = 6 * step + (0, BATCHES[0])[rank]
    return torch.arange(first, first + BATCHES[rank]) % 48


def plain(session: Session, model: nn.Module, optimizer: Any, chosen: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, chosen).backward()
    optimizer.step()
    session.step(samples=len(chosen))


def counted(session: Session, model: nn.Module, optimizer: Any, chosen: Tensor) -> None:
    """Without a call after the step, and clipped."""
    optimizer.zero_grad()
    loss_of(model, chosen).backward()
    session.average_gradients()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()


def clipped(session: Session, model: nn.Module, optimizer: Any, chosen: Tensor) -> None:
    counted(session, model, optimizer, chosen)
    session.step(samples=len(chosen))


def accumulated(session: Session, model: nn.Module, optimizer: Any, chosen: Tensor) -> None:
    optimizer.zero_grad()
    for part in chosen.chunk(2):
        (loss_of(model, part) / 2).backward()
    optimizer.step()
    session.step(samples=len(chosen))
    session.average()  # it is the averaged one


def in_closure(session: Session, model: nn.Module, optimizer: Any, chosen: Tensor) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, chosen)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)
    session.step(samples=len(chosen))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1, fused=True)


class Script:
    """A script in a thread, and the server's side of its exchange."""

    def __init__(self, rank: int, do: Do, make: Any = adamw, prepare: Any = None) -> None:
        self.exchange = Exchange(WorkerSpec("cpu"), rank, 3, BATCHES[rank], is_main=rank == 0)
        self.error: BaseException | None = None
        self.progress: list[float] = []
        self.rates: list[float] = []
        self.changed: list[bool] = []

        def main() -> None:
            model = first_model()
            optimizer = make(model)
            session = Session(model, optimizer, self.exchange)
            if prepare:
                prepare(session, optimizer)
            session.wait_for_first_order()
            step = 0
            while not session.done:
                self.progress.append(session.progress)
                self.rates.append(optimizer.param_groups[0]["lr"])
                before = session.order
                do(session, model, optimizer, samples_of(step, rank))
                self.changed.append(session.order is not before)
                step += 1
            self.model = model

        def run() -> None:
            try:
                main()
            except BaseException as error:
                self.error = error
            self.exchange.end(self.error)

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def finish(self, arrays: ArrayRecord) -> None:
        self.exchange.finish(arrays)
        self.thread.join(10)
        if self.error:
            raise self.error


def averaged(reports: Sequence[TrainReport]) -> ArrayRecord:
    total = sum(report.num_examples for report in reports)
    weights = [report.num_examples / total for report in reports]
    return view_record(weighted_average([tensors_of(r.arrays) for r in reports], weights))


def all_train(scripts: Sequence[Script], orders: Sequence[Any]) -> list[TrainReport]:
    reports: dict[int, Any] = {}

    def train(i: int) -> None:
        try:
            reports[i] = scripts[i].exchange.train(orders[i])
        except UsageError as error:
            reports[i] = error

    threads = [threading.Thread(target=train, args=(i,)) for i in range(len(scripts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    for report in reports.values():
        if isinstance(report, Exception):
            raise report
        assert all(np.isfinite(tensor).all() for tensor in tensors_of(report.arrays).values())
    return [reports[i] for i in range(len(scripts))]


def train(scripts: Sequence[Script], steps: int = STEPS) -> list[TrainReport]:
    """Order these steps and the model, which ends the scripts; return the last reports."""
    arrays, brings = state_record(_FIRST), "model"
    settings: dict[str, Any] = {"momentum_policy": "average", "returns": "gradient"}
    for step in range(1, steps + 1):
        own = {**settings, "brings": brings, "progress": step / 10}
        orders = [order_of(step, 1, arrays, BATCHES[i], **own) for i, _ in enumerate(scripts)]
        reports = all_train(scripts, orders)
        arrays = averaged(reports)
        brings = "skip" if any(not r.completed_steps for r in reports) else "gradient"
    last = {"momentum_policy": "average", "brings": brings, "indices": np.empty(0, np.int32)}
    reports = all_train(scripts, [order_of(steps + 1, 0, arrays, 1, **last)] * len(scripts))
    for script in scripts:
        script.finish(reports[0].arrays)
    return reports


def one_process(
    make: Any, clip: float = 0.0, left_out: Sequence[int] = (), rates: Sequence[float] = ()
) -> nn.Module:
    model = first_model()
    optimizer = make(model)
    for step in range(STEPS):
        if step in left_out:
            continue
        chosen = torch.cat([samples_of(step, rank) for rank in range(2)])
        for group in optimizer.param_groups:
            group["lr"] = rates[step] if rates else RATE
        optimizer.zero_grad()
        loss_of(model, chosen).backward()
        if clip:
            assert nn.utils.clip_grad_norm_(model.parameters(), clip) > clip
        optimizer.step()
    return model


def furthest(arrays: ArrayRecord, model: nn.Module) -> float:
    expected = model.state_dict()
    found = tensors_of(arrays)
    assert found.keys() == expected.keys()
    return max(float(np.abs(found[n] - expected[n].numpy()).max()) for n in found)


@pytest.mark.parametrize(
    ("do", "clip"),
    [(plain, 0), (clipped, CLIP), (accumulated, 0), (in_closure, 0), (counted, CLIP)],
)
@pytest.mark.parametrize("make", [sgd, adamw])
def test_two_scripts_are_one_process_with_both_batches(do: Do, clip: float, make: Any) -> None:
    scripts = [Script(rank, do, make) for rank in range(2)]
    reports = train(scripts)
    model = one_process(make, clip)
    for script, report in zip(scripts, reports, strict=True):
        assert furthest(report.arrays, model) < 1e-6
        assert furthest(state_record(script.model), model) < 1e-6
        # The model is the averaged one after each step.
        assert script.changed == [do is not counted, *[True] * (STEPS - 1)]
    first, second = (tensors_of(report.momentum or ArrayRecord()) for report in reports)
    assert first
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_the_rate_of_a_step_is_that_of_its_own_order() -> None:
    def prepare(session: Session, optimizer: torch.optim.Optimizer) -> None:
        session.scheduler(optimizer, lambda progress: 1 - progress)

    scripts = [Script(rank, plain, prepare=prepare) for rank in range(2)]
    reports = train(scripts)
    rates = [RATE * (1 - step / 10) for step in range(1, STEPS + 1)]
    assert scripts[0].rates == pytest.approx(rates)
    assert scripts[1].progress == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert furthest(reports[0].arrays, one_process(adamw, rates=rates)) < 1e-6


_OVERFLOWS = (
    "in the step",
    "before the step",
    "before the step, counted",
    "fused",
    "zeroed at once",
)


@pytest.mark.parametrize("kind", _OVERFLOWS)
def test_an_overflow_of_one_skips_the_step_of_all(kind: str) -> None:
    """The gradients of the script of rank 1 overflow in its step 2, from 0."""
    make = fused if kind == "fused" else adamw

    def does(rank: int) -> Do:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        step = 0

        def do(session: Session, model: nn.Module, optimizer: Any, chosen: Tensor) -> None:
            nonlocal step
            optimizer.zero_grad()
            overflow = torch.inf if step == 2 and rank == 1 else 1.0
            scaler.scale(loss_of(model, chosen) * overflow).backward()
            if kind.startswith("before"):
                scaler.unscale_(optimizer)
                session.average_gradients()
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            scaler.step(optimizer)
            scaler.update()
            if kind == "zeroed at once":
                optimizer.zero_grad()
            if not kind.endswith("counted"):
                session.step(samples=len(chosen))
            step += 1
            assert scaler.get_scale() == (128.0 if rank == 1 and step > 2 else 256.0)

        return do

    scripts = [Script(rank, does(rank), make) for rank in range(2)]
    reports = train(scripts)
    model = one_process(make, CLIP if kind.startswith("before") else 0.0, left_out=[2])
    for script in scripts:
        assert furthest(state_record(script.model), model) < 1e-6
    assert furthest(reports[0].arrays, model) < 1e-6


def test_a_script_that_is_given_a_model_meanwhile_continues_with_it() -> None:
    """Its reply was late, so the server has continued without it."""
    script = Script(0, plain)
    own: dict[str, Any] = {"momentum_policy": "average", "returns": "gradient"}
    first, second = state_record(_FIRST), first_model()
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.add_(1.0)
    script.exchange.train(order_of(1, 1, first, 4, **own))
    report = script.exchange.train(order_of(4, 1, state_record(second), 4, **own))
    loss_of(second, samples_of(1, 0)).backward()
    for name, parameter in second.named_parameters():
        assert parameter.grad is not None
        assert np.allclose(report.arrays[name].numpy(), parameter.grad.numpy(), atol=1e-6)
    script.finish(first)
    assert furthest(first, script.model) == 0.0


def test_after_close_a_script_takes_its_own_steps() -> None:
    def do(session: Session, model: nn.Module, optimizer: Any, chosen: Tensor) -> None:
        plain(session, model, optimizer, chosen)
        session.close()
        loss_of(model, chosen).backward()
        session.average_gradients()
        optimizer.step()

    script = Script(0, do)
    with pytest.raises(UsageError, match="ended before the run was over"):
        train([script])
    script.thread.join(10)
    assert script.error is None


def without_step(session: Session, model: nn.Module, optimizer: Any, chosen: Tensor) -> None:
    loss_of(model, chosen).backward()
    session.step(samples=len(chosen))


class Twice(torch.optim.SGD):
    """Evaluates its closure twice, as sharpness-aware optimizers do."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        closure()
        return super().step(closure)


def twice(model: nn.Module) -> torch.optim.Optimizer:
    return Twice(model.parameters(), lr=RATE)


def by_loss(session: Session, _: Any) -> None:
    session.sampler(range(48), by_loss=True)


def chosen_by_server(session: Session, _: Any) -> None:
    assert session._orders is not None
    exchange = session._orders.exchange
    next_work = exchange.next_work

    def without_stream() -> Work:
        work = next_work()
        return replace(work, order=replace(work.order, stream_stride=0))

    exchange.next_work = without_stream


@pytest.mark.parametrize(
    ("do", "make", "prepare", "told"),
    [
        (without_step, adamw, None, "session.step was called without a step of the optimizer"),
        (in_closure, twice, None, "evaluates its closure once"),
        (plain, adamw, by_loss, "without by_loss"),
        (plain, adamw, chosen_by_server, "sampler=uniform without selection"),
    ],
)
def test_what_is_refused(do: Do, make: Any, prepare: Any, told: str) -> None:
    scripts = [Script(rank, do, make, prepare) for rank in range(2)]
    with pytest.raises(UsageError, match=told):
        train(scripts)
    for script in scripts:
        script.exchange.end(None)
        script.thread.join(10)
