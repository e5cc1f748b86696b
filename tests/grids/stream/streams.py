"""Stream grids without Flower's processes: nodes are threads, the connections are real."""

import contextlib
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from flower_blsgd.engines.stream.grid import StreamGrid
from flower_blsgd.engines.stream.serving import serve_sessions
from flower_blsgd.flower.array_records import AnyArray, view_record
from flower_blsgd.flower.internals import NODE_GONE, RAISED, empty_run

from ..processes import wait_until
from .slow_link import SlowLink

PATIENCE_SECONDS = 60.0
LOOPBACK = "127.0.0.1:0"


class FakeNode:
    """A SuperNode: one message at a time, on a thread; an exception becomes an error reply."""

    def __init__(self, node_id: int, app: ClientApp, config: Mapping[str, Any]) -> None:
        self.node_id, self.app = node_id, app
        self.context = Context(1, node_id, dict(config), RecordDict(), {})
        self.work: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self.replies: dict[str, Message] = {}
        self.answered_at: dict[str, float] = {}
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while (message := self.work.get()) is not None:
            try:
                reply = self.app(message, self.context)
            except Exception as error:
                reason = f"{type(error)}:<'{error}'>"
                reply = Message(Error(RAISED, reason), reply_to=message)
            message_id = message.metadata.message_id
            self.answered_at[message_id] = time.monotonic()
            self.replies[message_id] = reply

    def close(self) -> None:
        self.work.put(None)
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "a session did not end"


class FakeFlower(Grid):
    """Flower's grid of a deployment, without a SuperLink."""

    def __init__(self, apps: Mapping[int, ClientApp] | None = None) -> None:
        self._run = empty_run(1)
        self.nodes: dict[int, FakeNode] = {}
        self.offline: set[int] = set()
        self.pushed: list[Message] = []
        self._node_of: dict[str, FakeNode] = {}
        for node_id, app in (apps or {}).items():
            self.add(node_id, app)

    def add(self, node_id: int, app: ClientApp, **config: Any) -> FakeNode:
        self.nodes[node_id] = FakeNode(node_id, app, config)
        return self.nodes[node_id]

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [node_id for node_id in self.nodes if node_id not in self.offline]

    def get_nodes(self) -> Iterable[Any]:
        return [
            SimpleNamespace(node_id=node_id, last_activated_at="")
            for node_id in self.get_node_ids()
        ]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = message_id = uuid.uuid4().hex
            node = self.nodes[message.metadata.dst_node_id]
            self._node_of[message_id] = node
            arrived = message_from_proto(message_to_proto(message))
            self.pushed.append(arrived)
            node.work.put(arrived)
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = []
        for message_id in message_ids:
            node = self._node_of[message_id]
            if message_id in node.replies:
                replies.append(node.replies.pop(message_id))
            elif node.node_id in self.offline:
                (message,) = (m for m in self.pushed if m.metadata.message_id == message_id)
                replies.append(Message(Error(NODE_GONE, "Node Unavailable"), reply_to=message))
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        raise NotImplementedError


class LinkedGrid(StreamGrid):
    """A stream grid whose nodes connect through a slow link."""

    link: SlowLink
    delay_seconds = 0.0
    bytes_per_second = float("inf")

    def _addresses(self, address: str) -> list[str]:
        self.link = SlowLink(self._server.port, self.delay_seconds, self.bytes_per_second)
        return [f"127.0.0.1:{self.link.port}"]

    def close(self) -> None:
        super().close()
        self.link.close()


@contextlib.contextmanager
def streaming(
    *apps: ClientApp, kind: type[StreamGrid] = StreamGrid, wire_dtype: str = "float32"
) -> Iterator[Any]:
    """Give a grid whose nodes 7, 8, ... serve these apps; afterwards all sessions must end."""
    flower = FakeFlower({7 + i: app for i, app in enumerate(apps)})
    try:
        with kind(flower, LOOPBACK, wire_dtype, PATIENCE_SECONDS) as grid:  # type: ignore[arg-type]
            grid.wait_until_connected()
            yield grid
    finally:
        flower.close()


def flower_of(grid: StreamGrid) -> FakeFlower:
    flower = grid._grid
    assert isinstance(flower, FakeFlower)
    return flower


def made_app(
    handle: Callable[[Message, Context], RecordDict | Message], **arguments: Any
) -> ClientApp:
    """Return an app that serves sessions and does this at ``train``."""
    app = ClientApp(**arguments)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        answer = handle(message, context)
        return Message(answer, reply_to=message) if isinstance(answer, RecordDict) else answer

    return serve_sessions(app)


def echo(message: Message, _: Context) -> RecordDict:
    return message.content


def order(node_id: int = 7, model: Mapping[str, AnyArray] | None = None, **values: Any) -> Message:
    content = RecordDict({"config": ConfigRecord(values)})
    if model is not None:
        content["arrays"] = view_record(model)
    return Message(content, node_id, "train", group_id="3")


def exchange(grid: Grid, *messages: Message, timeout: float = PATIENCE_SECONDS) -> list[Message]:
    """Send messages; return the replies in the same order. Each must come."""
    replies = list(grid.send_and_receive(messages, timeout=timeout))
    assert len(replies) == len(messages), f"{len(replies)} replies to {len(messages)} messages"
    by_id = {reply.metadata.reply_to_message_id: reply for reply in replies}
    return [by_id[message.metadata.message_id] for message in messages]


def collect(grid: StreamGrid, ids: Iterable[str]) -> list[Message]:
    """Wait for the replies to messages that were pushed, by pulling."""
    found: list[Message] = []
    expected = list(ids)
    assert wait_until(
        lambda: found.extend(grid.pull_messages(expected)) or found[len(expected) - 1 :]
    )
    return found


def config_of(reply: Message) -> dict[str, Any]:
    assert not reply.has_error(), reply.error.reason
    return dict(reply.content["config"])


def answer(**values: Any) -> RecordDict:
    return RecordDict({"config": ConfigRecord(values)})


def random_model(num_bytes: int, tensors: int = 4, seed: int = 1) -> dict[str, AnyArray]:
    rng = np.random.default_rng(seed)
    size = num_bytes // 4 // tensors
    return {f"w{i}": rng.standard_normal(size, np.float32) for i in range(tensors)}


def same_bits(reply: Message, model: Mapping[str, AnyArray]) -> bool:
    found = reply.content["arrays"]
    return found.keys() == model.keys() and all(
        found[name].numpy().tobytes() == tensor.tobytes() for name, tensor in model.items()
    )
