"""A whole run on any grid: check, load, connect, measure speeds, train, evaluate, save."""

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid

from .algorithm.catalog import RELEASED_SAMPLERS, TRAIN_ON, part_of, tau_fast
from .algorithm.outer_optimizer import OUTER_OPTIMIZERS
from .algorithm.randomness import derived_seed
from .checkpoint.resume import ResumedRun, open_run_to_resume
from .checkpoint.writing import Checkpoints
from .config import RunConfig
from .devices.machine import accelerator_of, format_bytes, require_bytes, this_machine
from .devices.worker_spec import WorkerSpec, parse_workers
from .engines.features import features_of
from .engines.local.fork_server import start_fork_server
from .engines.local.grid import LocalGrid
from .errors import UsageError, first_line, is_out_of_memory
from .flower.app_folder import built_in_app
from .protocol import TRACE_FOLDER, EvaluateReport, WorkerProfile, state_copies
from .released import ReleasedLocalSGD, released_sampler
from .results.events import require_tensorboard
from .results.folder import RunFolder
from .results.metric import Metric, split_of
from .results.progress import ProgressView
from .results.recorder import RunRecorder
from .results.run_log import own_warnings
from .results.stopping import refuse_other_metric
from .strategy.biased_local_sgd import BiasedLocalSGD
from .strategy.budget import Budget
from .strategy.connector import assume_speeds
from .strategy.cost_model import predict_run
from .strategy.evaluation import WorkerEvaluation
from .strategy.replies import ModelShape
from .strategy.rounds import EpochEnd
from .strategy.workers import WorkerRegistry
from .tasks.by_name import check_weights, load_task
from .tasks.check import check_task
from .tasks.task import Task
from .worker import MODULES
from .worker.model_io import check_model, load_state, model_fingerprint, state_record
from .worker.step import check_precision, use_precision

_LOG = logging.getLogger(__name__)


def train_on(
    grid: Grid,
    config: RunConfig,
    view: ProgressView | None = None,
    task: Task | None = None,
    load: "LoadWorkload | None" = None,
) -> RunRecorder:
    """Train as the settings say, and write a results folder.

    Invalid settings are refused before anything is written, and on the local grid before a process
    is started. Nodes of other grids are queried for their profiles first.

    A given `task` replaces, on the server, the one that the settings name; workers load theirs by
    name. `load` returns the workload and the settings, instead of a task. Without a `view`,
    progress is shown on standard output.

    UsageError if settings, data and workers do not fit together; AggregationError as in
    `BiasedLocalSGD`, and KeyboardInterrupt on Ctrl-C, with the results so far in the folder.
    """
    config = config.with_absolute_paths()
    is_local = isinstance(grid, LocalGrid)
    with own_warnings(), open_run_to_resume(config, complete=is_local) as resumed:
        load = load or functools.partial(_workload_of_task, given=task)
        return _train(grid, resumed.config if resumed else config, view, resumed, load)


def _train(
    grid: Grid,
    config: RunConfig,
    view: ProgressView | None,
    resumed: ResumedRun | None,
    load: "LoadWorkload",
) -> RunRecorder:
    began = time.monotonic()

    # Check and load: nothing is written, and no process is started.
    if config.tensorboard:
        require_tensorboard()
    if not resumed:
        RunFolder.refuse_unusable(config.out)
    work, config = load(grid, config)
    arrays, last_round = work.arrays, 0
    workers = grid.workers if isinstance(grid, LocalGrid) else ()
    strategy = make_strategy(
        config,
        work.num_samples,
        min(config.min_workers, len(workers) or config.min_workers),
        work.parameter_names,
    )
    if workers:
        check_workers(config, workers, work.num_samples)
        _require_buffers(config, len(workers), arrays)
    if not workers or config.is_script:
        _refuse_without_local_grid(config, strategy)
    view = view or ProgressView(Budget.of_run(config))
    recorder = RunRecorder(config, strategy, view, began, work.metric)
    if resumed:
        arrays, last_round = resumed.restore(strategy, recorder, arrays)
    strategy.registry.data_fingerprint = work.data_fingerprint
    strategy.registry.model_fingerprint = work.model_fingerprint
    strategy.planner.measures_in_rounds = config.is_script

    with recorder.recording(work.data, work.assets):  # which saves the results at the end
        # Connect, measure speeds, and choose local steps by them.
        strategy.prepare(grid, arrays)
        if strategy.registry.active_or_excluded or not resumed:  # else it waits for workers
            strategy.planner.check(strategy.registry.active_or_excluded)
        recorder.open_folder(RunFolder(resumed.folder) if resumed else None)
        if not workers:
            _note_ignored_settings(config, strategy.registry, recorder)
        elif not config.is_script and (note := precision_note(config.precision, workers)):
            recorder.say(note)

        checkpoints = Checkpoints(grid, strategy, recorder)
        evaluation = _Evaluation(grid, config, work, strategy, recorder, checkpoints)
        with checkpoints.written(locked=resumed is not None):
            if not recorder.history.why_over:  # else it was killed before its results were written
                _train_rounds(grid, strategy, arrays, last_round, recorder, checkpoints, evaluation)
        traces = recorder.folder.path / "trace"
        if config.trace and traces.is_dir():  # written in round 2
            recorder.say(f"traces of one round: {traces} (open them in ui.perfetto.dev)")
        _note_wire_errors(grid, recorder)
    return recorder


