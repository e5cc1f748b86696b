"""Connect workers, measure their speeds and choose local steps, before planning."""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.exception import AggregationError

from ..algorithm.averaging import LoadWeighting
from ..algorithm.epoch_plan import RoundShape
from ..algorithm.local_steps import Clock, balanced_batches
from ..devices.worker_spec import Tier
from ..engines.features import features_of
from ..errors import UsageError
from ..protocol import (
    HOST,
    QUERY_PROFILE,
    Failure,
    Keys,
    ProfileQuery,
    TrainOrder,
    WorkerProfile,
)
from ..protocol.hosts import by_rank
from .averaging import Averaging
from .messages import Address, answer_of, node_messages, read_answer, replies_to
from .patience import MULTIPLE_OF_START
from .planner import Planner
from .round import Outcome, Round
from .workers import Worker, WorkerRegistry

_LOG = logging.getLogger(__name__)
_PROGRESS = logging.getLogger("flwr")  # shown at the level of Flower's own strategies

UNKNOWN_DEVICE = "unknown device"
"""Device of a node whose ClientApp does not answer the profile query."""

_POLL_SECONDS = 0.5
_FIRST_QUERY_SECONDS, _QUERY_AGAIN_SECONDS = 600.0, 60.0
"""Time to wait for profiles. Later queries wait at least a multiple of the first one's duration."""

_RETURN_SECONDS = 60.0
"""Time to wait for nodes to return if too few workers are left."""

_FIRST_ROUND_SECONDS = 3600.0
_MEASURED_SECONDS = 3.0

_WARM_UP_ROUNDS, _FEWEST_ROUNDS, _MOST_ROUNDS, _ENOUGH_SECONDS = 2, 3, 10, 0.75
"""Rounds of training that measure the speeds of scripts: first one with a single step of each,
which may compile, and one by its times; then as many as compute for long enough.
"""


