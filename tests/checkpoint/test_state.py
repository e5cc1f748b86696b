"""A run that is captured, and goes on with a new strategy and new workers, to the bit."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from flower_blsgd import BiasedLocalSGD, LocalSGD
from flower_blsgd.algorithm.catalog import ALGORITHMS
from flower_blsgd.algorithm.epoch_plan import EpochPlan, RoundShape
from flower_blsgd.algorithm.outer_optimizer import OUTER_OPTIMIZERS
from flower_blsgd.checkpoint.state import capture, expanded, restore
from flower_blsgd.checkpoint.store import Checkpoint, CheckpointStore
from flower_blsgd.config import RunConfig
from flower_blsgd.flower.array_records import view_record
from flower_blsgd.flower.internals import become_server
from flower_blsgd.parts import make_strategy
from flower_blsgd.protocol import MOMENTUM, HostOrders, WorkerProfile
from flower_blsgd.strategy import connector
from flower_blsgd.strategy.budget import Budget
from flower_blsgd.worker.profile import answer_sum

from ..hosts.host_nodes import HostNode
from ..in_process_grid import (
    FastGrid,
    InProcessGrid,
    TorchWorker,
    ToyWorker,
    fast_profile,
    same_bits,
    slow_profile,
    toy_arrays,
)
from ..log_capture import captured_log
from ..refusal import refusal
from ..small_training import DECAY, NUM_SAMPLES, data, make_model
from ..strategy.orders import Clocked


class Worker(TorchWorker):
    """Trains, sums, and answers what a checkpoint asks, as our ClientApp does."""

    def __call__(self, message: Message, node_id: int) -> Message:
        if message.metadata.message_type == "query.momentum":
            kept = self.state.array_records.get(MOMENTUM, ArrayRecord())
            return Message(RecordDict({MOMENTUM: kept}), reply_to=message)
        if message.metadata.message_type == "train.sum":
            return answer_sum(message)
        return super().__call__(message, node_id)


def worker_of(profile: WorkerProfile, optimizer: str = "sgd") -> Worker:
    sgd = LocalSGD(make_model(True), data(), optimizer=optimizer, momentum=0.9, weight_decay=DECAY)
    return Worker(profile, sgd)


def grid_of(optimizer: str = "sgd", first_id: int = 10) -> FastGrid:
    profiles = [
        fast_profile(0, seconds_per_step=1.0),
        fast_profile(1, seconds_per_step=1.1),
        slow_profile(2, seconds_per_step=3.0),
    ]
    handlers = [worker_of(profile, optimizer) for profile in profiles]
    return FastGrid(dict(zip(range(first_id, 99), handlers, strict=False)))


def first_model() -> ArrayRecord:
    return ArrayRecord(make_model(True).state_dict())


def play(
    strategy: BiasedLocalSGD, grid: Grid, arrays: ArrayRecord, first: int, last: int
) -> list[ArrayRecord]:
    """Return the models after these rounds."""
    models = []
    for server_round in range(first, last + 1):
        orders = strategy.configure_train(server_round, arrays, ConfigRecord(), grid)
        found, _ = strategy.aggregate_train(server_round, grid.send_and_receive(orders))
        assert found is not None
        models.append(arrays := strategy.settled(found, grid))
    return models


def config_of(**changes: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "batch_size": 2,
        "local_steps_fast": 3,
        "local_steps_slow": "auto",
        "epochs": 4,
        "seed": 3,
        "min_workers": 3,
        "warmup_epochs": 1.5,
        "decay_epochs": "50%, 3",
    }
    return RunConfig(**(settings | changes))


def strategy_of(config: RunConfig) -> BiasedLocalSGD:
    names = [name for name, _ in make_model(True).named_parameters()]
    strategy = make_strategy(config, NUM_SAMPLES, config.min_workers, names)
    strategy.planner.budget = Budget.of_run(config)
    return strategy


def over_the_disk(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    store = CheckpointStore(folder, 1)
    store.save(checkpoint, checkpoint.values["round"])
    store.close()
    read = store.newest()
    assert read is not None
    return read


def assert_goes_on_to_the_bit(
    folder: Path, config: RunConfig, k: int, new_grid: Callable[[], FastGrid] | None = None
) -> EpochPlan:
    """Capture after round k, and compare the five rounds after it with those of a resumed run.

    Return the plan after round k.
    """
    new_grid = new_grid or (lambda: grid_of(config.optimizer))
    whole, grid = strategy_of(config), new_grid()
    models = play(whole, grid, first_model(), 1, k)
    checkpoint = capture(whole, grid, k, models[-1])
    models += play(whole, grid, models[-1], k + 1, k + 5)
    resumed = strategy_of(config)
    read = over_the_disk(checkpoint, folder)
    with captured_log() as log:
        arrays, server_round = restore(resumed, read, first_model())
    assert log.lines(30) == []
    assert server_round == k
    assert same_bits(arrays, models[k - 1])
    at_once = capture(resumed, new_grid(), k, arrays)  # before any worker is back
    assert at_once.values == read.values
    np.testing.assert_equal(at_once.tensors, read.tensors)
    plan = resumed.planner.plan
    again = play(resumed, new_grid(), arrays, k + 1, k + 5)
    for found, wanted in zip(again, models[k:], strict=True):
        assert same_bits(found, wanted)
    assert not any(map(same_bits, models[1:], models[:-1]))
    for name, value in vars(whole.planner.table).items():
        np.testing.assert_array_equal(vars(resumed.planner.table)[name], value)
    assert resumed.planner.progress == whole.planner.progress
    np.testing.assert_equal(
        vars(resumed.planner.sampling_stats), vars(whole.planner.sampling_stats)
    )
    return plan


pytestmark = pytest.mark.usefixtures("one_thread")


POLICIES, OUTER = ("keep", "reset", "average"), tuple(OUTER_OPTIMIZERS)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_resumed_run_has_the_same_models_to_the_bit(tmp_path: Path, algorithm: str) -> None:
    """Each algorithm, with all policies and outer optimizers; in an epoch, or at its end."""
    place = list(ALGORITHMS).index(algorithm)
    config = config_of(
        algorithm=algorithm,
        momentum_buffers="reset" if algorithm == "fednova" else POLICIES[place // 2 % 3],
        outer_optimizer="none" if algorithm == "dlb" else OUTER[place % 3],
        clock="device" if algorithm == "dlb" else "wall",  # on which its batches would follow time
    )
    assert_goes_on_to_the_bit(tmp_path, config, k=3 + place % 2)


def test_resumed_selection_has_the_same_samples_and_weights(tmp_path: Path) -> None:
    config = config_of(selection="infobatch", weights="per-sample")
    plan = assert_goes_on_to_the_bit(tmp_path, config, k=5)
    assert plan.epoch > 1
    assert plan.weights is not None


def test_resumed_lists_of_an_epoch_before_go_on(tmp_path: Path) -> None:
    """Rounds of 14 of 48 samples: lists for 3 rounds, epochs of 48 // (2 x 3 x 3) = 2.

    The second lists begin with round 4, within an epoch, and go on in round 5; the third with 7.
    """
    config = config_of(algorithm="biased-local-sgd-released")
    plan = assert_goes_on_to_the_bit(tmp_path, config, k=5)
    assert (plan.rounds, plan.first_round, plan.lists_end) == (2, -1, 2)


@pytest.mark.parametrize("policy", ["keep", "average"])
def test_resumed_adamw_has_its_moments_and_steps(tmp_path: Path, policy: str) -> None:
    config = config_of(optimizer="adamw", momentum_buffers=policy, sampler="unified")
    assert_goes_on_to_the_bit(tmp_path, config, k=5)


def test_resumed_run_keeps_the_local_steps_that_were_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overheads = iter([0.05, 1.0])

    def measured(*given: object) -> object:
        (shape,) = (value for value in given if isinstance(value, RoundShape))
        return [[*(1.0 for _ in shape.local_steps), next(overheads)]], []

    monkeypatch.setattr(connector, "measure_rounds", measured)
    assert_goes_on_to_the_bit(tmp_path, config_of(local_steps_fast="auto"), k=3)
    assert next(overheads) == 1.0  # it was not measured again


def test_resumed_devices_behind_one_node_have_each_its_own_momentum(tmp_path: Path) -> None:
    def one_host() -> FastGrid:
        return FastGrid({10: HostNode(*grid_of().handlers.values(), partition_id=0)})

    assert_goes_on_to_the_bit(tmp_path, config_of(min_workers=1), 3, one_host)


# --- workers


def test_worker_that_left_keeps_its_place_and_its_losses_stay_given_up(tmp_path: Path) -> None:
    config = config_of(min_workers=2)
    whole, grid = strategy_of(config), grid_of()
    models = play(whole, grid, first_model(), 1, 2)
    gone = grid.disconnect(11)
    models += play(whole, grid, models[-1], 3, 3)
    checkpoint = capture(whole, grid, 3, models[-1])
    models += play(whole, grid, models[-1], 4, 6)
    resumed, others = strategy_of(config), grid_of()
    with captured_log() as log:
        arrays, _ = restore(resumed, over_the_disk(checkpoint, tmp_path), first_model())
    assert log.lines(30) == ["no momentum in the checkpoint, so it starts at zero: fast-1 (cpu:1)"]
    again = others.disconnect(11)
    for found, wanted in zip(play(resumed, others, arrays, 4, 6), models[3:], strict=True):
        assert same_bits(found, wanted)
    assert resumed.planner.samples_given_up == whole.planner.samples_given_up > 0
    for strategy, of, handler in ((whole, grid, gone), (resumed, others, again)):
        of.connect(77, handler)
        play(strategy, of, first_model(), 7, 7)
        assert [w.index for w in strategy.registry.active] == [0, 1, 2]


@pytest.mark.parametrize(("failure", "kind"), [("dies", "died"), ("mis-shaped", "unusable reply")])
def test_worker_that_was_left_out_is_queried_again_at_the_next_plan(
    tmp_path: Path, failure: str, kind: str
) -> None:
    """It has the momentum that it had, also if it trained while its replies could not be used."""
    config = config_of(min_workers=2, algorithm="sync-sgd")  # whose first epoch has 8 rounds
    whole, grid = strategy_of(config), grid_of()
    for server_round in (1, 2, 3):
        grid.fail_at(1, server_round, failure)
    with captured_log():
        models = play(whole, grid, first_model(), 1, 3)
    checkpoint = capture(whole, grid, 3, models[-1])
    models += play(whole, grid, models[-1], 4, 10)
    resumed, others = strategy_of(config), grid_of()
    with captured_log():
        arrays, _ = restore(resumed, over_the_disk(checkpoint, tmp_path), first_model())
    again = play(resumed, others, arrays, 4, 8)
    assert [worker.index for worker in resumed.registry.active] == [0, 2]
    again += play(resumed, others, again[-1], 9, 10)
    assert all(map(same_bits, again, models[3:]))
    for strategy in (whole, resumed):
        left_out = strategy.registry.workers[1]
        assert (left_out.excluded, left_out.failures) == ("", [kind] * 3)


def test_measured_speed_is_taken_from_the_checkpoint_unless_the_device_is_another() -> None:
    def strategy_of_two() -> BiasedLocalSGD:
        return BiasedLocalSGD(200, 2, local_steps=8, min_available_nodes=2, seed=1)

    whole = strategy_of_two()
    grid = FastGrid({10: Clocked(fast_profile(0), 1.0), 11: Clocked(slow_profile(1), 4.0)})
    checkpoint = capture(whole, grid, 1, play(whole, grid, toy_arrays(), 1, 1)[-1])
    for device, batch, asked, steps in (
        *(("cpu:1", 0, 0, (8, 2)), ("cpu:9", 0, 1, (8, 4))),
        ("cpu:1", 4, 1, (8, 4)),  # another batch takes another time
    ):
        changed_one = replace(slow_profile(1), device=device, batch_size=batch)
        workers = [Clocked(fast_profile(0), 9.0), Clocked(changed_one, 2.0)]
        resumed = strategy_of_two()
        arrays, _ = restore(resumed, checkpoint, toy_arrays())
        rounds = 1 + whole.planner.plan.rounds  # into the epoch after
        play(resumed, FastGrid(dict(zip((20, 21), workers, strict=True))), arrays, 2, rounds)
        assert [worker.measured for worker in workers] == [asked, asked]
        assert resumed.planner.plan.shape.local_steps == steps


def test_other_data_than_those_of_the_checkpoint_are_refused() -> None:
    def grid_with(fingerprint: str) -> FastGrid:
        profiles = fast_profile(0, data_fingerprint=fingerprint), slow_profile(1)
        return FastGrid({10 + i: ToyWorker(profile) for i, profile in enumerate(profiles)})

    strategy, grid = BiasedLocalSGD(200, 2, local_steps_slow=8), grid_with("a")
    checkpoint = capture(strategy, grid, 1, play(strategy, grid, toy_arrays(), 1, 1)[-1])
    for of_server in ("", "b"):
        resumed = BiasedLocalSGD(200, 2, local_steps_slow=8)
        arrays, _ = restore(resumed, checkpoint, toy_arrays())
        resumed.registry.data_fingerprint = of_server
        line = refusal(play, resumed, grid_with("b"), arrays, 2, 2)
        assert "resumed: node 10 has different training data than in the checkpoint; " in line
    resumed, with_another = BiasedLocalSGD(200, 2, local_steps_slow=8), grid_with("a")
    with_another.connect(12, ToyWorker(fast_profile(3, data_fingerprint="b")))
    with captured_log() as log:
        play(resumed, with_another, restore(resumed, checkpoint, toy_arrays())[0], 2, 2)
    assert log.lines(40)[0].startswith("node 12 does not take part: has different training data")
    assert [worker.node_id for worker in resumed.registry.workers] == [10, 11]


def test_momentum_of_workers_that_do_not_send_it_begins_with_zero_and_one_line_says_so() -> None:
    config = config_of(local_steps_slow=1)
    strategy, grid = strategy_of(config), grid_of()
    knows_nothing = grid.handlers[12]

    def foreign(message: Message, node_id: int) -> Message:
        if message.metadata.message_type == "query.momentum":
            return ClientApp()(message, Context(1, node_id, {}, RecordDict(), {}))
        return knows_nothing(message, node_id)

    grid.handlers[12] = foreign
    arrays = play(strategy, grid, first_model(), 1, 1)[-1]
    with captured_log() as log:
        checkpoints = [capture(strategy, grid, 1, arrays) for _ in range(2)]
    (line,) = log.lines(30)
    assert line.startswith("checkpoint without momentum of slow-2 (cpu:2): ")
    assert grid.timeouts[-1] == 60.0
    slow = InProcessGrid(grid.handlers)  # as Flower's own: each message would take seconds
    checkpoints.append(capture(strategy_of_first_round(slow), slow, 1, arrays))
    assert slow.sent_of_type("query.momentum") == []
    labels = ("slow-2 (cpu:2)", "slow-2 (cpu:2)", "fast-0 (cpu:0), fast-1 (cpu:1), slow-2 (cpu:2)")
    for checkpoint, lost in zip(checkpoints, labels, strict=True):
        with captured_log() as log:
            restore(strategy_of(config), checkpoint, first_model())
        assert log.lines(30) == [f"no momentum in the checkpoint, so it starts at zero: {lost}"]


def test_momentum_of_a_resumed_run_is_sent_until_it_arrives_and_is_in_its_checkpoints() -> None:
    config = config_of(min_workers=2, local_steps_slow=1)
    strategy, grid = strategy_of(config), grid_of()
    checkpoint = capture(strategy, grid, 3, play(strategy, grid, first_model(), 1, 3)[-1])
    resumed, grid = strategy_of(config), grid_of()
    arrays, _ = restore(resumed, checkpoint, first_model())
    handler = grid.handlers[11]

    def deaf(message: Message, node_id: int) -> Message:
        if message.metadata.message_type == "query.profile":
            return handler(message, node_id)
        raise RuntimeError("busy")

    grid.handlers[11] = deaf
    with captured_log():
        arrays = play(resumed, grid, arrays, 4, 4)[-1]
        again = capture(resumed, grid, 4, arrays)
    assert list(resumed.planner.resumed_momentum) == [1]
    assert [m.metadata.dst_node_id for m in grid.sent_of_type("query.momentum")] == [10, 12]
    with captured_log() as log:
        restore(strategy_of(config), again, first_model())
    assert log.lines(30) == []
    before, after = (expanded(c)["momentum"]["1"] for c in (checkpoint, again))
    assert same_bits(view_record(after), view_record(before))
    grid.handlers[11] = handler
    play(resumed, grid, arrays, 5, 6)
    arrived = [order.momentum is not None for order in handler.orders]
    assert arrived == [True, False]
    assert resumed.planner.resumed_momentum == {}


def test_queries_for_momentum_wait_as_long_as_orders_and_not_for_those_that_hang() -> None:
    config = config_of(min_workers=1, local_steps_slow=1)
    strategy, grid = strategy_of(config), FastGrid({10: HostNode(*grid_of().handlers.values())})
    arrays = play(strategy, grid, first_model(), 1, 1)[-1]
    strategy.patience_seconds = lambda most: min(most, 100.0)  # type: ignore[method-assign]
    slow = strategy.registry.workers[2]
    slow.failures, slow.failures_in_a_row = ["late"], 1
    checkpoint = capture(strategy, grid, 1, arrays)
    (query,) = grid.sent_of_type("query.momentum")
    orders = HostOrders.from_message(query)
    assert (grid.timeouts[-1], orders.patience_seconds, [*orders.contents]) == (
        100.0,
        100.0,
        [0, 1],
    )
    assert [row["no-momentum"] for row in checkpoint.values["registry"]["workers"]] == [
        *("", "", "it was not queried")
    ]


def strategy_of_first_round(grid: InProcessGrid) -> BiasedLocalSGD:
    strategy = strategy_of(config_of(local_steps_slow=1))
    play(strategy, grid, first_model(), 1, 1)
    return strategy


# --- what is refused


@pytest.fixture(scope="module")
def captured() -> Checkpoint:
    become_server(1)
    config = config_of(outer_optimizer="nesterov")
    strategy, grid = strategy_of(config), grid_of()
    arrays = play(strategy, grid, first_model(), 1, 3)[-1]
    return capture(strategy, grid, 3, arrays)


def changed(value: Any, *path: Any) -> Callable[[Checkpoint], None]:
    def change(checkpoint: Checkpoint) -> None:
        inner = checkpoint.values
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value

    return change


def with_tensor(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Any:
    def apply(checkpoint: Checkpoint) -> None:
        checkpoint.tensors[name] = change(checkpoint.tensors[name].copy())

    return apply


OTHERS: dict[str, Callable[[Checkpoint], object]] = {
    "no counters": lambda c: c.values["planner"].pop("counters"),
    "an unknown counter": changed(1, "planner", "counters", "batch_size"),
    "a batch of one": changed(1, "registry", "workers", 0, "profile", "batch"),
    "text for a number": changed("x", "registry", "workers", 0, "training-seconds-per-step"),
    "statistics missing": lambda c: c.values["planner"]["stats"].pop("all_loss_mean"),
    "a tensor of the model less": lambda c: c.values["model"].pop("0.bias"),
    "model of another dtype": with_tensor("model/0.weight", lambda t: t.astype(np.float64)),
    "losses of more samples": with_tensor("planner/table/losses", lambda t: np.append(t, t[:1])),
    "momentum not finite": with_tensor("momentum/1/0.weight", lambda t: t * np.nan),
    "no tensors": lambda c: c.tensors.clear(),
    "no values": lambda c: c.values.clear(),
}


@pytest.mark.parametrize("what", OTHERS)
def test_state_of_another_run_is_refused_in_one_line(captured: Checkpoint, what: str) -> None:
    checkpoint = copy.deepcopy(captured)
    OTHERS[what](checkpoint)
    strategy = strategy_of(config_of(outer_optimizer="nesterov"))
    line = refusal(restore, strategy, checkpoint, first_model())
    assert "this checkpoint cannot be resumed from: " in line


def test_state_of_an_outer_optimizer_that_this_run_does_not_have_is_refused(
    captured: Checkpoint,
) -> None:
    line = refusal(restore, strategy_of(config_of()), captured, first_model())
    assert "state of an outer optimizer, but this run" in line
