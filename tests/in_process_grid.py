"""A Flower grid without processes: messages go to functions, and failures are injected.

Every message and every reply passes through Flower's own wire format, so nothing can be shared
by accident between a test's server and its workers.
"""

import dataclasses
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from flower_blsgd.engines.features import GridFeatures
from flower_blsgd.engines.mailbox import Mailbox, MailboxGrid
from flower_blsgd.flower.app_call import OUT_OF_MEMORY, error_of
from flower_blsgd.flower.internals import (
    CRASHED,
    NODE_GONE,
    RAISED,
    SERVER_NODE_ID,
    empty_run,
    give_message_id,
)
from flower_blsgd.protocol import TrainOrder, TrainReport, WorkerProfile
from flower_blsgd.strategy.biased_local_sgd import BiasedLocalSGD
from flower_blsgd.strategy.budget import Budget
from flower_blsgd.strategy.round_metrics import RoundRecord
from flower_blsgd.strategy.rounds import RoundEnd

Handler = Callable[[Message, int], Message]
"""(message, node id) -> reply; what it raises becomes an error reply, as in Flower."""

Order = Literal["sent", "reversed", "shuffled"]


def _with_nan(tensor: np.ndarray) -> np.ndarray:
    tensor = tensor.copy()
    tensor.flat[-1] = np.nan
    return tensor


_BROKEN_TENSORS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "non-finite": _with_nan,
    "mis-shaped": lambda tensor: tensor[None],
}
_BROKEN_METRICS = {
    "no number": ("num-examples", None),
    "no weight": ("num-examples", 0),
    "weight not finite": ("num-examples", float("inf")),
    "no such time": ("compute-seconds", 1e308),
}
BROKEN_REPLIES = (*_BROKEN_TENSORS, *_BROKEN_METRICS)

FailureKind = str
"""One of BROKEN_REPLIES, or "raises", "out of memory", "dies", "gone", "missing", "twice" or "of
another round"."""

TRACEBACK = (
    "Traceback (most recent call last):\n"
    '  File "client.py", line 7, in train\n'
    "    raise RuntimeError('the fan stands still')\n"
    "RuntimeError: the fan stands still\n"
)


class InProcessGrid(Grid, GridFeatures):
    """Calls a handler per node, at once and in this thread.

    Parameters
    ----------
    handlers : mapping of int to Handler
        By node id.
    order : {"sent", "reversed", "shuffled"} (default: "sent")
        In which order the replies of a batch of messages come back.
    seed : int (default: 0)
        Of the shuffling.
    """

    def __init__(
        self, handlers: Mapping[int, Handler], order: Order = "sent", seed: int = 0
    ) -> None:
        self.handlers = dict(handlers)
        self.sent: list[Message] = []
        self.timeouts: list[float | None] = []
        self._places = list(handlers)
        self._order = order
        self._random = random.Random(seed)
        self._failures: dict[tuple[int, int], FailureKind] = {}
        self._run = empty_run(1)
        self.pulls_in_vain = 0
        """After how many pulls the reply to a message that was pushed is there."""
        self._pushed: dict[str, list[Any]] = {}

    def fail_at(self, worker: int, server_round: int, kind: FailureKind) -> None:
        """Let the order of the worker-th node (as they were given) fail in a round."""
        self._failures[self._places[worker], server_round] = kind

    def disconnect(self, node_id: int) -> Handler:
        return self.handlers.pop(node_id)

    def connect(self, node_id: int, handler: Handler) -> None:
        self.handlers[node_id] = handler

    def sent_of_type(self, message_type: str) -> list[Message]:
        return [m for m in self.sent if m.metadata.message_type == message_type]

    def get_node_ids(self) -> Iterable[int]:
        return list(self.handlers)

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            ids.append(give_message_id(message))
            self.sent.append(message)
            reply = self._answer(message)
            if reply is not None:
                self._pushed[ids[-1]] = [self.pulls_in_vain, over_the_wire(reply)]
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = []
        for message_id in set(message_ids) & self._pushed.keys():
            self._pushed[message_id][0] -= 1
            if self._pushed[message_id][0] < 0:
                replies.append(self._pushed.pop(message_id)[1])
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        self.timeouts.append(timeout)
        replies = []
        for message in messages:
            give_message_id(message)
            self.sent.append(message)
            reply = self._answer(message)
            if reply is None:
                continue
            replies.append(over_the_wire(reply))
            kind = self._failures.get((message.metadata.dst_node_id, _round_of(message)))
            if kind == "twice":
                replies.append(over_the_wire(reply))
            elif kind == "of another round":
                replies[-1].metadata.__dict__["_reply_to_message_id"] = "an older message"
        if self._order == "reversed":
            replies.reverse()
        elif self._order == "shuffled":
            self._random.shuffle(replies)
        return replies

    def _answer(self, message: Message) -> Message | None:
        node_id = message.metadata.dst_node_id
        kind = self._failures.get((node_id, _round_of(message)))
        if kind == "missing" or node_id not in self.handlers:
            return None
        if kind == "raises":
            return Message(Error(RAISED, TRACEBACK), reply_to=message)
        if kind == "out of memory":
            reason = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
            reason = f"{TRACEBACK}\n{TRACEBACK.splitlines()[0]}\n{reason}"
            return Message(Error(OUT_OF_MEMORY, reason), reply_to=message)
        if kind == "dies":
            return Message(Error(CRASHED, "the process was killed"), reply_to=message)
        if kind == "gone":
            reply = Message(Error(NODE_GONE, "its connection broke"), reply_to=message)
            reply.metadata.__dict__["_src_node_id"] = SERVER_NODE_ID  # as Flower's SuperLink
            return reply
        try:
            reply = self.handlers[node_id](over_the_wire(message), node_id)
        except Exception as error:
            return Message(error_of(error), reply_to=message)
        if kind in BROKEN_REPLIES:
            _break(reply, kind)
        return reply