def _train_rounds(
    grid: Grid,
    strategy: BiasedLocalSGD,
    arrays: ArrayRecord,
    last_round: int,
    recorder: RunRecorder,
    checkpoints: Checkpoints,
    evaluation: "_Evaluation",
) -> None:
    """Train until the budget is used up, or a result or a signal ends the run."""
    config, planner = recorder.config, strategy.planner

    def add_late_result(is_last: bool) -> bool:
        """Add the result of an async evaluation if there is one; return whether to stop."""
        late = evaluation.late_result(is_last)
        if late is None:
            return False
        stops = recorder.add_epoch(late)
        checkpoints.save(late)
        return stops

    def end_epoch(end: EpochEnd, over: bool) -> bool:
        """Evaluate the model if due, and record the epoch; return whether to stop."""
        if over or end.epoch % config.evaluate_every_epochs == 0:
            end = evaluation.evaluate(end, at_once=over)
        if over:
            add_late_result(is_last=True)
        stops = recorder.add_epoch(end)
        checkpoints.save(end)
        return stops or over

    budget = Budget.of_run(config)
    if recorder.history.evaluation_missing:  # the run that is resumed ended before it
        over = bool(budget.used_up(planner.used, planner.epoch_ended))
        if end_epoch(EpochEnd(planner.progress.epoch, last_round, arrays), over):
            return
    are_speeds_shown = planner.measured is None
    if are_speeds_shown:
        _predict(strategy, recorder)
    train_config = ConfigRecord()
    if config.trace:
        train_config[TRACE_FOLDER] = str((recorder.folder.path / "trace").resolve())
    rounds = strategy.rounds(
        grid, arrays, budget, train_config=train_config, start_round=last_round
    )
    del arrays
    for end in rounds:
        if not (are_speeds_shown or end.measures_speeds):
            _predict(strategy, recorder)
            are_speeds_shown = True
        recorder.add_round(end.record, end.measures_speeds)
        if end.error:
            continue  # and the loop raises it
        checkpoints.after_round(end.round, end.arrays)
        over = bool(end.over) or add_late_result(is_last=False)
        if end.epoch_ended or over:
            over = end_epoch(EpochEnd(end.epoch, end.round, end.arrays), over)
        if over:
            break


# --- what is trained ------------------------------------------------------------------------------


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


