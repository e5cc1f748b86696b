"""The workload of a run: a model, samples and an evaluation, of a task or of a script."""

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid

from .algorithm.randomness import derived_seed
from .checkpoint.writing import Checkpoints
from .config import RunConfig
from .devices.machine import this_machine
from .errors import UsageError, first_line, is_out_of_memory
from .protocol import EvaluateReport
from .results.metric import Metric, split_of
from .results.recorder import RunRecorder
from .results.stopping import refuse_other_metric
from .strategy.biased_local_sgd import BiasedLocalSGD
from .strategy.evaluation import WorkerEvaluation
from .strategy.rounds import EpochEnd
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


class RunEvaluation:
    """Evaluation of models by the server, or by the workers; also while the others train."""

    def __init__(
        self,
        grid: Grid,
        config: RunConfig,
        work: Workload,
        strategy: BiasedLocalSGD,
        recorder: RunRecorder,
        checkpoints: Checkpoints,
    ) -> None:
        self._config, self._work = config, work
        self._recorder, self._checkpoints = recorder, checkpoints
        self._on_workers = WorkerEvaluation(
            grid,
            strategy.registry,
            work.num_test,
            work.evaluation_batch_size,
            work.evaluate_slice,
            work.to_metrics,
            strategy.unevaluated,
        )

    def evaluate(self, end: EpochEnd, at_once: bool) -> EpochEnd:
        """Return the end of an epoch with metrics, unless other workers evaluate its model.

        With `at_once`, they are not asked.
        """
        if not self._work.num_test or (not at_once and self._on_workers.begin(end)):
            return end
        return self._evaluated(end)

    def has_late_result(self) -> bool:
        """Return whether `late_result` has something to do."""
        return self._on_workers.has_ended()

    def late_result(self, is_last: bool) -> EpochEnd | None:
        """Return the result of an async evaluation that has ended, or None.

        If its workers failed, the model is evaluated now. At the end of the run, it is dropped, and
        so are unfinished evaluations.
        """
        end = self._on_workers.take()
        if is_last:
            self._on_workers.unevaluated.clear()
        elif end is not None:
            end = end if end.metrics else self._evaluated(end)
            self._on_workers.finish()
        return replace(end, late=True) if end and end.metrics else None

    def _evaluated(self, end: EpochEnd) -> EpochEnd:
        work = self._work
        with self._checkpoints.evaluating(end.round, end.arrays):
            began = time.perf_counter()
            try:
                if self._config.evaluate_on == "workers":
                    metrics = self._on_workers(end.round, end.arrays)
                else:
                    metrics = work.to_metrics(work.evaluate_slice(end.arrays, 0, work.num_test))
            except UsageError:  # already a one-line message
                raise
            except Exception as error:
                raise UsageError(
                    f"task = {self._config.task!r}: evaluating after round {end.round} raised "
                    f"{type(error).__name__}: {first_line(error)}"
                ) from error
            self._recorder.history.durations.evaluation_seconds += time.perf_counter() - began
        return replace(end, metrics=metrics)
