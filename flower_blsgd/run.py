"""A whole run on any grid: task, strategy, loop, evaluation, results folder."""

import time
from collections.abc import Collection, Sequence
from pathlib import Path

from flwr.serverapp import Grid

from .algorithm.catalog import SAMPLERS, STEPS, TRAIN_ON, WEIGHTS
from .algorithm.outer_optimizer import OUTER_OPTIMIZERS
from .algorithm.randomness import derived_seed
from .config import RunConfig
from .errors import UsageError
from .experiments.run_prediction import predict_run, predicted_figures
from .experiments.speed_profile import SpeedProfile
from .model_check import ModelShape
from .protocol import WorkerProfile, state_copies
from .results.epoch_trace import EpochTrace
from .results.folder import RunFolder
from .results.measured import Figures
from .results.progress import ProgressView
from .results.report import RunReport
from .roster import Roster
from .run_evaluation import run_evaluation
from .run_notes import tell_ignored_workers, tell_replicas, tell_transport, tell_wire_errors
from .runtime.devices import WorkerSpec
from .runtime.local_grid import LocalGrid
from .runtime.memory import format_bytes, free_bytes, require_bytes
from .speeds import before_measuring
from .strategy import BiasedLocalSGD
from .tasks import Task, load_task
from .tasks.check import check_task, checked_initial_model
from .tasks.weights import check_weights
from .traced_strategy import TracedLocalSGD
from .worker.model_state import state_record
from .worker.profile import profile_of


def train_on(grid: Grid, config: RunConfig, view: ProgressView | None = None) -> RunReport:
    """Train as the settings say, and leave a results folder.

    Everything that can be refused is refused before anything is written, and on the local grid
    before it starts a process. Other grids must first be asked who their workers are.

    Parameters
    ----------
    grid : Grid
        Any Flower grid.
    config : RunConfig
        The settings.
    view : ProgressView, optional
        Where to tell how it goes.

    Returns
    -------
    RunReport
        What was measured; its folder holds the rest.

    Raises
    ------
    UsageError
        If the settings do not fit together, the data or the workers.
    AggregationError
        If a round had no usable reply. What was reached before is in the folder.
    KeyboardInterrupt
        Likewise.
    """
    began = time.time()
    check_weights(config.task, config.model, config.pretrained)  # before data are prepared
    task = load_own_task(config)
    local = grid.workers if isinstance(grid, LocalGrid) else ()
    if TRAIN_ON[config.choices.train_on](config.part_settings).slow_sums and not local:
        raise UsageError(
            f'train-on = "{config.choices.train_on}" ({config.algorithm}): slow workers add up '
            'models in shared memory, on the local grid only; use blsgd run, or train-on = "fast"'
        )
    model = checked_initial_model(task, config.task, derived_seed(config.seed, "model"))
    names = [name for name, _ in model.named_parameters()]
    strategy = make_strategy(config, task.num_train, len(local) or config.min_workers, names)
    trace = EpochTrace(config.trace_epoch)
    if isinstance(strategy, TracedLocalSGD):
        strategy.trace = trace
    if local:
        _check_team(config, strategy, local)
    overhead = 0.0
    if local and config.profile:  # others ignore it, and may not have the file
        overhead = SpeedProfile.read(Path(config.profile)).overhead_seconds.median
    RunFolder.refuse_unusable(config.out)
    arrays = state_record(model)
    if local:
        copies = state_copies(config.optimizer, config.momentum)
        _require_buffers(len(local), ModelShape(arrays).num_bytes, copies)
    view = view or ProgressView(config.epochs, seconds=config.seconds)
    report = RunReport(config, strategy, view, began)
    evaluation = run_evaluation(grid, config, task, strategy.roster, report.count_evaluation)
    with report.telling(task):
        strategy.roster.update(grid)
        strategy.planner.check(strategy.roster.active)
        report.open_folder()
        tell_replicas(config, local, report)
        if not local:
            tell_ignored_workers(config, strategy.roster, report)
            tell_transport(grid, report)
        for worker in strategy.roster.active:
            if worker.speed:
                report.say(f"  {worker.label}: {worker.speed}")
        report.predicted = _predict(config, strategy, overhead)
        with trace.writing(report.folder.path, report.say):
            strategy.fit(
                grid,
                arrays,
                epochs=config.epochs,
                seconds=config.seconds or None,
                seconds_of=report.seconds_of,
                evaluate_fn=trace.evaluating(evaluation),
                evaluate_every_epochs=config.evaluate_every_epochs,
                on_round=trace.on_round(report.add_round),
                on_epoch=trace.on_epoch(report.add_epoch, report.folder.path, report.say),
            )
        tell_wire_errors(grid, report)
    return report


