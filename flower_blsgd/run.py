"""A whole run on any grid: check, load, connect, measure speeds, train, evaluate, save."""

import functools
import logging
import time
from collections import Counter
from collections.abc import Sequence

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from .checkpoint.resume import ResumedRun, open_run_to_resume
from .checkpoint.writing import Checkpoints
from .config import RunConfig
from .devices.machine import accelerator_of
from .devices.worker_spec import WorkerSpec, parse_workers
from .engines.features import features_of
from .engines.local.grid import LocalGrid
from .errors import UsageError
from .parts import check_workers, make_strategy, require_buffers
from .protocol import TRACE_FOLDER
from .results.events import require_tensorboard
from .results.folder import RunFolder
from .results.progress import ProgressView
from .results.recorder import RunRecorder
from .results.run_log import own_warnings
from .strategy.biased_local_sgd import BiasedLocalSGD
from .strategy.budget import Budget
from .strategy.cost_model import predict_run
from .strategy.rounds import EpochEnd
from .strategy.workers import WorkerRegistry
from .tasks.task import Task
from .workload import LoadWorkload, RunEvaluation, workload_of_task

_LOG = logging.getLogger(__name__)


def train_on(
    grid: Grid,
    config: RunConfig,
    view: ProgressView | None = None,
    task: Task | None = None,
    load: LoadWorkload | None = None,
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
        load = load or functools.partial(workload_of_task, given=task)
        return _train(grid, resumed.config if resumed else config, view, resumed, load)


def _train(
    grid: Grid,
    config: RunConfig,
    view: ProgressView | None,
    resumed: ResumedRun | None,
    load: LoadWorkload,
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
        require_buffers(config, len(workers), arrays)
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
        if strategy.planner.measured is None:  # else the first rounds measure speeds
            _predict(strategy, recorder)

        checkpoints = Checkpoints(grid, strategy, recorder)
        evaluation = RunEvaluation(grid, config, work, strategy, recorder, checkpoints)
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
    evaluation: RunEvaluation,
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
        checkpoints.after_round(end.round, end.arrays, end.idle)
        if not end.idle:  # the workers wait when a late result is taken
            if evaluation.has_late_result():
                strategy.pause()
            continue
        over = bool(end.over) or add_late_result(is_last=False)
        if end.epoch_ended or over:
            over = end_epoch(EpochEnd(end.epoch, end.round, end.arrays), over)
        if over:
            break


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
    training = [w for w in workers if w.role == "train" and w.device != "cpu" and not w.python]
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