class FastGrid(InProcessGrid):
    """A grid whose messages are cheap, so that it is queried for momentum."""

    @property
    def connected_nodes(self) -> set[int]:
        return set(self.get_node_ids())


class MailGrid(InProcessGrid, MailboxGrid):
    """A grid that sends without waiting, as the local grid and streams do.

    The replies arrive at once.
    """

    def __init__(self, handlers: Mapping[int, Handler]) -> None:
        InProcessGrid.__init__(self, handlers)
        MailboxGrid.__init__(self, Mailbox())

    def close(self) -> None:
        pass

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            ids.append(give_message_id(message))
            self._mailbox.expect(ids[-1])
            self.sent.append(message)
            reply = self._answer(message)
            if reply is not None:
                self._mailbox.receive(over_the_wire(reply))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return MailboxGrid.pull_messages(self, message_ids)

    @property
    def waiting(self) -> int:
        """Number of replies that nobody has taken."""
        return len(self._mailbox._replies)


def over_the_wire(message: Message) -> Message:
    """Return the message as another process would receive it."""
    return message_from_proto(message_to_proto(message))


def _round_of(message: Message) -> int:
    config = message.content.config_records.get("config", ConfigRecord())
    return int(config.get("server-round", 0))


def _break(reply: Message, kind: FailureKind) -> None:
    arrays, metrics = reply.content["arrays"], reply.content["metrics"]
    if kind in _BROKEN_TENSORS:
        name = next(name for name, array in arrays.items() if array.dtype.startswith("float"))
        arrays[name] = Array(_BROKEN_TENSORS[kind](arrays[name].numpy()))
        return
    key, value = _BROKEN_METRICS[kind]
    del metrics[key]
    if value is not None:
        metrics[key] = value


