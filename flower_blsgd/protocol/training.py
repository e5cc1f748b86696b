"""Order to train, and its report."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from ..fields import to_record
from .failure import NotFiniteError, ProtocolError
from .records import (
    ARRAYS,
    COMPLETED_STEPS,
    CONFIG,
    LOSSES,
    METRICS,
    MOMENTUM,
    MOMENTUM_ZEROED,
    NUM_EXAMPLES,
    OWN_MODEL,
    SERVER_ROUND,
    SKIPPED_STEPS,
    TRAIN_LOSS,
    AnyRecord,
    Record,
    from_wire,
    records_of,
    unchecked_content,
    unchecked_record,
)

MomentumPolicy = Literal["keep", "reset", "average"]
MOMENTUM_POLICIES: tuple[MomentumPolicy, ...] = ("keep", "reset", "average")

Average = Literal["models", "gradients"]
"""What the server averages."""

Brings = Literal["model", "gradient", "skip"]
"""Arrays of an order: a model to load, the averaged gradient of the last order, or one with which
no worker steps, because that of a worker overflowed.
"""

MOST_SKIPS = 40
"""Largest number of steps in a row that may be skipped because gradients overflow.

A loss scale of 2^24 is then below 2^-16.
"""

_INDEX_DTYPE = np.dtype("<i4")
_LOSS_DTYPE = np.dtype("<f4")
_INDICES = "indices"
_SAMPLES = {
    "indices": (_INDICES, _INDEX_DTYPE),
    "sample_weights": ("sample-weights", _LOSS_DTYPE),
    "next_indices": ("next-indices", _INDEX_DTYPE),
    "next_weights": ("next-weights", _LOSS_DTYPE),
}
"""Keys and dtypes of an order's samples, by field."""

SLOTS: Mapping[str, tuple[str, ...]] = {
    "sgd": ("momentum_buffer",),
    "adamw": ("exp_avg", "exp_avg_sq", "step"),
}
"""Torch's names of the state that each optimizer keeps per parameter."""

COUNTERS = frozenset({"step"})
"""Slots with one float32 on the CPU; all others have the parameter's shape and dtype."""