def _workload_of_task(
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


def _refuse_without_local_grid(config: RunConfig, strategy: BiasedLocalSGD) -> None:
    if strategy.planner.settings.train_on.slow_reduce:
        raise UsageError(
            f'train-on = "{config.choices.train_on}" ({config.algorithm}): slow workers sum '
            "models in shared memory, which only the local grid has; use blsgd run, or "
            'train-on = "fast"'
        )
    if config.trace:
        raise UsageError(
            "trace = true: workers write their traces on the local grid only; use blsgd run"
        )


def _predict(strategy: BiasedLocalSGD, recorder: RunRecorder) -> None:
    """Print steps and speeds of the workers, and predict the figures that the summary measures."""
    if chosen := strategy.connector.steps_chosen:
        recorder.say(f"  {chosen}")
    workers = strategy.registry.active_or_excluded
    for worker in workers:
        if worker.speed:
            recorder.say(f"  {worker.label}: {worker.speed}")
    for worker in strategy.registry.evaluating:
        recorder.say(f"  {worker.label}: evaluates while the others train")
    if any(worker.profile.seconds_per_step for worker in workers):
        prediction = predict_run(strategy, workers)
        if prediction is not None:  # all speeds are known
            recorder.history.predicted = {
                "clock": recorder.config.clock,
                "round_seconds": prediction.round_seconds,
                "epoch_seconds": prediction.epoch_seconds,
                "fast_waiting_share": prediction.waiting_share(fast=True),
                "slow_waiting_share": prediction.waiting_share(fast=False),
            }


# --- the parts of a run, as the settings describe them --------------------------------------------


def make_local_grid(
    config: RunConfig,
    setup: Callable[[], object] | None = None,
    workers: Sequence[WorkerSpec] | None = None,
) -> LocalGrid:
    """Return the grid of the built-in app's workers; processes start with the first message.

    Every process calls `setup` before it loads the app. `workers` replaces those of the settings.
    UsageError if a worker cannot be used, or `setup` cannot be sent.
    """
    app = built_in_app()
    if workers is None:
        workers = parse_workers(config.workers)
    settings = config.to_run_config()
    start_fork_server(MODULES)
    try:
        return LocalGrid(workers, app.client_app, app.path, settings, setup)
    except Exception as error:
        if setup is None or isinstance(error, UsageError):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(
            f"task: it cannot be sent to the workers ({reason}); create locks, open files and the "
            "like inside its functions, or name it as module:function"
        ) from error


def load_own_task(config: RunConfig, given: Task | None = None) -> Task:
    """Return the given task, or that of the settings.

    UsageError if there is no such task, or the object is not a valid task.
    """
    task = load_task(**config.task_settings, given=given)
    check_task(task, config.task, config.micro_batch_size)
    refuse_other_metric(config, task.metric_name, "task")
    return task


def make_strategy(
    config: RunConfig,
    num_samples: int,
    min_workers: int,
    parameter_names: Collection[str] | None = None,
) -> BiasedLocalSGD:
    """Return the strategy that the settings describe.

    UsageError if the batch size is larger than the data, or settings exclude each other.
    """
    if config.batch_size > num_samples:
        raise UsageError(
            f"batch-size = {config.batch_size} is larger than the data: {num_samples} samples; "
            "use a smaller batch"
        )
    choices = config.choices
    strategy: type[BiasedLocalSGD] = BiasedLocalSGD
    if choices.sampler in RELEASED_SAMPLERS:
        strategy, sampler = ReleasedLocalSGD, released_sampler(config)
    else:
        sampler = part_of("sampler", choices.sampler, config)
    outer = OUTER_OPTIMIZERS[config.outer_optimizer]
    return strategy(
        num_samples,
        config.batch_size,
        part_of("steps", choices.steps, config),
        local_steps_fast=tau_fast(config),
        learning_rate=config.learning_rate_schedule,
        sampler=sampler,
        selection=part_of("selection", config.selection, config) if config.selection else None,
        weights=part_of("weights", choices.weights, config),
        epoch=choices.epoch,  # type: ignore[arg-type]  # checked there
        momentum_buffers=choices.momentum_buffers,  # type: ignore[arg-type]  # likewise
        deadline_seconds=config.deadline_seconds,
        clock=config.clock,
        train_on=TRAIN_ON[choices.train_on],
        outer_optimizer=outer and outer(config.outer_learning_rate, config.outer_momentum),
        parameter_names=parameter_names,
        rebalance=config.rebalance,
        fast_threshold=config.fast_threshold,
        seed=config.seed,
        min_available_nodes=min_workers,
        min_evaluate_nodes=1,
    )


def check_workers(config: RunConfig, workers: Sequence[WorkerSpec], num_samples: int) -> None:
    """Raise UsageError if a run with these settings cannot start with these workers."""
    if len(workers) < config.min_workers != RunConfig.min_workers:
        raise UsageError(
            f"min-workers = {config.min_workers}: workers names {len(workers)}; name more, or use "
            f"at most {len(workers)}"
        )
    for worker in workers:
        check_precision(worker.precision or config.precision, torch.device(worker.device))
    strategy = make_strategy(config, num_samples, len(workers))
    profiles = [WorkerProfile.of(worker, partition) for partition, worker in enumerate(workers)]
    strategy.registry.register({(i, None): p for i, p in enumerate(assume_speeds(profiles))})
    strategy.planner.check(strategy.registry.active)


def _require_buffers(config: RunConfig, num_workers: int, arrays: ArrayRecord) -> None:
    """Raise UsageError if the shared buffers of the workers do not fit into memory."""
    model_bytes = ModelShape(arrays).num_bytes
    each = model_bytes * (1 + state_copies(config.optimizer, config.momentum))
    require_bytes(
        num_workers * each + 2 * model_bytes,
        f"sharing the model ({format_bytes(model_bytes)}) with {num_workers} workers",
        "name fewer workers or use a smaller model",
    )


# --- evaluation -------------------------------------------------------------------------------


class _Evaluation:
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


# --- notes ----------------------------------------------------------------------------------------


def _note_ignored_settings(
    config: RunConfig, registry: WorkerRegistry, recorder: RunRecorder
) -> None:
    """Print which settings a grid ignores: SuperNodes name their own devices."""
    try:
        specs = parse_workers(config.workers)
    except UsageError:  # devices of another machine
        specs = []
    named = Counter((spec.device_with_cores, spec.tier) for spec in specs)
    there = Counter((w.profile.device, w.profile.tier) for w in registry.workers)
    if config.workers != "auto" and there - named:
        recorder.say(f'workers = "{config.workers}" is ignored: SuperNodes name their own devices')


def precision_note(precision: str, workers: Sequence[WorkerSpec]) -> str:
    """Return a line about cards that have bfloat16 and train in float32; empty without them."""
    training = [w for w in workers if w.role == "train" and w.device != "cpu"]
    plain = {w.device for w in training if (w.precision or precision) == "float32"}
    cards = sorted(device for device in plain if accelerator_of(device).has_bfloat16)
    if not cards:
        return ""
    return (
        f"note: {', '.join(cards)} can train in bfloat16, which is usually much faster than "
        'float32: set precision = "bfloat16", or "tf32" for all matrix products'
    )


def _note_wire_errors(grid: Grid, recorder: RunRecorder) -> None:
    """Print the error of models that travelled with 16 bits per value."""
    for name, error in features_of(grid).wire_errors.items():
        recorder.say(
            f"{name} travelled as {recorder.config.wire_dtype}, with an error of "
            f"{100 * error:.2g} % (root mean square, mean of all rounds)"
        )
