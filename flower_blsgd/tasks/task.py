"""Training tasks: data, model, loss and metric in one object, loaded by name and tried on the CPU.

A `Task` is ready to train; a `Benchmark` makes tasks of one name.
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
from torch import Tensor, nn
from torch.utils.data import Subset

from ..algorithm.randomness import generator
from ..data.cache import Prepared, UnusableError, open_entry
from ..errors import UsageError, nearest
from ..worker.batches import BatchSource, Samples, num_samples, tensor_parts
from ..worker.evaluation import EvaluateReport, are_in_range, evaluate_sums
from ..worker.local_sgd import SampleLoss, cross_entropy
from ..worker.model_io import check_model
from ..worker.step import Augment, check_micro_batches, micro_batches
from . import GIVEN_IN_PYTHON, OPTIONS, TASKS

_LOG = logging.getLogger(__name__)

_LONGEST_REASON = 200


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return 1.0 for every sample whose class was hit, else 0.0; shape (batch_size,)."""
    return (outputs.argmax(dim=1) == targets).float()


@dataclass(frozen=True)
class Task:
    """A training task: data, model, loss and metric.

    Parameters
    ----------
    model : callable
        Makes a fresh model, with weights drawn from torch's generator.
    train, test : pair of tensors or numpy arrays, TensorDataset or map-style Dataset
        Inputs and targets; every worker reads all of `train`. Of a pair either part may be a
        numpy array or a memory map.
    loss : callable (default: cross entropy)
        ``(outputs, targets) -> losses`` of shape (batch_size,).
    metric : callable (default: `correct`)
        ``(outputs, targets) -> values`` of shape (batch_size,); its mean over the test set is
        reported as ``accuracy``.
    augment : callable, optional
        ``(inputs, generator) -> inputs``: changes a whole batch, in training only, on the
        device. Its random numbers come from the generator, which lives on that device.
    data_fingerprint : str (default: "")
        What `fingerprint` returns; empty to hash the training data.
    pretrained : callable, optional
        Puts the weights to begin with into a fresh model, in place: ``(model) -> None``. Called
        once in a run, by the server; workers get the weights from it.
    evaluation_batch_size : int (default: 0)
        Samples per batch in evaluation, where nothing is kept for a backward pass; 0 for four
        times as many as the run computes at once in training.
    assets : mapping (default: empty)
        Files that a saved model needs, such as the tokenizer, by the names that they get in the
        results folder. Data that belong to other ones are refused when the model is evaluated.
    prepared : Prepared, optional
        The cache entry that the data are in, if they had to be prepared.

    Raises
    ------
    UsageError
        If a part of the data is empty or its inputs and targets differ in number, or `model` does
        not make models.
    """

    model: Callable[[], nn.Module]
    train: Samples
    test: Samples
    loss: SampleLoss = cross_entropy
    metric: Callable[[Any, Tensor], Tensor] = correct
    augment: Augment | None = None
    data_fingerprint: str = ""
    pretrained: Callable[[nn.Module], None] | None = None
    evaluation_batch_size: int = 0
    assets: Mapping[str, Path] = field(default_factory=dict)
    prepared: Prepared | None = None

    def __post_init__(self) -> None:
        if isinstance(self.model, nn.Module) or not callable(self.model):
            raise UsageError(
                f"task: model is a {type(self.model).__name__}, but must be a function that makes "
                "a fresh one, such as model=lambda: Net()"
            )
        if self.evaluation_batch_size < 0:
            raise UsageError(
                f"task: evaluation_batch_size is {self.evaluation_batch_size}, but must be at "
                "least 0"
            )
        _check_samples("train", self.train)
        _check_samples("test", self.test)

    @property
    def num_train(self) -> int:
        """Samples of the training set."""
        return num_samples(self.train)

    @property
    def num_test(self) -> int:
        """Samples of the test set."""
        return num_samples(self.test)

    def fresh_model(self, seed: int) -> nn.Module:
        """Return a model whose weights are all a pure function of the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.model()

    def initial_model(self, seed: int) -> nn.Module:
        """Return the model to begin with: a fresh one, with pretrained weights where there are any.

        What `pretrained` draws at random, such as a new last layer, follows from the seed as well.

        Raises
        ------
        UsageError
            If these cannot be had, or the function for them raises.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.model()
            if self.pretrained is not None:
                _call("task", "pretrained(model)", self.pretrained, model)
        return model

    def evaluate(
        self, model: nn.Module, device: str, first: int, last: int, batch_size: int
    ) -> EvaluateReport:
        """Return loss and metric added up over the samples [first, last) of the test set.

        `batch_size` samples are computed at once, unless the task says how many.
        """
        parts, size = (self.test, self.loss, self.metric), self.evaluation_batch_size or batch_size
        return evaluate_sums(model, *parts, device, first, last, size)

    def fingerprint(self) -> str:
        """Return 16 hex digits that are equal for equal training data.

        Tensors and arrays are hashed whole; of another data set only its length counts.
        """
        if self.data_fingerprint:
            return self.data_fingerprint
        digest = hashlib.sha256(str(self.num_train).encode())
        for part in tensor_parts(self.train) or ():
            digest.update(str((part.dtype, tuple(part.shape))).encode())
            digest.update(part.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()[:16]


class Benchmark:
    """A task that is known by name: its data and its models.

    Attributes
    ----------
    task : callable
        ``(data, model, again=, ...) -> Task``, preparing its data if that was not done yet, or
        `again`. Takes those of `OPTIONS` that it has parameters for. Raises UsageError if the data
        cannot be had, there is no such model, or they do not go with the options.
    saved_model : callable
        ``(model, tensors, dropout) -> Module``: a fresh model of the sizes of saved weights, made
        without looking at the data. Raises UsageError if there is no such model.
    default_model : str
        The one where nobody sets any.
    """

    task: Callable[..., Task]
    saved_model: Callable[[str, Mapping[str, Tensor], float | str], nn.Module]
    default_model: str


def _check_samples(name: str, samples: Samples) -> None:
    try:
        lengths = [len(part) for part in tensor_parts(samples) or ()]
        sound = num_samples(samples) > 0 and len(lengths) in (0, 2) and len(set(lengths)) < 2
        found = f"its parts have the lengths {lengths}" if lengths else "it is empty"
    except TypeError as error:
        sound, found = False, str(error)
    if not sound:
        raise UsageError(
            f"task: {name} must be a pair (inputs, targets) of tensors or numpy arrays of equal "
            f"length, or a map-style Dataset of pairs, and not empty; {found}"
        )


def check_task(task: Task, name: str = "", micro_batch_size: int = 0) -> bool:
    """Try model, loss, metric and augmentation once on two samples each, on the CPU.

    Torch's generator is as before afterwards. Returns whether all values of the metric are in
    [0, 1], as those of an accuracy are.

    Parameters
    ----------
    task : Task
        The task.
    name : str (default: "")
        What the user calls it.
    micro_batch_size : int (default: 0)
        The most samples of a micro-batch; 0: batches stay whole.

    Raises
    ------
    UsageError
        If one of the task's functions raises, or returns something of the wrong shape, or the
        model cannot be trained, or not in micro-batches. A UsageError of a function itself comes
        out as it is.
    """
    title = f"task = {name!r}" if name else "task"
    call = partial(_call, title)
    inputs, targets = train = call("reading train", _two_samples, task.train)
    test = call("reading test", _two_samples, task.test)
    if micro_batch_size > 0:
        next(micro_batches(inputs, targets, micro_batch_size))
    with torch.no_grad():
        model = call("model()", task.fresh_model, 0)
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"{title}: model() returned {_what(model)}, expected a torch.nn.Module"
            )
        check_micro_batches(model, micro_batch_size)
        check_model(model)
        model = model.cpu().eval()
        if task.augment is not None:
            seeded = torch.Generator().manual_seed(0)
            augmented = call("augment(inputs, generator)", task.augment, inputs.clone(), seeded)
            if not isinstance(augmented, Tensor) or augmented.shape[:1] != inputs.shape[:1]:
                raise UsageError(
                    f"{title}: augment(inputs, generator) returned {_what(augmented)}, expected a "
                    f"tensor of the whole batch, like the inputs' shape {tuple(inputs.shape)}"
                )
            call("model(augment(inputs, generator))", model, augmented)
        functions: dict[str, SampleLoss] = {"loss": task.loss}
        for of, (inputs, targets) in (("", train), (" of test", test)):
            outputs = call(f"model(inputs){of}", model, inputs)
            for kind, function in functions.items():
                described = f"{kind}(outputs, targets){of}"
                values = call(described, function, outputs, targets)
                if not isinstance(values, Tensor) or values.shape != (2,):
                    raise UsageError(
                        f"{title}: {described} returned {_what(values)} for 2 samples, expected "
                        'shape (2,): one value per sample; a torch loss does with reduction="none"'
                    )
            functions["metric"] = task.metric  # of test only
        return are_in_range(values)


