"""Replies: which models can be averaged, what has weight 0, and what the log says of it."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message

from flower_blsgd.flower.array_records import FlatTensors, flat_like
from flower_blsgd.protocol import ProtocolError
from flower_blsgd.strategy.replies import ModelShape

from ..hosts.host_nodes import HostNode
from ..in_process_grid import (
    InProcessGrid,
    ToyWorker,
    fast_profile,
    slow_profile,
    toy_arrays,
)
from ..log_capture import captured_log
from .orders import good_reply, orders_of_two, outcomes_of, strategy_of
from .test_round_metrics import rows_of


def record_of(**tensors: np.ndarray) -> ArrayRecord:
    return ArrayRecord({name: Array(tensor) for name, tensor in tensors.items()})


# --- the model in a reply


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bias": None}, "lacks tensor 'bias'"),
        ({"mask": np.zeros(2)}, "extra tensor 'mask'"),
        ({"weight": np.zeros((1, 2), np.float32)}, r"'weight' is float32 of shape \(1, 2\)"),
        ({"weight": np.zeros((2, 1), np.float64)}, "'weight' is float64"),
        ({"counter": np.array(7, np.int32)}, "'counter' is int32"),
        ({"weight": np.array([[1.0], [np.nan]], np.float32)}, "'weight' is not finite"),
        ({"bias": np.array([np.inf])}, "'bias' is not finite"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_model_is_refused_by_the_name_of_a_tensor(
    changes: dict[str, np.ndarray | None], reason: str
) -> None:
    arrays = toy_arrays(1.0)
    for name, tensor in changes.items():
        if tensor is None:
            del arrays[name]
        else:
            arrays[name] = Array(tensor)
    with pytest.raises(ProtocolError, match=reason):
        ModelShape(toy_arrays()).checked(arrays)


def test_model_in_one_piece_is_refused_by_the_name_of_a_tensor() -> None:
    shape, arrays = ModelShape(flat_like(toy_arrays())), flat_like(toy_arrays())
    assert isinstance(shape.checked(arrays), FlatTensors)
    arrays["bias"].numpy()[...] = np.nan
    with pytest.raises(ProtocolError, match="'bias' is not finite"):
        shape.checked(arrays)


@pytest.mark.parametrize(
    ("stype", "data"),
    [("numpy.ndarray", Array(np.zeros(3)).data), ("numpy.ndarray", b""), ("pickle", b"cos\n.")],
    ids=["other shape", "nothing", "pickle"],
)
def test_read_reply_whose_data_are_not_what_the_header_says_counts_zero(
    stype: str, data: bytes
) -> None:
    orders = orders_of_two()
    reply = good_reply(orders, 1)
    reply.content.array_records["arrays"]["bias"] = Array("float64", (1,), stype, data)
    first, second = outcomes_of(orders, good_reply(orders, 0), reply)
    assert (first.load, second.load) == (4.0, 0)
    assert second.failure


# --- the optimizer's state in a reply


def test_momentum_may_leave_parameters_out_but_adds_none() -> None:
    shape = ModelShape(record_of(a=np.zeros(2), b=np.ones(3)))
    assert list(shape.checked_momentum(record_of(b=np.full(3, 2.0)))) == ["b"]
    with pytest.raises(ProtocolError, match="extra tensor 'c'"):
        shape.checked_momentum(record_of(c=np.zeros(1)))


def adamw_state(parameter: str = "weight", **changes: np.ndarray | None) -> ArrayRecord:
    """Return AdamW's state of one parameter of the toy model, with some slots changed."""
    slots: dict[str, np.ndarray | None] = {
        "exp_avg": np.ones((2, 1), np.float32),
        "exp_avg_sq": np.ones((2, 1), np.float32),
        "step": np.array(3.0, np.float32),
    }
    return record_of(
        **{f"{k}/{parameter}": v for k, v in (slots | changes).items() if v is not None}
    )


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (adamw_state("mask"), "extra tensor 'exp_avg/mask'"),
        (adamw_state(exp_avg=np.ones(2, np.float32)), r"'exp_avg/weight' is float32 of shape \(2,"),
        (adamw_state(step=np.array(3)), "'step/weight' is int64"),
        (adamw_state(step=np.array(np.nan, np.float32)), "'step/weight' is not finite"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_momentum_of_adamw_is_refused_by_name(state: ArrayRecord, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        ModelShape(toy_arrays()).checked_momentum(state)


# --- replies matched with orders


def test_read_matches_replies_with_orders_in_worker_order() -> None:
    orders = orders_of_two()
    stranger = ToyWorker()(Message(orders[0][1].to_records(), 77, "train"), 77)
    backwards = (good_reply(orders, 1, 4.0), stranger, good_reply(orders, 0, 1.0))
    first, second = outcomes_of(orders, *backwards)
    assert (first.worker.index, second.worker.index) == (0, 1)
    assert (first.load, second.load) == (4.0, 2.0)  # completed steps x batch size
    assert [o.reply.tensors["bias"][0] for o in (first, second) if o.reply] == [1.0, 4.0]
    assert (first.failure, second.failure) == (None, None)


def test_read_keeps_worker_order_where_a_node_has_the_first_and_the_last() -> None:
    host = HostNode(ToyWorker(fast_profile(0)), ToyWorker(slow_profile(0)), partition_id=0)
    grid, strategy = InProcessGrid({10: host, 20: ToyWorker(fast_profile(1))}), strategy_of()
    messages = strategy.configure_train(1, toy_arrays(), ConfigRecord(), grid)
    assert strategy.round is not None
    workers = [o.worker for o in strategy.round.read(grid.send_and_receive(messages))]
    assert [(worker.index, worker.node_id) for worker in workers] == [(0, 10), (1, 20), (2, 10)]


# --- momentum


@pytest.mark.parametrize(("says", "counted", "load"), [(0, False, 4), (1, True, 4), (2, False, 0)])
@pytest.mark.parametrize("finite", [True, False])
def test_momentum_that_was_zeroed_counts_whether_or_not_the_model_does(
    says: int, counted: bool, load: int, finite: bool
) -> None:
    orders = orders_of_two()
    reply = good_reply(orders, 0, 1.0 if finite else np.nan)
    reply.content.metric_records["metrics"]["momentum-zeroed"] = says
    with captured_log() as log:
        for _ in range(2):  # it is logged once
            outcomes = outcomes_of(orders, reply, good_reply(orders, 1))
    warnings = [line for line in log.warnings if "fast-0 (cpu:0): momentum was not finite" in line]
    assert len(warnings) == counted
    assert [o.load for o in outcomes] == [load if finite else 0, 2]
    assert [row.momentum_zeroed for row in rows_of(outcomes, [0.0, 1.0])] == [counted, False]
