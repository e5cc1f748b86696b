"""Every copy between host and card, and every wait of the host, in an ordinary order."""

import collections
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import RecordDict

from flower_blsgd import LocalSGD
from flower_blsgd.session.replica import Replica
from flower_blsgd.worker import batches

from ..fake_cuda.log import Event, recorded
from .helpers import data, independent_model, independent_order, order_of, small_model

pytestmark = pytest.mark.cuda

LOCAL_STEPS = 6

ORDER = {
    "copy to card, pageable, waits: transfer.copy_to_device": 1,
    "wait for synchronize: timing.synchronize": 2,  # around the steps, whose time is measured
    "wait for item: optimizer.OptimizerState.is_finite": 1,
    "copy to host, pageable, waits: transfer.copy_to_host": 1,
    "copy to host, pageable, waits: local_sgd.LocalSGD._train": 1,  # the losses
}
"""Of the model, which fits into one piece; optimizer state stays on the card."""

DATA_ON_CARD = {"copy to card, pageable, waits: local_sgd.LocalSGD._as_tensor": 1}
"""The indices of all samples of the order."""

DATA_ON_HOST = {
    "pin: batches.BatchSource._brought.<locals>.bring": 2 * LOCAL_STEPS,
    "copy to card, pinned: batches.BatchSource._brought.<locals>.bring": 2 * LOCAL_STEPS,
}
"""Inputs and targets of each step."""

FLOAT16 = {
    "wait for item: step.LossScaler.unscale": LOCAL_STEPS,  # whether the gradients overflowed
    "wait for item: step.LossScaler.state": 2,
}


def row_of(event: Event) -> str:
    """Return an event as a row of these tables; empty if it is the card's own work."""
    if event.kind in ("kernel", "copy on card"):
        return ""
    if event.kind == "wait":
        return f"wait for {event.what}: {event.where}"
    if event.kind == "pin":
        return f"pin: {event.where}"
    memory = "pinned" if event.pinned else "pageable"
    return f"{event.kind}, {memory}{', waits' if event.blocking else ''}: {event.where}"


@pytest.mark.parametrize("on_card", [True, False], ids=["data on card", "data on host"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer": "adamw"},
        {"optimizer": "adamw", "channels_last": True},
        {"precision": "bfloat16"},
        {"precision": "float16"},
        {"micro_batch_size": 3},
        {"clip_norm": 1.0},
    ],
    ids=lambda settings: " ".join(f"{k}={v}" for k, v in settings.items()) or "sgd",
)
def test_copies_and_waits_of_an_order_with_state(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], on_card: bool
) -> None:
    monkeypatch.setattr(batches, "DATA_SHARE", 0.5 if on_card else 0.0)
    cut = "micro_batch_size" in settings
    make_model, make_order = (
        (independent_model, independent_order) if cut else (small_model, order_of)
    )
    sgd, state = LocalSGD(make_model(), data(), device="cuda:0", **settings), RecordDict()
    sgd.run(make_order(1), state)
    with recorded() as events:
        sgd.run(make_order(2, local_steps=LOCAL_STEPS), state)
    found = collections.Counter(filter(None, map(row_of, events)))
    more = FLOAT16 if settings.get("precision") == "float16" else {}
    assert found == ORDER | (DATA_ON_CARD if on_card else DATA_ON_HOST) | more


@pytest.mark.parametrize("settings", [{}, {"optimizer": "adamw", "clip_norm": 1.0}])
def test_copies_and_waits_of_an_averaged_gradient(settings: dict[str, Any]) -> None:
    sgd = LocalSGD(small_model(), data(), device="cuda:0", **settings)
    order = order_of(1, local_steps=1)
    report = sgd.run(dataclasses.replace(order, returns="gradient"))
    order = dataclasses.replace(order, round=2, brings="gradient", arrays=report.arrays)
    with recorded() as events:
        sgd.run(dataclasses.replace(order, returns="gradient"))
    found = collections.Counter(filter(None, map(row_of, events)))
    left = ORDER | DATA_ON_CARD
    del left["wait for item: optimizer.OptimizerState.is_finite"]  # all are asked at the end only
    assert found == left


def test_a_script_waits_once_to_see_whether_its_gradients_are_finite() -> None:
    model = small_model()
    replica = Replica(model, torch.optim.SGD(model.parameters()), torch.device("cuda:0"))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with recorded() as events:
        assert replica.has_gradients()
    waits = collections.Counter(event.where for event in events if event.kind == "wait")
    assert waits == {"replica.Replica.has_gradients": 1}
    next(model.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]
    assert not replica.has_gradients()


@pytest.mark.parametrize("settings", [{}, {"optimizer": "adamw"}])
def test_copies_and_waits_of_a_first_step_and_of_the_order_after_it(
    settings: dict[str, Any],
) -> None:
    """What the order waits for is as without it; what the first step waits for, nobody sees."""
    sgd, state = LocalSGD(small_model(), data(), device="cuda:0", **settings), RecordDict()
    batch = np.arange(4, dtype=np.int32)
    sgd.run(order_of(1, next_indices=batch), state)
    with recorded() as events:
        sgd.work_ahead(state)
    first = collections.Counter(filter(None, map(row_of, events)))
    assert first == {"wait for synchronize: timing.synchronize": 2} | DATA_ON_CARD
    with recorded() as events:
        sgd.run(order_of(2, local_steps=LOCAL_STEPS, overlap=True), state)
    assert collections.Counter(filter(None, map(row_of, events))) == ORDER | DATA_ON_CARD
