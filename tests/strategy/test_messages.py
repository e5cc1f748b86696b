"""Messages to nodes with several devices, and which runs they cannot take part in."""

from collections.abc import Sequence
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message

from flower_blsgd import BiasedLocalSGD
from flower_blsgd.algorithm.averaging import EqualWeighting, NormalizedWeighting, Weighting
from flower_blsgd.algorithm.catalog import TrainOnFast
from flower_blsgd.algorithm.sampling import UniformSampler
from flower_blsgd.errors import UsageError
from flower_blsgd.protocol import HostOrders, TrainOrder

from ..hosts.host_nodes import HostNode
from ..in_process_grid import (
    InProcessGrid,
    ToyWorker,
    fast_profile,
    over_the_wire,
    slow_profile,
    toy_arrays,
)
from ..log_capture import captured_log


class ByRoot(Weighting):
    def weights(self, completed_loads: Sequence[float]) -> list[float]:
        roots = [load**0.5 for load in completed_loads]
        return [root / sum(roots) for root in roots]


def strategy_of(nodes: int = 1, **changes: Any) -> BiasedLocalSGD:
    arguments: dict[str, Any] = {
        "batch_size": 2,
        "local_steps": 3,
        "local_steps_slow": 1,
        "fraction_evaluate": 0.0,
        "min_available_nodes": nodes,
        "sampler": UniformSampler(),
    }
    return BiasedLocalSGD(24, **(arguments | changes))


def host() -> HostNode:
    return HostNode(ToyWorker(fast_profile(0), 1.0), ToyWorker(slow_profile(1), 5.0))


def message_to_host(**changes: Any) -> Message:
    config = ConfigRecord({"own": 1})
    grid = InProcessGrid({10: host()})
    (message,) = strategy_of(**changes).configure_train(1, toy_arrays(), config, grid)
    return over_the_wire(message)


def play(strategy: BiasedLocalSGD, grid: InProcessGrid, server_round: int = 1) -> float:
    orders = strategy.configure_train(server_round, toy_arrays(), ConfigRecord(), grid)
    arrays, _ = strategy.aggregate_train(server_round, grid.send_and_receive(orders))
    assert arrays is not None
    return float(arrays["bias"].numpy()[0])


def test_message_holds_the_orders_of_all_workers_and_how_to_average() -> None:
    message = message_to_host(
        weights=NormalizedWeighting(0.5), momentum_buffers="reset", weighted_by_key="mine"
    )
    found = HostOrders.from_message(message)
    assert (found.weighted_by, found.worker_weight) == ("mine", "equal")
    assert found.update_norms == [0.0, 1.0, 2.5, 4.25]  # 1; 1.5 + 1; 1.75 + 1.5 + 1
    assert found.moving == ["weight", "bias"]
    orders = [TrainOrder.from_content(content) for content in found.contents.values()]
    assert [order.local_steps for order in orders] == [3, 1]
    assert all(c.config_records["config"]["own"] == 1 for c in found.contents.values())
    plain = HostOrders.from_message(message_to_host())
    assert (plain.worker_weight, plain.update_norms, plain.moving) == ("load", [], [])


def test_message_keeps_the_names_of_records_that_the_user_chose() -> None:
    message = message_to_host(arrayrecord_key="model", configrecord_key="settings")
    for content in HostOrders.from_message(message).contents.values():
        assert set(content) == {"model", "settings"}
        assert TrainOrder.from_content(content, "model", "settings").round == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weights": ByRoot()}, "ByRoot cannot be averaged there"),
        (
            {"weights": EqualWeighting(), "train_on": TrainOnFast(slow_reduce=True)},
            "shared memory only",
        ),
    ],
)
def test_host_that_cannot_average_is_refused_at_the_start(
    changes: dict[str, Any], reason: str
) -> None:
    grid = InProcessGrid({10: host()})
    with pytest.raises(UsageError, match=rf"{reason}.*one SuperNode for each device") as refusal:
        play(strategy_of(**changes), grid)
    assert "\n" not in str(refusal.value)
    assert grid.sent_of_type("train") == []


def test_host_that_comes_later_and_does_not_fit_is_left_out() -> None:
    grid = InProcessGrid({20: ToyWorker(fast_profile(7), 4.0)})
    strategy = strategy_of(weights=ByRoot(), local_steps=12)  # each round is an epoch
    assert play(strategy, grid, 1) == 4.0
    grid.connect(10, host())
    with captured_log() as log:
        assert play(strategy, grid, 2) == 4.0
    assert [worker.node_id for worker in strategy.registry.active] == [20]
    assert len(log.errors) == 2
    assert "ByRoot cannot be averaged there" in log.errors[0]
