"""Training tasks: data, model, loss and metric in one object, loaded by name and checked.

A `Task` is ready to train. A `Benchmark` creates the tasks of one name.
"""

import hashlib
import importlib
import inspect
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import MetricRecord
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from ..algorithm.randomness import derived_seed, generator
from ..data.cache import Prepared, UnusableError, open_entry
from ..data.source import import_torchvision, is_repaired
from ..errors import UsageError, nearest
from ..worker.batches import (
    BatchSource,
    Collate,
    Samples,
    inputs_and_targets,
    map_tensors,
    micro_batches,
    num_samples,
    tensor_parts,
)
from ..worker.evaluation import EvaluateReport, evaluate_sums, named_values
from ..worker.local_sgd import SampleLoss, cross_entropy
from ..worker.model_io import check_model, frozen_tensors
from ..worker.step import (
    Augment,
    MakeOptimizer,
    augmented,
    check_micro_batches,
    custom_optimizer,
    takes_model,
)
from . import GIVEN_IN_PYTHON, OPTIONS, TASKS

_LOG = logging.getLogger(__name__)

_LONGEST_REASON = 200


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return 1.0 for every correctly classified sample, else 0.0; shape (batch_size,)."""
    return (outputs.argmax(dim=1) == targets).float()


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
        over the test set is the metric; or a dict of such values by name.
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
        if _is_lightning(self.model):
            raise UsageError(
                "task: model is a LightningModule, whose training_step and configure_optimizers "
                "would be ignored; train its script with blsgd launch and "
                "flower_blsgd.integrations.lightning.BlsgdCallback, or pass a function that "
                "returns its torch.nn.Module, and the loss"
            )
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
        name = self.metric_name or ("accuracy" if is_default else "metric")
        if name == "loss":
            raise UsageError("task: metric_name is 'loss', the name of the loss; use another one")
        object.__setattr__(self, "metric_name", name)
        object.__setattr__(self, "metric_mode", self.metric_mode or "max")
        if self.evaluation_batch_size < 0:
            raise UsageError(
                f"task: evaluation_batch_size is {self.evaluation_batch_size}, but must be at "
                "least 0"
            )
        _check_samples("train", self.train)
        _check_samples("test", self.test)

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
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.model()

    def initial_model(self, seed: int) -> nn.Module:
        """Return the initial model of a run, with pretrained weights if the task has any.

        Random draws of `pretrained`, such as a new last layer, also depend on the seed only.

        Raises
        ------
        UsageError
            If `pretrained` raises an exception.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.model()
            if self.pretrained is not None:
                _call("task", "pretrained(model)", self.pretrained, model)
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
        self, model: nn.Module, device: str, first: int, last: int, batch_size: int
    ) -> EvaluateReport:
        """Return sums of loss and metric over the test samples [first, last).

        `batch_size` applies unless the task sets its own.
        """
        parts, size = (self.test, self.loss, self.metric), self.evaluation_batch_size or batch_size
        more = self.collate, self.metric_name
        return evaluate_sums(model, *parts, device, first, last, size, *more)

    def figure(self, report: EvaluateReport) -> float:
        """Return the value of the metric for a report on the whole test set.

        UsageError if `metric_from_sums` raises an exception, or is missing where there are several
        values and none has the metric's name.
        """
        sums = report.totals
        if self.metric_from_sums is not None:
            count = report.num_examples
            found = _call("task", "metric_from_sums", self.metric_from_sums, sums, count)
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


class Benchmark:
    """Built-in task with its data and models.

    ``task(data, model, again=, needs_test=, ...)`` prepares the data if this was not done yet, or
    with `again`. It accepts the `OPTIONS` that it has parameters for. UsageError if the data are
    not available, have no test split although `needs_test` is set, the model is unknown, or the
    options are invalid.

    ``saved_model(model, tensors, dropout)`` returns a new model with the sizes of saved weights,
    made without the data. UsageError if the model is unknown.
    """

    task: Callable[..., Task]
    saved_model: Callable[[str, Mapping[str, Tensor], float | str], nn.Module]
    default_model: str

    def check_weights(self, model: str) -> None:
        """Download the pretrained weights of a model, if it has any; UsageError if this fails.

        Only the server does this, before data are prepared: workers get the weights in the first
        round, and a saved run has its own.
        """


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
        sound, found = False, str(error)
    if not sound:
        raise UsageError(
            f"task: {name} must be a pair (inputs, targets) of tensors or numpy arrays of equal "
            f"length, or a map-style Dataset, and not empty; {found}"
        )


def _is_lightning(model: Any) -> bool:
    kinds = model.__mro__ if isinstance(model, type) else type(model).__mro__
    return any(kind.__name__ == "LightningModule" for kind in kinds)


