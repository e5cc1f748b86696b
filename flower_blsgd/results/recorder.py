"""Record a run: sum up its rounds, show them while it goes on, and write its results folder."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord

from ..config import RunConfig
from ..strategy import BiasedLocalSGD
from ..strategy.fit_loop import EpochEnd
from ..strategy.round_metrics import RoundRecord
from ..tasks import Task
from .folder import EpochRow, RunFolder
from .metrics import RunMetrics
from .progress import ProgressView
from .summary import (
    HARDLY,
    Figures,
    measured_figures,
    plan_line,
    result_line,
    slow_device_line,
    summary_of,
)


class RunRecorder:
    """Records one run, from its first round to its summary.

    Each round and each epoch is written, and shown, as soon as it is over; the workers wait
    meanwhile, for about a third of a millisecond a round.

    Parameters
    ----------
    config : RunConfig
        The settings.
    strategy : BiasedLocalSGD
        Knows the workers and the samples given up.
    view : ProgressView
        Shows rounds, epochs and lines.
    began_at : float
        Unix time at which set-up began.

    Attributes
    ----------
    summary : dict
        The content of ``summary.json``; empty until the run is over.
    evaluation_seconds : float
        How long training waited for evaluation.
    predicted : dict, optional
        What was expected, by the names of `measured_figures`; None if nothing could be.
    """

    def __init__(
        self, config: RunConfig, strategy: BiasedLocalSGD, view: ProgressView, began_at: float
    ) -> None:
        self.config = config
        self.evaluation_seconds = 0.0
        self.summary: dict[str, Any] = {}
        self.predicted: Figures | None = None
        self._strategy = strategy
        self._view = view
        self._began_at = began_at
        self._first_order_at = began_at
        self._last_model_at = began_at
        self._metrics = RunMetrics(config.clock)
        self._rows: list[EpochRow] = []
        self._arrays: ArrayRecord | None = None
        self._folder: RunFolder | None = None
        self._assets: Mapping[str, Path] = {}
        self._shown_steps: dict[int, int] = {}

    @property
    def folder(self) -> RunFolder:
        """The results folder."""
        assert self._folder is not None, "open_folder comes first"
        return self._folder

    @contextlib.contextmanager
    def recording(self, task: Task) -> Iterator[None]:
        """Show what will be done, then the progress, and write how the run ended.

        After an error, or Ctrl-C, what was reached is written, marked as interrupted.
        """
        self._assets = task.assets
        choices, budget = self.config.choices, f"{self.config.epochs} epochs"
        if self.config.seconds:
            budget = f"{self.config.seconds:g} s of training ({budget} at most)"
        self.say(
            f"{self.config.algorithm} (steps {choices.steps}, sampler {choices.sampler}, "
            f"weights {choices.weights}, train on {choices.train_on}) on {self.config.task}: "
            f"{task.num_train:,} training and {task.num_test:,} test samples, batch size "
            f"{self.config.batch_size}, {budget}, seed {self.config.seed}"
        )
        self._view.begin()
        try:
            yield
        except BaseException:
            self._view.end()
            with contextlib.suppress(Exception):  # the first error is the one to be raised
                if self._folder is not None:
                    self._finish(interrupted=True)
            raise
        self._view.end()
        self._finish()

    def say(self, line: str) -> None:
        """Print a line."""
        self._view.say(line)

    def open_folder(self) -> None:
        """Make the results folder, with what the model needs; UsageError if it cannot be made."""
        config = self.config
        name = config.name or config.task.rpartition(":")[2]
        self._folder = RunFolder.new(config.out, name)
        self._folder.write_config(config.to_run_config())
        self._folder.add_assets(self._assets)

    def count_evaluation(self, seconds: float) -> None:
        """Add seconds that training waited for evaluation."""
        self.evaluation_seconds += seconds

    def seconds_of(self, record: RoundRecord) -> float:
        """Return what the last round that was added counts against a budget in seconds."""
        assert record is self._metrics.records[-1], "each round is counted once, after it was added"
        return self._metrics.last_budget_seconds

    def add_round(self, record: RoundRecord) -> None:
        """Write a round, and show it."""
        now = time.time()
        if not self._metrics.records:
            self._first_order_at = now - record.round_seconds
        self._last_model_at = now
        self._metrics.seconds_per_step = self._seconds_per_step_alone()
        self._metrics.add(record)
        self._show_steps(record)
        self.folder.add_round(record)
        self._view.round(record, self._metrics)

    def add_epoch(self, end: EpochEnd) -> None:
        """Write the end of an epoch, and show it."""
        self._arrays = end.arrays
        last, planner = self._metrics.records[-1], self._strategy.planner
        metrics: Mapping[str, Any] = end.metrics or {}
        row = EpochRow(
            epoch=end.epoch,
            wall_seconds=self._last_model_at - self._first_order_at,
            training_seconds=self._metrics.training_seconds,
            device_seconds=self._metrics.device_seconds,
            accuracy=metrics.get("accuracy"),
            loss=metrics.get("loss"),
            learning_rate=last.learning_rate,
            train_loss=last.train_loss,
            rounds=len(self._metrics.records),
            samples=self._metrics.samples,
            mean_loss_age_rounds=planner.table.mean_age_rounds(end.round),
            sampling=planner.sampling_stats,
        )
        self._rows.append(row)
        self.folder.add_epoch(row)
        self._view.epoch(row)

    def _show_steps(self, record: RoundRecord) -> None:
        """Print every worker's local steps in the first round, later those that changed."""
        first = len(self._metrics.records) == 1
        for row in record.workers:
            before = self._shown_steps.get(row.worker, row.local_steps)
            if first and not row.trained:
                self.say(f"  {row.label}: sums up its slice of the fast workers' models")
            elif first:
                hardly = " (hardly takes part)" if 0 < row.weight < HARDLY else ""
                steps = f"{row.local_steps} steps a round, weight {row.weight:.1%}"
                self.say(f"  {row.label}: {steps}{hardly}")
            elif before != row.local_steps:
                self.say(
                    f"  epoch {record.epoch}: {row.label} does {row.local_steps} steps a round "
                    f"instead of {before}: its speed changed"
                )
            self._shown_steps[row.worker] = row.local_steps

    def _seconds_per_step_alone(self) -> dict[int, float]:
        """Return the known speeds by worker index, as they are now: one may have come, or left.

        What we measure on the wall clock we measure on all workers at once: not alone.
        """
        alone = {}
        for worker in self._strategy.registry.workers:
            seconds = worker.profile.seconds_per_step_alone
            if not seconds and (self.config.clock == "device" or not worker.measured):
                seconds = worker.profile.seconds_per_step
            if seconds:
                alone[worker.index] = seconds
        return alone

    def _finish(self, interrupted: bool = False) -> None:
        self.summary = {
            **summary_of(self.config, self._strategy, self._metrics, self._rows),
            "predicted": self.predicted,
            "measured": measured_figures(self._metrics),
            "wall_seconds": self._last_model_at - self._first_order_at,
            "setup_seconds": self._first_order_at - self._began_at,
            "evaluation_seconds": self.evaluation_seconds,
            "interrupted": interrupted,
        }
        if self._arrays is not None:
            self.folder.write_model(self._arrays)
        self.folder.write_summary(self.summary)
        if self._metrics.records:
            self._draw()
        self.say(result_line(self.summary, self.folder.path))
        if self._metrics.records:
            self.say(slow_device_line(self._metrics, self.config, self.folder.path))
        if self.predicted and self.summary["measured"]:
            self.say(plan_line(self.predicted, self.summary["measured"]))

    def _draw(self) -> None:
        # Importing matplotlib takes a second.
        from .plots import draw_learning_curve, draw_sampling, draw_timeline

        title = f"{self.config.algorithm}, {self.config.task}, seed {self.config.seed}"
        path = self.folder.path
        draw_learning_curve(self._rows, title, path / "learning_curve.png", self._metrics.clock)
        draw_timeline(self._metrics.records, title, path / "timeline.png")
        draw_sampling(self._rows, title, path / "sampling.png")
