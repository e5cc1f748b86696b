"""Record a run and show its progress: each round and epoch as it ends, then files and summary."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from ..config import RunConfig
from ..strategy.biased_local_sgd import BiasedLocalSGD
from ..strategy.fit_loop import EpochEnd
from ..strategy.round_metrics import RoundRecord
from ..tasks.task import Task
from .folder import EpochRow, RunFolder
from .metrics import HARDLY, Figures, RunMetrics, last_lines, measured_figures, summary_of


class ProgressView:
    """Shows epoch, round, accuracy, samples per second, waiting shares and the time left.

    In a terminal a line that is rewritten after every round stands below one line per epoch;
    elsewhere only the lines per epoch are printed.

    Parameters
    ----------
    epochs : int
        How many there will be.
    console : rich.console.Console, optional
        Standard output by default.
    seconds : float (default: 0)
        The budget in seconds, if that is what ends the run; 0 for none.
    """

    def __init__(self, epochs: int, console: Console | None = None, seconds: float = 0.0) -> None:
        self._epochs, self._seconds = epochs, seconds
        self._of_epochs = "" if seconds else f"/{epochs}"
        self._console = console or Console(highlight=False, soft_wrap=True, emoji=False)
        self._live: Progress | None = None
        self._began = time.monotonic()
        self._share_done = 0.0
        self._pace = ""

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self._console.print(escape(line), emoji=False)

    def begin(self) -> None:
        """Start the live line, if this is a terminal."""
        if self._console.is_terminal:
            self._live = Progress(
                BarColumn(bar_width=24),
                TextColumn("{task.description}"),
                console=self._console,
                transient=True,
                refresh_per_second=8,
            )
            self._live.start()
            self._live.add_task("starting the workers", total=1.0)

    def round(self, record: RoundRecord, metrics: RunMetrics) -> None:
        """Show a round that is over, of which `metrics` has the times already."""
        examples = sum(row.num_examples for row in record.workers)
        shares = {"fast": metrics.waiting_share(True, last_round=True)}
        shares["slow"] = metrics.waiting_share(False, last_round=True)
        waits = [f"{tier} waits {x:.0%}" for tier, x in shares.items() if x is not None]
        self._pace = (
            f"{examples / record.round_seconds:,.0f} samples/s  {', '.join(waits)}".rstrip()
        )
        if not self._share_done:  # the workers' start says nothing of the time that is left
            self._began = time.monotonic() - record.round_seconds
        in_epoch = record.round_in_epoch / record.rounds_in_epoch
        by_epochs = (record.epoch - 1 + in_epoch) / self._epochs
        by_seconds = metrics.budget_seconds / self._seconds if self._seconds else 0.0
        self._share_done = min(1.0, max(by_epochs, by_seconds))
        if self._live is not None:
            at = f"round {record.round_in_epoch}/{record.rounds_in_epoch}"
            text = self._line(f"epoch {record.epoch}{self._of_epochs}", at)
            self._live.update(TaskID(0), completed=self._share_done, description=escape(text))

    def epoch(self, row: EpochRow) -> None:
        """Print the line of an epoch that is over."""
        width = len(str(self._epochs)) if self._of_epochs else 3
        accuracy = [] if row.accuracy is None else [f"accuracy {row.accuracy:.2%}"]
        number = f"epoch {row.epoch:{width}}{self._of_epochs}"
        self.say(self._line(number, *accuracy, f"train loss {row.train_loss:.4f}"))

    def end(self) -> None:
        """Remove the live line; may be called twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self, *parts: str) -> str:
        spent, done = time.monotonic() - self._began, self._share_done
        left = timedelta(seconds=round(spent * (1 / done - 1))) if done else "?"
        return "  ".join([*parts, self._pace, f"{left} left"])


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
        """Print the local steps of every worker in its first round, and where they changed."""
        for row in record.workers:
            before = self._shown_steps.get(row.worker)
            if before is None and not row.trained:
                self.say(f"  {row.label}: sums up its slice of the fast workers' models")
            elif before is None:
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
        for line in last_lines(self.summary, self._metrics, self.config, self.folder.path):
            self.say(line)

    def _draw(self) -> None:
        # Importing matplotlib takes a second.
        from .plots import draw_learning_curve, draw_sampling, draw_timeline

        title = f"{self.config.algorithm}, {self.config.task}, seed {self.config.seed}"
        path = self.folder.path
        draw_learning_curve(self._rows, title, path / "learning_curve.png", self._metrics.clock)
        draw_timeline(self._metrics.records, title, path / "timeline.png")
        draw_sampling(self._rows, title, path / "sampling.png")
