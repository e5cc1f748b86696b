"""Parameter-server reduce: each slow worker sums its slice of the fast ones' models (BytePS)."""

import logging
from collections.abc import Mapping, Sequence

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from ..algorithm.averaging import AnyArray, weighted_average
from ..array_records import view_record
from ..protocol import TRAIN_SUM, SumOrder, SumReport
from ..protocol.records import ProtocolError
from .workers import Worker

_LOG = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 600.0


class SlowWorkerReduce:
    """Averages models in the slow workers' processes.

    The floating tensors of each model are laid end to end, one flat buffer for each dtype, and
    every slow worker gets an equal slice of it. The result is that of `weighted_average` to the
    bit. A slice whose worker fails is summed here.

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

    def __init__(self, grid: Grid, workers: Sequence[Worker]) -> None:
        self._grid = grid
        self._workers = workers
        self.summing: list[tuple[Worker, tuple[float, float]]] = []

    def __call__(
        self, models: Sequence[Mapping[str, AnyArray]], weights: Sequence[float]
    ) -> dict[str, AnyArray]:
        """Return ``sum_i w_i x_i`` for every named tensor; see `weighted_average`."""
        counted = [(model, w) for model, w in zip(models, weights, strict=True) if w > 0]
        floating = [name for name, tensor in counted[0][0].items() if tensor.dtype.kind in "fc"]
        flat = [_flat(model, floating) for model, _ in counted]
        shares = [weight for _, weight in counted]
        summed = self._sum(flat, shares)
        others = [
            {name: tensor for name, tensor in model.items() if name not in floating}
            for model, _ in counted
        ]
        averages = weighted_average(others, shares)
        starts = dict.fromkeys(summed, 0)
        for name in floating:
            like = counted[0][0][name]
            dtype = str(like.dtype)
            start = starts[dtype]
            averages[name] = summed[dtype][start : start + like.size].reshape(like.shape)
            starts[dtype] = start + like.size
        return {name: averages[name] for name in counted[0][0]}

    def _sum(
        self, models: Sequence[Mapping[str, AnyArray]], weights: Sequence[float]
    ) -> dict[str, AnyArray]:
        summed = {dtype: np.empty_like(whole) for dtype, whole in models[0].items()}
        messages, bounds, orders = [], {}, {}
        for rank, worker in enumerate(self._workers):
            bounds[worker.node_id] = {
                dtype: slice(
                    len(whole) * rank // len(self._workers),
                    len(whole) * (rank + 1) // len(self._workers),
                )
                for dtype, whole in summed.items()
            }
            own = bounds[worker.node_id]
            slices = tuple(
                view_record({dtype: model[dtype][own[dtype]] for dtype in summed})
                for model in models
            )
            orders[worker.node_id] = SumOrder(tuple(weights), slices)
            messages.append(Message(orders[worker.node_id].to_records(), worker.node_id, TRAIN_SUM))
        replies = {
            reply.metadata.src_node_id: reply
            for reply in self._grid.send_and_receive(messages, timeout=_TIMEOUT_SECONDS)
        }
        self.summing = []
        for worker in self._workers:
            order = orders[worker.node_id]
            arrays = self._read(worker, order, replies.get(worker.node_id))
            for dtype, part in bounds[worker.node_id].items():
                summed[dtype][part] = arrays[dtype].numpy()
        return summed

    def _read(self, worker: Worker, order: SumOrder, reply: Message | None) -> ArrayRecord:
        try:
            if reply is None:
                raise ProtocolError("it did not answer in time")
            if reply.has_error():
                raise ProtocolError((reply.error.reason or "it failed").strip().splitlines()[-1])
            report = SumReport.from_reply(reply, order.slices)
        except Exception as error:  # whatever a node sends, it costs only time
            reason = str(error) or type(error).__name__
            _LOG.warning("%s did not sum its slice, so the server does: %s", worker.label, reason)
            return view_record(weighted_average(order.models(), order.weights))
        self.summing.append((worker, (report.started_at, report.ended_at)))
        return report.arrays


def _flat(model: Mapping[str, AnyArray], names: Sequence[str]) -> dict[str, AnyArray]:
    parts: dict[str, list[AnyArray]] = {}
    for name in names:
        parts.setdefault(str(model[name].dtype), []).append(model[name].reshape(-1))
    return {dtype: np.concatenate(arrays) for dtype, arrays in parts.items()}
