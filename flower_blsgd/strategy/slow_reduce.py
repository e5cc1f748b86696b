"""Parameter-server reduce: each slow worker sums a slice of the fast workers' models (BytePS)."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from ..algorithm.averaging import weighted_average
from ..algorithm.tensor_sum import AnyArray
from ..flower.array_records import tensors_of, view_record
from ..protocol import TRAIN_SUM, Failure, SumOrder, SumReport
from .messages import read_answer, replies_to
from .replies import ModelShape
from .workers import Worker

_LOG = logging.getLogger(__name__)


@dataclass
class SlowWorkerReduce:
    """Average of models, computed in the processes of the slow workers.

    Every slow worker gets an equal slice of each tensor, or of each memory block if the tensors of
    a model are contiguous. The result is bit-identical to `weighted_average`. If a worker fails or
    takes longer than `patience_seconds`, its slice is summed here. The grid should share memory, or
    the models travel twice. `summing` has the workers that summed in the last call, with the Unix
    times of their start and end.
    """

    grid: Grid
    workers: Sequence[Worker]
    patience_seconds: float = 600.0
    summing: list[tuple[Worker, tuple[float, float]]] = field(default_factory=list, init=False)

    def __call__(
        self,
        models: Sequence[Mapping[str, AnyArray]],
        weights: Sequence[float],
        out: Mapping[str, AnyArray] | None = None,
    ) -> dict[str, AnyArray]:
        """Return ``sum_i w_i x_i`` for every named tensor; see `weighted_average`."""
        counted = [(model, w) for model, w in zip(models, weights, strict=True) if w > 0]
        first = counted[0][0]
        shares = tuple(weight for _, weight in counted)
        out = out or {name: np.empty_like(tensor, order="C") for name, tensor in first.items()}
        flat_out = _flat(out)
        flat = [_flat(model) for model, _ in counted]
        asked = []
        for rank, worker in enumerate(self.workers):
            part = {
                name: slice(
                    len(whole) * rank // len(self.workers),
                    len(whole) * (rank + 1) // len(self.workers),
                )
                for name, whole in flat[0].items()
            }
            slices = (view_record({n: model[n][part[n]] for n in part}) for model in flat)
            asked.append((worker, part, SumOrder(shares, tuple(slices))))
        messages = [Message(o.to_records(), worker.node_id, TRAIN_SUM) for worker, _, o in asked]
        replies = replies_to(self.grid, messages, self.patience_seconds)
        self.summing = []
        for worker, part, order in asked:
            arrays = self._read(worker, order, replies.get(worker.node_id))
            for name, part_of in part.items():
                flat_out[name][part_of] = arrays[name]
        return {name: out[name] for name in first}

    def _read(
        self, worker: Worker, order: SumOrder, reply: Message | None
    ) -> Mapping[str, AnyArray]:
        def read(content: RecordDict) -> Mapping[str, AnyArray]:
            report = SumReport.from_content(content)
            sums = ModelShape(order.slices[0]).checked(report.arrays)
            self.summing.append((worker, (report.started_at, report.ended_at)))
            return sums

        sums = read_answer(reply, None, read)
        if not isinstance(sums, Failure):
            worker.fresh = False
            return sums
        if worker.note_failure(f"{sums.kind}, summing"):
            what = "%s did not sum its slice, so the server does: %s"
            _LOG.warning(what, worker.label, sums.brief)
        return weighted_average([tensors_of(part) for part in order.slices], order.weights)


def _flat(model: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
    return {name: tensor.reshape(-1) for name, tensor in model.items()}
