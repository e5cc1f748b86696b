"""One training round: orders, messages and replies."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, ConfigRecord, Message, Metadata, RecordDict

from ..protocol import HostOrders, Keys, TrainOrder
from ..protocol.records import records_of
from .averaging import Averaging
from .messages import Address, node_messages
from .replies import ModelShape, Outcome, read_replies
from .slow_reduce import SlowWorkerReduce
from .workers import Worker


@dataclass(eq=False)
class Round:
    """One training round.

    Parameters
    ----------
    orders : sequence of (Worker, TrainOrder)
        One per worker that trains, in worker order.
    arrays : ArrayRecord
        The global model at the start of the round.
    keys : Keys
        Names of the records in the messages.
    batch_size : int
        The run's samples per step.
    epoch, round_in_epoch, rounds_in_epoch : int
        Position of the round; the first two are counted from 1.
    planning_seconds : float
        Time that the workers waited for the plan of the round.
    slow_reduce : SlowWorkerReduce, optional
        Sums the models, if slow workers do that.

    Attributes
    ----------
    model_shape : ModelShape
        Names, shapes and dtypes of the model, to check replies.
    sent_at : float
        Unix time in seconds of the first message.
    reply_seconds : float
        Seconds from the first message to the last reply; 0 until `read`.
    """

    orders: Sequence[tuple[Worker, TrainOrder]]
    arrays: ArrayRecord
    keys: Keys
    batch_size: int
    epoch: int = 0
    round_in_epoch: int = 0
    rounds_in_epoch: int = 0
    planning_seconds: float = 0.0
    slow_reduce: SlowWorkerReduce | None = None
    sent_at: float = field(default=0.0, init=False)
    reply_seconds: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.model_shape = ModelShape(self.arrays)
        self._sent: list[Metadata] = []
        self._sent_on_clock = 0.0

    @property
    def seconds(self) -> float:
        """Seconds since the first message."""
        return time.perf_counter() - self._sent_on_clock

    def messages(
        self,
        averaging: Averaging,
        config: ConfigRecord | None = None,
        patience_seconds: float = 600.0,
    ) -> list[Message]:
        """Return the messages with the orders, and start the clock of the round.

        A node with several devices gets the model once, the orders of all its workers, and the
        rule to average their models.

        Parameters
        ----------
        averaging : Averaging
            The averaging of the run.
        config : ConfigRecord, optional
            Sent with every order; the keys of the order take precedence.
        patience_seconds : float (default: 600)
            Time that the server waits for the replies.
        """
        contents = []
        for worker, order in self.orders:
            records = order.to_records(self.keys.arrays, self.keys.config)
            if config:
                own = records_of(records, ConfigRecord)[self.keys.config]
                for key in config.keys() - own.keys():
                    own[key] = config[key]
            contents.append((worker.address, records))

        def to_host(by_rank: dict[int, RecordDict]) -> HostOrders:
            longest_steps = max(order.local_steps for _, order in self.orders)
            rule = averaging.at_nodes(self.arrays, longest_steps)
            keys = self.keys.arrays, self.keys.config, self.keys.weighted_by
            return HostOrders(by_rank, *keys, **rule, patience_seconds=patience_seconds)

        messages = node_messages(contents, "train", to_host)
        self._sent = [message.metadata for message in messages]  # ids are set when they are sent
        self.sent_at, self._sent_on_clock = time.time(), time.perf_counter()
        return messages

    def read(self, replies: Iterable[Message]) -> list[Outcome]:
        """Return the outcome of each order, in worker order: a checked reply, or a failure."""
        replies = list(replies)
        self.reply_seconds = self.seconds
        ids = {sent.dst_node_id: sent.message_id for sent in self._sent}
        return read_replies(replies, self.orders, self.model_shape, self.keys.weighted_by, ids)


def samples_of(orders: Iterable[tuple[Worker, TrainOrder]]) -> dict[tuple[Address, int], int]:
    """Return the number of samples in the orders, by worker and batch size."""
    return {(w.address, order.batch_size): len(order.indices) for w, order in orders}