def _call(title: str, described: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except UsageError:  # it is one line for the user already
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:_LONGEST_REASON]
        raise UsageError(f"{title}: {described} raised {type(error).__name__}: {reason}") from error


def _two_samples(samples: Samples) -> tuple[Any, Any]:
    """Return a batch of the first and the last sample; of a single sample twice that one."""
    indices = torch.tensor([0, num_samples(samples) - 1])
    return BatchSource(samples, torch.device("cpu")).batch(indices)


def _what(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def with_validation(task: Task, share: float, seed: int) -> Task:
    """Return a task that trains on a part of the training data and tests on the rest of it.

    Nothing is copied: both parts are lists of indices into `task.train`. The fingerprint is
    another one for another share or seed; `task.test` is not looked at.

    Parameters
    ----------
    task : Task
        The whole task.
    share : float
        Which share of the training samples becomes the test data, in (0, 1).
    seed : int
        Which ones: a pure function of it.

    Raises
    ------
    UsageError
        If one side would be empty.
    """
    if not 0 < share < 1:
        raise UsageError(f"validation-share = {share} must be above 0 and below 1")
    count = task.num_train
    held_out = int(np.floor(share * count + 0.5))
    if not 0 < held_out < count:
        raise UsageError(
            f"validation-share = {share} of {count} training samples leaves "
            f"{held_out} for validation and {count - held_out} for training; both need one"
        )
    order = generator(seed, "validation-share").permutation(count)
    identity = f"{task.fingerprint()} {share!r} {seed}"
    return replace(
        task,
        # Neighbours stay such in a memory map.
        train=Subset(task.train, np.sort(order[held_out:])),  # type: ignore[arg-type]
        test=Subset(task.train, np.sort(order[:held_out])),  # type: ignore[arg-type]
        data_fingerprint=hashlib.sha256(identity.encode()).hexdigest()[:16],
    )


# --- by name


_REGISTERED: dict[str, Callable[..., Task]] = {}
"""What returns the tasks that were registered in this process, by name."""


def register_task(task: Task, name: str = GIVEN_IN_PYTHON) -> str:
    """Let `load_task` find a task under a name, in this process, and return the name.

    A task that had the name before is replaced.
    """
    _REGISTERED[name] = lambda: task
    return name


def load_task(
    name: str,
    data: str = "",
    model: str = "",
    *,
    validation_share: float = 0.0,
    seed: int = 0,
    again: bool = False,
    given: Task | None = None,
    **options: Any,
) -> Task:
    """Return a task by name.

    Parameters
    ----------
    name : str
        A registered name, one in `TASKS`, or ``module:function``.
    data, model : str (default: "")
        Where the data is and which model; empty for the task's own default.
    validation_share : float (default: 0.0)
        Above 0: test on this share of the training data instead of the test data.
    seed : int (default: 0)
        Which samples that share consists of.
    again : bool (default: False)
        Prepare the data of a benchmark even if that was done.
    given : Task, optional
        The task itself: nothing is looked up by the name.
    **options
        Of `OPTIONS`; those that the task does not take must be at their default.

    Raises
    ------
    UsageError
        If there is no such task, or it refuses one of the settings.
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
    if "again" in parameters:
        known["again"] = again
    if set(parameters) - set(known):
        task = make(data, model, **known)
    else:
        _refuse_set(name, {"data": data, "model": model})
        task = make(**known)
    if not isinstance(task, Task):
        raise UsageError(f"task = {name!r} returned {type(task).__name__}, not a Task")
    return task if validation_share == 0 else with_validation(task, validation_share, seed)


def prepare_task(
    name: str, data: str = "", model: str = "", again: bool = False, **options: Any
) -> str:
    """Prepare the data of a task, and return a line that says what there is.

    What was ready is read once and compared with what was written: a run looks at the sizes only.
    Parameters and errors are those of `load_task`.
    """
    task = load_task(name, data, model, again=again, **options)
    prepared = task.prepared
    if prepared is None:
        made = "" if name in TASKS else ", as its own code makes them"
        return (
            f"{name}: {task.num_train:,} training and {task.num_test:,} test samples{made}; "
            "nothing has to be prepared"
        )
    try:
        open_entry(prepared.folder, content=True)
    except UnusableError as error:
        _LOG.warning("%s is damaged (%s); preparing it again", prepared.folder, error)
        load_task(name, data, model, again=True, **options)
    bad = sum(prepared.skipped.values())
    left_out = f", {bad:,} that cannot be read left out" if bad else ""
    return (
        f"{name}: {task.num_train:,} training and {task.num_test:,} test {prepared.noun} of "
        f"{prepared.num_classes} classes{left_out}, ready in {prepared.folder}"
    )


def load_saved_model(
    task: str, model: str, tensors: Mapping[str, Tensor], dropout: float | str = "auto"
) -> nn.Module:
    """Return a fresh model for saved weights of a task in `TASKS`: its `Benchmark.saved_model`."""
    benchmark = _benchmark(task)
    return benchmark.saved_model(model or benchmark.default_model, tensors, dropout)


def check_weights(task: str, model: str = "", pretrained: bool = True) -> None:
    """Refuse a model whose published weights cannot be had, before minutes go into its data.

    Those of the HF hub are downloaded. Only the server calls it: workers get the weights with the
    first round, and a saved run has its own.

    Raises
    ------
    UsageError
        If they are out of reach.
    """
    if not pretrained or task not in TASKS:
        return
    benchmark = _benchmark(task)
    if "pretrained" in inspect.signature(benchmark.task).parameters:
        from ..models.pretrained import is_published, model_folder

        model = model or benchmark.default_model
        if is_published(model):
            model_folder(model)


def _benchmark(name: str) -> Benchmark:
    benchmark: Benchmark = importlib.import_module(f".{TASKS[name]}", __package__).BENCHMARKS[name]
    return benchmark


def _refuse_set(name: str, settings: Mapping[str, Any], taken: Collection[str] = ()) -> None:
    """Refuse settings that are not at their default and that a task does not take."""
    for key, value in settings.items():
        if key not in taken and value != OPTIONS.get(key, ""):
            shown = str(value).lower() if isinstance(value, bool) else repr(value)
            raise UsageError(
                f"{key.replace('_', '-')} = {shown}: task = {name!r} does not take it; leave it out"
            )


def _own_function(name: str) -> Callable[..., Any]:
    module_name, colon, function_name = name.partition(":")
    if not colon:
        near = nearest(name, [*TASKS, *_REGISTERED])
        raise UsageError(f"task = {name!r} is not known; {near}, or module:function")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
        inspect.signature(function)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == module_name
        hint = "; put its folder into PYTHONPATH, or install it" if missing else ""
        raise UsageError(f"task = {name!r} cannot be loaded: {error}{hint}") from None
    return function
