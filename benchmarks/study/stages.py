"""What each stage of the study runs, as far as the rows so far decide it; PLAN.md says why."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from .arms import ADD_ONS, FAST_ALONE, TUNED, TWO_DEVICES, arm, on_fast_alone, why_not
from .runs import MOST_TRIES, STEP_SECONDS, Row, Run, Store, counting

GRID = (0.05, 0.1, 0.2, 0.4)
RATE_LIMITS = (0.0125, 1.6)
GAIN = 0.003
"""That an add-on must show in screening to be combined with others."""

GAPS = (2.0, 4.0, 16.0)


@dataclass(frozen=True)
class Scale:
    """How large the study is.

    Parameters
    ----------
    seconds, text_seconds, long_seconds, block_seconds : float
        Budgets.
    blocks : int
        Of `throughput`.
    few_seeds, two_seeds : int
        Seeds of the stages after `confirmation`.
    gap_seeds : tuple of int
        Those of `confirmation`, for each gap.
    """

    seconds: float = 100.0
    text_seconds: float = 60.0
    long_seconds: float = 600.0
    block_seconds: float = 20.0
    blocks: int = 5
    few_seeds: int = 3
    two_seeds: int = 2
    gap_seeds: tuple[int, ...] = (8, 5, 5)


FULL = Scale()
TINY = Scale(1.5, 1.0, 2.0, 1.5, 1, 1, 1, (2, 1, 1))

Rows = Mapping[str, Sequence[Row]]
"""By stage."""


@dataclass(frozen=True)
class Choice:
    """What screening chose.

    Parameters
    ----------
    rates : mapping
        The best rate of each base.
    fast_alone, base, ours, ours_at_16 : str
        Arms.
    ours_rate, same_rate : float
        Of ours, and of the fast device alone with the same add-ons.
    """

    rates: Mapping[str, float]
    fast_alone: str
    base: str
    ours: str
    ours_rate: float
    same_rate: float
    ours_at_16: str

    def confirmed(self, gap: float) -> str:
        """Return the arm that `confirmation` takes at a gap."""
        return self.ours_at_16 if gap > 8 else self.ours

    @property
    def ships(self) -> str:
        """Ours in the form that fits other machines: steps by what a round takes here."""
        return f"{self.base}+steps-auto"

    @property
    def same(self) -> str:
        """The fast device alone with those add-ons of ours that it can use."""
        return on_fast_alone(self.ours)


# --- throughput

MEASURED_BATCHES = ("bare-8", "bare-16", "bare-64")


def proportional(gap: float) -> str:
    """Return the arm of DDP in proportion to speed that fits a gap."""
    return "ddp-proportional-128" if gap > 8 else "ddp-proportional"


def throughput(rows: Rows, scale: Scale) -> list[Run]:
    """Return the blocks: of each gap all contenders, in random order."""
    runs = []
    for block in range(scale.blocks):
        for gap in GAPS:
            arms = ["bare", "ddp-equal", proportional(gap), "biased"]
            random.Random(f"throughput {block} {gap}").shuffle(arms)
            own = {"gap": gap, "block": block}
            runs += [Run("throughput", name, 0.1, scale.block_seconds, **own) for name in arms]
        alone = {"gap": 1.0, "block": block}
        beside = Run("throughput", "bare", 0.1, scale.block_seconds, **alone, neighbour=True)
        asleep = Run("throughput", "bare", 0.1, scale.block_seconds, **alone)
        others = [
            Run("throughput", name, 0.1, scale.block_seconds / 2, **alone)
            for name in MEASURED_BATCHES
        ]
        runs += [asleep, beside, *others]
    return runs


def step_seconds(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the seconds of a step of the bare loop, constant and per sample, by least squares."""
    measured: dict[int, list[float]] = {}
    for row in counting(rows).values():
        if row["gap"] == 1 and not row["neighbour"] and "samples_per_second" in row:
            batch = row["batches"][0]
            measured.setdefault(batch, []).append(batch / row["samples_per_second"])
    if len(measured) < 2:
        return STEP_SECONDS
    slope, constant = np.polyfit(list(measured), [median(v) for v in measured.values()], 1)
    return max(0.0, float(f"{constant:.4g}")), float(f"{slope:.4g}")


