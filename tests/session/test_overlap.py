"""A script that begins a round on its own model, and the orders that it answers."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flower_blsgd.errors import UsageError
from flower_blsgd.session.exchange import HERE
from flower_blsgd.session.session import Session
from flower_blsgd.worker.model_io import state_record

from .orders import BATCH
from .test_session import (
    Script,
    first_order,
    loader_of,
    model_of,
    order_of,
    script_of,
    weight_of,
)

NEXT = {"next_indices": np.arange(BATCH, dtype=np.int32)}


class Halves:
    """Steps with the gradient 5 w, whose rate 0.1 halves w, and the weights after them."""

    def __init__(self, momentum: float = 0.0) -> None:
        self.momentum = momentum
        self.weights: list[float] = []

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=self.momentum)
        return self.sgd

    def step(self, model: nn.Module, session: Session) -> None:
        (weight,) = model.parameters()
        weight.grad = 5 * weight.detach()
        self.sgd.step()
        self.weights.append(float(weight.detach()))


def begun(halves: Halves) -> Script:
    return Script(script_of(step=halves.step, optimizer=halves.optimizer))


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(
    ("momentum", "steps", "weight"),
    [
        (0.0, 1, 0.6 - 0.125),  # the first step is that of the own model, 0.25
        (0.0, 2, 0.475 / 2),
        # w = 0.5, v = 5; - 0.2, v = 7; v = 6.3 - 1 = 5.3; v = 4.77 + 0.35 = 5.12
        (0.9, 2, 0.6 - 0.53 - 0.512),
    ],
)
def test_first_step_is_on_the_own_model(
    momentum: float, steps: int, weight: float, ahead: bool
) -> None:
    """Whether it is done before the order arrives or after does not matter."""
    script = begun(Halves(momentum))
    script.train(order_of(1, 2, value=1.0, **(NEXT if ahead else {})))
    report = script.train(order_of(2, steps, value=0.6, overlap=True))
    assert weight_of(report) == pytest.approx(weight)
    assert (report.completed_steps, report.num_examples) == (steps, steps * BATCH)
    script.finish()


def test_script_begins_with_the_own_model_that_an_order_brings() -> None:
    """After a resume, with its momentum: v = 7 from the round before."""
    own, momentum = state_record(model_of(-0.2)), state_record(model_of(7.0))
    script = begun(Halves(0.9))
    order = order_of(3, 2, value=0.6, overlap=True, own_model=own, momentum=momentum)
    assert weight_of(script.train(order)) == pytest.approx(0.6 - 0.53 - 0.512)
    script.finish()


@pytest.mark.parametrize("ahead", [True, False])
def test_first_step_has_the_progress_of_the_last_round(ahead: bool) -> None:
    seen: list[tuple[float, float]] = []

    def before(_: nn.Module, session: Session) -> None:
        session.scheduler(halves.sgd, lambda progress: 1 - progress)
        session.average()

    def step(model: nn.Module, session: Session) -> None:
        seen.append((session.progress, halves.sgd.param_groups[0]["lr"]))

    halves = Halves()
    script = Script(script_of(step, before, optimizer=halves.optimizer))
    script.train(order_of(1, 2, progress=0.2, **(NEXT if ahead else {})))
    script.train(order_of(2, 2, progress=0.5, overlap=True, last_progress=0.2))
    script.finish()
    assert seen[:4] == [(p, pytest.approx(0.1 * (1 - p), abs=1e-9)) for p in (0.2, 0.2, 0.2, 0.5)]


def test_worker_that_has_no_own_model_begins_from_the_average() -> None:
    """One of a new process, and one whose model was replaced for an evaluation."""

    def before(_: nn.Module, session: Session) -> None:
        session.evaluate(lambda _: {"accuracy": 1.0})

    halves = Halves()
    script = Script(script_of(halves.step, before, optimizer=halves.optimizer))
    assert weight_of(script.train(order_of(4, 2, value=0.6, overlap=True))) == pytest.approx(0.15)
    assert script.exchange.own_model()
    script.evaluate(8.0)
    assert not script.exchange.own_model()
    assert weight_of(script.train(order_of(5, 2, value=0.8, overlap=True))) == pytest.approx(0.2)
    script.finish()


def test_first_step_after_a_failed_round_has_no_effect() -> None:
    """Its momentum is forgotten, too: 0.6 - 0.1 x 5 x 0.6."""
    script = begun(Halves(0.9))
    script.train(order_of(1, 2, value=1.0, **NEXT))
    assert weight_of(script.train(order_of(2, 1, value=0.6))) == pytest.approx(0.3)
    script.finish()


def test_evaluation_and_the_end_during_a_first_step() -> None:
    """The model of the evaluation does not matter; the final model replaces all."""
    seen: list[float] = []

    def before(model: nn.Module, session: Session) -> None:
        session.evaluate(lambda model: seen.append(model.weight.item()) or {"accuracy": 1.0})
        session.average()

    halves = Halves()
    script = Script(script_of(halves.step, before, optimizer=halves.optimizer))
    script.train(order_of(1, 2, value=1.0, **NEXT))
    script.evaluate(8.0)
    report = script.train(order_of(2, 2, value=0.6, overlap=True, **NEXT))
    assert weight_of(report) == pytest.approx(0.475 / 2)
    script.finish(3.0)
    assert seen == [8.0]
    assert halves.weights[-1] == pytest.approx(0.475 / 4)


def test_average_loads_the_average_before_a_first_step() -> None:
    """All steps of the round are then from the average."""
    loaded: list[float] = []

    def step(model: nn.Module, session: Session) -> None:
        if len(halves.weights) in (2, 4):  # after two steps of a round each
            session.average()
            loaded.append(model.weight.item())
        halves.step(model, session)

    halves = Halves()
    script = Script(script_of(step, first_order, optimizer=halves.optimizer))
    script.train(order_of(1, 2, value=1.0, **NEXT))
    report = script.train(order_of(2, 2, value=0.6, overlap=True, **NEXT))
    assert weight_of(report) == pytest.approx(0.15)
    report = script.train(order_of(3, 2, value=0.4, overlap=True))
    assert weight_of(report) == pytest.approx(0.1)
    script.finish()
    assert loaded == pytest.approx([0.6, 0.4])


def test_sampler_knows_the_samples_of_the_first_step() -> None:
    """Those of the stream, as without overlap."""
    batches: list[list[int]] = []

    def main(overlap: bool) -> list[list[int]]:
        batches.clear()
        HERE.has_joined = False

        def before(_: nn.Module, session: Session) -> None:
            loaders.append(iter(loader_of(session)))

        def step(_: nn.Module, session: Session) -> None:
            batches.append(next(loaders[-1]).tolist())

        loaders: list[Any] = []
        script = Script(script_of(step, before))
        stride = {"stream_stride": 3 * BATCH}
        for number in range(1, 4):
            own = {"overlap": overlap and number > 1, **(NEXT if overlap else {})}
            script.train(order_of(number, 2, stream_start=(number - 1) * 12, **stride, **own))
        script.finish()
        return batches[:6]

    assert main(True) == main(False)


def test_refuses_samples_by_loss() -> None:
    script = Script(script_of(before=lambda _, session: loader_of(session, by_loss=True) and None))
    with pytest.raises(UsageError, match=r"^overlap = true: session\.sampler"):
        script.train(order_of(1, 2, **NEXT))