@dataclass(eq=False)
class Connector:
    """Connection and measurement of the workers, before a round is planned.

    New workers are added to `registry`. The planner's step policy decides whose speeds are needed.
    The first round waits for `min_workers` nodes (>= 1). Every epoch needs as many training
    workers, or those of the first epoch if they were fewer. The clock ``"wall"`` measures all
    workers together, as in training; ``"device"`` measures one after another, and always.
    `steps_chosen` is the line about the tau_fast that `choose_steps` chose; empty before.
    """

    registry: WorkerRegistry
    planner: Planner
    min_workers: int
    clock: Clock = "wall"

    def __post_init__(self) -> None:
        self.steps_chosen = ""
        self._speeds_are_due = False
        self._rounds: list[tuple[int, float, float]] = []
        self._overhead_seconds: float | None = None
        self._queried_nodes: set[int] = set()
        self._incomplete_nodes: set[int] = set()
        """Nodes with several devices, of which some did not answer."""

    def refresh(self, grid: Grid) -> None:
        """Update which workers are connected.

        The first call waits for enough nodes, queries them, and measures speeds if needed. Later
        calls query a new node, or one that was gone, only if it may be a worker that returns, as
        its process may be another one; `prepare_epoch` queries the others. UsageError if, in the
        first call, a worker cannot take part, or fewer than `min_workers` can train because the
        others failed to start.
        """
        registry = self.registry
        online = wait_for_nodes(grid, 0 if registry.begun else self.min_workers)
        self._queried_nodes &= online
        registry.refused_nodes &= online
        for worker in registry.workers:
            if worker.present and worker.node_id not in online:
                worker.forget_times()  # it may return on another device
                worker.present = False
                _LOG.warning("%s is gone", worker.label)
        for node_id in features_of(grid).take_deaths():  # of a local grid
            for worker in registry.workers:
                if worker.node_id == node_id:
                    worker.note_failure("died between orders")
        new = sorted(online - self._queried_nodes)
        if not registry.begun:
            began = time.monotonic()
            self._query(grid, new)
            seconds = time.monotonic() - began
            if seconds < _FIRST_QUERY_SECONDS:  # all nodes answered
                registry.start_seconds = seconds
            failed = [w for w in registry.workers if w.trains and w.never_started]
            able, lost = map(len, map(self.planner.training, (registry.active, failed)))
            if able < min(self.min_workers, able + lost):
                raise UsageError(
                    f"the run cannot begin: {able} of {able + lost} workers can train, and "
                    f"min-workers = {self.min_workers} ({self._reasons()})"
                    + (f"; repair it, or use min-workers = {able}" if able else "")
                )
            self._measure_speeds(grid, 0)
        elif new and not all(worker.present for worker in registry.workers):
            self._query(grid, new)

    def prepare_epoch(self, grid: Grid) -> None:
        """Query new nodes and excluded workers before an epoch.

        Nodes that did not answer before are queried after 1, 2, 4, 8, ... epochs only. Waits if too
        few training workers are left; AggregationError if they do not return.
        """
        registry, began = self.registry, self.planner.progress.began
        training = self.planner.training
        first_new, needed = len(registry.workers), min(self.min_workers, began)
        known = {worker.node_id for worker in registry.workers if worker.present}
        known -= self._incomplete_nodes
        nodes = set(grid.get_node_ids()) - known - registry.refused_nodes
        if self.planner.progress.epoch & (self.planner.progress.epoch - 1):
            absent = {worker.node_id for worker in registry.workers if not worker.present}
            nodes -= self._queried_nodes - absent
        nodes |= {w.node_id for w in registry.workers if w.present and w.excluded}
        self._query(grid, sorted(nodes))
        give_up_at = time.monotonic() + _RETURN_SECONDS
        while len(training(registry.active)) < needed and not all(
            worker.present for worker in registry.workers if worker.trains
        ):
            if time.monotonic() > give_up_at:
                break
            time.sleep(_POLL_SECONDS)
            self.refresh(grid)
        self._measure_speeds(grid, first_new)
        left = training(registry.active)
        if len(left) < needed:
            raise AggregationError(
                f"the next epoch cannot begin: {len(left)} of {began} workers "
                f"are left, and min-workers = {self.min_workers} ({self._reasons()})"
            )

    def _reasons(self) -> str:
        """Return the workers that should train and cannot, by reason."""
        labels: dict[str, list[str]] = {}
        for worker in self.registry.workers:
            if worker.trains and worker not in self.registry.active:
                reason = worker.excluded or worker.never_started or "its node is gone"
                labels.setdefault(reason, []).append(worker.label)
        return "; ".join(f"{', '.join(its)}: {reason}" for reason, its in labels.items())

    def choose_steps(self, grid: Grid, arrays: ArrayRecord, averaging: Averaging) -> None:
        """Choose the tau_fast of an open step policy.

        The duration of a round without computing is measured in rounds with the smallest tau_fast.
        They also replace the speeds measured by the run.
        """
        planner, workers = self.planner, self.registry.active
        settings, training = planner.settings, planner.training(workers)
        overhead_seconds = self._overhead_seconds
        if planner.measures_in_rounds and not overhead_seconds:
            planner.measured = planner.measured or {}
            return
        if not overhead_seconds and any(worker.speed_ratio for worker in workers):
            shape = planner.check(workers)
            # Neither may have seen these rounds.
            averaging = replace(averaging, weighting=LoadWeighting(), outer_optimizer=None)
            rows, _ = measure_rounds(
                grid, training, arrays, shape, settings.num_samples, averaging, settings.keys
            )
            if rows:
                *columns, overheads = zip(*rows, strict=True)
                speeds = map(_lower_quartile, columns)
                longest = np.argmax(np.transpose(columns) * shape.local_steps, axis=1).tolist()
                overhead_seconds = overhead_of(longest, overheads)
                for worker, seconds, size in zip(training, speeds, shape.batch_sizes, strict=True):
                    counts = worker.measured and self.clock == "wall"
                    if counts and size == worker.own_batch(settings.batch_size):
                        worker.profile = replace(worker.profile, seconds_per_step=seconds)
                self.registry.assign_tiers()
        planner.take_steps(planner.fewest_steps(workers, overhead_seconds))
        taken, share = "an unknown time in addition to computing", ""
        if overhead_seconds:
            taken = f"{overhead_seconds:.3g} s in addition to computing"
            shape = planner.shape(workers, planner.settings.local_steps_fast)
            if seconds := max(planner.computing_seconds(training, shape)):
                share = f", {overhead_seconds / (overhead_seconds + seconds):.1%} of the time"
            share += self._compared(training, shape.samples_per_round, overhead_seconds)
        chosen = f"local-steps-fast = auto: {planner.settings.local_steps_fast}"
        self.steps_chosen = f"{chosen}; a round takes {taken}{share}"
        _PROGRESS.info(self.steps_chosen)

    def _compared(
        self, workers: Sequence[Worker], samples: Sequence[int], overhead_seconds: float
    ) -> str:
        """Return the speed of rounds with these samples, and of those that average gradients.

        Both as shares of what the workers compute without waiting; empty if a speed is unknown.
        """
        size = self.planner.settings.batch_size
        speeds = [worker.samples_per_second(size) for worker in workers]
        if not all(speeds):
            return ""
        batches = [worker.own_batch(size) for worker in workers]
        if not self.planner.measures_in_rounds:  # scripts have batches of one size
            batches = balanced_batches(sum(batches), speeds)

        def reached(samples: Sequence[int]) -> float:
            longest = max(n / speed for n, speed in zip(samples, speeds, strict=True))
            return sum(samples) / (overhead_seconds + longest) / sum(speeds)

        return (
            f"; {reached(samples):.0%} of all samples per second, {reached(batches):.0%} with "
            'average = "gradients"'
        )

    def note_round(self, round: Round, outcomes: Sequence[Outcome]) -> None:
        """Record the times of a round of training that measures speeds, after averaging.

        After the last one, the speeds and the overhead of a round are known.
        """
        planner, slowest, longest = self.planner, 0, 0.0
        if planner.measured is None:
            return
        for worker, report in ((o.worker, o.report) for o in outcomes if o.load):
            if report and report.compute_seconds:
                size = worker.own_batch(planner.settings.batch_size)
                newest = report.compute_seconds * size / report.num_examples
                if len(self._rounds) > _WARM_UP_ROUNDS:  # disturbances only lengthen a round
                    newest = min(newest, planner.measured.get(worker.index, newest))
                planner.measured[worker.index] = newest
                if report.compute_seconds > longest:
                    slowest, longest = worker.index, report.compute_seconds
        self._rounds.append((slowest, longest, max(1e-6, round.seconds - longest)))
        workers, computing, overheads = zip(*self._rounds, strict=True)
        is_enough = sum(computing[_WARM_UP_ROUNDS:]) >= _ENOUGH_SECONDS
        if len(computing) < _WARM_UP_ROUNDS + (_FEWEST_ROUNDS if is_enough else _MOST_ROUNDS):
            return
        for worker in planner.training(self.registry.active):
            worker.forget_times()  # of the first steps
            if not worker.profile.seconds_per_step and worker.index in planner.measured:
                seconds = planner.measured[worker.index]
                worker.profile = replace(worker.profile, seconds_per_step=seconds)
                worker.measured = True
        self._overhead_seconds = overhead_of(workers, overheads)
        self._rounds, planner.measured = [], None
        self.registry.assign_tiers()
        planner.check(planner.workers)

    def _query(self, grid: Grid, nodes: Sequence[int]) -> None:
        """Query nodes, register new workers, and readmit excluded workers that answer."""
        registry = self.registry
        level = logging.ERROR if set(nodes) - self._queried_nodes else logging.DEBUG
        seconds = _FIRST_QUERY_SECONDS
        if registry.begun:
            seconds = max(_QUERY_AGAIN_SECONDS, MULTIPLE_OF_START * registry.start_seconds)
        found, failures = query_profiles(grid, nodes, seconds, level)
        known = dict(zip(grid.get_node_ids(), enumerate(features_of(grid).workers), strict=False))
        failed = []
        for (node_id, rank), failure in failures.items():
            if node_id in self._queried_nodes:
                _LOG.debug("node %d does not take part: %s", node_id, failure.brief)
            elif any(worker.node_id == node_id for worker in registry.workers):
                _LOG.warning("node %d does not take part: %s", node_id, failure.brief)
            elif node_id in known:
                partition_id, spec = known[node_id]
                failed.append((WorkerProfile.of(spec, partition_id), rank, failure))
            else:
                name = f"node {node_id}" if rank is None else f"device {rank} of node {node_id}"
                failed.append((WorkerProfile(UNKNOWN_DEVICE, name=name), rank, failure))
        self._queried_nodes |= set(nodes)
        self._incomplete_nodes -= set(nodes) - {node_id for node_id, _ in failures}
        self._incomplete_nodes |= {node_id for node_id, rank in failures if rank is not None}
        for worker in (w for w in registry.workers if w.present):
            profile = found.pop(worker.address, None)
            if profile and worker.excluded and not registry.mismatch(profile, worker.local_rank):
                worker.excluded = ""
                _LOG.info("%s answers and takes part again", worker.label)
        self._speeds_are_due |= bool(found)
        registry.register(found, failed)

    def _measure_speeds(self, grid: Grid, first_new: int) -> None:
        registry, planner = self.registry, self.planner
        batch_size = planner.settings.batch_size
        known = [w for w in registry.active if w.profile.device != UNKNOWN_DEVICE]
        by_speed = planner.settings.step_policy.needs_speeds
        needed = any(not w.profile.tier or (by_speed and not w.profile.steps) for w in known)
        due, self._speeds_are_due = self._speeds_are_due, False
        unknown = [w for w in known if not w.profile.seconds_per_step]
        if not (needed or self.clock == "device"):
            return
        if planner.measures_in_rounds:
            if planner.training(unknown):  # also of a worker that failed until now
                planner.measured = planner.measured or {}
                if self.clock == "device" and not planner.progress.epoch:
                    raise UsageError(
                        'clock = "device" needs the speed of each worker alone, but scripts are '
                        "measured while all train; give every worker seconds-per-step="
                    )
            return
        if not due:
            return
        if self.clock == "wall":  # workers measured before compute, too, as in a round
            groups = [[*unknown, *(w for w in registry.active if w.measured)]] if unknown else []
        else:
            groups = [[worker] for worker in unknown]
        speeds: dict[Address, float | str] = {}
        for group in groups:
            _LOG.info("measuring the seconds per step: %s", ", ".join(w.label for w in group))
            speeds |= query_speeds(grid, {w.address: w.own_batch(batch_size) for w in group})
        reasons = []
        for worker in unknown:
            seconds = speeds[worker.address]
            if isinstance(seconds, float):
                worker.profile = replace(worker.profile, seconds_per_step=seconds)
                worker.measured = True
            else:
                reasons.append(f"{worker.label}: {seconds}")
        if reasons:
            what = (
                "unknown speed, so each counts as the fastest (gamma 1); set seconds-per-step: %s"
            )
            _LOG.warning(what, "; ".join(reasons))
        registry.assign_tiers(first_new)