# --- screening


class Screening:
    """The runs of screening that are known, and what they say. Stops where a run is missing."""

    def __init__(self, rows: Sequence[Row], scale: Scale) -> None:
        self._rows, self._seconds = counting(rows), scale.seconds
        errors = Counter(row["key"] for row in rows if "error" in row)
        self._failed = {key for key, count in errors.items() if count >= MOST_TRIES}
        self.runs: list[Run] = []
        self.complete = True

    def run(self, name: str, rate: float, seed: int = 0, gap: float = 2.0) -> Run:
        """Return a run of it; scoring is not computing by steps, so a gap of 16 is measured."""
        gap, clock = (gap, "device") if gap == 2 else (gap, "wall")
        task = "validation"
        return Run("screening", name, rate, self._seconds, gap, seed, task, clock)

    def want(self, *runs: Run) -> bool:
        """Add runs; return whether all of them are there, or cannot be had."""
        self.runs += [run for run in runs if not why_not(run.arm) and run not in self.runs]
        missing = [r for r in runs if not why_not(r.arm) and not self._over(r)]
        self.complete = self.complete and not missing
        return not missing

    def _over(self, run: Run) -> bool:
        return run.key in self._rows or run.key in self._failed

    def accuracy(self, run: Run) -> float:
        """Return what it reached; below everything if there is no row of it."""
        row = self._rows.get(run.key)
        return -1.0 if row is None else row["accuracy"]

    def best(self, runs: Sequence[Run]) -> Run:
        """Return the best one, of equals the first."""
        return max(runs, key=self.accuracy)

    def choose(self) -> Choice | None:  # noqa: PLR0911  # a return for each thing that is awaited
        """Add what is to be run, and return the choice once all of it is there."""
        tried = {name: list(GRID) for name in TUNED}
        if not self.want(*(self.run(n, rate) for n, rates in tried.items() for rate in rates)):
            return None
        if not self._widen(tried):
            return None
        rates = {n: self.best([self.run(n, r) for r in own]).rate for n, own in tried.items()}
        fast_alone = self.best([self.run(name, rates[name]) for name in FAST_ALONE]).arm
        rates["fast-only"] = rates["bare"]
        base = self.best([self.run(name, rates[name]) for name in TWO_DEVICES]).arm
        singles = self._add_ons(base, rates)
        if not self.want(*singles, self.run("fast-only", rates["fast-only"])):
            return None
        combined = self._combined(base, rates)
        if not self.want(*combined):
            return None
        two = [self.run(name, rates[name]) for name in TWO_DEVICES]
        two += [r for r in [*singles, *combined] if arm(r.arm).both and "permuted" not in r.arm]
        ranked = sorted({r.arm: r for r in two}.values(), key=self.accuracy, reverse=True)[:3]
        again = [self.run(r.arm, r.rate, seed) for r in ranked for seed in (1, 2)]
        if not self.want(*again):
            return None
        ours = max(ranked, key=self._mean_of_three)
        same = on_fast_alone(ours.arm)
        around = {}
        for name, rate in ((ours.arm, ours.rate), (same, rates["fast-only"])):
            around[name] = [self.run(name, rate * factor) for factor in (1.0, 0.5, 2.0)]
        at_16 = [
            self.run(ours.arm, ours.rate, gap=16.0),
            self.run(self._scoring(ours.arm, rates), ours.rate, gap=16.0),
        ]
        if not self.want(*(run for runs in around.values() for run in runs), *at_16):
            return None
        return Choice(
            rates,
            fast_alone,
            base,
            ours.arm,
            self.best(around[ours.arm]).rate,
            self.best(around[same]).rate,
            self.best(at_16).arm,
        )

    def _widen(self, tried: dict[str, list[float]]) -> bool:
        """Widen each grid while its best rate is at an edge; return whether all are done."""
        settled = True
        for name, rates in tried.items():
            while True:
                best = self.best([self.run(name, rate) for rate in rates]).rate
                new = {min(rates): best / 2, max(rates): best * 2}.get(best)
                if new is None or not RATE_LIMITS[0] <= new <= RATE_LIMITS[1]:
                    break
                rates.append(new)
                if not self.want(self.run(name, new)):
                    settled = False
                    break
        return settled

    def _add_ons(self, base: str, rates: Mapping[str, float]) -> list[Run]:
        by_loss = self.best([self.run(n, rates[n]) for n in ("biased", "biased-to-slow")]).arm
        runs = []
        for name, one in ADD_ONS.items():
            if name == "score":  # for wider gaps
                continue
            on = by_loss if one.biased else base
            runs.append(self.run(f"{on}+{name}", rates[on]))
            if one.on_one:
                runs.append(self.run(f"fast-only+{name}", rates["fast-only"]))
        return runs

    def _combined(self, base: str, rates: Mapping[str, float]) -> list[Run]:
        """Return the base with its two best add-ons, its three best, and all that gain."""
        alone = self.accuracy(self.run(base, rates[base]))
        best: dict[str, tuple[float, str]] = {}
        for name, one in ADD_ONS.items():
            gain = self.accuracy(self.run(f"{base}+{name}", rates[base])) - alone
            if gain >= GAIN and one.group != "control":
                best[one.group] = max(best.get(one.group, (0.0, "")), (gain, name))
        names = [name for _, name in sorted(best.values(), reverse=True)]
        counts = sorted({n for n in (2, 3, len(names)) if 2 <= n <= len(names)})
        return [self.run("+".join([base, *names[:n]]), rates[base]) for n in counts]

    def _scoring(self, ours: str, rates: Mapping[str, float]) -> str:
        """Return the arm whose slow device scores: ours, if its fast one can train alone."""
        if not ours.startswith("biased"):
            return f"{ours}+score"
        by_loss = ("infobatch", "kakurenbo", "fraction")
        runs = [self.run(f"fast-only+{name}", rates["fast-only"]) for name in by_loss]
        return f"{self.best(runs).arm}+score"

    def _mean_of_three(self, run: Run) -> float:
        return fmean(self.accuracy(self.run(run.arm, run.rate, seed)) for seed in (0, 1, 2))


