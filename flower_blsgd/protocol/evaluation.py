"""Order to evaluate a slice of the test set, and its report."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from ..fields import to_record
from .failure import ProtocolError
from .records import (
    ARRAYS,
    CONFIG,
    METRICS,
    NUM_EXAMPLES,
    SERVER_ROUND,
    SUMS,
    from_wire,
)


@dataclass(frozen=True)
class EvaluateOrder:
    """One worker's share of an evaluation: the slice [first, last) of the test set.

    The model is that after `round`; `arrays` has the tensors that are sent, see `sent_tensors`.
    """

    round: int = field(metadata={"key": SERVER_ROUND, "limits": 0})
    first: int
    last: int
    arrays: ArrayRecord = field(metadata={"wire": False})

    def to_records(self) -> RecordDict:
        """Return the content of the order's message; `arrays` itself is shared, not copied."""
        return RecordDict({ARRAYS: self.arrays, CONFIG: ConfigRecord(to_record(self))})

    @classmethod
    def from_message(cls, message: Message, num_test: int) -> "EvaluateOrder":
        """Read the order in an evaluate message to a worker whose test set has `num_test` samples.

        A message without a slice, as from Flower's own strategies, means the whole test set.
        ProtocolError if there is no model, or if the test set has no such slice.
        """
        config = message.content.config_records.get(CONFIG, ConfigRecord())
        arrays = message.content.array_records.get(ARRAYS)
        if arrays is None:
            raise ProtocolError(f"the message to evaluate holds no model {ARRAYS!r}")
        whole = {SERVER_ROUND: 0, "first": 0, "last": num_test}
        order = cls(**from_wire(cls, {**whole, **config}), arrays=arrays)
        if not 0 <= order.first < order.last <= num_test:
            raise ProtocolError(
                f"samples {order.first} to {order.last} of the test set were ordered, but it "
                f"has {num_test} here; all workers must see the same data"
            )
        return order


@dataclass(frozen=True)
class EvaluateReport:
    """Sums of the loss and of the metric's values over the slice [first, last) of the test set.

    `loss_sums` has the sum of each batch in float64, in order, so the total does not depend on the
    slices. `metric_sums` has the sums of all values of the metric over the first batch, then over
    the second one, and so on; without names, it is empty. `seconds` is the duration of the
    evaluation; 0 if unknown.
    """

    first: int
    last: int
    loss_sums: list[float] = field(metadata={"limits": None})
    metric_sums: list[float] = field(metadata={"limits": None})
    metric_names: list[str] = field(default_factory=lambda: ["accuracy"])
    seconds: float = field(default=0.0, metadata={"limits": 0})

    @property
    def num_examples(self) -> int:
        """Number of samples."""
        return self.last - self.first

    @property
    def loss(self) -> float:
        """Mean loss."""
        return sum(self.loss_sums) / self.num_examples

    @property
    def totals(self) -> dict[str, float]:
        """Sum of each value of the metric over all samples."""
        count = len(self.metric_names)
        return {name: sum(self.metric_sums[i::count]) for i, name in enumerate(self.metric_names)}

    def metrics(self) -> MetricRecord:
        """Return the means of the loss and of the metric's values."""
        means = {name: total / self.num_examples for name, total in self.totals.items()}
        return MetricRecord({**means, "loss": self.loss})

    @classmethod
    def total(cls, reports: Sequence["EvaluateReport"]) -> "EvaluateReport":
        """Return the report of consecutive slices as one."""
        losses = [loss_sum for r in reports for loss_sum in r.loss_sums]
        metrics = [metric_sum for r in reports for metric_sum in r.metric_sums]
        names = reports[0].metric_names
        return cls(reports[0].first, reports[-1].last, losses, metrics, names)

    def to_reply(self, message: Message) -> Message:
        """Return the reply to an evaluate message.

        Its only MetricRecord has the means and ``num-examples``, so Flower's own strategies can
        average it. The sums are in a ConfigRecord.
        """
        metrics = MetricRecord({NUM_EXAMPLES: self.num_examples, **self.metrics()})
        sums = ConfigRecord(to_record(self))
        return Message(RecordDict({METRICS: metrics, SUMS: sums}), reply_to=message)

    @classmethod
    def from_content(cls, content: RecordDict, order: EvaluateOrder) -> "EvaluateReport":
        """Read the content of the reply to an order; ProtocolError if the sums are missing."""
        sums = content.config_records.get(SUMS)
        if sums is None:
            raise ProtocolError("the reply holds no sums")
        report = cls(**from_wire(cls, sums))
        if (report.first, report.last) != (order.first, order.last):
            raise ProtocolError(
                f"samples {order.first} to {order.last} were ordered, but the sums are of samples "
                f"{report.first} to {report.last}"
            )
        batches, names = len(report.loss_sums), len(report.metric_names)
        if not batches or batches * names != len(report.metric_sums):
            raise ProtocolError("the reply does not hold a loss and a metric of each batch")
        return report
