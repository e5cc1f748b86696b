"""Record a run: each round and epoch as it ends, then the summary, the model and the pictures."""

import contextlib
import dataclasses
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord

from ..algorithm.catalog import part_of
from ..config import RunConfig
from ..errors import UsageError
from ..protocol import Failure
from ..strategy.biased_local_sgd import BiasedLocalSGD
from ..strategy.budget import Budget
from ..strategy.cost_model import slow_device_lines
from ..strategy.round_metrics import RoundRecord
from ..strategy.rounds import EpochEnd
from .events import EventWriter
from .folder import RunFolder
from .history import RunHistory
from .metric import ACCURACY, Metric
from .model_card import model_card
from .progress import ProgressView
from .round_totals import measured_figures
from .run_log import RunLog, reason_of
from .summary import last_lines, summary_of
from .waiting import Notes

_PROGRESS = logging.getLogger("flwr")  # shown at the level of Flower's own strategies


class RunRecorder:
    """Records one run, from its first round to its summary.

    The history is in `history`. Each round and each epoch is written and shown as soon as it ends.
    Within an epoch, the workers compute the next round meanwhile. `began_at` is the start of the
    set-up, on the clock of `time.monotonic`.

    `summary` is the content of ``summary.json``, empty until the run ends. With `at_once`, an
    interrupted run ends without writing its results so far.
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
        self.history = RunHistory(config, strategy, began_at, metric)
        self.log = RunLog(view.say)
        self.summary: dict[str, Any] = {}
        self.at_once = False
        self._strategy = strategy
        self._view = view
        self._events: EventWriter | None = None
        self._notes = Notes(strategy.registry)
        self._assets: Mapping[str, Path] = {}

    @property
    def folder(self) -> RunFolder:
        """The results folder."""
        assert self.log.folder is not None, "open_folder comes first"
        return self.log.folder

    def say(self, line: str) -> None:
        """Print a line, and write it to ``run.log``."""
        self.log.say(line)

    @contextlib.contextmanager
    def recording(self, data: str, assets: Mapping[str, Path]) -> Iterator[None]:
        """Show the settings, then the progress, and write the results at the end.

        `data` describes the data in words; `assets` are files to copy into the results folder.
        After an error or Ctrl-C, the results so far are written and marked as interrupted.
        """
        self._assets = assets
        config, choices = self.config, self.config.choices
        self.say(
            f"{config.algorithm} (steps {choices.steps}, sampler {choices.sampler}, "
            f"weights {choices.weights}, train on {choices.train_on}"
            f"{config.selection and f', selection {config.selection}'}"
            f") on {config.task}: {data}, batch size {config.batch_size}, "
            f"{Budget.of_run(config)}, seed {config.seed}"
        )
        self._view.begin()
        with self.log.warnings():
            try:
                yield
            except BaseException as error:
                self._close()
                with contextlib.suppress(Exception):  # the first error is raised
                    if self.log.folder is not None and not self.at_once:
                        self._finish(interrupted=True)
                self.log.end(error)
                raise
        self._close()
        self._finish()

    def _close(self) -> None:
        self._view.close()
        if self._events is not None:
            self._events.close()

    def open_folder(self, resumed: RunFolder | None = None) -> None:
        """Make the results folder with the assets of the task, or open that of a resumed run.

        UsageError if it cannot be made or written to.
        """
        config, history = self.config, self.history
        name = config.name or config.task.rpartition(":")[2]
        folder = resumed or RunFolder.new(config.out, name)
        folder.metric = history.metric
        folder.write_config(config.to_run_config())
        folder.add_assets(self._assets)
        last_round = history.resumed[-1] if resumed else 0
        if resumed:
            folder.cut_back(history.metrics.records, history.rows)
            if missing := last_round - len(history.metrics.records):
                self.say(f"warning: {missing} rounds are missing in rounds.jsonl and the figures")
        self._view.on_folder(folder.path)
        self.log.open(folder)
        if config.tensorboard:
            self._events = EventWriter(folder.path, last_round, self.log)

    def add_round(self, record: RoundRecord, measures_speeds: bool = False) -> None:
        """Write and show a finished round."""
        self.history.add_round(record, measures_speeds)
        self.log.attempt("rounds.jsonl", self.folder.add_round, record)
        if self._events is not None:
            self._events.add_round(record)
        self._view.add_round(record, self.history)
        for line in self._notes.add_round(record, self.history):
            self.say(line)

    def add_epoch(self, end: EpochEnd) -> bool:
        """Write and show a finished epoch or a late result; return whether to stop early."""
        history = self.history
        row = history.add_epoch(end)
        if end.metrics is not None:
            _PROGRESS.info("epoch %d: %s", end.epoch, end.metrics)
        if row.late:
            self.log.attempt("epochs.csv", self.folder.write_epochs, history.rows)
        else:
            self.log.attempt("epochs.csv", self.folder.add_epoch, row)
        if self._events is not None:
            self._events.add_epoch(row)
        for line in chain(self._view.add_epoch(row, history), self._notes.add_epoch(row, history)):
            self.say(line)
        ignored = history.stopping.add(row, end.round, history.stopped_early is not None)
        if ignored:
            self.log.warn_once(ignored, f"{ignored}, so best_model and stop-at-accuracy ignore it")
        if reason := history.stop_early(row):
            self.say(f"stopping early: {reason}")
        return history.stopped_early is not None

    def _finish(self, interrupted: bool = False) -> None:
        config, history = self.config, self.history
        chosen_on = "the validation share" if config.validation_share else "the test set"
        has_best_model = history.best and config.keep_checkpoints
        best = history.best.value if history.best else None
        if history.arrays is not None:  # first, whatever comes after it
            self._save_model(history.arrays)
        self.summary = {
            **summary_of(config, self._strategy, history.metrics, history.rows),
            **history.metric.description,
            **history.metric.columns(best, "best_"),
            "best_model_chosen_on": chosen_on if has_best_model else None,
            "predicted": history.predicted,
            "measured": measured_figures(history.metrics),
            **dataclasses.asdict(history.durations),
            "interrupted": interrupted,
            "stopped_early": history.stopped_early,
            "resumed": history.resumed,
            "slow_devices": _slow_devices(history, self._strategy),
        }
        self.log.attempt("summary.json", self.folder.write_summary, self.summary)
        if history.arrays is not None:
            own = {} if history.arrays_are_evaluated else history.metric.columns(None)
            card = model_card({**self.summary, **own}, config, self.folder.path.name)
            self.log.attempt("the model card", self.folder.write_model_card, card)
        for line in last_lines(self.summary, history.metrics, config, self.folder.path):
            self.say(line)
        if history.metrics.records:
            self.log.attempt("pictures", self._draw)

    def _save_model(self, arrays: ArrayRecord) -> None:
        """Save the model in the results folder, else in a temporary one, else raise UsageError."""
        wanted = self.folder.path
        try:
            self.folder.write_model(arrays)
        except OSError as error:
            reason = f"the model cannot be saved in {wanted} ({reason_of(error)})"
            elsewhere = ""
            try:
                elsewhere = tempfile.mkdtemp(prefix="blsgd-")
                self.log.folder = RunFolder(Path(elsewhere))
                self.folder.write_config({**self.config.to_run_config(), "out": ""})
                self.folder.write_model(arrays)
            except (OSError, UsageError) as second:
                if elsewhere:
                    shutil.rmtree(elsewhere, ignore_errors=True)
                where = elsewhere or "a temporary folder"
                raise UsageError(f"{reason}, nor in {where} ({reason_of(second)})") from None
            self.say(f"warning: {reason}; it is in {elsewhere}, with the settings and the summary")

    def _draw(self) -> None:
        # Importing matplotlib takes a second.
        from .plots import draw_learning_curve, draw_sampling, draw_timeline

        config, history, path = self.config, self.history, self.folder.path
        title = f"{config.algorithm}, {config.task}, seed {config.seed}"
        curve = path / "learning_curve.png"
        draw_learning_curve(history.rows, title, curve, config.clock, history.metric)
        draw_timeline(history.metrics.records, title, path / "timeline.png")
        draw_sampling(history.rows, title, path / "sampling.png")

    @property
    def node_ids(self) -> set[int]:
        """The nodes of the workers that have taken part."""
        return {worker.address[0] for worker in self._strategy.registry.workers}

    def add_last_failures(self, failures: Mapping[int, Failure]) -> str:
        """Add failures after the end, by node, to the summary; return a line that names them."""
        labels = {w.address[0]: w.label for w in self._strategy.registry.workers}
        said = []
        for node_id, failure in failures.items():
            label, kind = labels.get(node_id, f"node {node_id}"), failure.kind
            said.append(f"in worker {label}: {failure.brief}")
            row = {"worker": label, "kind": kind, "reason": failure.reason}
            self.summary["failures"].append({"round": len(self.history.metrics.records), **row})
            counts = self.summary["failures_by_worker"].setdefault(label, {})
            counts[kind] = counts.get(kind, 0) + 1
        line = f"{self.config.task} failed after the run, {'; '.join(said)}"
        self.log.write(f"error: {line}")
        self.log.attempt("summary.json", self.folder.write_summary, self.summary)
        return line


def _slow_devices(history: RunHistory, strategy: BiasedLocalSGD) -> list[str]:
    """Return what each slow device is best used for, by the times of the run."""
    config, durations, rows = history.config, history.durations, history.rows
    size, trained = config.batch_size, history.metrics.training_seconds
    late = sum(row.late is not None for row in rows)
    waited = sum(row.value is not None for row in rows) - late
    each = durations.evaluation_seconds / waited if waited and trained else 0.0
    relative, total, speeds = 0.0, 0.0, []
    if each and late:  # if a worker that evaluates took its share of all evaluations
        alone = durations.async_evaluation_seconds / late
        relative = each / max(alone - each, each)
    for worker in strategy.registry.workers:  # workers that evaluate come last
        pace = config.clock == "wall" and worker.training_seconds_per_step
        speed = worker.own_batch(size) / pace if pace else worker.samples_per_second(size)
        speeds.append((worker, speed if worker.trains else speed or relative * total))
        total += speed * worker.trains
    share = each and each * -(-len(rows) // config.evaluate_every_epochs) / trained
    weighting = part_of("weights", config.choices.weights, config)
    return slow_device_lines(speeds, size, weighting, share)
