"""The `evaluate_fn` of a run, as its settings say: by the workers, or by the server."""

import functools
import time
from collections.abc import Callable

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid

from .config import RunConfig
from .protocol import EvaluateReport
from .roster import Roster
from .runtime.machine import this_machine
from .tasks import Task
from .training_loop import EvaluateFn
from .worker.evaluation import evaluate_sums
from .worker.model_state import load_state
from .worker.precision import use_precision
from .worker_evaluation import EvaluateHere, WorkerEvaluation


def run_evaluation(
    grid: Grid,
    config: RunConfig,
    task: Task,
    roster: Roster,
    count: Callable[[float], None],
) -> EvaluateFn:
    """Return what evaluates in a run.

    Parameters
    ----------
    grid : Grid
        Where the workers are.
    config : RunConfig
        The settings.
    task : Task
        Holds the test set.
    roster : Roster
        Who the workers are.
    count : callable
        Takes the seconds of each evaluation; training waits meanwhile.
    """
    here = _evaluate_here(task, config.precision)
    by_workers = WorkerEvaluation(grid, roster, task.num_test, here)

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        began = time.perf_counter()
        if config.evaluate_on == "workers":
            metrics = by_workers(server_round, arrays)
        else:
            whole = here(arrays, 0, task.num_test)
            metrics = MetricRecord({"accuracy": whole.accuracy, "loss": whole.loss})
        count(time.perf_counter() - began)
        return metrics

    return evaluate


def _evaluate_here(task: Task, precision: str) -> EvaluateHere:
    model = functools.cache(task.model)  # made only if this process has to evaluate

    def evaluate_here(arrays: ArrayRecord, first: int, last: int) -> EvaluateReport:
        device = next(iter(this_machine().accelerators), "cpu")
        use_precision(precision, device)
        load_state(model(), arrays)
        return evaluate_sums(
            model(),
            task.test,
            task.loss,
            task.metric,
            device,
            first,
            last,
            task.evaluation_batch_size,
        )

    return evaluate_here
