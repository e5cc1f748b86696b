"""What is trained: data, model, loss and metric in one object, tried before a run starts.

A `Task` is ready to train; a `Benchmark` makes tasks of one name.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ..algorithm.randomness import generator
from ..data.cache import Prepared
from ..errors import UsageError
from ..worker.batches import IndexedSamples, Samples, batch_source, num_samples, tensor_parts
from ..worker.local_sgd import SampleLoss, cross_entropy
from ..worker.step import check_micro_batches

_LONGEST_REASON = 200

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""(inputs, generator) -> inputs: changes a whole training batch at random."""


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
    evaluation_batch_size : int (default: 1024)
        Samples per batch in evaluation, where nothing is kept for a backward pass.
    assets : mapping (default: empty)
        Files that a saved model needs, such as the tokenizer, by the names that they get in the
        results folder. Data that belong to other ones are refused when the model is evaluated.

    Raises
    ------
    UsageError
        If a part of the data is empty or its inputs and targets differ in number, `model` does
        not make models, or an asset has no plain name.
    """

    model: Callable[[], nn.Module]
    train: Samples
    test: Samples
    loss: SampleLoss = cross_entropy
    metric: Callable[[Any, Tensor], Tensor] = correct
    augment: Augment | None = None
    data_fingerprint: str = ""
    pretrained: Callable[[nn.Module], None] | None = None
    evaluation_batch_size: int = 1024
    assets: Mapping[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.model, nn.Module) or not callable(self.model):
            raise UsageError(
                f"task: model is a {type(self.model).__name__}, but must be a function that makes "
                "a fresh one, such as model=lambda: Net()"
            )
        optional = [name for name in ("augment", "pretrained") if getattr(self, name) is not None]
        for name in ("loss", "metric", *optional):
            if not callable(getattr(self, name)):
                kind = type(getattr(self, name)).__name__
                raise UsageError(f"task: {name} is a {kind}, but must be a function")
        if self.evaluation_batch_size < 1:
            raise UsageError(
                f"task: evaluation_batch_size is {self.evaluation_batch_size}, but must be at "
                "least 1"
            )
        for name in self.assets:
            if name in ("", ".", "..") or set(name) & set("/\\"):
                raise UsageError(f"task: assets names {name!r}, but needs the plain name of a file")
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
            If these cannot be had.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.model()
            if self.pretrained is not None:
                self.pretrained(model)
        return model

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
    """A task that is known by name: its data, its models, and the settings that it takes.

    A subclass defines `task` and `saved_model`, and the rest where it applies. The parameter
    `options` has all keys of `OPTIONS`; those that the property does not name have their defaults.
    """

    @property
    def options(self) -> tuple[str, ...]:
        """Of `OPTIONS`, the settings that it takes; others that are set are refused."""
        return ()

    def task(self, data: str, model: str, options: Mapping[str, Any]) -> Task:
        """Return the task.

        Parameters
        ----------
        data, model : str
            Where the data is and which model; empty for the default.
        options : mapping
            Values of the settings in `OPTIONS`.

        Raises
        ------
        UsageError
            If the data cannot be had, there is no such model, or they do not go with the options.
        """
        raise NotImplementedError

    def prepare(
        self, data: str, model: str, options: Mapping[str, Any], again: bool = False
    ) -> Prepared | None:
        """Return the data as `task` has them, preparing them if that was not done yet.

        None if nothing has to be prepared. No weights are needed. With `again` they are prepared
        even if that was done.

        Raises
        ------
        UsageError
            As `task`.
        """
        return None

    def saved_model(
        self, name: str, tensors: Mapping[str, Tensor], dropout: float | str
    ) -> nn.Module:
        """Return a fresh model of the sizes of saved weights, without looking at the data.

        Raises
        ------
        UsageError
            If there is no such model.
        """
        raise NotImplementedError

    def check_weights(self, model: str) -> None:
        """Refuse a model whose published weights cannot be had; the HF hub's are downloaded.

        For the server alone, before data are prepared: workers get the weights with the first
        round.

        Raises
        ------
        UsageError
            If there is no such model, or its weights are out of reach.
        """


def _check_samples(name: str, samples: Samples) -> None:
    try:
        lengths = [len(part) for part in tensor_parts(samples) or ()]
        count = num_samples(samples)
    except TypeError as error:
        raise UsageError(
            f"task: {name} has no length ({error}); use a pair (inputs, targets) of tensors or "
            "numpy arrays, or a map-style Dataset of pairs"
        ) from None
    if lengths and len(lengths) != 2:
        raise UsageError(
            f"task: {name} has {len(lengths)} parts; use a pair (inputs, targets), or a map-style "
            "Dataset of pairs"
        )
    if lengths and lengths[0] != lengths[1]:
        raise UsageError(
            f"task: {name} has {lengths[0]} inputs, but {lengths[1]} targets; each sample needs "
            "one of both"
        )
    if count == 0:
        raise UsageError(f"task: {name} is empty; it needs at least one sample")


def check_task(task: Task, name: str = "", micro_batch_size: int = 0) -> None:
    """Try model, loss, metric and augmentation once on two training samples, on the CPU.

    Torch's generator is as before afterwards.

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
        model does not allow micro-batches. A UsageError of a function itself comes out as it is.
    """
    title = _title(name)
    call = partial(_call, title)
    inputs, targets = call("reading train", _two_samples, task.train)
    with torch.no_grad():
        model = call("model()", task.fresh_model, 0)
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"{title}: model() returned {_what(model)}, expected a torch.nn.Module"
            )
        check_micro_batches(model, micro_batch_size)
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
        outputs = call("model(inputs)", model, inputs)
        losses = call("loss(outputs, targets)", task.loss, outputs, targets)
        _check_per_sample(f"{title}: loss", losses, 'a torch loss does with reduction="none"')
        values = call("metric(outputs, targets)", task.metric, outputs, targets)
        _check_per_sample(f"{title}: metric", values, "return it before taking the mean")


def checked_initial_model(task: Task, name: str, seed: int) -> nn.Module:
    """Return `Task.initial_model`; what goes wrong in it becomes one line for the user.

    Raises
    ------
    UsageError
        If pretrained weights cannot be had, or the task's function for them raises.
    """
    described = "model()" if task.pretrained is None else "pretrained(model)"
    model: nn.Module = _call(_title(name), described, task.initial_model, seed)
    return model


def _title(name: str) -> str:
    return f"task = {name!r}" if name else "task"


def _call(title: str, described: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except UsageError:  # it is one line for the user already
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:_LONGEST_REASON]
        raise UsageError(f"{title}: {described} raised {type(error).__name__}: {reason}") from error


def _two_samples(samples: Samples) -> tuple[Any, Any]:
    """Return a batch of the first two samples; of a single sample twice that one."""
    indices = torch.tensor([0, min(1, num_samples(samples) - 1)])
    return batch_source(samples, torch.device("cpu")).batch(indices)


def _check_per_sample(function: str, values: Any, hint: str) -> None:
    if not isinstance(values, Tensor) or values.shape != (2,):
        raise UsageError(
            f"{function}(outputs, targets) returned {_what(values)} for 2 samples, expected shape "
            f"(2,): one value per sample; {hint}"
        )


def _what(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def with_validation(task: Task, share: float, seed: int) -> Task:
    """Return a task that trains on a part of the training data and tests on the rest of it.

    Nothing is copied: both parts are lists of indices into `task.train`.

    Parameters
    ----------
    task : Task
        The whole task; its test data is not looked at.
    share : float
        Which share of the training samples becomes the test data, in (0, 1).
    seed : int
        Which ones: a pure function of it.

    Returns
    -------
    Task
        Its fingerprint is another one for another share or seed.

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
        train=_subset(task.train, order[held_out:]),
        test=_subset(task.train, order[:held_out]),
        data_fingerprint=hashlib.sha256(identity.encode()).hexdigest()[:16],
    )


def _subset(samples: Samples, indices: npt.NDArray[np.int64]) -> IndexedSamples:
    indices = np.sort(indices)  # neighbours stay neighbours in a memory map
    if isinstance(samples, IndexedSamples):
        return IndexedSamples(samples.samples, samples.indices[indices])
    return IndexedSamples(samples, indices)
