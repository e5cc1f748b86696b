"""Record a run and show its progress: each round and epoch as it ends, then files and summary."""

import contextlib
import dataclasses
import logging
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from ..algorithm.catalog import WEIGHTS
from ..config import RunConfig
from ..errors import UsageError
from ..strategy.biased_local_sgd import BiasedLocalSGD
from ..strategy.cost_model import NEGLIGIBLE, slow_device_lines
from ..strategy.fit_loop import EpochEnd
from ..strategy.round_metrics import RoundRecord
from ..tasks.task import Task
from .events import EventWriter
from .folder import EpochRow, RunFolder, append, counted, of_plain, plain, shown_late
from .metrics import (
    Figures,
    RunMetrics,
    last_lines,
    measured_figures,
    shown_metric,
    summary_of,
    versions,
)
from .waiting import waiting_note

_SECONDS = (
    *("wall_seconds", "setup_seconds", "evaluation_seconds", "checkpoint_seconds"),
    "async_evaluation_seconds",
)


@dataclasses.dataclass(frozen=True)
class Best:
    """The model with the highest accuracy so far: which one it is, and its accuracy."""

    round: int
    epoch: int
    accuracy: float


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
        self.measured_on = ""
        self.log: Callable[[str], object] = lambda line: None
        self._epochs, self._seconds = epochs, seconds
        self._of_epochs = "" if seconds else f"/{epochs}"
        self._console = console or Console(highlight=False, soft_wrap=True, emoji=False)
        self._live: Progress | None = None
        self._began = time.monotonic()
        self._share_done = self._share_before = 0.0
        self._pace = ""

    def say(self, line: str) -> None:
        """Print a line that stays, and hand it to `log`."""
        self.log(line)
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
        if not self._share_done:  # the workers' start says nothing of the time left
            self._began = time.monotonic() - record.round_seconds
            before = metrics.budget_seconds - metrics.last_budget_seconds
            self._share_before = self._share(record, record.round_in_epoch - 1, before)
        share = self._share(record, record.round_in_epoch, metrics.budget_seconds)
        self._share_done = min(1.0, share)
        if self._live is not None:
            at = f"round {record.round_in_epoch}/{record.rounds_in_epoch}"
            text = self._line(f"epoch {record.epoch}{self._of_epochs}", at)
            self._live.update(TaskID(0), completed=self._share_done, description=escape(text))

    def _share(self, record: RoundRecord, rounds_done: int, budget_seconds: float) -> float:
        by_epochs = (record.epoch - 1 + rounds_done / record.rounds_in_epoch) / self._epochs
        return max(by_epochs, budget_seconds / self._seconds if self._seconds else 0.0)

    def epoch(self, row: EpochRow) -> None:
        """Print the line of an epoch that is over, or of a result that arrived later."""
        width = len(str(self._epochs)) if self._of_epochs else 3
        shown = shown_metric(row.accuracy, row.metric)
        accuracy = [f"{self.measured_on}{shown}"] if shown else []
        number = f"epoch {row.epoch:{width}}{self._of_epochs}"
        if row.late:
            self.say("  ".join([number, *accuracy, f"(arrived {shown_late(row.late)} later)"]))
            return
        self.say(self._line(number, *accuracy, f"train loss {row.train_loss:.4f}"))

    def end(self) -> None:
        """Remove the live line; may be called twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self, *parts: str) -> str:
        spent, done = time.monotonic() - self._began, self._share_done - self._share_before
        left = "?"
        if done > 0:
            left = str(timedelta(seconds=round(spent * (1 - self._share_done) / done)))
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
        When set-up began, on the clock of `time.monotonic`, which nobody sets.

    Attributes
    ----------
    summary : dict
        The content of ``summary.json``; empty until the run is over.
    wall_seconds, setup_seconds : float
        From the first plan to the last model, and before it; of all processes of a resumed run.
    evaluation_seconds, checkpoint_seconds : float
        How long training waited for them.
    async_evaluation_seconds : float
        How long workers with ``role=evaluate`` evaluated while the others trained.
    predicted : dict, optional
        What was expected, by the names of `measured_figures`; None if nothing could be.
    stopped_early : str, optional
        Why the run ended before its budget; None if it did not.
    at_once : bool
        Whether a run that is interrupted ends without writing what was reached.
    arrays : ArrayRecord, optional
        The model that is saved at the end; None before an epoch is over.
    metric_is_accuracy : bool
        Whether no value of the metric was outside [0, 1] so far.
    best : Best, optional
        The first of the models with the highest accuracy, also if its epoch was resumed in the
        middle; None before an evaluation, and if the metric is not an accuracy.
    """

    def __init__(
        self, config: RunConfig, strategy: BiasedLocalSGD, view: ProgressView, began_at: float
    ) -> None:
        self.config = config
        self.wall_seconds = self.setup_seconds = 0.0
        self.evaluation_seconds = self.checkpoint_seconds = self.async_evaluation_seconds = 0.0
        self.summary: dict[str, Any] = {}
        self.stopped_early: str | None = None
        self.at_once = False
        self.predicted: Figures | None = None
        self._strategy = strategy
        self._view = view
        view.log, self._early_lines = self._log, ""
        self._began_at = began_at
        self._last_model_at = 0.0
        self._resumed: list[int] = []
        self._unwritten: set[str] = set()
        self._metrics = RunMetrics(config.clock)
        self._rows: list[EpochRow] = []
        self.arrays: ArrayRecord | None = None
        self.best: Best | None = None
        self.metric_is_accuracy = True
        self._since_best = 0
        self._said: set[str] = set()
        self._folder: RunFolder | None = None
        self._assets: Mapping[str, Path] = {}
        self._shown_steps: dict[int, int] = {}
        self._events: EventWriter | None = None

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
        choices, budget = self.config.choices, counted(self.config.epochs, "epoch")
        if self.config.seconds:
            budget = f"{self.config.seconds:g} s of training ({budget} at most)"
        self.say(
            f"{self.config.algorithm} (steps {choices.steps}, sampler {choices.sampler}, "
            f"weights {choices.weights}, train on {choices.train_on}"
            f"{self.config.selection and f', selection {self.config.selection}'}"
            f") on {self.config.task}: "
            f"{task.num_train:,} training and {task.num_test:,} test samples, batch size "
            f"{self.config.batch_size}, {budget}, seed {self.config.seed}"
        )
        if self.config.validation_share:
            self._view.measured_on = "validation "
        self._view.begin()
        warnings, loggers = logging.Handler(logging.WARNING), ("flower_blsgd", "flwr")
        warnings.emit = lambda record: self._log(record.getMessage())  # type: ignore[method-assign]
        for name in loggers:
            logging.getLogger(name).addHandler(warnings)
        try:
            yield
        except BaseException:
            self._end_progress()
            with contextlib.suppress(Exception):  # the first error is the one to be raised
                if self._folder is not None and not self.at_once:
                    self._finish(interrupted=True)
            raise
        finally:
            for name in loggers:
                logging.getLogger(name).removeHandler(warnings)
        self._end_progress()
        self._finish()

    def _end_progress(self) -> None:
        self._view.end()
        if self._events is not None:
            self._write("tensorboard", self._events.close)

    def say(self, line: str) -> None:
        """Print a line, which ``run.log`` gets as well."""
        self._view.say(line)

    def _log(self, line: str) -> None:
        line = f"{datetime.now().astimezone().isoformat(timespec='seconds')} {line}\n"
        if self._folder is None:
            self._early_lines += line
        else:
            self._write("run.log", append, self._folder.path / "run.log", line)

    def open_folder(self, resumed: RunFolder | None = None) -> None:
        """Make the results folder, with what the model needs, or take that of a run that goes on.

        UsageError if it cannot be made or written to; then nothing is written at the end either.
        """
        config = self.config
        name = config.name or config.task.rpartition(":")[2]
        folder = resumed or RunFolder.new(config.out, name)
        folder.write_config(config.to_run_config())
        folder.add_assets(self._assets)
        if resumed:
            folder.cut_back(self._metrics.records, self._rows)
            if missing := self._resumed[-1] - len(self._metrics.records):
                self.say(f"warning: {missing} rounds are missing in rounds.jsonl and all figures")
        self._folder = folder
        self._write("run.log", append, folder.path / "run.log", self._early_lines)
        if config.tensorboard:
            self._events = EventWriter(folder.path, self._resumed[-1] if resumed else 0)

    # --- a run that goes on

    def state(self) -> dict[str, Any]:
        """Return what `take_up` needs, as JSON can hold it."""
        state = {
            "config": dataclasses.replace(self.config, resume="").to_run_config(),
            "versions": versions(),
            "epochs": [dataclasses.asdict(row) for row in self._rows],
            "seconds": {name: getattr(self, name) for name in _SECONDS},
            "resumed": self._resumed,
            "best": self.best and dataclasses.asdict(self.best),
            "since_best": self._since_best,
        }
        return dict(plain(state))

    def take_up(
        self, folder: RunFolder, state: Mapping[str, Any], last_round: int, arrays: ArrayRecord
    ) -> None:
        """Go on with the run in a folder, of which `state` was returned after a round.

        Nothing is written before `open_folder`. LookupError, TypeError or ValueError if the state
        is none.
        """
        planner = self._strategy.planner
        self._metrics.seconds_per_step = self._seconds_per_step_alone()
        for record in folder.rounds_until(last_round):
            self._metrics.add(record)
        for name in _SECONDS:
            setattr(self, name, float(state["seconds"][name]))
        self._resumed = [*map(int, state["resumed"]), last_round]
        self._rows = [of_plain(EpochRow, row) for row in state["epochs"]]
        self.best = of_plain(Best, state["best"]) if state["best"] else None
        self.metric_is_accuracy = all(row.metric is None for row in self._rows)
        self._since_best = int(state["since_best"])
        self.stopped_early = self._reason_to_stop()
        if self._budget_used_up() or planner.epoch_ended or self.stopped_early:
            self.arrays = arrays
        else:  # a budget in seconds may have ended the run within an epoch, whose row is not final
            self._rows = [row for row in self._rows if row.epoch < planner.epoch]

    @property
    def evaluation_missing(self) -> bool:
        """Whether the run goes on between its last round, or that of an epoch, and evaluation."""
        planner, rows = self._strategy.planner, self._rows
        ended = planner.epoch_ended or bool(self._budget_used_up() or self.stopped_early)
        return ended and planner.epoch > (rows[-1].epoch if rows else 0)

    @property
    def why_over(self) -> str:
        """Why a run that is to go on has nothing left to do; empty if it has."""
        over = self._budget_used_up() or self.stopped_early or ""
        return "" if self.evaluation_missing else over

    def _budget_used_up(self) -> str:
        config, planner = self.config, self._strategy.planner
        if planner.epoch_ended and planner.epoch >= config.epochs:
            return f"{planner.epoch} of {counted(config.epochs, 'epoch')} done"
        if config.seconds and (used := self.budget_seconds()) >= config.seconds:
            return f"{used:.1f} of {config.seconds:g} seconds of training are over"
        return ""

    def budget_seconds(self) -> float:
        """Return what all rounds so far count against a budget in seconds."""
        return self._metrics.budget_seconds

    def add_round(self, record: RoundRecord) -> None:
        """Write a round, and show it."""
        now = time.monotonic()
        if not self._last_model_at:
            self._last_model_at = now - record.round_seconds - record.planning_seconds
            self.setup_seconds += self._last_model_at - self._began_at
        self.wall_seconds += now - self._last_model_at
        self._last_model_at = now
        self._metrics.seconds_per_step = self._seconds_per_step_alone()
        self._metrics.add(record)
        self._show_steps(record)
        self._write("rounds.jsonl", self.folder.add_round, record)
        if self._events is not None:
            self._write("tensorboard", self._events.add_round, record)
        self._view.round(record, self._metrics)

    def add_epoch(self, end: EpochEnd) -> bool:
        """Write the end of an epoch, and show it; return whether the run is to stop early."""
        self.arrays = end.arrays
        planner = self._strategy.planner
        # There is none where a run goes on whose rounds were lost.
        last = self._metrics.records[-1] if self._metrics.records else None
        row = EpochRow(
            epoch=end.epoch,
            wall_seconds=self.wall_seconds,
            training_seconds=self._metrics.training_seconds,
            device_seconds=self._metrics.device_seconds,
            **self._measured(end),
            learning_rate=last.learning_rate if last else math.nan,
            train_loss=last.train_loss if last else math.nan,
            rounds=len(self._metrics.records),
            samples=self._metrics.samples,
            mean_loss_age_rounds=planner.table.mean_age_rounds(end.round),
            sampling=planner.sampling_stats,
        )
        rounds_before = self._rows[-1].rounds if self._rows else 0
        self._rows.append(row)
        self._write("epochs.csv", self.folder.add_epoch, row)
        if self._events is not None:
            self._write("tensorboard", self._events.add_epoch, row)
        self._view.epoch(row)
        self._note_best(row, end.round)
        # In the first round of all, processes warm up; so it is left out, and one is not enough.
        if rounds_before < 2 <= row.rounds:
            workers = self._strategy.registry.workers
            note = waiting_note(self.config, workers, self._metrics.rounds_on_clock(first=1))
            if note:
                self.say(note)
        self._stop_early()
        return self.stopped_early is not None

    def add_result(self, end: EpochEnd) -> bool:
        """Add the result of an async evaluation to the row of its epoch, as `add_epoch` does."""
        self.async_evaluation_seconds += end.busy_seconds
        number = next(i for i, row in enumerate(self._rows) if row.epoch == end.epoch)
        row = self._rows[number] = dataclasses.replace(
            self._rows[number],
            **self._measured(end),
            result_rounds=len(self._metrics.records),
            result_seconds=self.wall_seconds + time.monotonic() - self._last_model_at,
        )
        self._write("epochs.csv", self.folder.write_epochs, self._rows)
        if self._events is not None:
            self._write("tensorboard", self._events.add_epoch, row)
        self._view.epoch(row)
        self._note_best(row, end.round)
        self._stop_early(f", known {shown_late(row.late)} later" if row.late else "")
        return self.stopped_early is not None

    def _stop_early(self, when: str = "") -> None:
        reason = self._reason_to_stop()
        if reason and not self.stopped_early:
            self.stopped_early = reason + when
            self.say(f"stopping early: {self.stopped_early}")

    def _measured(self, end: EpochEnd) -> dict[str, Any]:
        """Return what the fields of a row are that an evaluation gives."""
        metrics: Mapping[str, Any] = end.metrics or {}
        value = metrics.get("accuracy", metrics.get("metric"))
        self.metric_is_accuracy &= "metric" not in metrics
        accuracy, metric = (value, None) if self.metric_is_accuracy else (None, value)
        return {"accuracy": accuracy, "metric": metric, "loss": metrics.get("loss")}

    def _note_best(self, row: EpochRow, server_round: int) -> None:
        """Take the model of this evaluation as the best one, unless it is not."""
        reason = ""
        if not self.metric_is_accuracy:
            self.best, reason = None, "the metric has values outside [0, 1]"
        elif row.accuracy is None:
            return
        elif not math.isfinite(row.accuracy):
            reason = "the accuracy is not a number"
        elif self.best is None or row.accuracy > self.best.accuracy:
            self.best = Best(server_round, row.epoch, row.accuracy)
            if not self.stopped_early:  # else a resumed run would not know that it ended
                self._since_best = 0
            return
        self._since_best += 1
        if reason and reason not in self._said:
            self._said.add(reason)
            self.say(f"warning: {reason}, so best_model, patience and stop-at-accuracy ignore it")

    def _reason_to_stop(self) -> str | None:
        """Return why the evaluations end the run before its budget; None if they do not."""
        config, best = self.config, self.best
        if best is None or self._budget_used_up():
            return None
        if config.stop_at_accuracy and best.accuracy >= config.stop_at_accuracy:
            return f"accuracy {best.accuracy:.2%} (stop-at-accuracy = {config.stop_at_accuracy:g})"
        if config.patience and self._since_best >= config.patience:
            return (
                f"{self._since_best} evaluations without more than the {best.accuracy:.2%} of "
                f"epoch {best.epoch} (patience = {config.patience})"
            )
        return None

    def _show_steps(self, record: RoundRecord) -> None:
        """Print the local steps of every worker in its first round, and where they changed."""
        for row in record.workers:
            before = self._shown_steps.get(row.worker)
            if before is None and not row.trained:
                self.say(f"  {row.label}: sums up its slice of the fast workers' models")
            elif before is None:
                hardly = " (hardly takes part)" if 0 < row.weight < NEGLIGIBLE else ""
                own = self._strategy.registry.workers[row.worker].profile
                steps = counted(row.local_steps, "step")
                steps += f" of {own.batch_size} samples" if own.batch_size else ""
                steps += f" a round{own.precision and f' in {own.precision}'}"
                steps += f", weight {row.weight:.1%}"
                self.say(f"  {row.label}: {steps}{hardly}")
            elif before != row.local_steps:
                why = ", or how many samples an epoch has" if self.config.selection else ""
                self.say(
                    f"  epoch {record.epoch}: {row.label} does {counted(row.local_steps, 'step')} "
                    f"a round instead of {before}: its speed changed{why}"
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
        chosen_on = "the validation share" if self.config.validation_share else "the test set"
        has_best_model = self.best and self.config.keep_checkpoints
        self.summary = {
            **summary_of(self.config, self._strategy, self._metrics, self._rows),
            "best_accuracy": self.best.accuracy if self.best else None,
            "best_model_chosen_on": chosen_on if has_best_model else None,
            "predicted": self.predicted,
            "measured": measured_figures(self._metrics),
            **{name: getattr(self, name) for name in _SECONDS},
            "interrupted": interrupted,
            "stopped_early": self.stopped_early,
            "resumed": self._resumed,
            "slow_devices": self._slow_devices(),
        }
        if self.arrays is not None:
            self._save_model(self.arrays)
        self._write("summary.json", self.folder.write_summary, self.summary)
        for line in last_lines(self.summary, self._metrics, self.config, self.folder.path):
            self.say(line)
        if self._metrics.records:
            self._write("pictures", self._draw)

    def _slow_devices(self) -> list[str]:
        """Return which role each slow device is worth, by the times of this run."""
        config, size, trained = self.config, self.config.batch_size, self._metrics.training_seconds
        late = sum(row.late is not None for row in self._rows)
        waited = sum(row.loss is not None for row in self._rows) - late
        each = self.evaluation_seconds / waited if waited and trained else 0.0
        relative, total, speeds = 0.0, 0.0, []
        if each and late:  # as far as a worker that evaluates took its share of all evaluations
            relative = each / max(self.async_evaluation_seconds / late - each, each)
        for worker in self._strategy.registry.workers:  # those that evaluate are the last
            pace = config.clock == "wall" and worker.training_seconds_per_step
            speed = worker.own_batch(size) / pace if pace else worker.samples_per_second(size)
            speeds.append((worker, speed if worker.trains else speed or relative * total))
            total += speed * worker.trains
        share = each and each * -(-len(self._rows) // config.evaluate_every_epochs) / trained
        return slow_device_lines(speeds, size, WEIGHTS[config.choices.weights](config), share)

    def _save_model(self, arrays: ArrayRecord) -> None:
        """Save the model in the results folder, else in a temporary one; UsageError if in none."""
        wanted = self.folder.path
        try:
            self.folder.write_model(arrays)
        except OSError as error:
            reason = f"the model cannot be saved in {wanted} ({_words(error)})"
            elsewhere = "a temporary folder"
            try:
                elsewhere = tempfile.mkdtemp(prefix="blsgd-")
                self._folder = RunFolder(Path(elsewhere))
                self.folder.write_config({**self.config.to_run_config(), "out": ""})
                self.folder.write_model(arrays)
            except (OSError, UsageError) as second:
                shutil.rmtree(elsewhere, ignore_errors=True)
                raise UsageError(f"{reason}, nor in {elsewhere} ({_words(second)})") from None
            self.say(f"warning: {reason}; it is in {elsewhere}, with its settings and summary")

    def _write(self, what: str, write: Callable[..., None], *arguments: Any) -> None:
        """Write something, or say once that it cannot be written."""
        try:
            write(*arguments)
        except OSError as error:
            if what not in self._unwritten:
                self._unwritten.add(what)
                where = f"{what} cannot be written to {self.folder.path} ({_words(error)})"
                self.say(f"warning: {where}; training continues")

    def _draw(self) -> None:
        # Importing matplotlib takes a second.
        from .plots import draw_learning_curve, draw_sampling, draw_timeline

        title = f"{self.config.algorithm}, {self.config.task}, seed {self.config.seed}"
        path = self.folder.path
        split = "validation" if self.config.validation_share else "test"
        curve = path / "learning_curve.png"
        draw_learning_curve(self._rows, title, curve, self._metrics.clock, split)
        draw_timeline(self._metrics.records, title, path / "timeline.png")
        draw_sampling(self._rows, title, path / "sampling.png")


def _words(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