def check_task(task: Task, name: str = "", micro_batch_size: int = 0) -> None:
    """Check model, loss, metric and augmentation with two samples, on the CPU.

    Preserves the state of torch's generator. `name` is for messages. `micro_batch_size` is the
    largest size of a micro-batch; 0: none. UsageError if one of the task's functions raises an
    exception or returns a wrong shape, or the model cannot be trained, or not with micro-batches. A
    UsageError of a function is passed on.
    """
    title = f"task = {name!r}" if name else "task"
    call = partial(_call, title)
    train = call("reading train", _two_samples, task, task.train)
    test = call("reading test", _two_samples, task, task.test)
    if micro_batch_size > 0:
        for _ in micro_batches(train, 2, 1):
            pass
    with torch.no_grad():
        model = call("model()", task.fresh_model, 0)
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"{title}: model() returned {_what(model)}, expected a torch.nn.Module"
            )
        if _is_lightning(model):
            raise UsageError(
                f"{title}: model() returned a LightningModule, whose training_step and "
                "configure_optimizers would be ignored; return its torch.nn.Module, or train its "
                "script with blsgd launch and flower_blsgd.integrations.lightning.BlsgdCallback"
            )
        check_micro_batches(model, micro_batch_size)
        check_model(model)
        model = model.cpu().eval()
        if task.optimizer is not None:
            call("optimizer(model)", custom_optimizer, task.optimizer, model)
        if task.augment is not None:
            train = call("augment(inputs, generator)", _checked_augment, title, task.augment, train)
        _check_functions(title, task, model, train, test)


def _check_functions(title: str, task: Task, model: nn.Module, train: Any, test: Any) -> None:
    """Check loss and metric on a batch of two training samples and one of two test samples."""
    call = partial(_call, title)
    changed = "augment(inputs, generator)" if task.augment else "inputs"
    for of, given, batch, functions in (
        ("", changed, train, {"loss": task.loss}),
        (" of test", "inputs", test, {"loss": task.loss, "metric": task.metric}),
    ):
        outputs: Any = None
        if not all(map(takes_model, functions.values())):
            inputs, targets = inputs_and_targets(batch)
            outputs = call(f"model({given}){of}", model, inputs)
        for kind, function in functions.items():
            if takes_model(function):
                described = f"{kind}(model, batch){of}"
                values = call(described, function, model, batch)
            else:
                described = f"{kind}(outputs, targets){of}"
                values = call(described, function, outputs, targets)
            named = named_values(values, kind) if kind == "metric" else {kind: values}
            for value in named.values():
                if not isinstance(value, Tensor) or value.shape != (2,):
                    raise UsageError(
                        f"{title}: {described} returned {_what(value)} for 2 samples, expected "
                        "shape (2,): one value per sample; for a torch loss, set "
                        'reduction="none"'
                    )
    sums = {k: float(v.sum()) for k, v in named_values(values, task.metric_name).items()}
    task.figure(EvaluateReport(0, 2, [0.0], list(sums.values()), list(sums)))


def _checked_augment(title: str, augment: Augment, batch: Any) -> Any:
    seeded = torch.Generator().manual_seed(0)
    found = augmented(augment, map_tensors(batch, Tensor.clone), seeded)
    before, after = (part[0] if type(part) is tuple else part for part in (batch, found))
    if isinstance(before, Tensor) and (
        not isinstance(after, Tensor) or after.shape[:1] != before.shape[:1]
    ):
        raise UsageError(
            f"{title}: augment(inputs, generator) returned {_what(after)}, expected a tensor of "
            f"the whole batch, like the inputs' shape {tuple(before.shape)}"
        )
    return found


def _call(title: str, described: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except UsageError:  # already a one-line message
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:_LONGEST_REASON]
        raise UsageError(f"{title}: {described} raised {type(error).__name__}: {reason}") from error


def _two_samples(task: Task, samples: Samples) -> Any:
    """Return a batch of the first and the last sample, which may be the same one."""
    indices = torch.tensor([0, num_samples(samples) - 1])
    return BatchSource(samples, torch.device("cpu"), collate=task.collate).batch(indices)


