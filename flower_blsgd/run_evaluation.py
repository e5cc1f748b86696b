"""Who evaluates in a run, as its settings say: workers, the server, or a process aside."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid

from .aside_evaluation import AsideEvaluation, Metrics
from .aside_place import AsidePlace, begin_aside, evaluation_share, idle_place, shared_place
from .config import RunConfig
from .errors import UsageError
from .host.inner_grid import package_found
from .own_grid import own_grid
from .protocol import EvaluateReport
from .roster import Roster
from .runtime.flower_internals import identity_kept
from .runtime.local_grid import LocalGrid
from .runtime.machine import this_machine
from .tasks import Task, given_task, register_task
from .training_loop import LateMetrics
from .worker.evaluation import evaluate_sums
from .worker.model_state import load_state
from .worker.precision import use_precision
from .worker.profile import profile_of
from .worker_evaluation import EvaluateHere, WorkerEvaluation


class RunEvaluation:
    """An ``evaluate_fn`` for `fit`.

    ``"workers"`` and ``"server"`` return metrics. ``"aside"`` returns late ones, and waits while
    two models wait already. ``"auto"`` is aside where there is a device for it, but never waits
    for it: while its process starts, and when it is behind, the workers evaluate.

    Parameters
    ----------
    where : {"auto", "aside", "workers", "server"}
        The setting.
    by_workers : WorkerEvaluation
        By the workers.
    here : callable
        In this process.
    num_test : int
        Samples of the test set.
    count : callable
        Takes the seconds that training waited for evaluation.
    aside : AsideEvaluation, optional
        Beside the training.
    note : str (default: "")
        What to tell the user of the place.
    """

    def __init__(
        self,
        where: str,
        by_workers: WorkerEvaluation,
        here: EvaluateHere,
        num_test: int,
        count: Callable[[float], None],
        aside: AsideEvaluation | None = None,
        note: str = "",
    ) -> None:
        self.note = note
        self._count = count
        self._where = where
        self._by_workers = by_workers
        self._here = here
        self._num_test = num_test
        self._aside = aside

    def __call__(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | LateMetrics:
        """Evaluate a model, or begin to."""
        with self._counted():
            aside = self._aside
            if aside is not None and (self._where == "aside" or (aside.ready and not aside.behind)):
                return _Late(aside.begin(server_round, arrays), self)
            if self._where == "server":
                whole = self._here(arrays, 0, self._num_test)
                return MetricRecord({"accuracy": whole.accuracy, "loss": whole.loss})
            return self._by_workers(server_round, arrays)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._count(time.perf_counter() - began)

    def wait_for(self, metrics: Metrics) -> MetricRecord:
        """Return metrics; what is waited for them counts."""
        with self._counted():
            return metrics.result()


class _Late:
    """Metrics that an evaluation aside will have."""

    def __init__(self, metrics: Metrics, run: RunEvaluation) -> None:
        self._metrics = metrics
        self._run = run

    def done(self) -> bool:
        return self._metrics.done()

    def result(self) -> MetricRecord | None:
        if self._metrics.done():
            with contextlib.suppress(concurrent.futures.CancelledError):
                return self._metrics.result()
            return None
        return self._run.wait_for(self._metrics)


@contextlib.contextmanager
def run_evaluation(
    grid: Grid,
    config: RunConfig,
    task: Task,
    roster: Roster,
    arrays: ArrayRecord,
    count: Callable[[float], None],
) -> Iterator[RunEvaluation]:
    """Make what evaluates in a run; its process, if it has one, ends with it.

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
    arrays : ArrayRecord
        Any model of the task, to get ready with.
    count : callable
        Takes the seconds that training waited for evaluation.

    Raises
    ------
    UsageError
        If there is not enough memory for a process aside that is asked for.
    """
    here = _evaluate_here(task, config.precision)
    by_workers = WorkerEvaluation(grid, roster, task.num_test, here)
    place = _place(grid, config, task)
    own: LocalGrid | None = None
    if place is not None:
        try:
            own = _grid_aside(config, place)
        except UsageError:
            if config.evaluate_on == "aside":
                raise
    if place is None or own is None:
        yield RunEvaluation(config.evaluate_on, by_workers, here, task.num_test, count)
        return
    aside = AsideEvaluation(own, profile_of(place.worker), task.num_test, here)
    aside.warm_up(arrays)
    try:
        yield RunEvaluation(
            config.evaluate_on, by_workers, here, task.num_test, count, aside, place.note
        )
    finally:
        aside.close()
        own.close()


def _place(grid: Grid, config: RunConfig, task: Task) -> AsidePlace | None:
    """Return where to evaluate aside; None if that is not to be done."""
    machine = this_machine()
    if config.evaluate_on == "auto" and isinstance(grid, LocalGrid):
        share = evaluation_share(task.num_train, task.num_test, config.evaluate_every_epochs)
        return idle_place(grid.workers, machine, share)
    if config.evaluate_on != "aside":
        return None
    if not isinstance(grid, LocalGrid):  # nobody knows whether workers are on this machine
        return shared_place(machine, accelerator=True)
    return idle_place(grid.workers, machine) or shared_place(machine)


def _grid_aside(config: RunConfig, place: AsidePlace) -> LocalGrid:
    """Return a grid of one worker, which starts with its first message."""
    given = given_task(config.task)
    setup: Callable[[], object] | None
    setup = None if given is None else functools.partial(register_task, given, config.task)
    if place.worker.device == "cpu":
        setup = functools.partial(begin_aside, setup)
    own = dataclasses.replace(config, threads=0, processes_per_device=0)
    with identity_kept(), package_found():
        return own_grid(own, setup, [place.worker])


def _evaluate_here(task: Task, precision: str) -> EvaluateHere:
    model = functools.cache(task.model)  # made only if this process has to evaluate
    one_at_a_time = threading.Lock()

    def evaluate_here(arrays: ArrayRecord, first: int, last: int) -> EvaluateReport:
        device = next(iter(this_machine().accelerators), "cpu")
        with one_at_a_time:
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
