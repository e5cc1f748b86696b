"""Say which setting makes fast workers wait."""

from collections import defaultdict
from collections.abc import Sequence

from ..config import RunConfig
from ..strategy.round_metrics import RoundRecord, WorkerRound, waiting_share
from ..strategy.workers import Worker
from .tables import counted

_MUCH = 0.2
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
        return ""  # now it waits, now the others wait for it
    cause = _cause_in_settings(config, workers[longest.worker], longest, fastest)
    if not cause and config.choices.steps in ("system-aware", "by-speed"):
        cause = _cause_in_speeds(config, workers, longest, fastest)
    return cause and f"fast workers wait {share:.0%} of the time for {longest.label}: {cause}"


def _cause_in_settings(
    config: RunConfig, worker: Worker, longest: WorkerRound, fastest: WorkerRound
) -> str:
    """Return which number of steps does not come from a speed; empty if each does."""
    steps, slow, by_speed = config.choices.steps, config.local_steps_slow, 'set steps = "by-speed"'
    if steps in ("same", "one"):
        return f'steps = "{steps}" gives everybody as many; {by_speed}'
    own, fixed = worker.profile.steps, not longest.fast and slow != "auto"
    if steps != "one-by-throughput" and longest.local_steps < (own or (fixed and int(slow))):
        return (
            f"an epoch is too short for rounds of its {own or slow} steps; use a smaller batch-size"
        )
    if own and steps != "one-by-throughput":
        return "its own steps= are too many; leave them out"
    if steps == "system-aware" and longest.fast:
        return f"all fast workers do {counted(fastest.local_steps, 'step')}; {by_speed}"
    if steps == "system-aware" and fixed:
        return f'local-steps-slow = {slow} is too many; set local-steps-slow = "auto"'
    return ""


def _cause_in_speeds(
    config: RunConfig, workers: Sequence[Worker], longest: WorkerRound, fastest: WorkerRound
) -> str:
    """Return why steps that come from speeds take one worker longer; empty if they will not."""
    worker = workers[longest.worker]
    known = [workers[row.worker].profile.seconds_per_step for row in (longest, fastest)]
    loads = [row.local_steps * row.batch_scale for row in (longest, fastest)]
    if all(known) and loads[0] * known[0] > _ABOUT * loads[1] * known[1]:
        way_out = 'set local-steps-fast = "auto"'
        if longest.local_steps == 1 and not config.shrink_slow_batch:
            way_out = "set shrink-slow-batch = true"
        elif config.choices.local_steps_fast != fastest.local_steps:
            # That many do not fit into an epoch.
            own = worker.profile.batch_size
            way_out = f"give it less than batch={own}" if own else "use a smaller batch-size"
        return f"rounds of {counted(fastest.local_steps, 'step')} are too short; {way_out}"
    if config.rebalance:
        return ""
    if not all(known):
        label = (fastest if known[0] else longest).label
        return f"the speed of {label} is not known; give it seconds-per-step="
    given = "measured" if worker.measured else "given"
    wall = config.clock == "wall"
    way_out = "set rebalance = true" if wall else "give other seconds-per-step"
    return f"its steps take longer than was {given}; {way_out}"