def screening(rows: Rows, scale: Scale) -> list[Run]:
    """Return what is to be run before the choice, as far as it is known."""
    screened = Screening(rows["screening"], scale)
    screened.choose()
    return screened.runs


def choice(rows: Rows, scale: Scale) -> Choice | None:
    """Return what screening chose; None if it is not over."""
    return Screening(rows["screening"], scale).choose()


# --- after the choice

OURS_SHARES = (0.65, 0.8, 1.0)
SLOW_LINK_SHARES = (0.3, 0.5, 1.0)
WITHOUT_LOSS = "weighted+steps-auto"


def confirmation(rows: Rows, scale: Scale) -> list[Run]:
    """Return the paired runs, seed by seed, in random order within one."""
    if (made := choice(rows, scale)) is None:
        return []
    runs = []
    for number in range(max(scale.gap_seeds)):
        ours = {
            gap: made.confirmed(gap)
            for gap, count in zip(GAPS, scale.gap_seeds, strict=True)
            if number < count
        }
        rivals = {gap: ["ddp-proportional"] for gap in ours if gap <= 8}
        if 4.0 in rivals:
            rivals[4.0].append("ddp-equal")
        runs += _paired("confirmation", made, 100 + number, scale, ours, rivals)
    return runs


def confirmation_auto(rows: Rows, scale: Scale) -> list[Run]:
    """Return likewise those of the arm that ships, against the fast device alone."""
    if (made := choice(rows, scale)) is None:
        return []
    ours = dict.fromkeys((2.0, 4.0), made.ships)
    seeds = range(400, 400 + scale.gap_seeds[1])
    stage = "confirmation-auto"
    return [run for seed in seeds for run in _paired(stage, made, seed, scale, ours, {})]