def load_own_task(config: RunConfig) -> Task:
    """Return the task that the settings name, checked.

    Raises
    ------
    UsageError
        If there is no such task, or it is not what a task must be.
    """
    task = load_task(
        config.task,
        config.data,
        config.model,
        validation_share=config.validation_share,
        seed=config.seed,
        **config.task_options,
    )
    check_task(task, config.task, config.micro_batch_size)
    return task


def check_team(config: RunConfig, workers: Sequence[WorkerSpec], num_samples: int) -> None:
    """Raise UsageError if a run with these settings could not begin with these workers."""
    _check_team(config, make_strategy(config, num_samples, len(workers)), workers)


def _check_team(config: RunConfig, strategy: BiasedLocalSGD, workers: Sequence[WorkerSpec]) -> None:
    profiles = [profile_of(worker, place) for place, worker in enumerate(workers)]
    strategy.planner.check(team_of(before_measuring(profiles), config).workers)


def _predict(
    config: RunConfig, strategy: BiasedLocalSGD, overhead_seconds: float
) -> Figures | None:
    """Return what to expect; without a profile there is no overhead in it."""
    if config.processes_per_device and config.clock == "wall":
        return None  # workers that take turns are not modelled
    prediction = predict_run(strategy, strategy.roster.active, overhead_seconds)
    return None if prediction is None else predicted_figures(prediction, config.clock)


def team_of(profiles: Sequence[WorkerProfile], config: RunConfig) -> Roster:
    """Return the workers that nodes with these profiles are under these settings."""
    return Roster.of_profiles(profiles, config.fast_threshold)


def _require_buffers(num_workers: int, model_bytes: int, state_copies: int) -> None:
    """Refuse more workers than there is memory for their shared buffers."""
    each = model_bytes * (1 + state_copies)
    needed = num_workers * each + 2 * model_bytes
    fitting = max(0, (free_bytes() or needed) - 2 * model_bytes) // each
    require_bytes(
        needed,
        f"sharing the model ({format_bytes(model_bytes)}) with {num_workers} workers",
        f"name fewer workers ({fitting} would fit)" if fitting else "use a smaller model",
    )


def make_strategy(
    config: RunConfig,
    num_samples: int,
    min_workers: int,
    parameter_names: Collection[str] | None = None,
) -> BiasedLocalSGD:
    """Return the strategy that the settings describe.

    Raises
    ------
    UsageError
        If the batch size is larger than the data, or settings do not go together.
    """
    if config.batch_size > num_samples:
        raise UsageError(
            f"batch-size = {config.batch_size} is larger than the data: {num_samples} samples; "
            "use a smaller batch"
        )
    parts, choices = config.part_settings, config.choices
    outer = OUTER_OPTIMIZERS[config.outer_optimizer]
    if config.rebalance and not getattr(STEPS[choices.steps](parts), "needs_speeds", False):
        raise UsageError(
            f"rebalance = true needs steps that come from speeds, but local-steps-slow = "
            f'{config.local_steps_slow} and steps = "{choices.steps}"; use '
            'local-steps-slow = "auto" or steps = "by-speed"'
        )
    if config.rebalance and config.clock == "device":
        raise UsageError(
            'rebalance = true follows measured speeds, but clock = "device" computes with fixed '
            'ones; use clock = "wall"'
        )
    weighting = WEIGHTS[choices.weights](parts)
    only = getattr(weighting, "momentum_buffers", choices.momentum_buffers)
    if only != choices.momentum_buffers:
        raise UsageError(
            f'momentum-buffers = "{choices.momentum_buffers}" does not go with weights = '
            f'"{choices.weights}", which needs "{only}"'
        )
    kind: type[BiasedLocalSGD] = TracedLocalSGD if config.trace_epoch else BiasedLocalSGD
    return kind(
        num_samples,
        config.batch_size,
        STEPS[choices.steps](parts),
        local_steps_fast=config.local_steps_fast,
        learning_rate=config.learning_rate_schedule,
        sampler=SAMPLERS[choices.sampler](parts),
        weights=weighting,
        epoch=config.epoch,
        momentum_buffers=choices.momentum_buffers,  # type: ignore[arg-type]  # checked there
        deadline_seconds=config.deadline_seconds,
        clock=config.clock,
        train_on=TRAIN_ON[choices.train_on](parts),
        outer_optimizer=outer(config.outer_learning_rate, config.outer_momentum),
        parameter_names=parameter_names,
        rebalance=config.rebalance,
        fast_threshold=config.fast_threshold,
        seed=config.seed,
        min_available_nodes=min_workers,
        min_train_nodes=1,
        min_evaluate_nodes=1,
    )
