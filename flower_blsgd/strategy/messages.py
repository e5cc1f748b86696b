"""Messages of a round: one for each node, whatever number of workers it has."""

import logging
from collections.abc import Callable, Iterable, Sequence

from flwr.app import ConfigRecord, Message, RecordDict

from ..algorithm.averaging import Weighting, node_weight
from ..errors import UsageError
from ..protocol import HostOrders, TrainOrder
from ..protocol.records import records_of
from .aggregation import Aggregation
from .planner import Planner
from .workers import Worker

_LOG = logging.getLogger(__name__)


def node_messages(
    contents: Iterable[tuple[Worker, RecordDict]],
    message_type: str,
    to_host: Callable[[dict[int, RecordDict]], HostOrders] = HostOrders,
) -> list[Message]:
    """Return a message to each node.

    Parameters
    ----------
    contents : iterable of (Worker, RecordDict)
        What each worker is sent, in worker order.
    message_type : str
        Of the messages.
    to_host : callable
        Returns the one message for all workers of a node with several devices, from their
        contents by local rank.
    """
    messages = []
    of_hosts: dict[int, dict[int, RecordDict]] = {}
    for worker, content in contents:
        if worker.local_rank is None:
            messages.append(Message(content, worker.node_id, message_type))
        else:
            of_hosts.setdefault(worker.node_id, {})[worker.local_rank] = content
    for node_id, by_rank in of_hosts.items():
        messages.append(Message(to_host(by_rank).to_records(), node_id, message_type))
    return messages


def train_messages(
    orders: Sequence[tuple[Worker, TrainOrder]],
    config: ConfigRecord,
    aggregation: Aggregation,
    keys: tuple[str, str, str],
) -> list[Message]:
    """Return the train messages of a round.

    A node that is one worker gets that worker's order. One with several devices gets the model
    once, the orders of all its workers, and how their models are averaged there.

    Parameters
    ----------
    orders : sequence of (Worker, TrainOrder)
        In worker order, at least one.
    config : ConfigRecord
        Sent along with every order; an order's own keys win.
    aggregation : Aggregation
        Knows how models are averaged.
    keys : tuple of str
        ``arrayrecord_key``, ``configrecord_key`` and ``weighted_by_key`` of Flower's FedAvg.
    """
    arrays_key, config_key, weighted_by_key = keys
    contents = []
    for worker, order in orders:
        records = order.to_records(arrays_key, config_key)
        if config:
            own = records_of(records, ConfigRecord)[config_key]
            for key in config.keys() - own.keys():
                own[key] = config[key]
        contents.append((worker, records))
    longest_steps = max(order.local_steps for _, order in orders)

    def to_host(by_rank: dict[int, RecordDict]) -> HostOrders:
        rule = aggregation.node_averaging(orders[0][1].arrays, longest_steps)
        return HostOrders(
            by_rank,
            arrays_key,
            config_key,
            weighted_by_key,
            rule.worker_weight,
            list(rule.update_norms),
            list(rule.moving),
        )

    return node_messages(contents, "train", to_host)


def refuse_unfit_hosts(workers: Sequence[Worker], weighting: Weighting, planner: Planner) -> None:
    """Refuse workers of a node with several devices, if they cannot be averaged there.

    Before the first epoch that ends the run; a node that comes later is left out.

    Raises
    ------
    UsageError
        In one line, with the way out.
    """
    on_hosts = [worker for worker in workers if worker.local_rank is not None]
    if not on_hosts:
        return
    if not node_weight(weighting):
        reason = (
            f"{type(weighting).__name__} cannot be averaged there: only weights by load "
            "and equal ones can"
        )
    elif planner.train_on.slow_reduce:
        reason = "slow workers reduce models in shared memory only"
    else:
        return
    reason = (
        f"is behind a node with several devices, and {reason}; start one SuperNode for each device"
    )
    if planner.epoch == 0:
        raise UsageError(f"worker {on_hosts[0].label} {reason}")
    for worker in on_hosts:
        worker.excluded = reason
        _LOG.error("worker %s does not take part: it %s", worker.label, reason)
