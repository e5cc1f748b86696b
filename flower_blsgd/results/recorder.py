"""Record a run: each round and epoch as it ends, then the summary, the model and the pictures."""

import contextlib
import dataclasses
import logging
import math
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord
from flwr.app.exception import AppExitException

from ..algorithm.catalog import part_of
from ..config import RunConfig
from ..errors import UsageError
from ..fields import from_json
from ..files import append
from ..protocol import Failure
from ..strategy.biased_local_sgd import BiasedLocalSGD
from ..strategy.budget import Budget
from ..strategy.cost_model import NEGLIGIBLE, slow_device_lines
from ..strategy.round_metrics import RoundRecord
from ..strategy.rounds import EpochEnd
from .events import EventWriter
from .folder import EpochRow, RunFolder, plain, shown_late
from .metric import ACCURACY, Metric
from .metrics import Figures, RunMetrics, measured_figures
from .progress import ProgressView
from .stopping import Best, EarlyStopping
from .summary import last_lines, summary_of
from .tables import counted
from .waiting import waiting_note

_PROGRESS = logging.getLogger("flwr")  # shown at the level of Flower's own strategies

_RUN: ContextVar[object] = ContextVar("run", default=None)


@contextlib.contextmanager
def own_warnings() -> Iterator[None]:
    """Keep warnings out of the ``run.log`` of runs in other threads."""
    token = _RUN.set(object())
    try:
        yield
    finally:
        _RUN.reset(token)


@dataclasses.dataclass
class Durations:
    """Seconds that the parts of a run took, summed over all processes of a resumed run.

    `wall_seconds` are from the first plan to the last model, `setup_seconds` before that.
    `evaluation_seconds` and `checkpoint_seconds` are how long training waited for these.
    `async_evaluation_seconds` is how long workers with ``role=evaluate`` evaluated while the others
    trained.
    """

    wall_seconds: float = 0.0
    setup_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    async_evaluation_seconds: float = 0.0


