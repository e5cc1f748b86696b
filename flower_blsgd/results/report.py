"""Gather what a run measures, tell it while it goes on, and write it down."""

import contextlib
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord

from ..config import RunConfig
from ..round_log import RoundRecord
from ..strategy import BiasedLocalSGD
from ..tasks import GIVEN_IN_PYTHON, Task
from ..training_loop import EpochEnd
from .accounts import Accounts
from .folder import EpochRow, RunFolder
from .measured import Figures, measured_figures, plan_line
from .progress import ProgressView
from .summary import HARDLY, summary_of


class RunReport:
    """One run's figures, from its first round to its summary.

    Parameters
    ----------
    config : RunConfig
        The settings.
    strategy : BiasedLocalSGD
        Asked for what only it knows: the samples left out, the workers.
    view : ProgressView
        Where to tell.
    began_at : float
        Unix time at which set-up began.
    """

    def __init__(
        self,
        config: RunConfig,
        strategy: BiasedLocalSGD,
        view: ProgressView,
        began_at: float,
    ) -> None:
        self.config = config
        self.evaluation_seconds = 0.0
        self.summary: dict[str, Any] = {}
        self._strategy = strategy
        self._view = view
        self._began_at = began_at
        self._first_order_at = began_at
        self._last_model_at = began_at
        self._accounts = Accounts(config.clock)
        self._records: list[RoundRecord] = []
        self._rows: list[EpochRow] = []
        self._arrays: ArrayRecord | None = None
        self._folder: RunFolder | None = None
        self._device_seconds = 0.0
        self._steps_told: dict[int, int] = {}
        self.predicted: Figures | None = None
        """What was expected, by the names of `measured_figures`; None if nothing could be."""

    @property
    def folder(self) -> RunFolder:
        """The results folder."""
        assert self._folder is not None, "open_folder comes first"
        return self._folder

    @contextlib.contextmanager
    def telling(self, task: Task) -> Iterator[None]:
        """Say what will be done, show it while it goes on, and write down how it ended.

        After an error, or Ctrl-C, what was reached is written, marked as interrupted.
        """
        choices = self.config.choices
        self.say(
            f"{self.config.algorithm} (steps {choices.steps}, sampler {choices.sampler}, "
            f"weights {choices.weights}, train on {choices.train_on}) on {self.config.task}: "
            f"{task.num_train:,} training and {task.num_test:,} test samples, batch size "
            f"{self.config.batch_size}, {self._budget()}, seed {self.config.seed}"
        )
        self._view.begin()
        try:
            yield
        except BaseException:
            self._view.end()
            if self._folder is not None:
                with contextlib.suppress(Exception):  # the first error is the one to be told
                    self._finish(interrupted=True)
            raise
        self._view.end()
        self._finish()

    def _budget(self) -> str:
        if not self.config.seconds:
            return f"{self.config.epochs} epochs"
        return f"{self.config.seconds:g} s of training ({self.config.epochs} epochs at most)"

    def seconds_of(self, record: RoundRecord) -> float:
        """Return what a round, already taken, counts against a budget in seconds."""
        device_seconds = self._accounts.device_seconds
        if self.config.clock == "wall" or device_seconds is None:
            return record.planning_seconds + record.round_seconds
        before, self._device_seconds = self._device_seconds, device_seconds
        return device_seconds - before

    def say(self, line: str) -> None:
        """Tell a line."""
        self._view.say(line)

    def open_folder(self) -> None:
        """Make the results folder; UsageError if it cannot be made."""
        config = self.config
        name = config.name or config.task.rpartition(":")[2]
        self._folder = RunFolder.new(config.out, name)
        self._folder.write_config(config.to_run_config())

    def add_round(self, record: RoundRecord) -> None:
        """Take a round."""
        now = time.time()
        if not self._records:
            self._first_order_at = now - record.round_seconds
            self._say_workers(record)
        self._say_changed_steps(record)
        self._last_model_at = now
        self._records.append(record)
        self._accounts.seconds_per_step = self._seconds_per_step_alone()
        self._accounts.add(record)
        self.folder.add_round(record)
        self._view.round(record, self._accounts)

    def add_epoch(self, end: EpochEnd) -> None:
        """Take the end of an epoch."""
        self._arrays = end.arrays
        last = self._records[-1]
        planner = self._strategy.planner
        metrics = end.metrics
        row = EpochRow(
            epoch=end.epoch,
            wall_seconds=self._last_model_at - self._first_order_at,
            training_seconds=self._accounts.training_seconds,
            device_seconds=self._accounts.device_seconds,
            accuracy=None if metrics is None else float(metrics["accuracy"]),  # type: ignore[arg-type]
            loss=None if metrics is None else float(metrics["loss"]),  # type: ignore[arg-type]
            learning_rate=last.learning_rate,
            train_loss=last.train_loss,
            rounds=self._accounts.rounds,
            samples=self._accounts.samples,
            mean_loss_age_rounds=planner.table.mean_age_rounds(end.round),
            sampling=planner.sampling_stats,
        )
        self._rows.append(row)
        self.folder.add_epoch(row)
        self._view.epoch(row)

    def _seconds_per_step_alone(self) -> dict[int, float]:
        """Return the known speeds by worker index, as they are now: one may have come, or left.

        What we measure on the wall clock we measure on all workers at once: not alone.
        """
        alone = {}
        for worker in self._strategy.roster.workers:
            seconds = worker.profile.seconds_per_step_alone
            if not seconds and (self.config.clock == "device" or not worker.measured):
                seconds = worker.profile.seconds_per_step
            if seconds:
                alone[worker.index] = seconds
        return alone

    def _finish(self, interrupted: bool = False) -> None:
        self.summary = {
            **summary_of(self.config, self._strategy, self._accounts, self._records, self._rows),
            "predicted": self.predicted,
            "measured": measured_figures(self._accounts, self._records),
            "wall_seconds": self._last_model_at - self._first_order_at,
            "setup_seconds": self._first_order_at - self._began_at,
            "evaluation_seconds": self.evaluation_seconds,
            "interrupted": interrupted,
        }
        if self._arrays is not None:
            self.folder.write_model(self._arrays)
        self.folder.write_summary(self.summary)
        if self._records:
            self._draw()
        self.say(self._result_line(interrupted))
        if self._records:
            self.say(self.slow_device_line())
        if self.predicted and self.summary["measured"]:
            self.say(plan_line(self.predicted, self.summary["measured"]))

    def _result_line(self, interrupted: bool) -> str:
        state = "stopped early" if interrupted else "done"
        accuracy, device_seconds = self.summary["accuracy"], self.summary["device_seconds"]
        reached = "" if accuracy is None else f"test accuracy {accuracy:.2%} "
        others = f"{self.summary['wall_seconds']:.1f} s with evaluation"
        if device_seconds is not None:
            others += f"; {device_seconds:.1f} s on simulated devices, computed"
        return (
            f"{state}: {reached}after {self.summary['training_seconds']:.1f} s of training "
            f"({others}); results in {self.folder.path}"
        )

    def slow_device_line(self) -> str:
        """Answer "do my slow devices help?" as far as this run can."""
        accounts = self._accounts
        if accounts.summing_seconds:
            return (
                f"slow devices: they added up models, for {accounts.summing_seconds:.2g} s in all, "
                "and trained on nothing"
            )
        if not any(not total.fast for total in accounts.workers.values()):
            return "slow devices: none took part, so nobody waited for one"
        longer = accounts.longer_for_slow()
        if longer is None:
            rounds = "rounds not known to be longer (clock = device needs everybody's speed)"
        else:
            rounds = f"rounds {longer:+.0%} longer for waiting for them"
            rounds += " (simulated devices)" if accounts.clock == "device" else ""
        return (
            f"slow devices: {accounts.sample_share(fast=False):.1%} of the samples, "
            f"{accounts.weight_share(fast=False):.1%} of the weight, {rounds}; "
            f"what they do to accuracy shows beside a run without them: {self._fast_only()}"
        )

    def _fast_only(self) -> str:
        """Return how the same is done without training on slow workers."""
        if self.config.task == GIVEN_IN_PYTHON:
            return "train(task, train_on='fast', sampler='uniform', ...)"
        command = (
            f"{_blsgd()} run -c {shlex.quote(str(self.folder.path / 'config.toml'))} "
            "-s train-on=fast -s sampler=uniform"
        )
        if self.config.out:
            command += f" -s out={shlex.quote(self.config.out + '-fast-only')}"
        return command

    def _say_changed_steps(self, record: RoundRecord) -> None:
        for row in record.workers:
            before = self._steps_told.get(row.worker, row.local_steps)
            if row.local_steps != before:
                self.say(
                    f"  epoch {record.epoch}: {row.label} does {row.local_steps} steps a round "
                    f"instead of {before}: its speed changed"
                )
            self._steps_told[row.worker] = row.local_steps

    def _say_workers(self, record: RoundRecord) -> None:
        for row in record.workers:
            if not row.trained:
                self.say(f"  {row.label}: adds up its slice of the fast workers' models")
                continue
            line = f"  {row.label}: {row.local_steps} steps a round, weight {row.weight:.1%}"
            if 0 < row.weight < HARDLY:
                line += " (hardly takes part)"
            self.say(line)

    def _draw(self) -> None:
        from .learning_curve import draw_learning_curve
        from .sampling_picture import draw_sampling
        from .timeline import draw_timeline

        title = f"{self.config.algorithm}, {self.config.task}, seed {self.config.seed}"
        path = self.folder.path
        draw_learning_curve(self._rows, title, path / "learning_curve.png", self._accounts.clock)
        draw_timeline(self._records, title, path / "timeline.png")
        draw_sampling(self._rows, title, path / "sampling.png")


def _blsgd() -> str:
    """Return how the command is called from here: the environment may not be activated."""
    beside = Path(sys.executable).with_name("blsgd")
    if shutil.which("blsgd") or not beside.exists():
        return "blsgd"
    return shlex.quote(os.path.relpath(beside))
