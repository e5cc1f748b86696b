"""Nodes with several devices whose workers are functions, for tests without processes."""

from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import Context, Message, RecordDict

from flower_blsgd.hosts.node_grid import NodeGrid
from flower_blsgd.hosts.several_devices import answer

from ..in_process_grid import Handler, InProcessGrid


class GridOfFunctions(NodeGrid):
    """The grid of a node, without processes."""

    def __init__(self, handlers: Sequence[Handler]) -> None:
        self.functions = InProcessGrid({100 + rank: h for rank, h in enumerate(handlers)})
        self._grid = self.functions  # type: ignore[assignment]  # any Grid will do
        self._node_ids = list(self.functions.get_node_ids())


class HostNode:
    """A node that is one grid of functions; a handler of an `InProcessGrid`."""

    def __init__(self, *handlers: Handler, **node_config: Any) -> None:
        self.grid = GridOfFunctions(handlers)
        self.messages: list[Message] = []
        self.replies: list[Message] = []
        self._node_config: Mapping[str, Any] = {
            key.replace("_", "-"): value for key, value in node_config.items()
        }

    def __call__(self, message: Message, node_id: int) -> Message:
        self.messages.append(message)
        context = Context(1, node_id, dict(self._node_config), RecordDict(), {})
        reply = answer(message, context, self.grid)
        self.replies.append(reply)
        return reply

    def sent_of_type(self, message_type: str) -> list[Message]:
        return [m for m in self.messages if m.metadata.message_type == message_type]
