"""Gather what a run measures, tell it while it goes on, and write it down."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord

from ..config import RunConfig
from ..round_log import RoundRecord
from ..strategy import BiasedLocalSGD
from ..tasks import Task
from ..training_loop import EpochEnd
from .accounts import Accounts
from .clocks import BudgetClock
from .folder import EpochRow, RunFolder
from .last_lines import result_line, slow_device_line
from .measured import Figures, measured_figures, plan_line
from .progress import ProgressView
from .summary import summary_of
from .worker_lines import WorkerLines


class RunReport:
    """One run's figures, from its first round to its summary.

    Each round and each epoch is written, and shown, as soon as it is over; the workers wait
    meanwhile, for about a third of a millisecond a round.

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
        self._assets: Mapping[str, Path] = {}
        self._budget_clock = BudgetClock(config.clock)
        self._alone: Mapping[int, float] = {}
        self._worker_lines = WorkerLines(self.say)
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
        self._assets = task.assets
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
            with contextlib.suppress(Exception):  # the first error is the one to be told
                if self._folder is not None:
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
        return self._budget_clock.seconds_of(record, self._alone)

    def say(self, line: str) -> None:
        """Tell a line."""
        self._view.say(line)

    def open_folder(self) -> None:
        """Make the results folder, with what the model needs; UsageError if it cannot be made."""
        config = self.config
        name = config.name or config.task.rpartition(":")[2]
        self._folder = RunFolder.new(config.out, name)
        self._folder.write_config(config.to_run_config())
        self._folder.add_assets(self._assets)

    def count_evaluation(self, seconds: float) -> None:
        """Take seconds that training waited for evaluation."""
        self.evaluation_seconds += seconds

    def add_round(self, record: RoundRecord) -> None:
        """Write a round, and show it."""
        now = time.time()
        if not self._records:
            self._first_order_at = now - record.round_seconds
        self._last_model_at = now
        self._alone = self._accounts.seconds_per_step = self._seconds_per_step_alone()
        self._records.append(record)
        self._accounts.add(record)
        self._worker_lines.add(record)
        self.folder.add_round(record)
        self._view.round(record, self._accounts)

    def add_epoch(self, end: EpochEnd) -> None:
        """Write the end of an epoch, and show it."""
        self._arrays = end.arrays
        last, planner = self._records[-1], self._strategy.planner
        metrics: Mapping[str, Any] = end.metrics or {}
        row = EpochRow(
            epoch=end.epoch,
            wall_seconds=self._last_model_at - self._first_order_at,
            training_seconds=self._accounts.training_seconds,
            device_seconds=self._accounts.device_seconds,
            accuracy=metrics.get("accuracy"),
            loss=metrics.get("loss"),
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
        self.say(result_line(self.summary, self.folder.path))
        if self._records:
            self.say(slow_device_line(self._accounts, self.config, self.folder.path))
        if self.predicted and self.summary["measured"]:
            self.say(plan_line(self.predicted, self.summary["measured"]))

    def _draw(self) -> None:
        from .learning_curve import draw_learning_curve
        from .sampling_picture import draw_sampling
        from .timeline import draw_timeline

        title = f"{self.config.algorithm}, {self.config.task}, seed {self.config.seed}"
        path = self.folder.path
        draw_learning_curve(self._rows, title, path / "learning_curve.png", self._accounts.clock)
        draw_timeline(self._records, title, path / "timeline.png")
        draw_sampling(self._rows, title, path / "sampling.png")
