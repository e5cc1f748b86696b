"""The runs of each stage, as far as the rows so far decide them. PLAN3.md gives the reasons."""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .arms import Arm, Setting, neighbors, search
from .runs import MOST_TRIES, Row, Run, Store, counting, is_due, on_one_machine

MARGINS = {"images": 0.02}
MARGIN_OF_TEXTS = 0.03
"""What a setting may be behind the best of its neighbors at seed 0 to get the other seeds."""

FIRST_SEED = 1400

Rows = Mapping[str, Sequence[Row]]
"""Rows by stage."""

Key = tuple[str, float]
"""Name and gap of an arm."""


@dataclass(frozen=True)
class Scale:
    """Size of the study: what all seconds are multiplied by, and the most seeds and blocks.

    Where there is one seed, settings are tried but not searched for.
    """

    times: float = 1.0
    most: int = 1000


FULL, TINY = Scale(), Scale(0.04, 1)


@dataclass(frozen=True)
class Comparison:
    """Arms that are tuned on their own, and then compared on other seeds.

    The first arm is the fast device alone; `alone_seconds` are the budgets of the ruler that the
    others are measured with. `link` is whether a slow link joins the devices.
    """

    task: str
    arms: tuple[Arm, ...]
    tuning_seconds: float
    seconds: float
    alone_seconds: tuple[float, ...]
    pairs: int
    link: bool = False


_AVERAGES = ("rate", "steps", "weights")
_OUTER = ("rate", "outer_rate", "outer_momentum")
_SGD, _ADAMW = Setting(0.1, 16, 8, "per-sample"), Setting(0.002, 4, weights="per-sample")
_ON_LINK = Setting(0.002, 4, 32, accumulate=8)
_LATE = {"overlap": True}
_BEGINNING = {"steps": 8, "outer_rate": 1.0, "outer_momentum": 0.3}


def _few(start: Setting, *choices: str) -> tuple[Arm, ...]:
    """Return the fast device alone, and averages of models and of gradients at a gap of 2."""
    changes = {"rate": start.rate, "batch": start.batch}
    return (
        Arm("alone", "loop", 1, ("rate",), start),
        Arm("models", "models", 2, (*choices, "overlap"), "python/blocking", changes),
        Arm("gradients", "gradients", 2, ("rate",), start),
    )


COMPARISONS: Mapping[str, Comparison] = {
    "images": Comparison(
        "images",
        (
            Arm("alone", "loop", 1, ("rate", "batch"), _SGD),
            Arm("blocking", "models", 2, (*_AVERAGES, "batch"), _SGD),
            Arm("overlapped", "models", 2, (*_AVERAGES, "batch"), "blocking", _LATE),
            Arm("gradients", "gradients", 2, ("rate", "batch"), _SGD),
            Arm("ddp", "ddp", 2, ("rate", "batch", "sync_bn"), _SGD),
            Arm("models", "models", 4, (*_AVERAGES, "batch", "overlap"), "blocking"),
            Arm("ddp", "ddp", 4, ("rate", "batch", "sync_bn"), "ddp"),
        ),
        *(60, 100, (100, 130), 10),
    ),
    "python": Comparison(
        "python",
        (
            Arm("alone", "loop", 1, ("rate",), _ADAMW),
            Arm("blocking", "models", 2, _AVERAGES, _ADAMW),
            Arm("overlapped", "models", 2, _AVERAGES, "blocking", _LATE),
            Arm("gradients", "gradients", 2, ("rate",), _ADAMW),
            Arm("ddp", "ddp", 2, ("rate",), _ADAMW),
            Arm("models", "models", 4, (*_AVERAGES, "overlap"), "blocking"),
            Arm("gradients", "gradients", 4, ("rate",), "gradients"),
        ),
        *(40, 60, (60, 85), 6),
    ),
    "slow-link": Comparison(
        "python",
        (
            Arm("alone", "loop", 1, (), "python/alone"),
            Arm("ddp", "ddp", 2, ("rate", "accumulate", "wire"), _ON_LINK),
            Arm("blocking", "models", 2, ("rate", "steps"), _ON_LINK, {"accumulate": 1}),
            Arm("overlapped", "models", 2, ("rate", "steps", "wire"), "blocking", _LATE),
        ),
        *(40, 60, (25, 70), 5),
        link=True,
    ),
    "batch-16": Comparison(
        "python", _few(replace(_ADAMW, batch=16), "rate", "steps"), 15, 30, (30, 42), 4
    ),
    "lora": Comparison(
        "lora", _few(replace(_ADAMW, rate=0.004), "rate", "steps"), 15, 30, (30, 42), 4
    ),
    "scratch": Comparison("news", _few(_ADAMW, "rate"), 40, 60, (60, 85), 4),
    "outer": Comparison(
        "python",
        (
            Arm("alone", "loop", 1, (), "python/alone"),
            Arm("alone-outer", "loop", 1, _OUTER, "python/alone", _BEGINNING),
            Arm("blocking", "models", 2, (), "python/blocking"),
            Arm("blocking-outer", "models", 2, _OUTER, "python/blocking", _BEGINNING),
        ),
        *(15, 30, (30, 42), 4),
    ),
}


def value_of(row: Row) -> float:
    """Return what a run is compared by: accuracy of images, loss of texts times -1."""
    if "accuracy" in row:
        return float(row["accuracy"])
    return -math.inf if row["loss"] is None else -float(row["loss"])


