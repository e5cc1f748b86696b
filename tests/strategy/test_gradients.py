"""Averages of gradients: workers that keep the model, fail, join, overflow and are resumed."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.exception import AggregationError
from torch import nn

from flower_blsgd import BiasedLocalSGD, LocalSGD, TrainOrder
from flower_blsgd.algorithm.averaging import EqualWeighting, PerSampleWeighting
from flower_blsgd.algorithm.catalog import TrainOn
from flower_blsgd.algorithm.local_steps import SameSteps, SystemAwareSteps
from flower_blsgd.algorithm.outer_optimizer import OuterSGD
from flower_blsgd.algorithm.sampling import UniformSampler
from flower_blsgd.checkpoint.state import capture, restore
from flower_blsgd.strategy.budget import Budget
from flower_blsgd.strategy.rounds import RoundEnd

from ..grids.stream.streams import made_app, streaming
from ..hosts.host_nodes import HostNode
from ..in_process_grid import (
    FastGrid,
    Handler,
    InProcessGrid,
    MailGrid,
    TorchWorker,
    fast_profile,
    same_bits,
    tensors_of,
)
from ..refusal import refusal
from ..small_training import NUM_SAMPLES, data, make_model

RATE, DECAY, CLIP = 0.05, 0.1, 0.5
BATCHES = (4, 2)  # of 48 samples, so 8 rounds an epoch

pytestmark = pytest.mark.usefixtures("one_thread")


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=DECAY)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)


def worker_of(i: int, make: Any = adamw, batch: int = 0, **settings: Any) -> TorchWorker:
    own = LocalSGD(
        make_model(settings.pop("batch_norm", False)),
        data(),
        optimizer=make,
        clip_norm=CLIP,
        peak_learning_rate=RATE,
    )
    return TorchWorker(fast_profile(i, batch_size=batch or BATCHES[i]), own, **settings)


def workers_of(make: Any = adamw) -> list[TorchWorker]:
    return [worker_of(i, make) for i in range(2)]


def strategy_of(**changes: Any) -> BiasedLocalSGD:
    arguments: dict[str, Any] = {
        "batch_size": 4,
        "local_steps": SameSteps(1),
        "learning_rate": RATE,
        "min_available_nodes": 2,
        "sampler": UniformSampler(),
        "average": "gradients",
        "seed": 2,
    }
    return BiasedLocalSGD(NUM_SAMPLES, **(arguments | changes))


def grid_of(workers: Sequence[TorchWorker]) -> MailGrid:
    return MailGrid({10 + i: worker for i, worker in enumerate(workers)})


def begin(batch_norm: bool = False) -> ArrayRecord:
    return ArrayRecord(make_model(batch_norm).state_dict())


def train(strategy: BiasedLocalSGD, grid: InProcessGrid, rounds: int = 16) -> list[RoundEnd]:
    return list(strategy.rounds(grid, begin(), Budget(rounds=rounds)))


def samples_of(*workers: TorchWorker) -> list[list[int]]:
    """Return the samples of each round, of those of these workers that had an order."""
    rounds: dict[int, list[int]] = {}
    for worker in workers:
        for order in worker.orders:
            if order.local_steps:
                rounds.setdefault(order.round, []).extend(order.indices.tolist())
    return [rounds[number] for number in sorted(rounds)]


def one_process(rounds: Sequence[Sequence[int]], make: Any) -> nn.Module:
    inputs, targets = data()
    model = make_model()
    optimizer = make(model)
    for chosen in rounds:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return model


def furthest(arrays: ArrayRecord, model: nn.Module) -> float:
    expected = model.state_dict()
    return max(
        float(np.abs(array - expected[name].numpy()).max())
        for name, array in tensors_of(arrays).items()
    )


@pytest.mark.parametrize("make", [sgd, adamw])
def test_two_epochs_are_one_process_with_batches_of_six(make: Any) -> None:
    workers = workers_of(make)
    ends = train(strategy_of(), grid_of(workers))
    rounds = samples_of(*workers)
    assert [len(samples) for samples in rounds] == [6] * 16
    assert furthest(ends[-1].arrays, one_process(rounds, make)) < 1e-6
    # The model moves at the beginning and the end of an epoch only, and the known one is its own.
    brings = ["model", *["gradient"] * 8] * 2
    assert [order.brings for order in workers[0].orders] == brings
    assert [order.returns for order in workers[0].orders] == [*["gradient"] * 8, "model"] * 2
    assert [end.idle for end in ends] == [*[False] * 7, True] * 2
    assert all(same_bits(end.arrays, begin()) for end in ends[:7])
    assert furthest(ends[7].arrays, one_process(rounds[:8], make)) < 1e-6


def broken(worker: TorchWorker, fails: Callable[[TrainOrder, int], bool]) -> TorchWorker:
    """Let some orders of a worker raise an exception; it also counts them."""
    count = 0

    def change(order: TrainOrder) -> TrainOrder:
        nonlocal count
        count += 1
        if fails(order, count):
            raise RuntimeError("broken")
        return order

    worker.change = change
    return worker


def test_a_failed_worker_costs_its_samples_and_continues_with_the_same_state() -> None:
    first, second = workers_of()
    broken(second, lambda order, _: order.round == 3)
    strategy = strategy_of()
    ends = train(strategy, grid_of([first, second]), rounds=8)
    assert [worker.failures for worker in strategy.registry.workers] == [[], ["raised"]]
    rounds = samples_of(first, second)
    assert [len(samples) for samples in rounds] == [6, 6, 4, *[6] * 5]
    assert furthest(ends[-1].arrays, one_process(rounds, adamw)) < 1e-6
    assert [w.completed_steps for w in ends[2].record.workers] == [1, 0]
    # All got the model again, and the optimizer's state of the one that had not failed.
    again = [[o for o in w.orders if o.round == 4 and o.local_steps] for w in (first, second)]
    for (order,) in again:
        assert order.brings == "model"
        assert order.momentum is not None


def test_the_model_is_that_of_another_worker_if_one_fails_to_return_it() -> None:
    first, second = workers_of()
    broken(first, lambda order, _: not order.local_steps and order.round == 9)
    ends = train(strategy_of(), grid_of([first, second]))
    rounds = samples_of(first, second)
    assert furthest(ends[-1].arrays, one_process(rounds, adamw)) < 1e-6


def test_without_any_worker_that_has_kept_the_model_the_run_ends() -> None:
    workers = [broken(worker, lambda order, _: order.round == 3) for worker in workers_of()]
    strategy = strategy_of()
    ends = []
    with pytest.raises(AggregationError, match="round 3: no worker succeeded"):
        ends.extend(strategy.rounds(grid_of(workers), begin(), Budget(rounds=8)))
    assert strategy.kept_model.orders  # so no checkpoint of an older model is written


def test_a_first_round_that_is_lost_can_be_repeated() -> None:
    workers = [broken(worker, lambda order, _: order.round == 1) for worker in workers_of()]
    ends = train(strategy_of(), grid_of(workers), rounds=8)
    rounds = samples_of(*workers)
    assert len(rounds) == 7
    assert furthest(ends[-1].arrays, one_process(rounds, adamw)) < 1e-6


def test_a_pause_changes_no_bit_and_a_resumed_run_continues_with_the_same() -> None:
    whole = train(strategy_of(), grid_of(workers_of()))[-1].arrays
    strategy, grid = strategy_of(), grid_of(workers_of())
    for end in strategy.rounds(grid, begin(), Budget(rounds=16)):
        if end.round == 4:
            assert not end.idle
            strategy.pause()
        if end.idle:
            break
    assert end.round == 5  # it was under way
    checkpoint = capture(strategy, grid, end.round, end.arrays)
    new = strategy_of()
    arrays, last = restore(new, checkpoint, begin())
    workers = workers_of()
    resumed = list(new.rounds(grid_of(workers), arrays, Budget(rounds=16), start_round=last))
    assert same_bits(resumed[-1].arrays, whole)
    assert workers[0].orders[0].brings == "model"


def overflows(worker: TorchWorker, rounds: Sequence[int]) -> Handler:
    def handle(message: Message, node_id: int) -> Message:
        reply = worker(message, node_id)
        if message.content.config_records.get("config", {}).get("server-round") in rounds:
            metrics = reply.content.metric_records["metrics"]
            metrics["completed-steps"] = metrics["num-examples"] = 0
            reply.content.config_records["losses"]["losses"] = b""
        return reply

    return handle


def test_all_skip_the_steps_of_overflows_which_are_no_lost_rounds() -> None:
    workers = workers_of()
    rows = zip(workers, ([3, 4, 5], [2, 3, 4, 5]), strict=True)
    grid = MailGrid({10 + i: overflows(*row) for i, row in enumerate(rows)})
    ends = train(strategy_of(), grid, rounds=8)
    rounds = samples_of(*workers)
    del rounds[1:5]
    assert furthest(ends[-1].arrays, one_process(rounds, adamw)) < 1e-6
    brings = ["model", "gradient", *["skip"] * 4, "gradient", "gradient"]
    assert [order.brings for order in workers[0].orders][:8] == brings
    assert [[w.weight for w in end.record.workers] for end in ends[1:3]] == [[1, 0], [0, 0]]


def test_a_gradient_that_stays_not_finite_ends_the_run() -> None:
    first, second = workers_of()
    grid = MailGrid({10: first, 11: overflows(second, range(3, 99))})
    ends = []
    told = r"round 43: no worker succeeded \(fast-1 \(cpu:1\): a gradient is not finite\)"
    with pytest.raises(AggregationError, match=told):
        ends.extend(strategy_of().rounds(grid, begin(), Budget(rounds=99)))
    rounds = samples_of(first, second)
    assert furthest(ends[-1].arrays, one_process(rounds[:2], adamw)) < 1e-6


def test_a_worker_that_joins_gets_the_model_and_the_state() -> None:
    workers = workers_of()
    late = worker_of(0, batch=3)
    late.profile = fast_profile(2, batch_size=3)
    grid = grid_of(workers)
    ends = []
    for end in strategy_of().rounds(grid, begin(), Budget(rounds=14)):
        ends.append(end)
        if end.round == 2:
            grid.handlers[12] = late
    rounds = samples_of(*workers, late)
    assert [len(samples) for samples in rounds[6:10]] == [6, 6, 9, 9]
    assert furthest(ends[-1].arrays, one_process(rounds, adamw)) < 1e-6


def test_a_node_with_two_devices_averages_their_gradients_first() -> None:
    workers = [*workers_of(), worker_of(0, batch=3)]
    workers[2].profile = fast_profile(1, batch_size=3)
    grid = MailGrid({10: HostNode(*workers[:2], partition_id=0), 11: workers[2]})
    ends = train(strategy_of(), grid, rounds=10)
    rounds = samples_of(*workers)
    assert [len(samples) for samples in rounds] == [9] * 10
    assert furthest(ends[-1].arrays, one_process(rounds, adamw)) < 1e-6
    assert [order.brings for order in workers[0].orders][:3] == ["model", "gradient", "gradient"]


def test_on_streams() -> None:
    def app_of(worker: TorchWorker) -> ClientApp:
        app = made_app(lambda message, _: worker(message, 0))
        app.query("profile")(lambda message, _: worker(message, 0))
        return app

    workers = workers_of()
    with streaming(*map(app_of, workers)) as grid:
        ends = train(strategy_of(), grid)
    assert furthest(ends[-1].arrays, one_process(samples_of(*workers), adamw)) < 1e-6


def test_what_is_refused() -> None:
    told = {
        "steps = SystemAwareSteps: a round is one step": {"local_steps": SystemAwareSteps(4)},
        "weights = PerSampleWeighting": {"weights": PerSampleWeighting()},
        "weights = EqualWeighting": {"weights": EqualWeighting()},
        'momentum-buffers = "reset"': {"momentum_buffers": "reset"},
        'train-on = "fast-slow-sums"': {"train_on": TrainOn(fast_only=True, slow_reduce=True)},
        "outer-optimizer (OuterSGD)": {"outer_optimizer": OuterSGD(0.7, 0.9)},
    }
    for line, changes in told.items():
        assert f'average = "gradients" does not work with {line}' in refusal(strategy_of, **changes)
    plain = InProcessGrid({10 + i: worker for i, worker in enumerate(workers_of())})
    assert "cannot keep the model" in refusal(train, strategy_of(), plain)
    assert "use rounds or fit" in refusal(strategy_of().start, plain, begin())
    # Every round ends idle on a grid that waits for its replies.
    ends = train(strategy_of(), FastGrid(plain.handlers), rounds=2)
    assert [end.idle for end in ends] == [True, True]
