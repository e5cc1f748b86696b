"""Run a training script on every worker: ``blsgd launch``."""

import contextlib
import functools
import shlex
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.exception import AggregationError
from rich.console import Console

from .config import RunConfig, task_of_script
from .devices.worker_spec import WorkerSpec, check_workers_of_script, parse_workers
from .engines.local.grid import LocalGrid
from .engines.local.worker_process import UNKNOWN_EXIT_CODE, death
from .engines.mailbox import MailboxGrid
from .errors import UsageError
from .protocol import (
    ARRAYS,
    EVALUATE,
    QUERY_END,
    QUERY_JOIN,
    SCRIPT,
    EvaluateOrder,
    EvaluateReport,
    Failure,
    ScriptInfo,
)
from .protocol.records import records_of
from .results.folder import RunFolder
from .results.metric import Metric
from .results.progress import ProgressView
from .results.recorder import RunRecorder
from .results.stopping import refuse_other_metric
from .run import train_on
from .session.script import MAIN_HAS_ENDED, MAIN_RANK, WORLD_SIZE
from .strategy.budget import Budget
from .strategy.connector import wait_for_nodes
from .strategy.messages import answer_of, read_answer, replies_to
from .strategy.replies import ModelShape
from .workload import Workload

_CLIENT_APP = "flower_blsgd.client_app:app"
_JOIN_SECONDS = 600.0
"""Time for a script to reach its first step."""

_END_SECONDS = 300.0
"""Time for the threads, child processes and exit functions of scripts after the run."""

_LATE = (
    f"it has not taken a step within {_JOIN_SECONDS:.0f} s; call flower_blsgd.join(model, "
    "optimizer), and let this optimizer take the steps"
)

_EPOCH_SAMPLES = 50_000
"""Samples of an epoch if the script has neither the session's sampler nor an evaluation."""


class ScriptFailedError(AggregationError):
    """A script failed after the run. `code` is its exit code, or 1."""

    code = 1


def launch(script: str, arguments: Sequence[str], config: RunConfig) -> RunRecorder:
    """Run a script on every worker, and train what its sessions join.

    The script is a Python file that calls `flower_blsgd.join`, and `arguments` are its command
    line; with ``"-m"`` as script, they begin with a module. UsageError if the script does not exist
    or cannot train with these workers and settings, or decides one of the settings itself;
    AggregationError as in `BiasedLocalSGD`; ScriptFailedError if a script fails after the run.
    """
    task, name = task_of_script(script, *arguments)
    config.check_script()
    config = replace(config, task=task, name=config.name or name)
    workers = parse_workers(config.workers)
    check_workers_of_script(workers)
    if not config.resume:
        RunFolder.refuse_unusable(config.out)  # before the scripts begin
    main = _main_rank(workers)
    logs = _WorkerLogs()
    folder = tempfile.TemporaryDirectory(prefix="blsgd-")
    grid = LocalGrid(
        workers,
        _CLIENT_APP,
        Path(__file__).parents[1],
        {
            **config.to_run_config(),
            SCRIPT: shlex.join([script, *arguments]),
            MAIN_RANK: main,
            WORLD_SIZE: len(workers),
            MAIN_HAS_ENDED: str(Path(folder.name, "main-has-ended")),
        },
        on_line=logs.add,
        shown=main,
        own_cards=True,
    )
    # No live line: the main worker prints in the same terminal.
    console = Console(force_terminal=False, highlight=False, soft_wrap=True, emoji=False)
    view = ProgressView(
        Budget.of_run(config),
        console,
        on_round_end=lambda _: logs.flush(),
        on_folder=logs.write_to,
    )

    try:
        with folder, grid:
            try:
                return train_script(grid, config, view)
            finally:
                grid.end_programs()
    finally:
        logs.flush()  # closing the grid has waited for the last lines


def train_script(grid: Grid, config: RunConfig, view: ProgressView | None = None) -> RunRecorder:
    """Train what the scripts of a grid's workers have joined, and end the scripts.

    The grid is a local grid, or has streams to SuperNodes. UsageError with another one, because
    Flower's plain messages start a process each. ScriptFailedError if a script fails after the run.
    Without a `view`, progress is shown on standard output.
    """
    if not isinstance(grid, MailboxGrid):
        raise UsageError(
            f"task = {config.task!r}: a training script needs blsgd launch, or nodes that connect "
            'over the stream (transport = "stream")'
        )
    config.check_script()
    recorder = train_on(grid, config, view, load=_workload)
    if recorder.history.arrays is not None:
        _end_scripts(grid, recorder, recorder.history.arrays)
    return recorder


def _end_scripts(grid: Grid, recorder: RunRecorder, arrays: ArrayRecord) -> None:
    """Hand the final model to all scripts, wait for their ends, and raise an error if one fails.

    A script that cannot take the model failed during the run, and that has been said.
    """
    if isinstance(grid, LocalGrid):
        grid.end_restarts()
    orders = [Message(RecordDict({ARRAYS: arrays}), n, QUERY_END) for n in grid.get_node_ids()]
    replies = replies_to(grid, orders, _JOIN_SECONDS)  # one may have started again
    answers = {n: answer_of(reply) for n, reply in replies.items()}
    took_part = recorder.node_ids
    answers = {n: a for n, a in answers.items() if n in took_part}
    taken = [n for n, a in answers.items() if not isinstance(a, Failure) or a.kind == "died"]
    replies = replies_to(grid, [Message(RecordDict(), n, QUERY_END) for n in taken], None)
    codes = grid.end_programs(_END_SECONDS) if isinstance(grid, LocalGrid) else {}
    failures = {}
    for node_id in taken:
        answer, code = answer_of(replies.get(node_id)), codes.get(node_id)
        if isinstance(answer, Failure) and not (answer.kind == "died" and code == 0):
            failures[node_id] = answer
        elif code and code != UNKNOWN_EXIT_CODE:
            failures[node_id] = Failure("died", f"its process {death(code)}")
    if failures:
        failed = ScriptFailedError(recorder.add_last_failures(failures))
        failed.code = max(1, *(codes.get(node_id, 1) for node_id in failures))
        raise failed


