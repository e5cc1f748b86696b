"""A whole run on any grid: task, strategy, loop, evaluation, results folder."""

import functools
import time
from dataclasses import replace

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid

from .algorithm.catalog import SAMPLERS, STEPS, WEIGHTS
from .algorithm.randomness import derived_seed
from .config import RunConfig
from .errors import UsageError
from .model_check import ModelShape
from .protocol import EvaluateReport
from .results.folder import RunFolder
from .results.progress import ProgressView
from .results.report import RunReport
from .roster import Roster
from .runtime.devices import parse_workers
from .runtime.local_grid import LocalGrid
from .runtime.machine import this_machine
from .runtime.memory import format_bytes, free_bytes, require_bytes
from .speeds import before_measuring
from .strategy import BiasedLocalSGD
from .tasks import Task, load_task
from .tasks.check import check_task
from .training_loop import EvaluateFn
from .worker.evaluation import evaluate_sums
from .worker.model_state import load_state, state_record
from .worker.profile import profile_of
from .worker_evaluation import WorkerEvaluation


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
    task = load_task(
        config.task,
        config.data,
        config.model,
        skip_bad=config.skip_bad,
        validation_share=config.validation_share,
        seed=config.seed,
    )
    check_task(task, config.task)
    local = grid.workers if isinstance(grid, LocalGrid) else ()
    strategy = make_strategy(config, task.num_train, len(local) or config.min_workers)
    if local:
        profiles = [profile_of(worker, place) for place, worker in enumerate(local)]
        strategy.planner.check(Roster.of_profiles(before_measuring(profiles)).workers)
    RunFolder.refuse_unusable(config.out)
    arrays = state_record(task.initial_model(derived_seed(config.seed, "model")))
    if local:
        _require_buffers(len(local), ModelShape(arrays).num_bytes, config.momentum)
    report = RunReport(config, strategy, view or ProgressView(config.epochs), began)
    with report.telling(task):
        strategy.roster.update(grid)
        strategy.planner.check(strategy.roster.active)
        report.open_folder()
        if not local:
            _tell_ignored_workers(config, strategy.roster, report)
        for worker in strategy.roster.active:
            if worker.speed:
                report.say(f"  {worker.label}: {worker.speed}")
        strategy.fit(
            grid,
            arrays,
            epochs=config.epochs,
            evaluate_fn=_evaluate_fn(grid, task, strategy.roster, report),
            evaluate_every_epochs=config.evaluate_every_epochs,
            on_round=report.add_round,
            on_epoch=report.add_epoch,
        )
    return report


def _require_buffers(num_workers: int, model_bytes: int, momentum: float) -> None:
    """Refuse more workers than there is memory for their shared buffers."""
    each = model_bytes * (2 if momentum else 1)
    needed = num_workers * each + 2 * model_bytes
    fitting = max(0, (free_bytes() or needed) - 2 * model_bytes) // each
    require_bytes(
        needed,
        f"sharing the model ({format_bytes(model_bytes)}) with {num_workers} workers",
        f"name fewer workers ({fitting} would fit)" if fitting else "use a smaller model",
    )


def make_strategy(config: RunConfig, num_samples: int, min_workers: int) -> BiasedLocalSGD:
    """Return the strategy that the settings describe.

    Raises
    ------
    UsageError
        If the batch size is larger than the data.
    """
    if config.batch_size > num_samples:
        raise UsageError(
            f"batch-size = {config.batch_size} is larger than the data: {num_samples} samples; "
            "use a smaller batch"
        )
    slow = None if config.local_steps_slow == "auto" else int(config.local_steps_slow)
    choices = config.choices
    return BiasedLocalSGD(
        num_samples,
        config.batch_size,
        STEPS[choices.steps](config.local_steps_fast, slow),
        local_steps_fast=config.local_steps_fast,
        learning_rate=config.learning_rate_schedule,
        sampler=SAMPLERS[choices.sampler](config.high_loss_ratio),
        weights=WEIGHTS[choices.weights](),
        epoch=config.epoch,
        momentum_buffers=config.momentum_buffers,
        deadline_seconds=config.deadline_seconds,
        clock=config.clock,
        seed=config.seed,
        min_available_nodes=min_workers,
        min_train_nodes=1,
        min_evaluate_nodes=1,
    )


def _tell_ignored_workers(config: RunConfig, roster: Roster, report: RunReport) -> None:
    """SuperNodes name their own device; only Flower's simulation reads ``workers``."""
    if config.workers == "auto":
        return
    try:
        named = [profile_of(worker) for worker in parse_workers(config.workers)]
    except UsageError:  # devices of another machine
        named = []
    for worker in roster.workers:
        place = worker.profile.partition_id  # simulation gives every node one
        profile = replace(worker.profile, partition_id=-1, data_fingerprint="")
        if place < 0 or profile not in named[place : place + 1]:
            report.say(
                f'workers = "{config.workers}" is ignored: each SuperNode names its own device'
            )
            return


def _evaluate_fn(grid: Grid, task: Task, roster: Roster, report: RunReport) -> EvaluateFn:
    model = functools.cache(task.model)  # made only if this process has to evaluate

    def evaluate_here(arrays: ArrayRecord, first: int, last: int) -> EvaluateReport:
        device = next(iter(this_machine().accelerators), "cpu")
        load_state(model(), arrays)
        return evaluate_sums(model(), task.test, task.loss, task.metric, device, first, last)

    by_workers = WorkerEvaluation(grid, roster, task.num_test, evaluate_here)

    def evaluate_global(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        began = time.perf_counter()
        if report.config.evaluate_on == "workers":
            metrics = by_workers(server_round, arrays)
        else:
            whole = evaluate_here(arrays, 0, task.num_test)
            metrics = MetricRecord({"accuracy": whole.accuracy, "loss": whole.loss})
        report.evaluation_seconds += time.perf_counter() - began
        return metrics

    return evaluate_global