def _what(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


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


# --- by name


_REGISTERED: dict[str, Callable[..., Task]] = {}
"""Functions that return the tasks registered in this process, by name."""


def register_task(task: Task, name: str = GIVEN_IN_PYTHON) -> str:
    """Register a task for `load_task` in this process, and return its name.

    Replaces a task of the same name.
    """
    _REGISTERED[name] = lambda: task
    return name


def registration(task: Task) -> Callable[[], str]:
    """Return a function that registers a task, to be sent to the workers by pickling.

    If this process has repaired torchvision, a worker does so before it unpickles the task, which
    may use it.
    """
    return partial(_register, *([_Repaired()] if is_repaired() else []), task)


class _Repaired:
    """Unpickled as the result of `import_torchvision`."""

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return import_torchvision, ()


def _register(*repaired_and_task: Any) -> str:
    return register_task(repaired_and_task[-1])


def load_task(
    name: str,
    data: str = "",
    model: str = "",
    *,
    validation_share: float = 0.0,
    seed: int = 0,
    again: bool = False,
    prefer_test: bool = False,
    given: Task | None = None,
    **options: Any,
) -> Task:
    """Return a task by name: a registered one, one in `TASKS`, or ``module:function``.

    Empty `data` or `model`: the task's default. A `validation_share` above 0 is the fraction of the
    training data, chosen by `seed`, to test on instead of the test set; with `prefer_test`, the
    test set is used nevertheless if there is one. With `again`, the data of a built-in task are
    prepared even if they are ready. `given` is the task, instead of one found by name.

    `options` are `OPTIONS`; those that the task does not accept must have their default. UsageError
    if the task is unknown or rejects one of the settings.
    """
    registered: Mapping[str, Callable[..., Task]]
    registered = _REGISTERED if given is None else {name: lambda: given}
    if name in registered:
        make = registered[name]
    elif name in TASKS:
        benchmark = _benchmark(name)
        make, model = benchmark.task, model or benchmark.default_model
    else:
        make = _own_function(name)
    parameters = inspect.signature(make).parameters
    options = {**OPTIONS, **options}
    known = {key: options[key] for key in OPTIONS if key in parameters}
    _refuse_set(name, options, known)
    own = {"again": again, "needs_test": validation_share == 0 and not prefer_test}
    known |= {key: own[key] for key in own if key in parameters}
    if set(parameters) - set(known):
        task = make(data, model, **known)
    else:
        _refuse_set(name, {"data": data, "model": model})
        task = make(**known)
    if not isinstance(task, Task):
        raise UsageError(f"task = {name!r} returned {type(task).__name__}, not a Task")
    has_test = task.prepared is None or task.prepared.has_test
    if validation_share == 0 or (prefer_test and has_test):
        return task
    return with_validation(task, validation_share, seed)


def prepare_task(
    name: str, data: str = "", model: str = "", again: bool = False, **options: Any
) -> str:
    """Prepare the data of a task, and return a line that describes them.

    Prepared data are compared with their checksums; a run compares sizes only. Parameters and
    errors are those of `load_task`.
    """
    task = load_task(name, data, model, again=again, prefer_test=True, **options)
    prepared = task.prepared
    if prepared is None:
        made = "" if name in TASKS else ", from its own code"
        return (
            f"{name}: {task.num_train:,} training and {task.num_test:,} test samples{made}; "
            "nothing to prepare"
        )
    try:
        open_entry(prepared.folder, content=True)
    except UnusableError as error:
        _LOG.warning("%s is damaged (%s); preparing it again", prepared.folder, error)
        load_task(name, data, model, again=True, prefer_test=True, **options)
    bad = sum(prepared.skipped.values())
    left_out = f", {bad:,} unreadable ones skipped" if bad else ""
    num_test = task.num_test if prepared.has_test else 0
    classes = prepared.num_classes
    samples = f"{prepared.noun} of {classes} classes" if classes else "blocks of tokens"
    return (
        f"{name}: {task.num_train:,} training and {num_test:,} test {samples}{left_out}, "
        f"ready in {prepared.folder}"
    )


def load_saved_model(
    task: str, model: str, tensors: Mapping[str, Tensor], dropout: float | str = "auto"
) -> nn.Module:
    """Return a new model for saved weights of a task in `TASKS`, see `Benchmark.saved_model`."""
    benchmark = _benchmark(task)
    return benchmark.saved_model(model or benchmark.default_model, tensors, dropout)


def check_weights(task: str, model: str = "", pretrained: bool = True) -> None:
    """Find or download the weights of a model of any task, see `Benchmark.check_weights`."""
    if pretrained and task in TASKS:
        benchmark = _benchmark(task)
        benchmark.check_weights(model or benchmark.default_model)


def _benchmark(name: str) -> Benchmark:
    made: Benchmark = importlib.import_module(f".{TASKS[name]}", __package__).BENCHMARKS[name]
    return made


def _refuse_set(name: str, settings: Mapping[str, Any], taken: Collection[str] = ()) -> None:
    """Raise UsageError for settings that a task does not accept and that are not the default."""
    for key, value in settings.items():
        if key not in taken and value != OPTIONS.get(key, ""):
            shown = str(value).lower() if isinstance(value, bool) else repr(value)
            raise UsageError(
                f"{key.replace('_', '-')} = {shown}: task = {name!r} does not accept it; leave "
                "it out"
            )


def _own_function(name: str) -> Callable[..., Any]:
    module_name, colon, function_name = name.partition(":")
    if not colon:
        near = nearest(name, TASKS)
        raise UsageError(f"task = {name!r} is not known; {near}, or module:function")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
        inspect.signature(function)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == module_name
        hint = "; put its folder into PYTHONPATH, or install it" if missing else ""
        raise UsageError(f"task = {name!r} cannot be loaded: {error}{hint}") from None
    return function