@dataclass(frozen=True)
class TrainOrder:
    """Order for one worker in one round, including the model to start from.

    Provisional: may change in any minor version.

    Parameters
    ----------
    round, epoch : int
        Both counted from 1.
    local_steps : int
        tau_i, >= 1; 0 for an order that only ends a series of averaged gradients, whose report has
        one sample, so that the models, which are equal, can be averaged.
    batch_size : int
        b_i, >= 1.
    learning_rate : float
        Learning rate of all steps.
    seed : int
        Seed of all randomness, such as dropout.
    deadline_seconds : float
        The worker stops after the first step that ends later than this; 0 for no deadline.
    momentum_policy : {"keep", "reset", "average"}
        Policy for the optimizer's state between rounds.
    indices : numpy.ndarray
        int32 of shape (local_steps * batch_size,), in training order.
    arrays : ArrayRecord
        The global model: the tensors that are sent, see `sent_tensors`.
    momentum : ArrayRecord, optional
        Initial state of the optimizer, named by `state_name`: the averaged state for the policy
        ``"average"``, or for ``"keep"`` the worker's own state after a resume.
    sample_weights : numpy.ndarray, optional
        float32 with the shape of `indices`, >= 0: factor of each sample's loss in the mean of its
        batch. None if all are 1.
    progress : float (default: 0)
        Used share of the budget, in [0, 1].
    stream_start, stream_stride : int (default: 0)
        Where the indices begin in the `permutation_stream` of the run, and by how much later those
        of the next round begin; a stride of 0 if the indices do not come from this stream.
    brings : {"model", "gradient", "skip"} (default: "model")
        Content of `arrays`. An averaged gradient has gradients in place of parameters; the worker
        first steps with it, on the model that it has kept.
    returns : {"model", "gradient"} (default: "model")
        Content of the reply's arrays. For ``"gradient"``, the worker computes that of one batch.
    overlap : bool (default: False)
        Do the first step on the worker's own model of the last round, and add its change of the
        parameters to `arrays`. A worker without such a model begins from `arrays`.
    last_learning_rate, last_progress : float (default: 0)
        Those of the last round, which the first step has with `overlap`.
    own_model : ArrayRecord, optional
        The worker's own model of the last round, after a resume.
    next_indices, next_weights : numpy.ndarray, optional
        Batch of the next round's first step, to be done after the reply to this order; None to
        wait for the next order.
    next_seed : int (default: 0)
        Seed of the next round.
    """

    round: int = field(metadata={"key": SERVER_ROUND, "limits": 0})
    epoch: int = field(metadata={"limits": 0})
    local_steps: int = field(metadata={"limits": 0})
    batch_size: int = field(metadata={"limits": 1})
    # Flower's own clients read this key.
    learning_rate: float = field(metadata={"key": "lr", "limits": 0})
    seed: int = field(metadata={"limits": 0})
    deadline_seconds: float = field(metadata={"limits": 0})
    momentum_policy: str = field(metadata={"limits": MOMENTUM_POLICIES})
    indices: npt.NDArray[np.int32] = field(metadata={"wire": False})
    arrays: ArrayRecord = field(metadata={"wire": False})
    momentum: ArrayRecord | None = field(default=None, metadata={"wire": False})
    sample_weights: npt.NDArray[np.float32] | None = field(default=None, metadata={"wire": False})
    progress: float = field(default=0.0, metadata={"limits": 0})
    stream_start: int = field(default=0, metadata={"limits": 0})
    stream_stride: int = field(default=0, metadata={"limits": 0})
    brings: Brings = field(default="model", metadata={"optional": "unwritten"})
    returns: Literal["model", "gradient"] = field(
        default="model", metadata={"optional": "unwritten"}
    )
    overlap: bool = field(default=False, metadata={"optional": "unwritten"})
    last_learning_rate: float = field(default=0.0, metadata={"limits": 0, "optional": "unwritten"})
    last_progress: float = field(default=0.0, metadata={"limits": 0, "optional": "unwritten"})
    own_model: ArrayRecord | None = field(default=None, metadata={"wire": False})
    next_indices: npt.NDArray[np.int32] | None = field(default=None, metadata={"wire": False})
    next_weights: npt.NDArray[np.float32] | None = field(default=None, metadata={"wire": False})
    next_seed: int = field(default=0, metadata={"limits": 0, "optional": "unwritten"})

    @classmethod
    def to_measure(
        cls,
        steps: int,
        batch_size: int,
        num_samples: int,
        arrays: ArrayRecord,
        draw: np.random.Generator,
    ) -> "TrainOrder":
        """Return an order for measuring speed, with random samples and learning rate 0."""
        return cls(
            round=0,
            epoch=0,
            local_steps=steps,
            batch_size=batch_size,
            learning_rate=0.0,
            seed=0,
            deadline_seconds=0.0,
            momentum_policy="reset",
            indices=draw.integers(0, num_samples, steps * batch_size, dtype=np.int32),
            arrays=arrays,
        )

    def to_records(self, arrays_key: str = ARRAYS, config_key: str = CONFIG) -> RecordDict:
        """Return the content of the order's message; `arrays` itself is shared, not copied."""
        values = to_record(self)
        for name, (key, dtype) in _SAMPLES.items():
            if (samples := getattr(self, name)) is not None:
                values[key] = samples.astype(dtype).tobytes()
        config = unchecked_record(ConfigRecord, values)
        records: dict[str, AnyRecord] = {arrays_key: self.arrays, config_key: config}
        if self.momentum is not None:
            records[MOMENTUM] = self.momentum
        if self.own_model is not None:
            records[OWN_MODEL] = self.own_model
        return unchecked_content(records)

    @classmethod
    def from_message(
        cls, message: Message, arrays_key: str = ARRAYS, config_key: str = CONFIG
    ) -> "TrainOrder":
        """Read the order in a train message.

        Raises
        ------
        ProtocolError
            If the message does not come from `BiasedLocalSGD`.
        """
        return cls.from_content(message.content, arrays_key, config_key)

    @classmethod
    def from_content(
        cls, content: RecordDict, arrays_key: str = ARRAYS, config_key: str = CONFIG
    ) -> "TrainOrder":
        """Read the order in the content of a train message; see `from_message`."""
        config = records_of(content, ConfigRecord).get(config_key)
        held = records_of(content, ArrayRecord)
        arrays = held.get(arrays_key)
        if config is None or arrays is None or _INDICES not in config:
            raise ProtocolError(
                "this message holds no order: the ServerApp must use the BiasedLocalSGD strategy"
            )
        samples: dict[str, Any] = {
            name: _array_from(config[key], dtype, key)
            for name, (key, dtype) in _SAMPLES.items()
            if key in config
        }
        order = cls(
            **from_wire(cls, config),
            **samples,
            arrays=arrays,
            momentum=held.get(MOMENTUM),
            own_model=held.get(OWN_MODEL),
        )
        given = f"an order of {order.local_steps} steps of {order.batch_size} samples"
        if len(order.indices) != order.local_steps * order.batch_size:
            raise ProtocolError(f"{given} holds {len(order.indices)} indices")
        if order.next_indices is not None and len(order.next_indices) != order.batch_size:
            raise ProtocolError(f"{given} holds {len(order.next_indices)} indices of a next step")
        for indices, weights in (
            (order.indices, order.sample_weights),
            (order.next_indices, order.next_weights),
        ):
            if indices is not None and indices.min(initial=0) < 0:
                raise ProtocolError("some of the message's indices are below 0")
            if weights is not None and (
                indices is None
                or len(weights) != len(indices)
                or not ((weights >= 0) & (weights < np.inf)).all()
            ):
                raise ProtocolError("an order's sample weights are not one number >= 0 per index")
        return order