# --- queries ------------------------------------------------------------------------------------


def query_profiles(
    grid: Grid, node_ids: Sequence[int], seconds: float, level: int
) -> tuple[dict[Address, WorkerProfile], dict[Address, Failure]]:
    """Query the profiles of nodes, and return those of their workers, and the failures.

    A worker that fails, does not answer within `seconds` or sends no profile is a failure. A
    ClientApp without a handler for the query counts as one fast worker, with a warning, at most at
    `level`. A node whose process died is queried again, because the process restarts.
    """
    content = ProfileQuery().to_records()
    replies: dict[int, Message] = {}
    queried = list(node_ids)
    for _ in range(2):
        messages = [Message(content, node_id, QUERY_PROFILE) for node_id in queried]
        replies |= replies_to(grid, messages, seconds)
        answers = {
            (node_id, rank): answer
            for node_id in node_ids
            for rank, answer in _profiles_in(replies.get(node_id)).items()
        }
        failures = {address: a for address, a in answers.items() if isinstance(a, Failure)}
        queried = sorted({node for (node, _), f in failures.items() if f.kind == "died"})
    found = {address: a for address, a in answers.items() if isinstance(a, WorkerProfile)}
    no_handler = [address for address, f in failures.items() if f.kind == "no handler"]
    if no_handler:
        found |= dict.fromkeys(no_handler, WorkerProfile(device=UNKNOWN_DEVICE))
        _LOG.log(
            min(level, logging.WARNING),
            "%s: the ClientApp has no profile handler, so each node counts as one fast worker "
            '(gamma 1); add app.query("profile")(flower_blsgd.answer_profile) to the ClientApp',
            ", ".join(f"node {node_id}" for node_id, _ in no_handler),
        )
    return found, {address: f for address, f in failures.items() if address not in no_handler}


