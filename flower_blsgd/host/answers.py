"""What a node with several devices answers: profiles, one averaged model, slices of sums."""

import logging
from collections.abc import Mapping
from dataclasses import replace

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict

from ..algorithm.averaging import AnyArray
from ..algorithm.nesting import HostRule, average_by_load
from ..array_view import view_record
from ..model_check import ModelShape
from ..protocol import (
    ARRAYS,
    EVALUATE,
    HOST,
    METRICS,
    MOMENTUM,
    MOMENTUM_LOADS,
    NUM_EXAMPLES,
    PROFILE,
    QUERY_PROFILE,
    Failure,
    HostOrders,
    HostReply,
    ProfileQuery,
    TrainOrder,
    WorkerProfile,
)
from ..reply_check import CheckedReply, check_reply
from .inner_grid import InnerGrid

_LOG = logging.getLogger(__name__)


class NobodyAnsweredError(Exception):
    """No worker behind the node did what was asked; the message says why, in one line.

    Parameters
    ----------
    failures : mapping of int to Failure
        By place, at least one.
    """

    def __init__(self, failures: Mapping[int, Failure]) -> None:
        told = "; ".join(f"device {place}: {f.brief}" for place, f in failures.items())
        super().__init__(f"no device of this node answered ({told})")
        self.code = next(iter(failures.values())).code
        """Flower's error code of the first of them."""


def answer(message: Message, context: Context, grid: InnerGrid) -> Message:
    """Answer a message for all workers behind this node.

    One that is not meant for several, as Flower's own strategies send it, goes to the first.

    Raises
    ------
    NobodyAnsweredError
        If there is nothing to reply but failures of workers that have no order of their own.
    ProtocolError
        If the message is not what it must be.
    """
    kind = message.metadata.message_type
    if kind == QUERY_PROFILE:
        return _answer_query(message, context, grid)
    if HOST not in message.content.config_records:
        return _answer_first(message, grid)
    return _answer_evaluate(message, grid) if kind == EVALUATE else _answer_train(message, grid)


def _answer_query(message: Message, context: Context, grid: InnerGrid) -> Message:
    """Say which workers are behind this node; those that are asked measure at the same time."""
    kind = message.metadata.message_type
    query = ProfileQuery.from_message(message)
    asked = query.places or tuple(grid.places)
    contents = dict.fromkeys(asked, replace(query, places=()).to_records())
    answers, failures = grid.ask_again_if_died(contents, kind)
    number = int(context.node_config.get("partition-id", -1))
    parts = {}
    for place, answer in answers.items():
        try:
            (profile,) = WorkerProfile.list_from_reply(Message(answer, reply_to=message))
        except ValueError as error:
            failures[place] = Failure(0, str(error))
            continue
        # Its own number is its place here, and other hosts have such workers as well.
        own = replace(profile, partition_id=number).to_reply(message)
        parts[place] = RecordDict({PROFILE: own.content[PROFILE]})
    if not parts:
        raise NobodyAnsweredError(failures)
    return HostReply(parts, failures).to_reply(message)


def _answer_evaluate(message: Message, grid: InnerGrid) -> Message:
    """Let each worker evaluate its slice of the test set; the sums go back as they are."""
    orders = HostOrders.from_message(message)
    answers, failures = grid.ask(orders.contents, message.metadata.message_type)
    return HostReply(answers, failures).to_reply(message)


def _answer_train(message: Message, grid: InnerGrid) -> Message:
    """Let the workers train, and reply with the average of their models.

    Their replies are checked as the server would: one that cannot be used counts 0, and its
    model is not in the average.
    """
    host_orders = HostOrders.from_message(message)
    rule = HostRule(
        host_orders.worker_weight, tuple(host_orders.update_norms), tuple(host_orders.moving)
    )
    keys = host_orders.arrays_key, host_orders.config_key
    orders = {p: TrainOrder.from_content(c, *keys) for p, c in host_orders.contents.items()}
    model_shape = ModelShape(next(iter(orders.values())).arrays)
    answers, failures = grid.ask(host_orders.contents, message.metadata.message_type)
    checked: dict[int, CheckedReply] = {}
    parts: dict[int, RecordDict] = {}
    for place, answer in answers.items():
        try:
            checked[place] = check_reply(
                answer, orders[place], model_shape, host_orders.weighted_by
            )
        except Exception as error:  # whatever a worker sends, it costs only its own share
            failures[place] = Failure(0, str(error) or type(error).__name__)
        else:
            own = {n: r for n, r in answer.items() if n not in answer.array_records}
            parts[place] = RecordDict(own)
    for place, failure in failures.items():
        _LOG.warning("device %d counts 0: %s", place, failure.brief)
    return HostReply(parts, failures, _averaged(checked, rule)).to_reply(message)


def _answer_first(message: Message, grid: InnerGrid) -> Message:
    answers, failures = grid.ask({0: message.content}, message.metadata.message_type)
    if not answers:
        raise NobodyAnsweredError(failures)
    return Message(answers[0], reply_to=message)


def _averaged(checked: Mapping[int, CheckedReply], rule: HostRule) -> RecordDict:
    """Return the host's own records: the averages, and the samples behind them."""
    counted = [reply for reply in checked.values() if reply.report.num_examples]
    loads = [float(reply.report.num_examples) for reply in counted]
    records = RecordDict({METRICS: MetricRecord({NUM_EXAMPLES: int(sum(loads))})})
    if not counted:
        return records
    steps = [reply.report.completed_steps for reply in counted]
    tensors: dict[str, AnyArray] = rule.average([r.tensors for r in counted], loads, steps)
    records[ARRAYS] = view_record(tensors)
    momentum, behind = average_by_load(
        [reply.momentum for reply in counted],
        [dict.fromkeys(r.momentum, load) for r, load in zip(counted, loads, strict=True)],
    )
    if momentum:
        records[MOMENTUM] = view_record(momentum)
        told = [behind[name] for name in sorted(behind)]
        records[MOMENTUM_LOADS] = ConfigRecord({MOMENTUM_LOADS: told})
    return records
