"""Adapter for ``transformers.Trainer``, see `BlsgdCallback`."""

import contextlib
import itertools
import math
import sys
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import RandomSampler, Sampler
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, set_seed

from ..errors import UsageError
from ..session.evaluation import Figures
from ..session.exchange import HERE, Exchange
from ..session.session import Session, join


class BlsgdCallback(TrainerCallback):
    """Callback with which a ``transformers.Trainer`` trains under ``blsgd launch``.

    Add it after all other callbacks, and start the script with ``blsgd launch``. Without the
    launcher, it changes nothing.

    - The budget of the run decides when training ends, not ``num_train_epochs``, ``max_steps`` or
      an early-stopping callback. Use ``-s patience`` or ``-s stop-at-accuracy`` instead of the
      latter.
    - The Trainer's learning-rate schedule is stretched over the run: at the start of a round, all
      workers set the rate that the schedule has after ``session.progress`` of the Trainer's steps.
      These are ``max_steps``, or those of ``num_train_epochs``. Schedules that react to a metric
      are not followed. With ``resume_from_checkpoint``, it continues at the checkpoint's step.
    - ``batch=`` of a worker is its number of samples per optimizer step. It must be a multiple of
      ``gradient_accumulation_steps``. Workers without it use the Trainer's own batch size.
    - The workers share one stream of permutations of ``train_dataset``, which needs a length.
      ``train_sampling_strategy`` has no effect. A derived class with its own
      ``get_train_dataloader`` keeps it; then each worker draws with its own random numbers.
    - Only the main worker logs and saves; ``trainer.is_world_process_zero()`` is True there and
      False on the others. It saves at the end of a round, because only then its model is the
      averaged one; with ``overlap``, the first step of a round has moved it. The Trainer's steps
      and epochs are those of this worker.
    - With an ``eval_strategy``, the run evaluates: once per epoch, or every ``eval_steps`` steps
      rounded to epochs. A worker with ``role=evaluate`` does it, or else the fastest worker between
      two rounds. The figures are in ``epochs.csv``. With ``load_best_model_at_end`` or
      ``save_strategy="best"``, the Trainer of the main worker evaluates instead, at the end of a
      round.

    Parameters
    ----------
    trainer : transformers.Trainer
        The Trainer, or one of a derived class such as TRL's ``SFTTrainer``.

    Attributes
    ----------
    session : Session or None
        The session; None before training begins, and always without ``blsgd launch``.

    Raises
    ------
    UsageError
        Under ``blsgd launch``, if the Trainer itself uses several processes, DeepSpeed or FSDP, has
        ``auto_find_batch_size``, its own sampler or a data set without a length, or if ``batch=``
        does not fit.

    Examples
    --------
    ::

        trainer = Trainer(model, args, train_dataset=dataset)
        trainer.add_callback(BlsgdCallback(trainer))
        trainer.train()
    """

    def __init__(self, trainer: Trainer) -> None:
        self.session: Session | None = None
        # Its methods are replaced, because it decides much before its callbacks are called.
        self._trainer: Any = trainer
        self._exchange = HERE.exchange
        self._stream: Iterator[int] = iter(())
        self._own_batch_size = 0
        self._run_evaluates = self._is_end_of_round = False
        self._postponed: set[str] = set()
        self._done_at: dict[str, int] = {}
        self._pause = contextlib.ExitStack()
        if self._exchange is not None:
            _check(trainer)
            self._adapt(self._exchange)

    def _adapt(self, exchange: Exchange) -> None:
        """Change what the Trainer decides before its callbacks are called."""
        trainer, args = self._trainer, self._trainer.args
        device = torch.device(exchange.worker.torch_device)  # not the first one of the machine
        args._n_gpu = int(device.type == "cuda")  # no DataParallel
        args.__dict__["_setup_devices"] = device
        args.distributed_state.device = trainer.accelerator.state.device = device
        self._own_batch_size = args.train_batch_size * args.gradient_accumulation_steps
        if batch := exchange.worker.batch_size:
            args.per_device_train_batch_size = batch // args.gradient_accumulation_steps
            if args.per_device_train_batch_size * args.gradient_accumulation_steps != batch:
                raise UsageError(
                    f"workers: batch={batch} must be a multiple of gradient_accumulation_steps = "
                    f"{args.gradient_accumulation_steps}"
                )
        trainer._train_batch_size = args.train_batch_size
        unscale = trainer.accelerator.unscale_gradients

        def unscale_and_average(*optimizer: Any) -> None:  # before gradients are clipped
            unscale(*optimizer)
            if self.session is not None:
                self.session.average_gradients()

        trainer.accelerator.unscale_gradients = unscale_and_average
        keeps_best = args.load_best_model_at_end or args.save_strategy == "best"
        self._run_evaluates = args.eval_strategy != "no" and not keeps_best
        # With resume_from_checkpoint, no samples are skipped, and random numbers differ by worker.
        args.ignore_data_skip = True
        trainer._load_rng_state = lambda *_: None
        values = trainer.set_initial_training_values

        def without_end(args: Any, dataloader: Any) -> tuple[Any, ...]:
            _, *others, steps = values(args, dataloader)
            if args.max_steps <= 0:  # the same on all workers, also with different batch=
                a_epoch = math.ceil(len(trainer.train_dataset) / self._own_batch_size)
                steps = math.ceil(args.num_train_epochs * a_epoch)
            return sys.maxsize, *others, steps

        trainer.set_initial_training_values = without_end
        trainer._get_train_sampler = lambda dataset=None: _EndlessSampler(
            self, trainer.train_dataset if dataset is None else dataset
        )
        if trainer.pop_callback(ProgressCallback):  # the number of steps is not known
            trainer.add_callback(PrinterCallback)
        trainer.is_world_process_zero = trainer.is_local_process_zero = lambda: exchange.is_main
        trainer.state.is_world_process_zero = trainer.state.is_local_process_zero = exchange.is_main
        if not exchange.is_main:
            trainer.save_model = lambda *_, **__: None

    # --- events of the Trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Join, and wait for the first order."""
        if self._exchange is None:
            return
        trainer = self._trainer
        if state.global_step >= state.max_steps:
            raise UsageError(
                f"Trainer: the checkpoint is at step {state.global_step} of {state.max_steps}, the "
                "end of the learning-rate schedule; raise max_steps or num_train_epochs"
            )
        model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        self.session = session = join(model, trainer.optimizer)
        set_seed(session.seed)
        if not session.is_main:  # in a checkpoint to resume from; the main worker may delete it
            state.best_model_checkpoint = None
        self._stream = iter(session.sampler(trainer.train_dataset))
        state.num_train_epochs = math.ceil(args.num_train_epochs)
        scheduler = trainer.lr_scheduler
        if isinstance(scheduler, LambdaLR) and len(set(scheduler.lr_lambdas)) == 1:
            factor, first = scheduler.lr_lambdas[0], state.global_step  # of a checkpoint
            left = state.max_steps - first
            # Step 0 of a warm-up has a rate of zero, which would waste the first round.
            following = session.scheduler(
                trainer.optimizer, lambda progress: factor(max(1.0, first + progress * left))
            )
            trainer.lr_scheduler = trainer.callback_handler.lr_scheduler = following
        if self._run_evaluates:
            metric = (args.metric_for_best_model or "loss").removeprefix("eval_")
            mode = "max" if args.greater_is_better else "min"
            steps = state.eval_steps if args.eval_strategy == "steps" else 0
            every = int(steps * self._own_batch_size)
            session.evaluate(self._figures, every, metric=metric, mode=mode)
        session.wait_for_first_order(self._own_batch_size)
        control.should_training_stop = session.done

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the pause for evaluating and saving."""
        self._pause.close()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note the step; the learning rate and the Trainer's own decisions come after it."""
        if self.session is None:
            return
        order, trainer = self.session.order, self._trainer
        self.session.step(trainer._train_batch_size * trainer.current_gradient_accumulation_steps)
        self._is_end_of_round = self.session.done or self.session.order is not order
        step = state.global_step + 1
        state.max_steps = step if self.session.done else max(state.max_steps, step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Postpone what the Trainer wants to do to the end of a round, when the model is averaged.

        Only the main worker does it then, once per step.
        """
        self._pause.close()
        if self.session is None:
            return
        control.should_training_stop = self.session.done
        for flag in ("should_evaluate", "should_save"):
            if getattr(control, flag):
                self._postponed.add(flag)
            is_wanted = (
                flag in self._postponed
                and self.session.is_main
                and self._is_end_of_round
                and self._done_at.get(flag) != state.global_step
                and not (flag == "should_evaluate" and self._run_evaluates)
            )
            if is_wanted:
                self._postponed.remove(flag)
                self._done_at[flag] = state.global_step
            setattr(control, flag, is_wanted)
        if control.should_evaluate or control.should_save:
            self._pause.enter_context(self.session.paused())

    on_epoch_end = on_step_end

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Continue even if an early-stopping callback has ended training."""
        if self.session is not None:
            control.should_training_stop = self.session.done

    # --- evaluation

    def _figures(self, model: nn.Module) -> Figures:
        """Evaluate as the Trainer does; `model` is its own."""
        found = self._trainer.evaluate().items()
        return {k.removeprefix("eval_"): v for k, v in found if not k.endswith(_NOT_FIGURES)}


_NOT_FIGURES = ("runtime", "per_second", "_time", "epoch")
"""Endings of what the Trainer adds to the figures of an evaluation."""


class _EndlessSampler(Sampler[int]):
    """One stream of samples over all of the Trainer's epochs, each with full batches only."""

    def __init__(self, callback: BlsgdCallback, dataset: Sized) -> None:
        self._callback, self._dataset = callback, dataset
        batch_size = callback._trainer._train_batch_size
        self._size: int = math.ceil(len(dataset) / batch_size) * batch_size

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        if self._callback.session is None:  # the script looks at a batch
            return iter(RandomSampler(self._dataset))
        return itertools.islice(self._callback._stream, self._size)


def _check(trainer: Any) -> None:
    """Raise UsageError for what cannot be combined with ``blsgd launch``."""
    args = trainer.args
    if args.world_size > 1 or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise UsageError(
            "Trainer: its own processes, DeepSpeed and FSDP do not work under blsgd launch, which "
            "runs the script once per device"
        )
    if args.auto_find_batch_size:
        raise UsageError("TrainingArguments: auto_find_batch_size = True; give batch= per worker")
    if type(trainer)._get_train_sampler is not Trainer._get_train_sampler:
        raise UsageError(
            f"{type(trainer).__name__}: it has its own sampler, so the workers cannot share the "
            "samples; use Trainer, or a class without _get_train_sampler"
        )
    if not hasattr(trainer.train_dataset, "__len__"):
        raise UsageError(
            "Trainer: train_dataset has no length, so the workers cannot share its samples; use a "
            "data set with __len__ and __getitem__"
        )