def _main_rank(workers: Sequence[WorkerSpec]) -> int:
    """Return the first fast worker that trains, else the first that trains."""
    training = [rank for rank, worker in enumerate(workers) if worker.role == "train"]
    if not training:
        raise UsageError("workers: all have role=evaluate; name one that trains")
    return min(training, key=lambda rank: (workers[rank].tier == "slow", rank))


def _workload(grid: Grid, config: RunConfig) -> tuple[Workload, RunConfig]:
    """Query the main worker for its model, and for what its script has told the session."""
    all_at_once = isinstance(grid, LocalGrid)  # also those that have failed, so none will come
    nodes = sorted(wait_for_nodes(grid, 0 if all_at_once else config.min_workers))
    queries = [Message(RecordDict(), node_id, QUERY_JOIN) for node_id in nodes]
    replies = replies_to(grid, queries, _JOIN_SECONDS)
    answers = [read_answer(replies.get(node_id), None, _read_join) for node_id in nodes]
    found = [a for a in answers if a and not isinstance(a, Failure)]
    if not found:
        reasons = {
            a.brief if a.kind != "late" else _LATE for a in answers if isinstance(a, Failure)
        }
        reasons = reasons or {"no node has partition-id=0 in its node config"}
        raise UsageError(f"{config.task} failed in the main worker: {'; '.join(sorted(reasons))}")
    info, arrays = found[0]
    refuse_other_metric(config, info.metric_name, "script")
    if config.patience and not info.metric_name:
        raise UsageError(f"patience = {config.patience}: the script does not call session.evaluate")
    if info.batch_size:
        config = replace(config, batch_size=max(2, info.batch_size))
    size = info.num_samples or max(0, info.evaluate_every) or _EPOCH_SAMPLES
    size = max(size, config.batch_size * len(nodes))
    is_open = config.evaluate_every_epochs == RunConfig.evaluate_every_epochs
    if is_open and info.evaluate_every > 0 and info.num_samples:
        every = max(1, round(info.evaluate_every / info.num_samples))
        config = replace(config, evaluate_every_epochs=every)

    def by_another(arrays: ArrayRecord, first: int, last: int) -> EvaluateReport:
        """Have the workers evaluate one after another, until one succeeds."""
        order = EvaluateOrder(0, first, last, arrays)
        for node_id in grid.get_node_ids():
            replies = replies_to(grid, [Message(order.to_records(), node_id, EVALUATE)])
            report = read_answer(
                replies.get(node_id), None, lambda c: EvaluateReport.from_content(c, order)
            )
            if not isinstance(report, Failure):
                return report
        return EvaluateReport(first, last, [], [], [])

    work = Workload(
        arrays=arrays,
        parameter_names=info.parameter_names,
        num_samples=size,
        data=f"{info.num_samples:,} samples" if info.num_samples else f"epochs of {size:,} samples",
        data_fingerprint=info.data_fingerprint,
        model_fingerprint=info.fingerprint,
        num_test=int(info.evaluate_every >= 0),
        evaluation_batch_size=1,
        evaluate_slice=by_another,
        to_metrics=functools.partial(_metrics, metric_name=info.metric_name),
        metric=Metric(info.metric_name or "accuracy", info.metric_mode or "max"),
        assets={},
    )
    return work, config


def _read_join(content: RecordDict) -> tuple[ScriptInfo, ArrayRecord] | None:
    """Return what the main worker's script has told its session, and its checked model.

    None for another worker, which sends no model.
    """
    arrays = records_of(content, ArrayRecord).get(ARRAYS)
    if not arrays:
        return None
    ModelShape(arrays).checked(arrays)
    return ScriptInfo.from_content(content), arrays


def _metrics(report: EvaluateReport, metric_name: str) -> MetricRecord:
    """Return a script's figures; none if no worker evaluated. UsageError without the metric."""
    if report.loss_sums and metric_name not in report.metric_names:
        raise UsageError(
            f"session.evaluate: the function must return the number {metric_name!r}, but it "
            f"returned {', '.join(report.metric_names) or 'none'}; name one of its figures with "
            "metric="
        )
    return MetricRecord({**report.totals})  # of one sample


class _WorkerLogs:
    """Files ``worker-<n>.log`` in the results folder; kept in memory until there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._lines: dict[int, list[str]] = {}

    def add(self, rank: int, line: str) -> None:
        """Add a line that a worker has printed."""
        with self._lock:
            self._lines.setdefault(rank, []).append(line)

    def write_to(self, folder: Path) -> None:
        """Write to this folder from now on."""
        self._folder = folder
        self.flush()

    def flush(self) -> None:
        """Write what has been added; on a full disk it is lost, which `RunRecorder` reports."""
        if self._folder is None:
            return
        with self._lock:
            lines, self._lines = self._lines, {}
        for rank, new in lines.items():
            path = self._folder / f"worker-{rank}.log"
            with contextlib.suppress(OSError), path.open("a", errors="replace") as file:
                file.writelines(f"{line}\n" for line in new)
