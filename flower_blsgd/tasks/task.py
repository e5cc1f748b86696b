"""Training tasks: data, model, loss and metric in one object that is ready to train."""

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import MetricRecord
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from ..algorithm.randomness import derived_seed, generator
from ..data.cache import Prepared
from ..errors import UsageError
from ..worker.batches import BatchSource, Collate, Samples, num_samples, tensor_parts
from ..worker.evaluation import EvaluateReport, evaluate_sums
from ..worker.local_sgd import SampleLoss, cross_entropy
from ..worker.model_io import frozen_tensors
from ..worker.optimizer import MakeOptimizer
from ..worker.step import Augment, takes_model

_LONGEST_REASON = 200


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return 1.0 for every correctly classified sample, else 0.0; shape (batch_size,)."""
    return (outputs.argmax(dim=1) == targets).float()


_GENERATOR = threading.RLock()


@contextlib.contextmanager
def restored_generator() -> Iterator[None]:
    """Restore torch's generator after a block, during which no other task's thread uses it."""
    with _GENERATOR, torch.random.fork_rng(devices=[]):
        yield


@dataclass(frozen=True)
class Task:
    """A training task: data, model, loss and metric.

    Parameters
    ----------
    model : callable
        Function that returns a new model, with weights drawn from torch's generator.
    train, test : pair of tensors or numpy arrays, TensorDataset or map-style Dataset
        Every worker reads all of ``train``. Arrays may be memory maps. Samples of a Dataset may be
        pairs (inputs, targets), dicts or tuples, as in torchvision and Hugging Face datasets.
    loss : callable (default: cross entropy)
        ``(outputs, targets) -> losses`` of shape (batch_size,): one loss per sample. For batches
        that are not pairs, or for a model that needs the whole batch: ``(model, batch) -> losses``;
        the first parameter must be called ``model``.
    metric : callable (default: `correct`)
        ``(outputs, targets)`` or ``(model, batch) -> values`` of shape (batch_size,), whose mean
        over the test set is the metric; or a dict of such values by name. Without a metric, it is
        the loss (``metric_name="loss"``) if `loss` takes batches that are not pairs.
    metric_mode : {"max", "min"}
        Whether a larger or a smaller metric is better; required with a custom metric. The best
        model and ``patience`` follow it.
    metric_name : str (default: "accuracy", of a custom metric "metric")
        Name of the metric in the results. ``"accuracy"`` is shown in percent.
    metric_from_sums : callable, optional
        ``(sums, num_samples) -> float``: computes the metric from the sums of its values over the
        test set, by name; for metrics that are not a mean over samples, such as F1, perplexity or
        RMSE.
    augment : callable, optional
        ``(inputs, generator) -> inputs`` for a whole training batch, on the worker's device; if
        batches are not pairs, ``(batch, generator) -> batch``. The generator is on that device and
        must be the only source of random numbers.
    collate : callable, optional
        ``(samples) -> batch`` for a map-style Dataset, like ``collate_fn`` of torch's DataLoader;
        by default torch's ``default_collate``. Padding collators of transformers can be used.
    optimizer : callable, optional
        ``(model) -> torch.optim.Optimizer``, for parameter groups, layer-wise learning rates, or
        any other torch optimizer. Its learning rates are the peak values of the run's schedule; the
        settings ``optimizer``, ``learning-rate``, ``momentum``, ``nesterov`` and ``weight-decay``
        are ignored.
    data_fingerprint : str (default: "")
        Fingerprint of the training data; empty: computed by hashing them.
    pretrained : callable, optional
        ``(model) -> None``: loads pretrained weights into a new model, in place. The server calls
        it once per run, and workers get the weights from the server.
    evaluation_batch_size : int (default: 0)
        Samples per evaluation batch; 0: four times the size of a training (micro-)batch.
    assets : mapping (default: empty)
        Files that a saved model needs, such as the tokenizer, by their names in the results folder.
        A model is not evaluated on data made with other assets.
    prepared : Prepared, optional
        Cache entry of the data, if they had to be prepared.

    Raises
    ------
    UsageError
        If a part of the data is empty, inputs and targets differ in length, or `model` is not a
        function.
    """

    model: Callable[[], nn.Module]
    train: Samples
    test: Samples
    loss: SampleLoss = cross_entropy
    metric: Callable[[Any, Any], Any] = correct
    metric_mode: str = ""
    metric_name: str = ""
    metric_from_sums: Callable[[Mapping[str, float], int], float] | None = None
    augment: Augment | None = None
    collate: Collate | None = None
    optimizer: MakeOptimizer | None = None
    data_fingerprint: str = ""
    pretrained: Callable[[nn.Module], None] | None = None
    evaluation_batch_size: int = 0
    assets: Mapping[str, Path] = field(default_factory=dict)
    prepared: Prepared | None = None

    def __post_init__(self) -> None:
        refuse_lightning("task: model is", self.model)
        if isinstance(self.model, nn.Module) or not callable(self.model):
            raise UsageError(
                f"task: model is a {type(self.model).__name__}, but must be a function that "
                "returns a new model, such as model=lambda: Net()"
            )
        is_default = self.metric is correct
        if not is_default and self.metric_mode not in ("max", "min"):
            raise UsageError(
                f"task: metric_mode is {self.metric_mode!r}, but a custom metric needs 'max' if "
                "larger values are better, or 'min'"
            )
        if not is_default and self.metric_name == "loss":
            raise UsageError("task: metric_name is 'loss', the name of the loss; use another one")
        if self.evaluation_batch_size < 0:
            raise UsageError(
                f"task: evaluation_batch_size is {self.evaluation_batch_size}, but must be at "
                "least 0"
            )
        _check_samples("train", self.train)
        _check_samples("test", self.test)
        name = self.metric_name or ("accuracy" if is_default else "metric")
        given = self.metric_name or self.metric_mode or self.metric_from_sums
        if is_default and not given and takes_model(self.loss) and not self._has_pairs():
            name = "loss"
        object.__setattr__(self, "metric_name", name)
        mode = self.metric_mode or ("min" if name == "loss" else "max")
        object.__setattr__(self, "metric_mode", mode)

    def _has_pairs(self) -> bool:
        """Return whether batches are pairs, or cannot be read, which `check_task` reports."""
        with contextlib.suppress(Exception), restored_generator():
            source = BatchSource(self.test, torch.device("cpu"), collate=self.collate)
            batch = source.batch(torch.tensor([0]))
            return isinstance(batch, tuple | list) and len(batch) == 2
        return True

    @property
    def num_train(self) -> int:
        """Number of training samples."""
        return num_samples(self.train)

    @property
    def num_test(self) -> int:
        """Number of test samples."""
        return num_samples(self.test)

    def fresh_model(self, seed: int) -> nn.Module:
        """Return a new model whose weights are a pure function of the seed."""
        with restored_generator():
            torch.manual_seed(seed)
            return self.model()

    def initial_model(self, seed: int) -> nn.Module:
        """Return the initial model of a run, with pretrained weights if the task has any.

        Random draws of `pretrained`, such as a new last layer, also depend on the seed only.
        """
        with restored_generator():
            torch.manual_seed(seed)
            model = self.model()
            if self.pretrained is not None:
                call_user("task", "pretrained(model)", self.pretrained, model)
        return model

    def replica(self, seed: int) -> nn.Module:
        """Return a model for a worker of a run with this seed; orders overwrite the sent tensors.

        Frozen tensors are those of the initial model. Pretrained weights are loaded only if the
        model has frozen tensors.
        """
        model = self.fresh_model(derived_seed(seed, "model"))
        if self.pretrained is not None and frozen_tensors(model):
            return self.initial_model(derived_seed(seed, "model"))
        return model

    def evaluate(
        self, model: nn.Module, device: str, first: int, last: int, batch_size: int, **settings: Any
    ) -> EvaluateReport:
        """Return sums of loss and metric over the test samples [first, last).

        `batch_size` applies unless the task sets its own. `settings` are those of `evaluate_sums`:
        `precision`, `channels_last` and `loader_workers`.
        """
        metric = None if self.metric_name == "loss" else self.metric
        parts = (self.test, self.loss, metric)
        size = self.evaluation_batch_size or batch_size
        more = (self.collate, self.metric_name)
        return evaluate_sums(model, *parts, device, range(first, last), size, *more, **settings)

    def figure(self, report: EvaluateReport) -> float:
        """Return the value of the metric for a report on the whole test set."""
        if self.metric_name == "loss":
            return report.loss
        sums = report.totals
        if self.metric_from_sums is not None:
            count = report.num_examples
            found = call_user("task", "metric_from_sums", self.metric_from_sums, sums, count)
            return float(found)
        if self.metric_name not in sums:
            raise UsageError(
                f"task: metric returned {', '.join(sums)}; set metric_name to one of them, or "
                "metric_from_sums"
            )
        return sums[self.metric_name] / report.num_examples

    def metrics(self, report: EvaluateReport) -> MetricRecord:
        """Return the metric by its name, and ``loss``."""
        return MetricRecord({self.metric_name: self.figure(report), "loss": report.loss})

    def fingerprint(self) -> str:
        """Return 16 hex digits that are equal for equal training data.

        Tensors and arrays are hashed completely; of other data sets, only the length.
        """
        if self.data_fingerprint:
            return self.data_fingerprint
        digest = hashlib.sha256(str(self.num_train).encode())
        for part in tensor_parts(self.train) or ():
            digest.update(str((part.dtype, tuple(part.shape))).encode())
            digest.update(part.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()[:16]


def _check_samples(name: str, samples: Samples) -> None:
    if isinstance(samples, DataLoader):
        raise UsageError(
            f"task: {name} is a DataLoader; pass its dataset, and its collate_fn as collate, "
            "because the server chooses the samples of each batch"
        )
    if isinstance(samples, IterableDataset):
        raise UsageError(
            f"task: {name} is an IterableDataset, whose samples have no index; pass a map-style "
            "Dataset with __getitem__ and __len__"
        )
    try:
        lengths = [len(part) for part in tensor_parts(samples) or ()]
        is_pair = len(lengths) == 2 or isinstance(samples, TensorDataset)
        sound = num_samples(samples) > 0 and (not lengths or is_pair) and len(set(lengths)) < 2
        found = f"its parts have the lengths {lengths}" if lengths else "it is empty"
    except TypeError as error:
        sound = False
        found = str(error)
    if not sound:
        raise UsageError(
            f"task: {name} must be a pair (inputs, targets) of tensors or numpy arrays of equal "
            f"length, or a map-style Dataset, and not empty; {found}"
        )


def refuse_lightning(described: str, model: Any) -> None:
    """Raise UsageError for a model, or a class of models, that is a LightningModule."""
    kinds = model.__mro__ if isinstance(model, type) else type(model).__mro__
    if any(kind.__name__ == "LightningModule" for kind in kinds):
        raise UsageError(
            f"{described} a LightningModule, whose training_step and configure_optimizers would be "
            "ignored; train its script with blsgd launch and "
            "flower_blsgd.integrations.lightning.BlsgdCallback, or pass a function that returns "
            "its torch.nn.Module, and the loss"
        )


def call_user(title: str, described: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the user's; UsageError if it raises an exception."""
    try:
        return function(*arguments)
    except UsageError:  # already a one-line message
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:_LONGEST_REASON]
        raise UsageError(f"{title}: {described} raised {type(error).__name__}: {reason}") from error


def with_validation(task: Task, share: float, seed: int) -> Task:
    """Return a task that trains on a part of the training data and tests on the rest.

    Both parts are lists of indices into `task.train`; no data are copied. `share`, in (0, 1), is
    the fraction that becomes the test set. The fingerprint depends on share and seed. `task.test`
    is not used. UsageError if one part would be empty.
    """
    if not 0 < share < 1:
        raise UsageError(f"validation-share = {share} must be above 0 and below 1")
    count = task.num_train
    held_out = int(np.floor(share * count + 0.5))
    if not 0 < held_out < count:
        raise UsageError(
            f"validation-share = {share} of {count} training samples leaves "
            f"{held_out} for validation and {count - held_out} for training; both need at "
            "least one"
        )
    order = generator(seed, "validation-share").permutation(count)
    identity = f"{task.fingerprint()} {share!r} {seed}"
    return replace(
        task,
        # Sorted, so that reads from a memory map are sequential.
        train=Subset(task.train, np.sort(order[held_out:])),  # type: ignore[arg-type]
        test=Subset(task.train, np.sort(order[:held_out])),  # type: ignore[arg-type]
        data_fingerprint=hashlib.sha256(identity.encode()).hexdigest()[:16],
    )