def _profiles_in(reply: Message | None) -> dict[int | None, WorkerProfile | Failure]:
    """Return the profile of each worker of a node, or its failure, by local rank."""
    answer = answer_of(reply)
    ranks: Iterable[int | None] = (None,)
    if isinstance(answer, RecordDict) and HOST in answer.config_records:
        ranks = by_rank(answer)[0] or ranks
    return {rank: read_answer(reply, rank, WorkerProfile.from_content) for rank in ranks}


def query_speeds(
    grid: Grid, batch_sizes: Mapping[Address, int], seconds: float = 1.0
) -> dict[Address, float | str]:
    """Measure workers at the same time: return seconds per step, or the reason for a failure.

    `batch_sizes` are the samples per step of each worker. The measurement takes about `seconds`.
    """
    queries = [
        (address, ProfileQuery(True, size, seconds).to_records())
        for address, size in batch_sizes.items()
    ]
    replies = replies_to(grid, node_messages(queries, QUERY_PROFILE))
    speeds: dict[Address, float | str] = {}
    for node_id, rank in batch_sizes:
        profile = read_answer(replies.get(node_id), rank, WorkerProfile.from_content)
        if isinstance(profile, Failure):
            speeds[node_id, rank] = profile.brief
        else:
            why = "its ClientApp does not measure; set seconds-per-step in its node config"
            speeds[node_id, rank] = profile.seconds_per_step or why
    return speeds