class Tuning:
    """The settings of a comparison's arms that are found, and the runs that finding them takes."""

    def __init__(self, name: str, rows: Rows, scale: Scale) -> None:
        self.stage, self.plan, self.scale = f"{name}-tuning", COMPARISONS[name], scale
        self.runs: dict[Run, None] = {}
        own = rows[self.stage]
        self._rows = counting(own)
        errors = Counter(row["key"] for row in own if "error" in row)
        self._failed = {key for key, count in errors.items() if count >= MOST_TRIES}
        self.found: dict[Key, Setting | None] = {}
        for arm in self.plan.arms:
            start = arm.start if isinstance(arm.start, Setting) else self._named(arm.start, rows)
            self.found[arm.name, arm.gap] = self._best(arm, arm.begin(start)) if start else None

    def _named(self, name: str, rows: Rows) -> Setting | None:
        """Return the setting that an arm begins with, of this comparison or another one."""
        other, _, own = name.rpartition("/")
        found = Tuning(other, rows, self.scale).found if other else self.found
        return found[own, 1 if own == "alone" else 2]

    def _best(self, arm: Arm, start: Setting) -> Setting | None:
        def value(setting: Setting, seed: int) -> float | None:
            names = self.stage, arm.kind, arm.kind, self.plan.task, setting
            seconds = self.scale.times * self.plan.tuning_seconds
            run = Run(*names, seconds, arm.gap, seed, self.plan.link, validated=True)
            self.runs[run] = None
            if run.key in self._rows:
                return value_of(self._rows[run.key])
            return -math.inf if run.key in self._failed else None

        if self.scale.most == 1 and arm.choices:
            value(start, 0)
            return start
        margin = MARGINS.get(self.plan.task, MARGIN_OF_TEXTS)
        return search(start, lambda one: neighbors(one, arm.choices, arm.gap), value, margin)


def _tuning(name: str) -> Callable[[Rows, Scale], list[Run]]:
    return lambda rows, scale: sorted(Tuning(name, rows, scale).runs, key=lambda run: run.seed)


def _comparing(name: str) -> Callable[[Rows, Scale], list[Run]]:
    def runs(rows: Rows, scale: Scale) -> list[Run]:
        plan, found = COMPARISONS[name], Tuning(name, rows, scale).found
        made: list[Run] = []
        for seed in range(FIRST_SEED, FIRST_SEED + min(plan.pairs, scale.most)):
            own = []
            for arm in plan.arms:
                if (setting := found[arm.name, arm.gap]) is None:
                    return []
                link = plan.link and arm.kind != "loop"
                for seconds in plan.alone_seconds if arm.name == "alone" else (plan.seconds,):
                    names = name, arm.name, arm.kind, plan.task, setting
                    own.append(Run(*names, scale.times * seconds, arm.gap, seed, link))
            random.Random(f"{name} {seed}").shuffle(own)
            made += own
        return made

    return runs


def throughput(rows: Rows, scale: Scale) -> list[Run]:
    """Return the timings of each block, in random order within it."""
    shipped, averages = Setting(0.05, 32, 0), Setting(0.05, 16, 8, "per-sample")
    timed = [
        *(("loop", Setting(0.05, batch), 1, busy) for batch in (16, 32) for busy in (False, True)),
        *(("recommended", shipped, gap, False) for gap in (2, 4)),
        *(("models", averages, gap, False) for gap in (2, 4)),
    ]
    runs = []
    for block in range(min(4, scale.most)):
        own = []
        for kind, setting, gap, busy in timed:
            names = "throughput", kind, kind, "images", setting
            own.append(Run(*names, 15 * scale.times, gap, block, neighbor=busy))
        random.Random(f"throughput {block}").shuffle(own)
        runs += own
    return runs


HELD_OUT: Mapping[tuple[float, bool], tuple[int, ...]] = {
    (1.5, False): (3, 6, 12, 24),
    (3, False): (3, 6, 12, 24),
    (6, False): (6, 12, 24, 48),
    (3, True): (12, 24, 48, 96),
}
"""Steps of the fast device that ``auto`` is compared with, by gap, and whether the link is slow."""


def auto(rows: Rows, scale: Scale) -> list[Run]:
    """Return what ships with its own steps, and with those of a small grid."""
    found = Tuning("images", rows, scale).found["blocking", 2]
    runs = []
    for (gap, link), grid in HELD_OUT.items() if found else ():
        for seed in range(min(2, scale.most)):
            names = "auto", "recommended", "recommended", "images"
            more = scale.times * 20, gap, seed, link, True
            own = [Run(*names, replace(found, steps=steps), *more) for steps in (0, *grid)]
            random.Random(f"auto {gap} {link} {seed}").shuffle(own)
            runs += own
    return runs


def _stages() -> Iterator[tuple[str, Callable[[Rows, Scale], list[Run]]]]:
    for name in COMPARISONS:
        yield f"{name}-tuning", _tuning(name)
        yield name, _comparing(name)
        if name == "images":
            yield "throughput", throughput
        if name == "slow-link":
            yield "auto", auto


STAGES: Mapping[str, Callable[[Rows, Scale], list[Run]]] = dict(_stages())
"""In the order in which they are taken."""


def due_runs(stage: str, rows: Rows, scale: Scale, most_tries: int = MOST_TRIES) -> list[Run]:
    """Return the runs that a stage still needs."""
    return [run for run in STAGES[stage](rows, scale) if is_due(run, rows[stage], most_tries)]


def read(store: Store) -> Rows:
    """Return the rows that may be compared."""
    return {stage: on_one_machine(store.read(stage)) for stage in STAGES}
