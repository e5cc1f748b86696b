"""Say which setting makes fast workers wait."""

from collections import defaultdict
from collections.abc import Sequence

from ..config import RunConfig
from ..strategy.round_metrics import RoundRecord, WorkerRound, waiting_share
from ..strategy.workers import Worker

_MUCH = 0.2
_BY_SPEED = 'steps = "by-speed"'
_FROM_SPEEDS = "system-aware", "by-speed"
_ALIKE = {
    steps: f'steps = "{steps}" gives everybody as many; set {_BY_SPEED}'
    for steps in ("same", "one")
}
_ABOUT = 1.15
"""Factor between two times that still counts as the same."""


def waiting_note(
    config: RunConfig, workers: Sequence[Worker], rounds: Sequence[RoundRecord]
) -> str:
    """Return in a line which setting makes fast workers wait for more than 20 %, and what to set.

    Empty if they wait less, or if steps or batches follow the speeds from the next epoch on.

    Parameters
    ----------
    config : RunConfig
        The settings.
    workers : sequence of Worker
        All of the run, by index.
    rounds : sequence of RoundRecord
        With the times of the run's clock.
    """
    rows = [row for record in rounds for row in record.workers if row.completed_steps]
    share = waiting_share(rows, sum(record.round_seconds for record in rounds), fast=True)
    if share is None or share <= _MUCH:
        return ""
    seconds: defaultdict[int, float] = defaultdict(float)
    for row in rows:
        seconds[row.worker] += row.compute_seconds
    last = {row.worker: row for row in rows}
    longest = last[max(seconds, key=seconds.__getitem__)]
    fastest = last[min((i for i in last if last[i].fast), key=seconds.__getitem__)]
    if workers[longest.worker].profile.steps and config.choices.steps in _FROM_SPEEDS:
        cause = "its own steps= are too many; leave them out"
    elif config.choices.steps in _FROM_SPEEDS:
        cause = _cause_in_settings(config, longest, fastest)
        cause = cause or _cause_in_speeds(config, workers, longest, fastest)
    else:
        cause = _ALIKE.get(config.choices.steps, "")
    return cause and f"fast workers wait {share:.0%} of the time for {longest.label}: {cause}"


def _cause_in_settings(config: RunConfig, longest: WorkerRound, fastest: WorkerRound) -> str:
    """Return which number of steps does not come from a speed; empty if each does."""
    if config.choices.steps == "by-speed":
        return ""
    if longest.fast:
        return f"all fast workers do {fastest.local_steps} steps; set {_BY_SPEED}"
    if config.local_steps_slow == "auto":
        return ""
    number = config.local_steps_slow
    return f'local-steps-slow = {number} is too many; set local-steps-slow = "auto"'


def _cause_in_speeds(
    config: RunConfig, workers: Sequence[Worker], longest: WorkerRound, fastest: WorkerRound
) -> str:
    """Return why steps that come from speeds take one worker longer; empty if they will not."""
    known = [workers[row.worker].profile.seconds_per_step for row in (longest, fastest)]
    loads = [row.local_steps * row.batch_scale for row in (longest, fastest)]
    if all(known) and loads[0] * known[0] > _ABOUT * loads[1] * known[1]:
        way_out = 'set local-steps-fast = "auto"'
        if longest.local_steps == 1 and not config.shrink_slow_batch:
            way_out = "set shrink-slow-batch = true"
        elif config.local_steps_fast != fastest.local_steps:  # that many do not fit into an epoch
            way_out = "use a smaller batch-size"
        return f"rounds of {fastest.local_steps} steps are too short; {way_out}"
    if config.rebalance:
        return ""
    if not all(known):
        label = (fastest if known[0] else longest).label
        return f"the speed of {label} is not known; give it seconds-per-step="
    given = "measured" if workers[longest.worker].measured else "given"
    wall = config.clock == "wall"
    way_out = "set rebalance = true" if wall else "give other seconds-per-step"
    return f"its steps take longer than was {given}; {way_out}"