def _paired(
    stage: str,
    made: Choice,
    seed: int,
    scale: Scale,
    ours: Mapping[float, str],
    rivals: Mapping[float, Sequence[str]],
) -> list[Run]:
    """Return the runs of a seed in random order; ours and the rivals are by gap."""
    runs = []

    def add(name: str, rate: float, gap: float, share: float = 1.0) -> None:
        runs.append(Run(stage, name, rate, scale.seconds * share, gap, seed))

    add(made.fast_alone, made.rates[made.fast_alone], 1.0)
    add(made.same, made.same_rate, 1.0)
    for gap, name in ours.items():
        for share in OURS_SHARES:
            add(name, made.ours_rate, gap, share)
        for rival in rivals.get(gap, ()):
            add(rival, made.rates[rival], gap)
    random.Random(f"{stage} {seed}").shuffle(runs)
    return runs


def long(rows: Rows, scale: Scale) -> list[Run]:
    """Return the long runs."""
    if (made := choice(rows, scale)) is None:
        return []
    arms = [
        (made.fast_alone, made.rates[made.fast_alone], 1.0),
        ("ddp-proportional", made.rates["ddp-proportional"], 2.0),
        (made.ships, made.ours_rate, 2.0),
    ]
    return [
        Run("long", name, rate, scale.long_seconds, gap, 200 + number)
        for number in range(scale.few_seeds)
        for name, rate, gap in arms
    ]


def slow_link(rows: Rows, scale: Scale) -> list[Run]:
    """Return the runs over a slow link."""
    if (made := choice(rows, scale)) is None:
        return []
    runs = []
    for number in range(scale.few_seeds):
        own = {"seed": 300 + number, "slow_link": True}
        rate = made.rates["ddp-proportional"]
        runs.append(Run("slow-link", "ddp-proportional", rate, scale.seconds, **own))
        runs += [
            Run("slow-link", made.ships, made.ours_rate, scale.seconds * share, **own)
            for share in SLOW_LINK_SHARES
        ]
    return runs


def by_loss(rows: Rows, scale: Scale) -> list[Run]:
    """Return the runs of what ships with and without choosing samples by loss, in random order."""
    if (made := choice(rows, scale)) is None:
        return []
    arms = [made.ships, WITHOUT_LOSS]
    runs = []
    for seed in range(500, 500 + scale.gap_seeds[1]):
        random.Random(f"by-loss {seed}").shuffle(arms)
        runs += [Run("by-loss", name, made.ours_rate, scale.seconds, 2.0, seed) for name in arms]
    return runs


def noise(rows: Rows, scale: Scale) -> list[Run]:
    """Return the runs with labels drawn anew."""
    if (made := choice(rows, scale)) is None:
        return []
    return [
        Run(
            "noise",
            name,
            made.rates[name.partition("+")[0]],
            scale.seconds,
            2.0,
            seed,
            task,
            "device",
        )
        for seed in range(scale.two_seeds)
        for task in ("noise-0", "noise-0.2", "noise-0.4")
        for name in ("weighted", "biased", "biased+trim")
    ]


def ag_news(rows: Rows, scale: Scale) -> list[Run]:
    """Return the runs on texts."""
    if (made := choice(rows, scale)) is None:
        return []
    arms = dict.fromkeys(["fast-only", "weighted", "biased", made.ships])
    return [
        Run("ag-news", name, 3e-4, scale.text_seconds, 2.0, seed, "ag-news", "device")
        for seed in range(scale.few_seeds)
        for name in arms
    ]


STAGES: Mapping[str, Callable[[Rows, Scale], list[Run]]] = {
    "throughput": throughput,
    "screening": screening,
    "confirmation": confirmation,
    "confirmation-auto": confirmation_auto,
    "by-loss": by_loss,
    "long": long,
    "slow-link": slow_link,
    "noise": noise,
    "ag-news": ag_news,
}
"""In the order in which they are run."""


def read(store: Store) -> dict[str, list[Row]]:
    """Return the rows of all stages."""
    return {stage: store.read(stage) for stage in STAGES}