def measure_rounds(
    grid: Grid,
    workers: Sequence[Worker],
    arrays: ArrayRecord,
    shape: RoundShape,
    num_samples: int,
    averaging: Averaging,
    keys: Keys,
    fewest: int = 4,
    most: int = 30,
) -> tuple[list[list[float]], list[Outcome]]:
    """Measure rounds: return the seconds per step of each worker, then the overhead in seconds.

    The rounds are those of training, with learning rate 0. After one warm-up round, rounds are
    measured for about three seconds, from `fewest` to `most`. Each gives a row; there are fewer
    rows, or none, if an order fails. The failed outcomes are returned, too.
    """
    rows: list[list[float]] = []
    until = time.perf_counter() + _MEASURED_SECONDS
    while len(rows) <= fewest or (len(rows) <= most and time.perf_counter() < until):
        orders, began = [], time.perf_counter()
        for rank, (worker, steps) in enumerate(zip(workers, shape.local_steps, strict=True)):
            size = shape.batch_sizes[rank]
            draw = np.random.default_rng([rank, len(rows)])  # other samples in every round
            order = TrainOrder.to_measure(steps, size, num_samples, arrays, draw)
            orders.append((worker, order))
        round = Round(orders, arrays, keys, max(shape.batch_sizes))
        messages = round.messages(averaging.at_nodes)
        outcomes = round.read(grid.send_and_receive(messages, timeout=_FIRST_ROUND_SECONDS))
        if failed := [outcome for outcome in outcomes if outcome.failure]:
            return rows[1:], failed
        averaging.next_model(round, outcomes)
        reports = [outcome.report for outcome in outcomes if outcome.report]
        seconds = [report.compute_seconds for report in reports]
        if not all(seconds):
            break
        per_step = [s / steps for s, steps in zip(seconds, shape.local_steps, strict=True)]
        rows.append([*per_step, max(0.0, time.perf_counter() - began - max(seconds))])
    return rows[1:], []


def overhead_of(longest: Sequence[int], overheads: Sequence[float]) -> float:
    """Return the seconds that a round takes in addition to computing, from measured rounds.

    `longest` is the worker that computed longest in each of them. It hides what it takes to reach
    another one over a slow network; with the chosen steps all compute equally long, and nothing is
    hidden. So the worker with the largest overhead counts, if it computed longest several times.
    """
    by_worker: dict[int, list[float]] = {}
    for worker, overhead in zip(longest, overheads, strict=True):
        by_worker.setdefault(worker, []).append(overhead)
    several = (own for own in by_worker.values() if len(own) > 1)
    return max(map(_lower_quartile, several), default=_lower_quartile(overheads))


def _lower_quartile(values: Sequence[float]) -> float:
    """Return the lower quartile: disturbances only lengthen a round, and medians vary more."""
    return sorted(values)[len(values) // 4]


def assume_speeds(profiles: Sequence[WorkerProfile]) -> list[WorkerProfile]:
    """Fill in unknown tiers and speeds, so that a check before the start rejects only clear errors.

    Workers without a named tier fill the missing tiers, first the fast one, because the fastest
    worker is always fast.
    """
    named = {profile.tier for profile in profiles if profile.role == "train"}
    tiers: tuple[Tier, ...] = ("fast", "slow")
    missing = [tier for tier in tiers if tier not in named]
    known = [profile.seconds_per_step for profile in profiles if profile.seconds_per_step > 0]
    assumed = min(known, default=1.0)
    filled = []
    for profile in profiles:
        wanted = missing if profile.role == "train" else []
        tier = profile.tier or (wanted.pop(0) if wanted else "fast")
        seconds = profile.seconds_per_step or assumed
        filled.append(replace(profile, tier=tier, seconds_per_step=seconds))
    return filled


def wait_for_nodes(grid: Grid, at_least: int) -> set[int]:
    """Wait until this number of nodes is connected, and return all that are."""
    logged = -1
    while len(online := set(grid.get_node_ids())) < at_least:
        if len(online) != logged:
            logged = len(online)
            _PROGRESS.info("waiting: %d of %d nodes are connected", logged, at_least)
        time.sleep(_POLL_SECONDS)
    return online
