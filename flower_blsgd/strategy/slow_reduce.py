"""Parameter-server reduce: each slow worker sums its slice of the fast ones' models (BytePS)."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from ..algorithm.averaging import AnyArray, weighted_average
from ..array_records import view_record
from ..protocol import TRAIN_SUM, Failure, SumOrder, SumReport
from ..protocol.records import ProtocolError
from .profiles import answer_of, replies_to
from .workers import Worker

_LOG = logging.getLogger(__name__)


@dataclass
class SlowWorkerReduce:
    """Averages models in the slow workers' processes.

    Every slow worker gets an equal slice of each tensor or, where the models lie in one piece of
    memory each, of the few long arrays that they are then. The result is that of
    `weighted_average` to the bit. A slice whose worker fails is summed here.

    Parameters
    ----------
    grid : Grid
        Where the workers are; one that shares memory, or the models would travel twice.
    workers : sequence of Worker
        Those that sum, at least one.

    Attributes
    ----------
    summing : list of (Worker, (float, float))
        Of the last call: who summed, and the Unix time in seconds of its start and its end.
    """

    grid: Grid
    workers: Sequence[Worker]
    summing: list[tuple[Worker, tuple[float, float]]] = field(default_factory=list, init=False)

    def __call__(
        self,
        models: Sequence[Mapping[str, AnyArray]],
        weights: Sequence[float],
        out: Mapping[str, AnyArray] | None = None,
    ) -> dict[str, AnyArray]:
        """Return ``sum_i w_i x_i`` for every named tensor; see `weighted_average`."""
        counted = [(model, w) for model, w in zip(models, weights, strict=True) if w > 0]
        first, shares = counted[0][0], tuple(weight for _, weight in counted)
        out = out or {name: np.empty_like(tensor, order="C") for name, tensor in first.items()}
        flat_out, flat = _flat(out), [_flat(model) for model, _ in counted]
        messages, orders, parts = [], {}, {}
        for rank, worker in enumerate(self.workers):
            part = parts[worker.node_id] = {
                name: slice(
                    len(whole) * rank // len(self.workers),
                    len(whole) * (rank + 1) // len(self.workers),
                )
                for name, whole in flat[0].items()
            }
            slices = (view_record({n: model[n][part[n]] for n in part}) for model in flat)
            order = orders[worker.node_id] = SumOrder(shares, tuple(slices))
            messages.append(Message(order.to_records(), worker.node_id, TRAIN_SUM))
        replies = replies_to(self.grid, messages)
        self.summing = []
        for worker in self.workers:
            node_id = worker.node_id
            arrays = self._read(worker, orders[node_id], replies.get(node_id))
            for name, part_of in parts[node_id].items():
                flat_out[name][part_of] = arrays[name].numpy()
        return {name: out[name] for name in first}

    def _read(self, worker: Worker, order: SumOrder, reply: Message | None) -> ArrayRecord:
        try:
            answer = answer_of(reply, None)
            if isinstance(answer, Failure):
                raise ProtocolError(answer.brief)
            assert reply is not None
            report = SumReport.from_reply(reply, order.slices)
        except Exception as error:  # whatever a node sends, it costs only time
            reason = str(error) or type(error).__name__
            _LOG.warning("%s did not sum its slice, so the server does: %s", worker.label, reason)
            return view_record(weighted_average(order.models(), order.weights))
        self.summing.append((worker, (report.started_at, report.ended_at)))
        return report.arrays


def _flat(model: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
    return {name: tensor.reshape(-1) for name, tensor in model.items()}
