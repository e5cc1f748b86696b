"""The runs of each stage, as far as the rows so far decide them. PLAN2.md gives the reasons."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from .arms import FAST_ALONE
from .runs import MOST_TRIES, Row, Run, Store, counting

RATES = (0.05, 0.1, 0.2, 0.4)
RATE_LIMITS = (0.0125, 1.6)
SCREENING_SEEDS = (0, 1, 2)
CONTENDER_MARGIN = 0.02
"""A setting that is further below the best of its grid at the first seed gets no other seed."""

TWO_DEVICES = ("ddp", "load", "per-sample")
GAPS = ("gap-2", "gap-4")

Rows = Mapping[str, Sequence[Row]]
"""Rows by stage."""


@dataclass(frozen=True)
class Scale:
    """Size of the study.

    Parameters
    ----------
    screening_seconds, seconds, long_seconds, block_seconds : float
        Budgets: of screening and the comparisons after it, of the confirmation, of the fast device
        alone near convergence, of a timing.
    blocks : int
        Repetitions of each timing.
    pairs, confirmed_pairs, long_pairs : int
        Seeds of the stages.
    """

    screening_seconds: float = 60.0
    seconds: float = 100.0
    long_seconds: float = 1228.0
    block_seconds: float = 20.0
    blocks: int = 5
    pairs: int = 12
    confirmed_pairs: int = 10
    long_pairs: int = 5


FULL = Scale()
TINY = Scale(1.0, 1.5, 2.0, 1.5, 1, 2, 2, 2)

Setting = tuple[float, str]
"""A learning rate and a decay."""


class Tuning:
    """The grid of each arm: its runs, and the best setting once all of them are there.

    The first seed tries the whole grid. The other seeds try its contenders.

    Parameters
    ----------
    rows : sequence of Row
        Rows of the stage.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = counting(rows)
        errors = Counter(row["key"] for row in rows if "error" in row)
        self._failed = {key for key, count in errors.items() if count >= MOST_TRIES}
        self.runs: list[Run] = []

    def best(self, make: Callable[[float, str, int], Run], decays: Iterable[str]) -> Setting | None:
        """Return the setting with the best mean accuracy; None while runs are missing.

        Parameters
        ----------
        make : callable
            ``(rate, decay, seed) -> Run``.
        decays : iterable of str
            The decays to try, each with all rates.
        """
        rates, decays = sorted(RATES), tuple(decays)
        while True:
            grid = [(rate, decay) for rate in rates for decay in decays]
            first = {
                setting: self._accuracy(make(*setting, SCREENING_SEEDS[0])) for setting in grid
            }
            known = {setting: mean for setting, mean in first.items() if mean is not None}
            if len(known) < len(grid):
                return None
            least = max(known.values()) - CONTENDER_MARGIN
            means = {s: self._mean(make, *s) for s in grid if known[s] >= least}
            found = {setting: mean for setting, mean in means.items() if mean is not None}
            if len(found) < len(means):
                return None
            rate, decay = max(found, key=lambda setting: found[setting])
            wider = {rates[0]: rate / 2, rates[-1]: rate * 2}.get(rate)
            if wider is None or not RATE_LIMITS[0] <= wider <= RATE_LIMITS[1]:
                return rate, decay
            rates = sorted([*rates, wider])

    def _mean(
        self, make: Callable[[float, str, int], Run], rate: float, decay: str
    ) -> float | None:
        """Return the mean accuracy over the seeds; None while one of them is missing."""
        found = [self._accuracy(make(rate, decay, seed)) for seed in SCREENING_SEEDS]
        known = [accuracy for accuracy in found if accuracy is not None]
        return fmean(known) if len(known) == len(found) else None

    def _accuracy(self, run: Run) -> float | None:
        """Return the accuracy of a run, 0 if it always failed; None while it is missing."""
        self.runs.append(run)
        if run.key in self._rows:
            accuracy: float = self._rows[run.key]["accuracy"]
            return accuracy
        return 0.0 if run.key in self._failed else None


def screened(name: str, shape: str, scale: Scale) -> Callable[[float, str, int], Run]:
    """Return what makes the runs of an arm's grid."""
    seconds = scale.screening_seconds
    return lambda rate, decay, seed: Run("screening", name, rate, seconds, decay, shape, seed)


def _tuned(rows: Rows, scale: Scale) -> tuple[list[Run], dict[tuple[str, str], Setting | None]]:
    """Return the runs of screening, and the setting of each arm and shape."""
    tuning = Tuning(rows["screening"])
    found: dict[tuple[str, str], Setting | None] = {}
    grids = [(name, "") for name in FAST_ALONE]
    grids += [(name, shape) for shape in GAPS for name in TWO_DEVICES]
    for name, shape in grids:
        found[name, shape] = tuning.best(screened(name, shape, scale), ("linear", "steps"))
    for shape in GAPS:
        same = found["per-sample", shape]
        if same is not None:
            make = screened("separated", shape, scale)
            found["separated", shape] = tuning.best(make, (same[1],))
    return tuning.runs, found


