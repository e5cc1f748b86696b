"""The parts of a run, as the settings describe them: its grid and its strategy."""

from collections.abc import Callable, Collection, Sequence

import torch
from flwr.app import ArrayRecord
from rich import filesize

from .algorithm.catalog import RELEASED_SAMPLERS, TRAIN_ON, part_of, tau_fast
from .algorithm.outer_optimizer import OUTER_OPTIMIZERS
from .config import RunConfig
from .devices.machine import require_bytes
from .devices.worker_spec import WorkerSpec, parse_workers
from .engines.local.fork_server import start_fork_server
from .engines.local.grid import LocalGrid
from .errors import UsageError
from .flower.app_folder import built_in_app
from .protocol import WorkerProfile, state_copies
from .released import ReleasedLocalSGD, released_sampler
from .strategy.biased_local_sgd import BiasedLocalSGD
from .strategy.connector import assume_speeds
from .strategy.replies import ModelShape
from .worker import MODULES
from .worker.step import check_precision


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
        average=choices.average,  # type: ignore[arg-type]  # likewise
        deadline_seconds=config.deadline_seconds,
        clock=config.clock,
        train_on=TRAIN_ON[choices.train_on],
        outer_optimizer=outer and outer(config.outer_learning_rate, config.outer_momentum),
        parameter_names=parameter_names,
        overlap=config.overlap,
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


def require_buffers(config: RunConfig, num_workers: int, arrays: ArrayRecord) -> None:
    """Raise UsageError if the shared buffers of the workers do not fit into memory."""
    model_bytes = ModelShape(arrays).num_bytes
    each = model_bytes * (1 + state_copies(config.optimizer, config.momentum))
    require_bytes(
        num_workers * each + 2 * model_bytes,
        f"sharing the model ({filesize.decimal(model_bytes)}) with {num_workers} workers",
        "name fewer workers or use a smaller model",
    )