class ToyWorker:
    """Sets every weight to a constant and reports made-up losses; needs no torch.

    Parameters
    ----------
    profile : WorkerProfile, optional
        None for a ClientApp without the profile handler.
    value : float (default: 0)
        What its floating weights become.
    losses : callable (default: the sample's own index)
        Indices -> losses.
    steps : int, optional
        It stops after so many steps, as at a deadline.
    """

    def __init__(
        self,
        profile: WorkerProfile | None = None,
        value: float = 0.0,
        losses: Callable[[np.ndarray], np.ndarray] = lambda indices: indices.astype(np.float32),
        steps: int | None = None,
    ) -> None:
        self.profile = profile
        self.value = value
        self.losses = losses
        self.steps = steps
        self.orders: list[TrainOrder] = []
        self.messages: list[Message] = []

    def __call__(self, message: Message, node_id: int) -> Message:
        self.messages.append(message)
        if message.metadata.message_type == "query.profile":
            if self.profile is None:
                return ClientApp()(message, Context(1, node_id, {}, RecordDict(), {}))
            return self.profile.to_reply(message)
        if message.metadata.message_type == "evaluate":
            metrics = MetricRecord({"num-examples": 10, "accuracy": self.value})
            return Message(RecordDict({"metrics": metrics}), reply_to=message)
        order = TrainOrder.from_message(message)
        self.orders.append(order)
        return self.report(order).to_reply(message)

    def report(self, order: TrainOrder) -> TrainReport:
        steps = order.local_steps if self.steps is None else self.steps
        done = order.indices[: steps * order.batch_size]
        return TrainReport(
            completed_steps=steps,
            batch_size=order.batch_size,
            compute_seconds=0.5,
            started_at=1.0,
            ended_at=1.5,
            losses=self.losses(done),
            arrays=self.model(order),
            learning_rate=order.learning_rate,
        )

    def model(self, order: TrainOrder) -> ArrayRecord:
        tensors = {name: array.numpy() for name, array in order.arrays.items()}
        return ArrayRecord(
            {
                name: Array(
                    np.full_like(tensor, self.value) if tensor.dtype.kind == "f" else tensor
                )
                for name, tensor in tensors.items()
            }
        )


class TorchWorker:
    """Runs orders with a `LocalSGD`; momentum is kept in a Flower state.

    Parameters
    ----------
    profile : WorkerProfile
        Its answer.
    sgd : LocalSGD
        Does the steps.
    change : callable, optional
        Order -> order, applied before it is run.
    """

    def __init__(
        self,
        profile: WorkerProfile,
        sgd: "object",
        change: Callable[[TrainOrder], TrainOrder] = lambda order: order,
    ) -> None:
        self.profile = profile
        self.sgd = sgd
        self.change = change
        self.state = RecordDict()
        self.orders: list[TrainOrder] = []

    def __call__(self, message: Message, node_id: int) -> Message:
        if message.metadata.message_type == "query.profile":
            return self.profile.to_reply(message)
        order = self.change(TrainOrder.from_message(message))
        self.orders.append(order)
        return self.sgd.run(order, state=self.state).to_reply(message)  # type: ignore[attr-defined]


def stop_at_once(order: TrainOrder) -> TrainOrder:
    """Give an order a deadline that is over after its first step."""
    return dataclasses.replace(order, deadline_seconds=1e-9)


def fast_profile(place: int = 0, **values: object) -> WorkerProfile:
    return WorkerProfile(f"cpu:{place}", tier="fast", partition_id=place, **values)  # type: ignore[arg-type]


def slow_profile(place: int = 1, **values: object) -> WorkerProfile:
    return WorkerProfile(f"cpu:{place}", tier="slow", partition_id=place, **values)  # type: ignore[arg-type]


def unnamed_profile(place: int, seconds: float = 0.0, **values: object) -> WorkerProfile:
    """Return the profile of a worker whose tier follows from its speed."""
    return WorkerProfile(f"cpu:{place}", partition_id=place, seconds_per_step=seconds, **values)  # type: ignore[arg-type]


def toy_arrays(value: float = 0.0) -> ArrayRecord:
    """Return a model of two weights, a float64 bias and a counter."""
    return ArrayRecord(
        {
            "weight": Array(np.full((2, 1), value, np.float32)),
            "bias": Array(np.full(1, value, np.float64)),
            "counter": Array(np.array(7, np.int64)),
        }
    )


def train_rounds(
    strategy: BiasedLocalSGD,
    grid: Grid,
    arrays: ArrayRecord | None = None,
    handle: Callable[[RoundRecord], object] = lambda record: None,
    **budget: Any,
) -> list[RoundEnd]:
    """Train, and return the ends of the rounds; `handle` gets the record of each."""
    ends = []
    for end in strategy.rounds(grid, arrays or toy_arrays(), Budget.of(**budget)):
        ends.append(end)
        handle(end.record)
    return ends


def tensors_of(arrays: ArrayRecord) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in arrays.items()}


def same_bits(first: ArrayRecord, second: ArrayRecord) -> bool:
    """Whether two models have the same names, shapes, dtypes and bits."""
    one, two = tensors_of(first), tensors_of(second)
    return list(one) == list(two) and all(
        one[name].dtype == two[name].dtype
        and one[name].shape == two[name].shape
        and one[name].tobytes() == two[name].tobytes()
        for name in one
    )
