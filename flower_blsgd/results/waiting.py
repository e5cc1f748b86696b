"""Say how many local steps the workers take, and which setting makes fast ones wait."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from ..algorithm.local_steps import balanced_batches
from ..config import RunConfig
from ..strategy.cost_model import NEGLIGIBLE
from ..strategy.round_metrics import RoundRecord, WorkerRound, waiting_share
from ..strategy.workers import Worker, WorkerRegistry
from .folder import EpochRow
from .history import RunHistory
from .tables import counted

_MUCH = 0.2
_ABOUT = 1.15
"""Two times whose ratio is below this count as equal."""


class Notes:
    """Names the local steps of the workers, and the setting that makes fast ones wait."""

    def __init__(self, registry: WorkerRegistry) -> None:
        self._registry = registry
        self._steps: dict[int, int] = {}

    def add_round(self, record: RoundRecord, history: RunHistory) -> Iterable[str]:
        """Name the steps of every worker in its first round, and when they change.

        Rounds that measure speeds do not count.
        """
        if history.measuring == len(history.metrics.records):
            return
        for row in record.workers:
            before = self._steps.get(row.worker)
            self._steps[row.worker] = row.local_steps
            if before is None:
                yield f"  {row.label}: {self._first(row, history)}"
            elif before != row.local_steps:
                why = " or the number of samples" if history.config.selection else ""
                yield (
                    f"  epoch {record.epoch}: {row.label} does {counted(row.local_steps, 'step')} "
                    f"per round instead of {before}, since its speed{why} changed"
                )

    def _first(self, row: WorkerRound, history: RunHistory) -> str:
        if not row.trained:
            return "sums its slice of the fast workers' models"
        own = self._registry.workers[row.worker].profile
        steps = counted(row.local_steps, "step")
        steps += f" of {own.batch_size} samples" if own.batch_size else ""
        steps += " per round"
        if own.precision and not history.config.is_script:
            steps += f" in {own.precision}"
        steps += f", weight {row.weight:.1%}"
        if 0 < row.weight < NEGLIGIBLE:
            steps += f" (contributes less than {NEGLIGIBLE:.0%})"
        return steps

    def add_epoch(self, row: EpochRow, history: RunHistory) -> Iterable[str]:
        """Name the setting after the first epoch in which the processes are warm."""
        rounds_before = history.rows[-2].rounds if len(history.rows) > 1 else 0
        if row is history.rows[-1] and not row.late and rounds_before < 2 <= row.rounds:
            # Processes warm up in the first round, or in those that measure.
            rounds = history.metrics.rounds_on_clock(max(1, history.measuring))
            if note := waiting_note(history.config, self._registry.workers, rounds):
                yield note


def waiting_note(
    config: RunConfig, workers: Sequence[Worker], rounds: Sequence[RoundRecord]
) -> str:
    """Return a line on which setting makes fast workers wait, and what to set instead.

    Empty if they wait at most 20 %, or if the next epoch adapts steps or batches to the speeds.
    Workers are all of the run, by index; the rounds have times on the run's clock.
    """
    stepped = [
        (record.round_seconds, [row for row in record.workers if row.completed_steps])
        for record in rounds
    ]
    share = waiting_share(stepped, fast=True)
    if share is None or share <= _MUCH:
        return ""
    seconds: defaultdict[int, float] = defaultdict(float)
    last: dict[int, WorkerRound] = {}
    for row in (row for _, rows in stepped for row in rows):
        seconds[row.worker] += row.compute_seconds
        last[row.worker] = row
    longest = last[max(seconds, key=seconds.__getitem__)]
    fastest = last[min((i for i in last if last[i].fast), key=seconds.__getitem__)]
    if longest is fastest:
        return ""  # they take turns waiting for each other
    if config.choices.average == "gradients" and config.choices.steps == "one":
        cause = _cause_in_batches(config, [workers[index] for index in sorted(last)])
    else:
        cause = _cause_in_settings(config, workers[longest.worker], longest, fastest)
    if not cause and config.choices.steps == "system-aware":
        cause = _cause_in_speeds(config, workers, longest, fastest)
    return cause and f"fast workers wait {share:.0%} of the time for {longest.label}: {cause}"


def _cause_in_batches(config: RunConfig, workers: Sequence[Worker]) -> str:
    """Return the batches that take all the same time; empty if unknown, or if they have them."""
    speeds = [worker.samples_per_second(config.batch_size) for worker in workers]
    sizes = [worker.own_batch(config.batch_size) for worker in workers]
    better = balanced_batches(sum(sizes), speeds) if all(speeds) else sizes
    pairs = zip(better, workers, strict=True)
    said = ", ".join(f"batch={size} for {worker.label}" for size, worker in pairs)
    return "" if better == sizes else f"set {said}"


def _cause_in_settings(
    config: RunConfig, worker: Worker, longest: WorkerRound, fastest: WorkerRound
) -> str:
    """Return which number of steps does not follow from a speed; empty if all do."""
    steps, slow = config.choices.steps, config.local_steps_slow
    if steps in ("same", "one"):
        return f'steps = "{steps}" gives all workers the same number; set steps = "system-aware"'
    own, fixed = worker.profile.steps, not longest.fast and slow != "auto"
    if steps != "one-by-throughput" and longest.local_steps < (own or (fixed and int(slow))):
        return (
            f"an epoch is too short for rounds of its {own or slow} steps; use a smaller batch-size"
        )
    if own and steps != "one-by-throughput":
        return "its steps= is too large; remove it"
    if steps != "system-aware" or slow == "auto":
        return ""
    cause = f"local-steps-slow = {slow} is too large"
    if longest.fast:
        cause = f"all fast workers do {counted(fastest.local_steps, 'step')}"
    return f'{cause}; set local-steps-slow = "auto"'


def _cause_in_speeds(
    config: RunConfig, workers: Sequence[Worker], longest: WorkerRound, fastest: WorkerRound
) -> str:
    """Return why steps that follow from speeds take one worker longer; empty if unknown."""
    worker = workers[longest.worker]
    known = [workers[row.worker].profile.seconds_per_step for row in (longest, fastest)]
    loads = [row.local_steps * row.batch_scale for row in (longest, fastest)]
    if all(known) and loads[0] * known[0] > _ABOUT * loads[1] * known[1]:
        remedy = 'set local-steps-fast = "auto"'
        if longest.local_steps == 1 and not config.shrink_slow_batch:
            remedy = "set shrink-slow-batch = true"
        elif config.choices.local_steps_fast != fastest.local_steps:
            # An epoch is too short for more steps.
            own = worker.profile.batch_size
            remedy = f"set its batch= below {own}" if own else "use a smaller batch-size"
        return f"rounds of {counted(fastest.local_steps, 'step')} are too short; {remedy}"
    if config.rebalance:
        return ""
    if not all(known):
        label = (fastest if known[0] else longest).label
        return f"the speed of {label} is unknown; set its seconds-per-step="
    given = "measured" if worker.measured else "given"
    wall = config.clock == "wall"
    remedy = "set rebalance = true" if wall else "set other seconds-per-step"
    return f"its steps take longer than {given}; {remedy}"
