"""The orders of a round as messages, and whom a node with several devices cannot stand for."""

from collections.abc import Sequence
from typing import Any

import pytest
from flwr.app import ConfigRecord

from flower_blsgd import BiasedLocalSGD
from flower_blsgd.algorithm.averaging import EqualWeighting, NormalizedWeighting
from flower_blsgd.algorithm.sampling import UniformSampler
from flower_blsgd.algorithm.train_on import TrainOnFast
from flower_blsgd.errors import UsageError
from flower_blsgd.protocol import HostOrders, ProtocolError, TrainOrder

from .host.host_nodes import HostNode
from .in_process_grid import (
    InProcessGrid,
    ToyWorker,
    fast_profile,
    over_the_wire,
    slow_profile,
    toy_arrays,
)
from .log_capture import captured_log


class ByRoot:
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


def play(strategy: BiasedLocalSGD, grid: InProcessGrid, server_round: int = 1) -> float:
    orders = strategy.configure_train(server_round, toy_arrays(), ConfigRecord(), grid)
    arrays, _ = strategy.aggregate_train(server_round, grid.send_and_receive(orders))
    assert arrays is not None
    return float(arrays["bias"].numpy()[0])


def test_message_to_a_host_holds_the_orders_of_its_workers_and_the_rule() -> None:
    weighting = NormalizedWeighting(0.5)
    strategy = strategy_of(weights=weighting, momentum_buffers="reset", weighted_by_key="mine")
    grid = InProcessGrid({10: host()})
    (message,) = strategy.configure_train(1, toy_arrays(), ConfigRecord({"own": 1}), grid)
    found = HostOrders.from_message(over_the_wire(message))
    assert found.weighted_by == "mine"
    assert found.worker_weight == "equal"
    assert found.update_norms == [0.0, 1.0, 2.5, 4.25]  # 1; 1.5 + 1; 1.75 + 1.5 + 1
    assert found.moving == ["weight", "bias"]
    orders = {place: TrainOrder.from_content(c) for place, c in found.contents.items()}
    assert [order.local_steps for order in orders.values()] == [3, 1]
    assert all(c.config_records["config"]["own"] == 1 for c in found.contents.values())


def test_message_without_normalised_updates_holds_no_norms() -> None:
    grid = InProcessGrid({10: host()})
    (message,) = strategy_of().configure_train(1, toy_arrays(), ConfigRecord(), grid)
    found = HostOrders.from_message(over_the_wire(message))
    assert (found.worker_weight, found.update_norms, found.moving) == ("load", [], [])


def test_message_keeps_the_names_of_records_that_the_user_chose() -> None:
    strategy = strategy_of(arrayrecord_key="model", configrecord_key="settings")
    grid = InProcessGrid({10: host()})
    (message,) = strategy.configure_train(1, toy_arrays(), ConfigRecord(), grid)
    found = HostOrders.from_message(over_the_wire(message))
    for content in found.contents.values():
        assert set(content) == {"model", "settings"}
        assert TrainOrder.from_content(content, "model", "settings").round == 1


@pytest.mark.parametrize(
    ("record", "key", "value"),
    [
        ("host", "update-norms", ["a"]),
        ("host", "moving", [1.0]),
        ("host", "worker-weight", 3),
        ("host", "arrays-key", None),
        ("order-0", None, None),
        ("order-0", "indices", b"123"),
    ],
)
def test_message_that_is_not_what_it_must_be_is_refused(record: str, key: Any, value: Any) -> None:
    grid = InProcessGrid({10: HostNode(ToyWorker(fast_profile(0)))})
    strategy = strategy_of()
    (message,) = strategy.configure_train(1, toy_arrays(), ConfigRecord(), grid)
    if key is None:
        del message.content[record]
    elif value is None:
        del message.content[record][key]
    else:
        message.content[record][key] = value
    with pytest.raises(ProtocolError):
        grid.handlers[10](over_the_wire(message), 10)


# --- what cannot be averaged there


def test_weighting_that_does_not_nest_is_refused_at_the_start() -> None:
    grid = InProcessGrid({10: host()})
    with pytest.raises(UsageError, match="ByRoot cannot be averaged there") as refusal:
        play(strategy_of(weights=ByRoot()), grid)
    assert "\n" not in str(refusal.value)
    assert "one SuperNode for each device" in str(refusal.value)
    assert grid.sent_of_type("train") == []


def test_weighting_that_does_not_nest_is_fine_on_single_nodes() -> None:
    nodes = {10: ToyWorker(fast_profile(0), 1.0), 20: ToyWorker(slow_profile(1), 5.0)}
    root = 3**0.5  # loads 6 and 2
    expected = (root * 1 + 5) / (root + 1)
    found = play(strategy_of(2, weights=ByRoot()), InProcessGrid(nodes))
    assert found == pytest.approx(expected)


def test_slow_workers_behind_a_host_do_not_add_up_models() -> None:
    strategy = strategy_of(weights=EqualWeighting(), train_on=TrainOnFast(slow_sums=True))
    with pytest.raises(UsageError, match="shared memory only") as refusal:
        play(strategy, InProcessGrid({10: host()}))
    assert "\n" not in str(refusal.value)


def test_host_that_comes_later_and_does_not_fit_is_left_out() -> None:
    grid = InProcessGrid({20: ToyWorker(fast_profile(7), 4.0)})
    strategy = strategy_of(weights=ByRoot())
    assert play(strategy, grid, 1) == 4.0
    grid.connect(10, host())
    with captured_log() as log:
        assert play(strategy, grid, 2) == 4.0
    assert [worker.node_id for worker in strategy.roster.active] == [20]
    assert len(log.errors) == 2
    assert "ByRoot cannot be averaged there" in log.errors[0]