@dataclass(frozen=True)
class TrainReport:
    """Result of an order: the trained model, the completed steps, and the losses.

    Provisional: may change in any minor version.

    Parameters
    ----------
    completed_steps : int
        In [0, local_steps]; fewer than ordered after a deadline.
    batch_size : int
        b_i of the order.
    compute_seconds : float
        Duration of the steps, including an emulated slowdown.
    started_at, ended_at : float
        Unix time in seconds at the start of the first step and the end of the last one.
    losses : numpy.ndarray
        float32 of shape (num_examples,), in the order of the indices; empty if they are unknown.
    arrays : ArrayRecord
        The worker's model.
    momentum : ArrayRecord, optional
        State of the optimizer, only for the policy ``"average"``.
    momentum_zeroed : int (default: 0)
        1 if the optimizer's state was not finite and was set to zero.
    skipped_steps : int (default: 0)
        Steps in float16 whose gradients overflowed; each was repeated with a smaller loss scale.
    samples : int (default: 0)
        Number of samples trained on if the batches had other sizes; 0 if they had `batch_size`.
    learning_rate : float (default: nan)
        Learning rate of the last step; nan if it is unknown.
    traced : int (default: 0)
        1 if a profiler made the steps longer, so that their time is not the worker's speed.
    """

    completed_steps: int
    batch_size: int
    compute_seconds: float = field(metadata={"limits": 0})
    started_at: float = field(metadata={"limits": 0})
    ended_at: float = field(metadata={"limits": 0})
    losses: npt.NDArray[np.float32] = field(metadata={"wire": False})
    arrays: ArrayRecord = field(metadata={"wire": False})
    momentum: ArrayRecord | None = field(default=None, metadata={"wire": False})
    momentum_zeroed: int = field(default=0, metadata={"key": MOMENTUM_ZEROED, "limits": (0, 1)})
    skipped_steps: int = field(default=0, metadata={"key": SKIPPED_STEPS, "limits": 0})
    samples: int = field(default=0, metadata={"limits": 0})
    learning_rate: float = field(default=math.nan, metadata={"limits": None})
    traced: int = field(default=0, metadata={"limits": (0, 1)})

    @property
    def num_examples(self) -> int:
        """Number of samples trained on."""
        return self.samples or self.completed_steps * self.batch_size

    @property
    def mean_loss(self) -> float:
        """Mean training loss; nan if no step was completed."""
        count = len(self.losses)
        return float(np.add.reduce(self.losses, dtype=np.float64)) / count if count else math.nan

    def to_reply(self, message: Message) -> Message:
        """Return the reply to the order's message.

        It has one ArrayRecord and one MetricRecord with ``num-examples``, so that Flower's own
        strategies can average it.
        """
        metrics = {**to_record(self), NUM_EXAMPLES: self.num_examples, TRAIN_LOSS: self.mean_loss}
        losses = self.losses.astype(_LOSS_DTYPE).tobytes()
        records: dict[str, AnyRecord] = {
            ARRAYS: self.arrays,
            METRICS: unchecked_record(MetricRecord, metrics),
            LOSSES: unchecked_record(ConfigRecord, {LOSSES: losses}),
        }
        if self.momentum is not None:
            records[MOMENTUM] = self.momentum
        return Message(unchecked_content(records), reply_to=message)

    @classmethod
    def from_content(cls, content: RecordDict, order: TrainOrder) -> "TrainReport":
        """Read the content of the reply to an order.

        The reply of a ClientApp written for FedAvg has one ArrayRecord and one MetricRecord. It
        counts as a report of all steps, without times and losses.

        ProtocolError if the reply has a different form, more steps than ordered, or a loss that is
        not finite.
        """
        arrays = records_of(content, ArrayRecord)
        momentum = arrays.pop(MOMENTUM, None)
        model = _only(arrays, ArrayRecord)
        metrics = _only(records_of(content, MetricRecord), MetricRecord)
        if COMPLETED_STEPS not in metrics and order.returns == "gradient":
            raise ProtocolError(
                'its ClientApp sends models, not gradients; use LocalSGD, or average = "models"'
            )
        if COMPLETED_STEPS not in metrics:
            return cls(
                order.local_steps,
                order.batch_size,
                *(0.0, 0.0, 0.0),
                losses=np.empty(0, np.float32),
                arrays=model,
                learning_rate=order.learning_rate,
            )
        raw_losses = records_of(content, ConfigRecord).get(LOSSES, ConfigRecord()).get(LOSSES, b"")
        report = cls(
            **from_wire(cls, metrics),
            losses=_array_from(raw_losses, _LOSS_DTYPE, "losses"),
            arrays=model,
            momentum=momentum,
        )
        if not 0 <= report.completed_steps <= order.local_steps:
            raise ProtocolError(
                f"{report.completed_steps} steps were completed of {order.local_steps} ordered"
            )
        lengths = {report.num_examples, 0 if report.samples else report.num_examples}
        fits = len(report.losses) in lengths and len(report.losses) <= len(order.indices)
        if report.batch_size != order.batch_size or not fits:
            raise ProtocolError(
                f"{report.completed_steps} steps of {order.batch_size} samples came with "
                f"{len(report.losses)} losses"
            )
        if not np.isfinite(report.losses).all():
            raise NotFiniteError("a loss is not finite; a smaller learning rate may help")
        return report


def _array_from(raw: Any, dtype: np.dtype[Any], what: str) -> npt.NDArray[Any]:
    if not isinstance(raw, bytes) or len(raw) % dtype.itemsize:
        raise ProtocolError(f"the message's {what} are not {dtype.name} bytes")
    return np.frombuffer(raw, dtype)


def _only(records: Mapping[str, Record], kind: type[Record]) -> Record:
    if len(records) != 1:
        raise ProtocolError(f"expected one {kind.__name__} in the reply, found {len(records)}")
    return next(iter(records.values()))


def state_name(slot: str, parameter: str) -> str:
    """Return the name of a parameter's optimizer state in a record.

    Examples
    --------
    >>> state_name("momentum_buffer", "layer.weight")
    'layer.weight'
    >>> state_name("exp_avg", "layer.weight")
    'exp_avg/layer.weight'
    """
    return parameter if slot == "momentum_buffer" else f"{slot}/{parameter}"


def state_copies(optimizer: str, momentum: float) -> int:
    """Return the number of tensors of a parameter's size in its optimizer state."""
    if optimizer == "sgd" and momentum == 0:
        return 0
    return len(set(SLOTS[optimizer]) - COUNTERS)