def screening(rows: Rows, scale: Scale) -> list[Run]:
    """Return the grids: seeds last, so that what is there early is a whole grid."""
    return sorted(dict.fromkeys(_tuned(rows, scale)[0]), key=lambda run: run.seed)


def settings_found(rows: Rows, scale: Scale) -> dict[tuple[str, str], Setting]:
    """Return the setting of each arm and shape whose grid is complete."""
    return {key: best for key, best in _tuned(rows, scale)[1].items() if best is not None}


def fast_alone(rows: Rows, scale: Scale) -> tuple[str, Setting] | None:
    """Return the best arm of the fast device alone and its setting; None while runs lack."""
    found = settings_found(rows, scale)
    if not all((name, "") in found for name in FAST_ALONE):
        return None
    done = counting(rows["screening"])

    def mean(name: str) -> float:
        rate, decay = found[name, ""]
        runs = [screened(name, "", scale)(rate, decay, seed) for seed in SCREENING_SEEDS]
        return fmean(done[run.key]["accuracy"] if run.key in done else 0.0 for run in runs)

    name = max(FAST_ALONE, key=mean)
    return name, found[name, ""]


def weights(rows: Rows, scale: Scale) -> list[Run]:
    """Return load and per-sample weights and separated sampling, each at its own best setting."""
    found = settings_found(rows, scale)
    return [
        Run("weights", name, *_split(found[name, shape], scale.screening_seconds), shape, seed)
        for seed in range(1000, 1000 + scale.pairs)
        for shape in GAPS
        for name in ("load", "per-sample", "separated")
        if (name, shape) in found
    ]


def _split(setting: Setting, seconds: float) -> tuple[float, float, str]:
    return setting[0], seconds, setting[1]


def near(rows: Rows, scale: Scale) -> list[Run]:
    """Return 20 epochs of the fast device, and per-sample weights for a share of that time."""
    alone, found = fast_alone(rows, scale), settings_found(rows, scale)
    if alone is None or ("per-sample", "gap-2") not in found:
        return []
    runs = []
    for seed in range(3000, 3000 + scale.long_pairs):
        rate, decay = alone[1]
        runs.append(
            Run("near", alone[0], rate, scale.long_seconds, decay, "", seed, task="cifar10")
        )
        rate, decay = found["per-sample", "gap-2"]
        runs += [
            Run("near", "per-sample", rate, seconds, decay, "gap-2", seed, task="cifar10")
            for seconds in (round(scale.long_seconds / 1.45, 1), round(scale.long_seconds / 1.2, 1))
        ]
    return runs


def throughput(rows: Rows, scale: Scale) -> list[Run]:
    """Return the timings of each block, in random order within it."""
    runs = []
    for block in range(scale.blocks):

        def timing(name: str, shape: str = "", block: int = block, **more: bool) -> Run:
            seconds = scale.block_seconds
            return Run(
                "throughput", name, 0.1, seconds, shape=shape, block=block, clock="wall", **more
            )

        own = [timing("fast-32"), timing("fast-32", neighbor=True)]
        own += [timing("shipped", shape) for shape in (*GAPS, "gap-16")]
        own += [timing(name, shape) for shape in GAPS for name in ("ddp", "per-sample")]
        random.Random(f"throughput {block}").shuffle(own)
        runs += own
    return runs


def confirmation(rows: Rows, scale: Scale) -> list[Run]:
    """Return the tuned fast device, DDP, and per-sample weights for three budgets."""
    alone, found = fast_alone(rows, scale), settings_found(rows, scale)
    needed = [(name, shape) for name in ("ddp", "per-sample") for shape in GAPS]
    if alone is None or not all(key in found for key in needed):
        return []
    runs = []
    for seed in range(1100, 1100 + scale.confirmed_pairs):

        def run(
            name: str,
            setting: Setting,
            shape: str = "",
            share: float = 1.0,
            seed: int = seed,
        ) -> Run:
            part = _split(setting, round(share * scale.seconds, 2))
            return Run("confirmation", name, *part, shape, seed, "cifar10")

        own = [run(*alone)]
        for shape in GAPS:
            shares = (0.65, 0.8, 1.0) if shape == "gap-2" else (0.8, 0.9, 1.0)
            setting = found["per-sample", shape]
            own += [run("per-sample", setting, shape, share) for share in shares]
            own.append(run("ddp", found["ddp", shape], shape))
        random.Random(f"confirmation {seed}").shuffle(own)
        runs += own
    return runs


STAGES: Mapping[str, Callable[[Rows, Scale], list[Run]]] = {
    "screening": screening,
    "weights": weights,
    "throughput": throughput,
    "confirmation": confirmation,
    "near": near,
}
"""In the order in which they are taken."""

WITH_ROWS = ("screening", "weights", "ideas", *list(STAGES)[2:], "slow-link")
"""Stages that have rows; PLAN2.md names the commit with the code of those not in `STAGES`."""


def read(store: Store) -> Rows:
    """Return all rows."""
    return {stage: store.read(stage) for stage in WITH_ROWS}
