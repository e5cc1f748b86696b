"""Whole rounds with a node that sends anything: it costs no more than its own share."""

import json
import math
from dataclasses import asdict

import numpy as np
from flwr.app import ConfigRecord, Error, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from flower_blsgd import BiasedLocalSGD
from flower_blsgd.protocol import TrainOrder

from ..hosts.host_nodes import HostNode
from ..in_process_grid import (
    Handler,
    InProcessGrid,
    ToyWorker,
    fast_profile,
    slow_profile,
    tensors_of,
    toy_arrays,
)
from ..strategy.orders import strategy_of
from .mutations import hostile, thoroughly

HONEST, LIAR = 10, 20


def orders_of(strategy: BiasedLocalSGD, liar: Handler) -> dict[int, Message]:
    """Return the orders of the first round by node; `liar` answers the query of its profile."""
    grid = InProcessGrid({HONEST: ToyWorker(fast_profile(0), 1.0), LIAR: liar})
    sent = strategy.configure_train(1, toy_arrays(), ConfigRecord(), grid)
    return {message.metadata.dst_node_id: message for message in sent}


def changed(reply: Message, data: st.DataObject) -> list[Message]:
    """Return what comes instead of a node's reply: something else, an error, or nothing."""
    kind = data.draw(st.sampled_from(["hostile"] * 9 + ["error", "nothing", "twice", "stranger"]))
    if kind == "nothing":
        return []
    if kind == "error":
        error = Error(data.draw(st.integers(0, 12)), data.draw(st.text(max_size=9)))
        content = None
    else:
        error, content = None, data.draw(hostile(lambda: reply.content, by_wire=True))
    made = Message(content if error is None else error, reply_to=message_to(reply))
    if kind == "stranger":
        made.metadata.__dict__["_src_node_id"] = 999
    return [made, made] if kind == "twice" else [made]


def message_to(reply: Message) -> Message:
    return Message(RecordDict(), reply.metadata.src_node_id, "train")


def check_round(strategy: BiasedLocalSGD, replies: list[Message], ordered: int) -> None:
    """Average a round to which the honest worker and perhaps the other replied."""
    arrays, metrics = strategy.aggregate_train(1, replies)
    assert arrays is not None
    assert metrics is not None
    before = tensors_of(toy_arrays())
    for name, tensor in tensors_of(arrays).items():
        assert (tensor.shape, tensor.dtype) == (before[name].shape, before[name].dtype)
        assert np.isfinite(tensor).all()
    record = strategy.record
    assert record is not None
    assert math.isclose(sum(row.weight for row in record.workers), 1.0)
    assert all(row.failure == "" or row.weight == 0 for row in record.workers)
    trained = sum(row.num_examples for row in record.workers)
    assert trained + strategy.planner.samples_given_up <= ordered
    assert not np.isnan(strategy.planner.table.losses).any()
    assert metrics["num-examples"] == trained
    json.dumps(asdict(record))


@thoroughly(10)
@given(st.data())
def test_reply_of_a_worker(data: st.DataObject) -> None:
    strategy = strategy_of(momentum_buffers=data.draw(st.sampled_from(["keep", "average"])))
    liar = ToyWorker(slow_profile(1), 4.0)
    orders = orders_of(strategy, liar)
    honest = ToyWorker(value=1.0)(orders[HONEST], HONEST)
    replies = [honest, *changed(liar(orders[LIAR], LIAR), data)]
    ordered = sum(len(TrainOrder.from_message(order).indices) for order in orders.values())
    check_round(strategy, data.draw(st.permutations(replies)), ordered)


@thoroughly(5)
@given(st.data())
def test_reply_of_a_node_with_several_devices(data: st.DataObject) -> None:
    strategy = strategy_of(momentum_buffers=data.draw(st.sampled_from(["keep", "average"])))
    devices = [ToyWorker(fast_profile(-1), 2.0), ToyWorker(slow_profile(-1), 4.0)]
    liar = HostNode(*devices, partition_id=3)
    orders = orders_of(strategy, liar)
    honest = ToyWorker(value=1.0)(orders[HONEST], HONEST)
    ordered = sum(len(order.indices) for _, order in strategy.round.orders)
    check_round(strategy, [honest, *changed(liar(orders[LIAR], LIAR), data)], ordered)
