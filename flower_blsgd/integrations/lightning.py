"""Callback that lets a Lightning script train under ``blsgd launch``.

Importing this module does not import Lightning.
"""

import contextlib
import importlib
import math
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from ..algorithm.randomness import derived_seed
from ..errors import UsageError, first_line, pip_install
from ..session.exchange import HERE
from ..session.session import Session, join

_REFUSED = ("StochasticWeightAveraging", "BatchSizeFinder", "LearningRateFinder", "BaseFinetuning")
"""Callbacks that count a worker's own epochs, search by its own speed, or unfreeze parameters."""

_AT_ITS_END = "Trainer.fit: its checkpoint is at the end of max_epochs or max_steps; raise them"


class BlsgdCallback:
    """Lightning callback that makes a script a worker of ``blsgd launch``.

    Without ``blsgd launch``, it changes nothing. Under it, every worker runs the script:

    - After each optimizer step, it calls `Session.step` with the samples of the step, including
      accumulated batches.
    - The run's budget ends the fit. `max_epochs`, `max_steps`, `max_time` and ``EarlyStopping`` do
      not.
    - Each worker shuffles with its own seed. A training loader that does not shuffle is refused.
    - Only the main worker validates, logs, saves checkpoints, and continues after ``Trainer.fit``;
      the scripts of the others end there.
    - Before a validation, the main worker ends its part of the round, so the averaged model is
      validated and saved. Validation and checkpoints do not count as the device's speed.
    - PyTorch's learning rate schedulers follow the progress of the run. At its end, they have taken
      the steps that `max_epochs` or `max_steps` would have given them, with those of a `ckpt_path`.

    Lightning trains on the worker's device. ``Trainer`` needs neither `accelerator` nor `devices`.

    Parameters
    ----------
    samples : callable, optional
        ``(batch) -> int``, the number of samples in a batch. Default: the first dimension of the
        first tensor in the batch.

    Raises
    ------
    UsageError
        If Lightning is not installed, and in ``Trainer.fit`` if the script uses what one worker of
        several cannot: manual optimization (several optimizers need it), a strategy for several
        devices, ``ReduceLROnPlateau``, callbacks that unfreeze or search, or a second fit.

    Examples
    --------
    ::

        trainer = Trainer(max_epochs=10, callbacks=[BlsgdCallback()])
        trainer.fit(model, loader)
    """

    def __new__(cls, *_: Any, **__: Any) -> "BlsgdCallback":
        """Return an instance that is a Lightning ``Callback``, too."""
        base = _lightning("callbacks").Callback
        if not issubclass(cls, base):
            names = {"__module__": cls.__module__, "__doc__": cls.__doc__}
            return super().__new__(type(cls.__name__, (cls, base), names))
        return super().__new__(cls)

    def __init__(self, samples: Callable[[Any], int] | None = None) -> None:
        self._samples_of = samples or _samples_of
        self._exchange = HERE.exchange
        self._session: Session | None = None
        self._trainer: Any = None
        self._pause = contextlib.ExitStack()
        self._is_averaged = False
        self._optimizer_steps = self._waiting_samples = self._num_loaders = 0
        self._move_schedules: list[Callable[[float], None]] = []
        self._rank = 0
        """For Lightning, 0 is the rank of the main worker only."""
        if self._exchange is not None:
            self._rank = 0 if self._exchange.is_main else self._exchange.rank + 1
            _use_one_device(self._exchange.worker.torch_device)
            # Lightning's loggers and messages are those of rank 0. The first logger is created
            # before any hook.
            from lightning_utilities.core.rank_zero import rank_zero_only

            rank_zero_only.rank = self._rank  # type: ignore[attr-defined,unused-ignore]

    @property
    def session(self) -> Session:
        """The session, from the first ``train_dataloader()`` of a fit on.

        ``train_dataloader`` may use its `sampler` and `batch_size`. UsageError before.
        """
        if self._session is None:
            if self._trainer is None or not self._trainer.optimizers:
                raise UsageError(
                    "BlsgdCallback.session was used before Trainer.fit had created the optimizer; "
                    "use it in train_dataloader, without trainer.estimated_stepping_batches"
                )
            self._session = join(self._trainer.lightning_module, self._trainer.optimizers[0])
        return self._session

    # --- Lightning's hooks

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check the trainer, and make it one worker of several."""
        if stage != "fit":
            return
        self._trainer = trainer
        if self._exchange is None:
            return
        if self._session is not None:
            raise UsageError("Trainer.fit was called twice; blsgd launch runs one fit of a script")
        self._check(trainer, pl_module)
        strategy, kind = trainer.strategy, type(trainer.strategy)
        own = {  # in place of two properties and a method
            "root_device": torch.device(self._exchange.worker.torch_device),
            "is_global_zero": self._exchange.is_main,
            "process_dataloader": lambda _, loader: self._shuffled(loader),
        }
        strategy.__class__ = type(kind.__name__, (kind,), own)
        strategy.global_rank = self._rank
        trainer.accelerator.setup_device(strategy.root_device)
        if not self._exchange.is_main:
            trainer.limit_val_batches = 0
            monitors = (_lightning("callbacks").Checkpoint, _lightning("callbacks").EarlyStopping)
            trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, monitors)]
        trainer.fit_loop.min_epochs = sys.maxsize  # should_stop has no effect

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse a schedule that cannot follow the run."""
        plateaus = (config.reduce_on_plateau for config in trainer.lr_scheduler_configs)
        if self._exchange is not None and any(plateaus):
            raise UsageError(
                "ReduceLROnPlateau follows the validation of one worker, so the workers' learning "
                "rates would differ; use a schedule of steps or epochs"
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Join the run, which decides when the fit ends."""
        if self._exchange is None:
            return
        _ = self.session
        self._move_schedules = _schedules(trainer, pl_module)
        self._optimizer_steps = trainer.global_step
        trainer.fit_loop.max_epochs = trainer.fit_loop.epoch_loop.max_steps = -1

    def on_train_batch_start(self, *_: Any) -> None:
        """End the pause of a validation or a checkpoint."""
        self._pause.close()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Average the gradients before they are clipped, if the run averages gradients."""
        if self._session is not None:
            self._session.average_gradients()

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, *_: Any) -> None:
        """Note the step, unless gradients are still accumulated."""
        if self._exchange is None:
            return
        self._waiting_samples += self._samples_of(batch)
        if trainer.global_step == self._optimizer_steps:
            return
        samples, self._waiting_samples = self._waiting_samples, 0
        self._optimizer_steps = trainer.global_step
        before = self.session.order
        self.session.step(samples)
        order = self.session.order  # with overlap, the first step has moved the average
        self._is_averaged = order is not before and not (order and order.overlap)
        self._follow(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Validate the averaged model, in time that does not count."""
        session = self._session
        if self._exchange is None or session is None or trainer.state.fn != "fit":
            return
        if not self._is_averaged and session.order is not None:
            session.average()
            self._is_averaged = True
            self._follow(trainer)
        self.on_save_checkpoint()  # begins a pause

    def on_save_checkpoint(self, *_: Any) -> None:
        """Begin a pause, in which time does not count."""
        self._pause.close()
        if self._session is not None:
            self._pause.enter_context(self._session.paused())

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End the scripts of all workers but the main one."""
        if stage != "fit":
            return
        if self._exchange is None:
            if self._session is not None:
                self._session.close()
                self._session = None
        elif self._session is None:
            raise UsageError(_AT_ITS_END)
        elif not self._exchange.is_main:
            raise SystemExit(0)

    # --- inside

    def _check(self, trainer: Any, pl_module: Any) -> None:
        assert self._exchange is not None
        worker, found = self._exchange.worker, trainer.strategy.root_device.type
        if worker.role == "evaluate":
            raise UsageError(
                f"worker {self._exchange.rank} has role=evaluate, but with BlsgdCallback the main "
                "worker validates; give it role=train"
            )
        if not pl_module.automatic_optimization:
            raise UsageError(
                f"{type(pl_module).__name__} has automatic_optimization = False; BlsgdCallback "
                "needs automatic optimization with one optimizer"
            )
        if type(trainer.strategy).__name__ != "SingleDeviceStrategy":
            raise _several_devices(type(trainer.strategy).__name__)
        if found != worker.device.split(":")[0]:
            raise UsageError(
                f"Trainer uses {found}, but this worker is {worker.device}; remove accelerator= "
                "and devices= from Trainer(...)"
            )
        for callback in trainer.callbacks:
            names = {kind.__name__ for kind in type(callback).__mro__}
            if names.intersection(_REFUSED):
                raise UsageError(
                    f"callback {type(callback).__name__} does not work under blsgd launch; remove "
                    "it"
                )

    def _shuffled(self, loader: Any) -> Any:
        """Give this worker's loader of a fit its own order of samples."""
        if not self._trainer.training:
            return loader
        assert self._exchange is not None
        self._num_loaders += 1
        draw = (self._exchange.seed, "lightning-shuffle", self._exchange.rank, self._num_loaders)
        seed = derived_seed(*draw)
        if self._num_loaders == 1:
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
        if not isinstance(loader, DataLoader):
            return loader
        if isinstance(loader.dataset, IterableDataset):
            _lightning("utilities").rank_zero_warn(
                "the training data are an IterableDataset: each worker must read another part, "
                "such as every BLSGD_WORLD_SIZE-th sample from BLSGD_RANK on (os.environ)"
            )
        sampler: Any = loader.sampler
        if loader.batch_sampler is not None:
            sampler = getattr(loader.batch_sampler, "sampler", None)
        if isinstance(sampler, SequentialSampler):
            raise UsageError(
                "the training DataLoader does not shuffle, so all workers would train on the same "
                "batches; use shuffle=True"
            )
        for owner in (loader, sampler):
            if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
                generator.manual_seed(seed)
        return loader

    def _follow(self, trainer: Any) -> None:
        """Move the schedules to the progress of the run, and end the fit with the run."""
        for move_to in self._move_schedules:
            move_to(self.session.progress)
        if self.session.done:
            trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps = 0, None
            trainer.should_stop = True


def _stretched(scheduler: Any, steps: int) -> Callable[[float], None]:
    """Return a function that takes the steps up to a share of those that are left."""
    counting = scheduler if hasattr(scheduler, "last_epoch") else scheduler._schedulers[0]
    first = counting.last_epoch  # of a checkpoint, else 0
    if first >= steps:
        raise UsageError(_AT_ITS_END)

    def move_to(progress: float) -> None:
        while counting.last_epoch < first + int(progress * (steps - first)):
            scheduler.step()

    return move_to


def _schedules(trainer: Any, pl_module: Any) -> list[Callable[[float], None]]:
    """Take the schedulers over from Lightning, with the number of steps it would give them."""
    found, base = [], _lightning("core").LightningModule
    is_custom = type(pl_module).lr_scheduler_step is not base.lr_scheduler_step
    for config in trainer.lr_scheduler_configs:
        steps = _scheduler_steps(trainer, config)
        if is_custom or not isinstance(config.scheduler, LRScheduler) or not steps:
            _lightning("utilities").rank_zero_warn(
                f"{type(config.scheduler).__name__} follows the steps of each worker, not the "
                "progress of the run, because it has a custom step or Trainer has no finite length"
            )
            continue
        found.append(_stretched(config.scheduler, steps))
        config.frequency = sys.maxsize  # Lightning never steps it
    return found


def _scheduler_steps(trainer: Any, config: Any) -> int:
    """Return the number of steps of a scheduler in a fit without ``blsgd launch``; 0: unknown."""
    try:
        steps = trainer.estimated_stepping_batches
    except Exception:  # accumulate_grad_batches varies
        return 0
    if config.interval == "epoch":
        steps /= math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
    return max(0, int(steps / config.frequency)) if math.isfinite(steps) else 0


def _use_one_device(device: str) -> None:
    """Make this device the default of ``Trainer``, and refuse Lightning's own processes."""
    kind, _, number = device.partition(":")
    os.environ["PL_TRAINER_ACCELERATOR"] = kind
    os.environ["PL_TRAINER_DEVICES"] = f"[{number}]" if number and kind != "cpu" else "1"

    def refuse(launcher: Any, *_: Any, trainer: Any = None, **__: Any) -> None:
        raise _several_devices(type(trainer.strategy).__name__)

    # No hook is called before a strategy starts its processes.
    launchers = _lightning("strategies.launchers")
    launchers._SubprocessScriptLauncher.launch = refuse
    launchers._MultiProcessingLauncher.launch = refuse


def _several_devices(strategy: str) -> UsageError:
    return UsageError(
        f"Trainer uses {strategy}, but blsgd launch starts one process per device; remove "
        "strategy=, accelerator= and devices= from Trainer(...)"
    )


def _samples_of(batch: Any) -> int:
    try:
        return int(_lightning("utilities.data").extract_batch_size(batch))
    except Exception as error:
        raise UsageError(
            f"the batch has no number of samples ({first_line(error)}); use "
            "BlsgdCallback(samples=lambda batch: ...)"
        ) from None


def _lightning(module: str) -> Any:
    """Import a module of Lightning, of the package that the script uses."""
    package = "lightning.pytorch"
    if "pytorch_lightning" in sys.modules and package not in sys.modules:
        package = "pytorch_lightning"
    try:
        return importlib.import_module(f"{package}.{module}")
    except ModuleNotFoundError as error:
        raise UsageError(f"BlsgdCallback needs {error.name}; {pip_install('lightning')}") from None
