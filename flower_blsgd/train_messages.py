"""The orders of a round as messages: one for each node, whatever it has behind it."""

import logging
from collections.abc import Sequence

from flwr.app import ConfigRecord, Message, RecordDict

from .aggregation import Aggregation
from .algorithm.averaging import Weighting
from .algorithm.nesting import nests
from .errors import UsageError
from .planner import Planner
from .protocol import HostOrders, TrainOrder
from .quick_records import records_of
from .roster import Worker

_LOG = logging.getLogger(__name__)


def train_messages(
    orders: Sequence[tuple[Worker, TrainOrder]],
    config: ConfigRecord,
    aggregation: Aggregation,
    names: tuple[str, str, str],
) -> list[Message]:
    """Return the messages of a round.

    A node that is one worker gets that worker's order. One with several devices gets the model
    once, the orders of all its workers, and how their models are averaged there.

    Parameters
    ----------
    orders : sequence of (Worker, TrainOrder)
        In worker order.
    config : ConfigRecord
        Sent along with every order; an order's own keys win.
    aggregation : Aggregation
        Says how models are averaged.
    names : tuple of str
        ``arrayrecord_key``, ``configrecord_key`` and ``weighted_by_key`` of Flower's FedAvg.
    """
    arrays_key, config_key, weighted_by_key = names
    messages = []
    behind: dict[int, dict[int, tuple[TrainOrder, RecordDict]]] = {}
    for worker, order in orders:
        records = order.to_records(arrays_key, config_key)
        own = records_of(records, ConfigRecord)[config_key]
        for key in config.keys() - own.keys():
            own[key] = config[key]
        if worker.place is None:
            messages.append(Message(records, worker.node_id, "train"))
        else:
            behind.setdefault(worker.node_id, {})[worker.place] = order, records
    for node_id, given in behind.items():
        order, _ = next(iter(given.values()))
        longest = max(order.local_steps for order, _ in given.values())
        rule = aggregation.host_rule(order.arrays, longest)
        host_orders = HostOrders(
            {place: records for place, (_, records) in given.items()},
            arrays_key,
            config_key,
            weighted_by_key,
            rule.worker_weight,
            list(rule.update_norms),
            list(rule.moving),
        )
        messages.append(Message(host_orders.to_records(), node_id, "train"))
    return messages


def refuse_unfit_hosts(workers: Sequence[Worker], weighting: Weighting, planner: Planner) -> None:
    """Refuse workers behind a node with several devices, if they cannot be averaged there.

    Before the first epoch that ends the run; a node that comes later is left out.

    Raises
    ------
    UsageError
        In one line, with the way out.
    """
    behind = [worker for worker in workers if worker.place is not None]
    reason = _why_not_behind_one_node(weighting, planner) if behind else ""
    if not reason:
        return
    if planner.epoch == 0:
        raise UsageError(f"worker {behind[0].label} {reason}")
    for worker in behind:
        worker.excluded = reason
        _LOG.error("worker %s does not take part: it %s", worker.label, reason)


def _why_not_behind_one_node(weighting: Weighting, planner: Planner) -> str:
    where = "is behind a node with several devices, and"
    way_out = "start one SuperNode for each device"
    if not nests(weighting):
        return (
            f"{where} {type(weighting).__name__} cannot be averaged there: only weights by load "
            f"and equal ones can (its worker_weight); {way_out}"
        )
    if planner.train_on.slow_sums:
        return f"{where} slow workers add up models in shared memory only; {way_out}"
    return ""