class RunRecorder:
    """Records one run, from its first round to its summary.

    Each round and each epoch is written and shown as soon as it ends. The workers wait for that,
    about a third of a millisecond per round. `began_at` is the start of the set-up, on the clock of
    `time.monotonic`.

    `summary` is the content of ``summary.json``, empty until the run ends. `predicted` has the
    names of `measured_figures`; None if a speed is unknown. `stopped_early` is why the run ended
    before its budget; None if it did not. With `at_once`, an interrupted run ends without writing
    its results so far. `arrays` is the model that is saved at the end; None before the end of an
    epoch.
    """

    def __init__(
        self,
        config: RunConfig,
        strategy: BiasedLocalSGD,
        view: ProgressView,
        began_at: float,
        metric: Metric = ACCURACY,
    ) -> None:
        self.config = config
        self.budget = Budget.of_run(config)
        self.durations = Durations()
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
        self._stopping = EarlyStopping(config, metric)
        self._metric = view.metric = metric
        self._said: set[str] = set()
        self._folder: RunFolder | None = None
        self._assets: Mapping[str, Path] = {}
        self._shown_steps: dict[int, int] = {}
        self._first_round = 1
        self._events: EventWriter | None = None

    @property
    def best(self) -> Best | None:
        """The first best model; None before an evaluation with a finite figure."""
        return self._stopping.best

    @property
    def folder(self) -> RunFolder:
        """The results folder."""
        assert self._folder is not None, "open_folder comes first"
        return self._folder

    @contextlib.contextmanager
    def recording(self, data: str, assets: Mapping[str, Path]) -> Iterator[None]:
        """Show the settings, then the progress, and write the results at the end.

        `data` describes the data in words; `assets` are files to copy into the results folder.
        After an error or Ctrl-C, the results so far are written and marked as interrupted.
        """
        self._assets = assets
        choices = self.config.choices
        self.say(
            f"{self.config.algorithm} (steps {choices.steps}, sampler {choices.sampler}, "
            f"weights {choices.weights}, train on {choices.train_on}"
            f"{self.config.selection and f', selection {self.config.selection}'}"
            f") on {self.config.task}: {data}, batch size {self.config.batch_size}, "
            f"{self.budget}, seed {self.config.seed}"
        )
        self._view.begin()
        warnings, loggers = logging.Handler(logging.WARNING), ("flower_blsgd", "flwr")
        run = _RUN.get()

        def emit(record: logging.LogRecord) -> None:
            if _RUN.get() in (run, None):
                self._log(record.getMessage())

        warnings.emit = emit  # type: ignore[method-assign]
        for name in loggers:
            logging.getLogger(name).addHandler(warnings)
        try:
            yield
        except BaseException as error:
            self._end_progress()
            with contextlib.suppress(Exception):  # the first error is raised
                if self._folder is not None and not self.at_once:
                    self._finish(interrupted=True)
            self.log_end(error)
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
        """Print a line, and write it to ``run.log``."""
        self._view.say(line)

    def log_end(self, error: BaseException) -> None:
        """Write the error that ends the command to ``run.log``."""
        expected = (UsageError, AppExitException, KeyboardInterrupt, SystemExit)
        alone = isinstance(error, expected)
        lines = (traceback.format_exception_only if alone else traceback.format_exception)(error)
        self._log("".join(lines).rstrip())

    def _log(self, line: str) -> None:
        line = f"{datetime.now().astimezone().isoformat(timespec='seconds')} {line}\n"
        if self._folder is None:
            self._early_lines += line
        else:
            self._write("run.log", append, self._folder.path / "run.log", line)

    def open_folder(self, resumed: RunFolder | None = None) -> None:
        """Make the results folder with the assets of the task, or open that of a resumed run.

        UsageError if it cannot be made or written to.
        """
        config = self.config
        name = config.name or config.task.rpartition(":")[2]
        folder = resumed or RunFolder.new(config.out, name)
        folder.metric = self._metric
        folder.write_config(config.to_run_config())
        folder.add_assets(self._assets)
        if resumed:
            folder.cut_back(self._metrics.records, self._rows)
            if missing := self._resumed[-1] - len(self._metrics.records):
                self.say(f"warning: {missing} rounds are missing in rounds.jsonl and the figures")
        self._folder = folder
        self._view.on_folder(folder.path)
        self._write("run.log", append, folder.path / "run.log", self._early_lines)
        if config.tensorboard:
            self._events = EventWriter(folder.path, self._resumed[-1] if resumed else 0)

    def add_last_failures(self, failures: Mapping[int, Failure]) -> str:
        """Add failures after the end, by node, to the summary; return a line that names them."""
        labels = {w.address[0]: w.label for w in self._strategy.registry.workers}
        said = []
        for node_id, failure in failures.items():
            label, kind = labels.get(node_id, f"node {node_id}"), failure.kind
            said.append(f"in worker {label}: {failure.brief}")
            row = {"worker": label, "kind": kind, "reason": failure.reason}
            self.summary["failures"].append({"round": len(self._metrics.records), **row})
            counts = self.summary["failures_by_worker"].setdefault(label, {})
            counts[kind] = counts.get(kind, 0) + 1
        line = f"{self.config.task} failed after the run, {'; '.join(said)}"
        self._log(f"error: {line}")
        self._write("summary.json", self.folder.write_summary, self.summary)
        return line

    # --- a resumed run

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON can hold it; the rounds are in ``rounds.jsonl``."""
        state = {
            "epochs": [dataclasses.asdict(row) for row in self._rows],
            "durations": dataclasses.asdict(self.durations)
            | {"wall_seconds": self._wall_seconds_now()},
            "resumed": self._resumed,
            **self._stopping.state_dict(),
        }
        return dict(plain(state))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; LookupError, TypeError or ValueError if it is invalid."""
        self._rows = [from_json(EpochRow, row) for row in state["epochs"]]
        self.durations = from_json(Durations, state["durations"])
        self._resumed = [*map(int, state["resumed"])]
        self._stopping.load_state_dict(state)

    def resume(
        self, folder: RunFolder, state: Mapping[str, Any], last_round: int, arrays: ArrayRecord
    ) -> None:
        """Continue after a round of the run in a folder, with the state and the model of then.

        The strategy has been restored before. Nothing is written until `open_folder`. LookupError,
        TypeError or ValueError if the state is invalid.
        """
        planner = self._strategy.planner
        self.load_state_dict(state)
        self._resumed.append(last_round)
        seconds_per_step = self._strategy.registry.seconds_per_step_alone(self.config.clock)
        for record in folder.rounds_until(last_round):
            self._metrics.add(record, seconds_per_step)
            self._strategy.count_seconds(record)
        self.stopped_early = self._reason_to_stop()
        if self._budget_used_up() or planner.epoch_ended or self.stopped_early:
            self.arrays = arrays
        else:  # a budget in seconds may have ended the run within an epoch, whose row is not final
            self._rows = [row for row in self._rows if row.epoch < planner.epoch]

    @property
    def evaluation_missing(self) -> bool:
        """Whether a resumed run still owes the evaluation after its last round, or an epoch's."""
        planner, rows = self._strategy.planner, self._rows
        ended = planner.epoch_ended or bool(self._budget_used_up() or self.stopped_early)
        return ended and planner.epoch > (rows[-1].epoch if rows else 0)

    @property
    def why_over(self) -> str:
        """Why a resumed run has nothing left to do; empty if it has."""
        over = self._budget_used_up() or self.stopped_early or ""
        return "" if self.evaluation_missing else over

    @property
    def setting_for_more(self) -> str:
        """Setting with which a run that is over continues."""
        planner = self._strategy.planner
        limit = self.budget.limit_reached(planner.used, planner.epoch_ended)
        return f"{limit}=N" if limit else f"{self._stopping.ended_by}=0"

    def _budget_used_up(self) -> str:
        planner = self._strategy.planner
        return self.budget.used_up(planner.used, planner.epoch_ended)

    def start_clock(self, now: float) -> None:
        """Let the wall clock run from now on, after the set-up, unless it runs already."""
        if not self._last_model_at:
            self._last_model_at = now
            self.durations.setup_seconds += now - self._began_at

    def _wall_seconds_now(self) -> float:
        since = time.monotonic() - self._last_model_at if self._last_model_at else 0.0
        return self.durations.wall_seconds + since

    def add_round(self, record: RoundRecord, measures_speeds: bool = False) -> None:
        """Write and show a finished round."""
        now = time.monotonic()
        self.start_clock(now - record.round_seconds - record.planning_seconds)
        self.durations.wall_seconds = self._wall_seconds_now()
        self._last_model_at = now
        registry = self._strategy.registry
        self._metrics.add(record, registry.seconds_per_step_alone(self.config.clock))
        if measures_speeds:
            self._first_round = len(self._metrics.records)
        else:
            self._show_steps(record)
        self._write("rounds.jsonl", self.folder.add_round, record)
        if self._events is not None:
            self._write("tensorboard", self._events.add_round, record)
        self._view.round(record, self._metrics)

    def add_epoch(self, end: EpochEnd) -> bool:
        """Write and show the end of an epoch; return whether the run shall stop early."""
        self.arrays = end.arrays
        planner = self._strategy.planner
        # None if a resumed run has lost its rounds.
        last = self._metrics.records[-1] if self._metrics.records else None
        row = EpochRow(
            epoch=end.epoch,
            wall_seconds=self.durations.wall_seconds,
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
        self._show_epoch(row, end)
        # Processes warm up in the first round, or in those that measure, which do not count.
        if rounds_before < 2 <= row.rounds:
            workers = self._strategy.registry.workers
            rounds = self._metrics.rounds_on_clock(self._first_round)
            note = waiting_note(self.config, workers, rounds)
            if note:
                self.say(note)
        return self._stop_early()

    def add_result(self, end: EpochEnd) -> bool:
        """Add the result of an async evaluation to the row of its epoch, as `add_epoch` does."""
        self.durations.async_evaluation_seconds += end.busy_seconds
        number = next(i for i, row in enumerate(self._rows) if row.epoch == end.epoch)
        row = self._rows[number] = dataclasses.replace(
            self._rows[number],
            **self._measured(end),
            result_rounds=len(self._metrics.records),
            result_seconds=self._wall_seconds_now(),
        )
        self._write("epochs.csv", self.folder.write_epochs, self._rows)
        self._show_epoch(row, end)
        return self._stop_early(f", known {shown_late(row.late)} later" if row.late else "")

    def _show_epoch(self, row: EpochRow, end: EpochEnd) -> None:
        if end.metrics is not None:
            _PROGRESS.info("epoch %d: %s", end.epoch, end.metrics)
        if self._events is not None:
            self._write("tensorboard", self._events.add_epoch, row)
        self._view.epoch(row)
        ignored = self._stopping.add(row, end.round, self.stopped_early is not None)
        if ignored and ignored not in self._said:
            self._said.add(ignored)
            self.say(f"warning: {ignored}, so best_model and stop-at-accuracy ignore it")

    def _stop_early(self, when: str = "") -> bool:
        reason = self._reason_to_stop()
        if reason and not self.stopped_early:
            self.stopped_early = reason + when
            self.say(f"stopping early: {self.stopped_early}")
        return self.stopped_early is not None

    def _measured(self, end: EpochEnd) -> dict[str, Any]:
        """Return the fields of a row that come from an evaluation."""
        metrics: Mapping[str, Any] = end.metrics or {}
        value = metrics.get(self._metric.name)
        return {**self._metric.columns(value), "loss": metrics.get("loss")}

    def _reason_to_stop(self) -> str | None:
        return None if self._budget_used_up() else self._stopping.reason()

    def _show_steps(self, record: RoundRecord) -> None:
        """Print the local steps of every worker in its first round, and when they change."""
        for row in record.workers:
            before = self._shown_steps.get(row.worker)
            if before is None and not row.trained:
                self.say(f"  {row.label}: sums its slice of the fast workers' models")
            elif before is None:
                own = self._strategy.registry.workers[row.worker].profile
                steps = counted(row.local_steps, "step")
                steps += f" of {own.batch_size} samples" if own.batch_size else ""
                precision = "" if self.config.is_script else own.precision
                steps += f" per round{precision and f' in {precision}'}"
                steps += f", weight {row.weight:.1%}"
                if 0 < row.weight < NEGLIGIBLE:
                    steps += f" (contributes less than {NEGLIGIBLE:.0%})"
                self.say(f"  {row.label}: {steps}")
            elif before != row.local_steps:
                why = " or the number of samples" if self.config.selection else ""
                self.say(
                    f"  epoch {record.epoch}: {row.label} does {counted(row.local_steps, 'step')} "
                    f"per round instead of {before}, since its speed{why} changed"
                )
            self._shown_steps[row.worker] = row.local_steps

    def _finish(self, interrupted: bool = False) -> None:
        chosen_on = "the validation share" if self.config.validation_share else "the test set"
        has_best_model = self.best and self.config.keep_checkpoints
        best = self.best.value if self.best else None
        self.summary = {
            **summary_of(self.config, self._strategy, self._metrics, self._rows),
            **self._metric.description,
            **self._metric.columns(best, "best_"),
            "best_model_chosen_on": chosen_on if has_best_model else None,
            "predicted": self.predicted,
            "measured": measured_figures(self._metrics),
            **dataclasses.asdict(self.durations),
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
        """Return what each slow device is best used for, by the times of this run."""
        config, size, trained = self.config, self.config.batch_size, self._metrics.training_seconds
        late = sum(row.late is not None for row in self._rows)
        waited = sum(row.value is not None for row in self._rows) - late
        each = self.durations.evaluation_seconds / waited if waited and trained else 0.0
        relative, total, speeds = 0.0, 0.0, []
        if each and late:  # if a worker that evaluates took its share of all evaluations
            alone = self.durations.async_evaluation_seconds / late
            relative = each / max(alone - each, each)
        for worker in self._strategy.registry.workers:  # workers that evaluate come last
            pace = config.clock == "wall" and worker.training_seconds_per_step
            speed = worker.own_batch(size) / pace if pace else worker.samples_per_second(size)
            speeds.append((worker, speed if worker.trains else speed or relative * total))
            total += speed * worker.trains
        share = each and each * -(-len(self._rows) // config.evaluate_every_epochs) / trained
        return slow_device_lines(
            speeds, size, part_of("weights", config.choices.weights, config), share
        )

    def _save_model(self, arrays: ArrayRecord) -> None:
        """Save the model in the results folder, else in a temporary one, else raise UsageError."""
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
            self.say(f"warning: {reason}; it is in {elsewhere}, with the settings and the summary")

    def _write(self, what: str, write: Callable[..., None], *arguments: Any) -> None:
        """Write something; if that fails, warn once and continue."""
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
        curve = path / "learning_curve.png"
        draw_learning_curve(self._rows, title, curve, self._metrics.clock, self._metric)
        draw_timeline(self._metrics.records, title, path / "timeline.png")
        draw_sampling(self._rows, title, path / "sampling.png")


def _words(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
