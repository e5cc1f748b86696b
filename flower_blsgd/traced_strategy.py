"""BiasedLocalSGD that asks its workers, in one epoch, what they did when."""

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from .protocol import HostReply, Operators, TrainOrder, WorkerTrace
from .protocol.tracing import TraceLevel, ask_for_trace
from .results.epoch_trace import EpochTrace
from .roster import Worker
from .strategy import BiasedLocalSGD

_LOG = logging.getLogger(__name__)


class TracedLocalSGD(BiasedLocalSGD):
    """Does as `BiasedLocalSGD`, and traces one epoch; the results are the same to the bit.

    In the first round of that epoch the workers record each operator as well. A worker that sends
    no trace, or one that cannot be read, costs a warning and its own spans, not the round.

    Parameters
    ----------
    *arguments, **more
        As for `BiasedLocalSGD`.

    Attributes
    ----------
    trace : EpochTrace
        Takes what is recorded, and says which epoch it wants; none unless another is set.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.trace = EpochTrace()
        self._silent: set[int] = set()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the orders, with the wish for a trace if this is the epoch."""
        began_ns = time.time_ns()
        messages = list(super().configure_train(server_round, arrays, config, grid))
        _, order = next(iter(self._orders.values()))
        if order.epoch == self.trace.epoch:
            level: TraceLevel = "spans" if self.trace.began else "operators"
            for message in messages:
                ask_for_trace(message.content, self.configrecord_key, level)
            planned_ns = round(self._planned_at * 1e9)
            planning_ns = round(self._planning_seconds * 1e9)
            self.trace.begin_round(server_round, began_ns, planned_ns - planning_ns, planned_ns)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the replies, and keep the traces that came along."""
        received_ns = time.time_ns()
        replies = list(replies)
        result = super().aggregate_train(server_round, replies)
        if self.trace.is_in(server_round):
            reading_ns = time.time_ns()
            self.trace.end_round(server_round, received_ns, reading_ns, *self._traces(replies))
        return result

    def _traces(
        self, replies: Iterable[Message]
    ) -> tuple[dict[int, WorkerTrace], dict[int, Operators]]:
        by_node = {reply.metadata.src_node_id: reply for reply in replies}
        traces, operators = {}, {}
        for worker, order in self._orders.values():
            reply = by_node.get(worker.node_id)
            if reply is None or reply.has_error():
                continue  # it counts 0, and that was told
            try:
                trace = _trace_of(worker, reply)
                found = trace.operators() if trace else None
            except Exception as error:  # whatever a node sends, it costs only its own spans
                self._tell(worker, order, str(error) or type(error).__name__)
                continue
            if trace is None:
                self._tell(worker, order, "it sends none")
                continue
            traces[worker.index] = trace
            if trace.note:
                _LOG.warning("trace of %s: %s", worker.label, trace.note)
            if found is not None:
                operators[worker.index] = found
        return traces, operators

    def _tell(self, worker: Worker, order: TrainOrder, reason: str) -> None:
        if worker.index not in self._silent:
            self._silent.add(worker.index)
            _LOG.warning(
                "no trace of %s in round %d: %s; its row shows what the server knows",
                worker.label,
                order.round,
                reason,
            )


def _trace_of(worker: Worker, reply: Message) -> WorkerTrace | None:
    if worker.place is None:
        return WorkerTrace.from_content(reply.content)
    parts: Mapping[int, Any] = HostReply.from_content(reply.content).parts
    part = parts.get(worker.place)
    return None if part is None else WorkerTrace.from_content(part)
