"""The workload of a run: a model, samples and an evaluation, of a task or of a script."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid

from .algorithm.randomness import derived_seed
from .config import RunConfig
from .devices.machine import this_machine
from .errors import UsageError, is_out_of_memory
from .protocol import EvaluateReport
from .results.metric import Metric, split_of
from .results.stopping import refuse_other_metric
from .tasks.by_name import check_weights, load_task
from .tasks.check import check_task
from .tasks.task import Task
from .worker.model_io import check_model, load_state, model_fingerprint, state_record
from .worker.step import use_precision

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Workload:
    """Work of a run: a model to train, a number of samples, and an evaluation.

    `arrays` has the tensors of the initial model that are sent; those that are not in
    `parameter_names` are buffers. `num_samples` is N, the samples of an epoch. `data` describes the
    data in words, such as ``"1,000 training and 200 test samples"``. The fingerprints of the
    workers must be equal to these, unless they are empty. `num_test` is 0 for no evaluation.

    ``evaluate_slice(arrays, first, last)`` evaluates a slice of the test set in this process or,
    for a training script, on a worker. `to_metrics` converts the report of the whole test set.
    Models are compared by the metric. `assets` are files to copy into the results folder, by name.
    """

    arrays: ArrayRecord
    parameter_names: Sequence[str]
    num_samples: int
    data: str
    data_fingerprint: str
    model_fingerprint: str
    num_test: int
    evaluation_batch_size: int
    evaluate_slice: Callable[[ArrayRecord, int, int], EvaluateReport]
    to_metrics: Callable[[EvaluateReport], MetricRecord]
    metric: Metric
    assets: Mapping[str, Path]


LoadWorkload = Callable[[Grid, RunConfig], tuple[Workload, RunConfig]]


def workload_of_task(
    grid: Grid, config: RunConfig, given: Task | None
) -> tuple[Workload, RunConfig]:
    """Return the workload of the given task, or of the one that the settings name."""
    if config.is_script:
        raise UsageError(f"task = {config.task!r} is a training script; use blsgd launch")
    check_weights(config.task, config.model, config.pretrained)  # before data are prepared
    task = load_own_task(config, given)
    model = task.initial_model(derived_seed(config.seed, "model"))
    check_model(model, values=True)
    # Made only if this process evaluates, without drawing from the caller's generator.
    replica = functools.cache(functools.partial(task.replica, config.seed))

    # For a worker that fails, the CPU evaluates: workers may need the whole memory of a card.
    accelerators = this_machine().usable_accelerators if config.evaluate_on == "server" else ()
    devices = [*accelerators[:1], "cpu"]

    def evaluate_slice(arrays: ArrayRecord, first: int, last: int) -> EvaluateReport:
        device = devices[0]
        use_precision(config.precision, device)
        try:
            model = replica().to(device)
            load_state(model, arrays)
            return task.evaluate(model, device, first, last, **config.evaluation_settings)
        except RuntimeError as error:
            if device == "cpu" or not is_out_of_memory(error):
                raise
            devices.remove(device)
            _LOG.warning("%s has too little memory: the server evaluates on the CPU", device)
        replica().cpu()
        torch.accelerator.empty_cache()  # for the workers
        return evaluate_slice(arrays, first, last)

    work = Workload(
        arrays=state_record(model),
        parameter_names=[name for name, _ in model.named_parameters(remove_duplicate=False)],
        num_samples=task.num_train,
        data=f"{task.num_train:,} training and {task.num_test:,} test samples",
        data_fingerprint=task.fingerprint(),
        model_fingerprint=model_fingerprint(model),
        num_test=task.num_test,
        evaluation_batch_size=task.evaluation_batch_size or config.evaluation_batch_size,
        evaluate_slice=evaluate_slice,
        to_metrics=task.metrics,
        metric=Metric(task.metric_name, task.metric_mode, split_of(config.validation_share)),
        assets=task.assets,
    )
    return work, config


def load_own_task(config: RunConfig, given: Task | None = None) -> Task:
    """Return the given task, or that of the settings.

    UsageError if there is no such task, or the object is not a valid task.
    """
    task = load_task(**config.task_settings, given=given)
    check_task(task, config.task, config.micro_batch_size)
    refuse_other_metric(config, task.metric_name, "task")
    return task
