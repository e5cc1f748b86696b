"""The fourth study: a slow device that computes directions for the fast one.

``python -m benchmarks.study.perturb --data CIFAR10 --hours 2``. PLAN4.md says what is run and why.
Steps are counted, so two runs share a machine, and other work beside them changes nothing. A later
call goes on after this one; Ctrl-C loses only the runs in progress.
"""

import argparse
import json
import math
import queue
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from threading import Lock
from typing import Any

from benchmarks.images import add_data_option, required_images
from benchmarks.taken_under import conditions
from flower_blsgd.devices.machine import usable_cores

from .arms import TUNING_SEEDS, search
from .estimator import interval
from .report import spread
from .runs import ENVIRONMENT, MOST_TRIES, ROOT, Row, Store, counting

FOLDER = Path(__file__).parent
PRETRAINED = ROOT / "runs" / "study3" / "news.safetensors"
"""What the third study trained on the news."""

TINY_ROWS = ROOT / "runs" / "tiny-study4"

MARGIN = 0.02
"""Accuracy, or nats: what a choice may be behind at seed 0 to get the other seeds."""

EPOCHS = {"images": 40, "texts": 10}
FIRST_SEED = 2000
OVERFITS_BY = 0.01
"""Nats by which the loss in the end is above its lowest one, if a model overfits."""

_LONGEST_SECONDS = 3600.0


@dataclass(frozen=True)
class Choice:
    """What an arm chooses: rate, weight decay, radius, and fast steps per direction."""

    rate: float
    weight_decay: float = 1e-4
    radius: float = 0.0
    steps: int = 1

    def __str__(self) -> str:
        return (
            f"rate={self.rate:.4g} weight_decay={self.weight_decay:g} radius={self.radius:g} "
            f"steps={self.steps}"
        )


@dataclass(frozen=True)
class Arm:
    """One way to train.

    `start` is the choice that its tuning begins with, or the arm whose choice that is, with
    `changes`. `factors` are those by which a choice moves to its neighbors, without an end, and
    `lists` the values of others. Without either, the start is its choice.
    """

    name: str
    method: str
    gap: int = 1
    factors: Mapping[str, Sequence[float]] = field(default_factory=dict)
    lists: Mapping[str, Sequence[float]] = field(default_factory=dict)
    start: Choice | str = "alone"
    changes: Mapping[str, Any] = field(default_factory=dict)

    def neighbors(self, choice: Choice) -> list[Choice]:
        """Return the choices that differ in one value, by one step."""
        found = []
        for name, factors in self.factors.items():
            values = [getattr(choice, name) * factor for factor in factors]
            found += [replace(choice, **{name: _exact(value)}) for value in values]
        for name, listed in self.lists.items():
            at = listed.index(getattr(choice, name))
            near = (*listed[max(0, at - 1) : at], *listed[at + 1 : at + 2])
            found += [replace(choice, **{name: value}) for value in near]
        return found


def _exact(value: float) -> float:
    """Return a value as that of a start times a power of the root of 2, so that equal ones are."""
    for start in (0.1, 0.001):
        exact = start * 2.0 ** (round(2 * math.log2(value / start)) / 2)
        if math.isclose(exact, value, rel_tol=1e-3):
            return exact
    return value


_TWO = (0.5, 2.0)
_RATE = {"rate": _TWO}
_BOTH = {"rate": _TWO, "radius": _TWO}
_STEPS = {"steps": (4, 8)}
_FIRST = {"radius": 0.2, "steps": 4}
_FINE = {"rate": (0.5, 0.5**0.5, 2**0.5, 2.0)}


def _arms(rate: float) -> dict[str, Arm]:
    decays = {"weight_decay": (1e-4, 5e-4, 2e-3, 8e-3)}
    arms = (
        Arm("alone", "plain", 1, _FINE, decays, Choice(rate)),
        Arm("random", "random", 1, _BOTH, {"steps": (1, 4, 8)}, "alone", {**_FIRST, "radius": 0.8}),
        Arm("next-16", "next", 16, _BOTH, _STEPS, "alone", _FIRST),
        Arm("other-16", "other", 16, _BOTH, _STEPS, "next-16"),
        Arm("sam", "sam", 1, _BOTH, {}, "next-16", {"steps": 1}),
        Arm("averaged-4", "averaged", 4, _RATE, _STEPS, "alone", {"steps": 4}),
        Arm("next-4", "next", 4, start="next-16"),
        Arm("other-4", "other", 4, start="other-16"),
        Arm("each-step-16", "next", 16, start="next-16", changes={"steps": 1}),
    )
    return {arm.name: arm for arm in arms}


ARMS = {"images": _arms(0.1), "texts": _arms(0.001)}
TEXTS = ("alone", "random", "next-16", "sam")
PAIRS, PAIRS_OF_OTHERS = 12, 6


@dataclass(frozen=True)
class Run:
    """A run; `stage` is ``images-tuning``, ``images``, ``texts-tuning`` or ``texts``."""

    stage: str
    method: str
    gap: int
    choice: Choice
    seed: int

    @property
    def key(self) -> str:
        """Name that rows of the same run share."""
        return f"{self.stage} {self.method} gap={self.gap} {self.choice} seed={self.seed}"


Rows = Mapping[str, Sequence[Row]]
STAGES = ("images-tuning", "images", "texts-tuning", "texts")


def value_of(row: Row) -> float:
    """Return what a run is compared by: accuracy of images, loss of texts times -1."""
    if "accuracy" in row:
        return float(row["accuracy"])
    return -math.inf if row["loss"] is None else -float(row["loss"])


class Tuning:
    """The choice of each arm that is found, and the runs that finding them takes."""

    def __init__(self, task: str, rows: Rows, seeds: Sequence[int] = TUNING_SEEDS) -> None:
        self.stage, self.seeds = f"{task}-tuning", seeds
        self.rows = counting(rows[self.stage])
        errors = Counter(row["key"] for row in rows[self.stage] if "error" in row)
        self._failed = {key for key, count in errors.items() if count >= MOST_TRIES}
        self.runs: dict[Run, None] = {}
        self.found: dict[str, Choice | None] = {}
        for name, arm in ARMS[task].items():
            if task == "texts" and name not in TEXTS:
                continue
            begun = self.found[arm.start] if isinstance(arm.start, str) else arm.start
            start = replace(begun, **arm.changes) if begun else None
            self.found[name] = self._best(arm, start) if start else None

    def _best(self, arm: Arm, start: Choice) -> Choice | None:
        def value(choice: Choice, seed: int) -> float | None:
            run = Run(self.stage, arm.method, arm.gap, choice, seed)
            self.runs[run] = None
            if run.key in self.rows:
                return value_of(self.rows[run.key])
            return -math.inf if run.key in self._failed else None

        if len(self.seeds) == 1:
            value(start, 0)
            return start
        return search(start, arm.neighbors, value, MARGIN)

    def mean(self, name: str) -> float:
        """Return what an arm's choice was worth, as a mean over the seeds of tuning."""
        arm, choice = ARMS[self.stage.removesuffix("-tuning")][name], self.found[name]
        if choice is None:
            return -math.inf
        runs = [Run(self.stage, arm.method, arm.gap, choice, seed) for seed in self.seeds]
        values = [value_of(self.rows[run.key]) for run in runs if run.key in self.rows]
        return fmean(values) if len(values) == len(runs) else -math.inf

    def deciding(self) -> str:
        """Return the arm that decides: directions from the next samples, or from others."""
        return max(("next-16", "other-16"), key=self.mean)

    def overfitting(self) -> float | None:
        """Return by how many nats the fast device alone ends above its lowest loss; None: unknown.

        Its loss is known ten times in a run.
        """
        choice = self.found["alone"]
        runs = [Run(self.stage, "plain", 1, choice, seed) for seed in self.seeds if choice]
        curves = [self.rows[run.key].get("curve", []) for run in runs if run.key in self.rows]
        if len(curves) < len(self.seeds) or any(not curve or None in curve for curve in curves):
            return None
        return fmean(curve[-1] - min(curve) for curve in curves)


def pairs_of(task: str, tuning: Tuning, tiny: bool) -> dict[str, int]:
    """Return the arms that are compared, and on how many seeds; none while tuning goes on."""
    if any(choice is None for choice in tuning.found.values()):
        return {}
    if task == "texts":
        overfits = tiny or (tuning.overfitting() or 0.0) > OVERFITS_BY
        return dict.fromkeys(TEXTS, PAIRS_OF_OTHERS) if overfits else {}
    many = {"alone", "random", "averaged-4", tuning.deciding()}
    return {name: PAIRS if name in many else PAIRS_OF_OTHERS for name in ARMS[task]}


def runs_of(stage: str, rows: Rows, tiny: bool) -> list[Run]:
    """Return the runs of a stage, as far as the rows so far decide them."""
    task, _, tunes = stage.partition("-")
    tuning = tuning_of(task, rows, tiny)
    if tunes:
        overfitting = tuning.overfitting() if task == "texts" and not tiny else None
        if overfitting is not None and overfitting <= OVERFITS_BY:
            return [run for run in tuning.runs if run.method == "plain"]
        return sorted(tuning.runs, key=lambda run: run.seed)
    made = []
    for name, count in pairs_of(task, tuning, tiny).items():
        arm, choice = ARMS[task][name], tuning.found[name]
        assert choice is not None
        seeds = range(FIRST_SEED, FIRST_SEED + (1 if tiny else count))
        made += [Run(stage, arm.method, arm.gap, choice, seed) for seed in seeds]
    return sorted(made, key=lambda run: run.seed)


def tuning_of(task: str, rows: Rows, tiny: bool) -> Tuning:
    """Return the tuning of a task's arms; a tiny one has a seed, and does not search."""
    return Tuning(task, rows, TUNING_SEEDS[:1] if tiny else TUNING_SEEDS)


class Study:
    """The runs that are due, two at a time; none begins when the time is up."""

    def __init__(self, store: Store, data: str, texts: Path, hours: float, tiny: bool) -> None:
        self.store, self.data, self.texts, self.tiny = store, data, texts, tiny
        self.ends_at = time.monotonic() + 3600 * hours
        self._writing = Lock()
        self._cores: queue.Queue[int] = queue.Queue()
        for core in usable_cores():
            self._cores.put(core)

    def rows(self) -> Rows:
        """Return all rows."""
        return {stage: self.store.read(stage) for stage in STAGES}

    def due(self, stage: str) -> list[Run]:
        """Return the runs of a stage without a row that counts."""
        rows = self.rows()
        own, tries = rows[stage], Counter(row["key"] for row in rows[stage])
        done, most = counting(own), 1 if self.tiny else MOST_TRIES
        runs = {run.key: run for run in runs_of(stage, rows, self.tiny)}
        return [run for key, run in runs.items() if key not in done and tries[key] < most]

    def run(self, stage: str) -> None:
        """Run what is due, and what becomes due by it, until the time is up."""
        while (due := self.due(stage)) and time.monotonic() < self.ends_at:
            print(f"{stage}: {len(due)} runs", flush=True)
            with ThreadPoolExecutor(self._cores.qsize()) as pool:
                list(pool.map(self._do, due))

    def _do(self, run: Run) -> None:
        if time.monotonic() >= self.ends_at:
            return
        core = self._cores.get()
        try:
            row = self._row(run, core)
        finally:
            self._cores.put(core)
        if row is None:
            self.ends_at = 0.0
            return
        figures = ("accuracy", "loss", "training_accuracy", "training_loss", "cpu_seconds")
        result = ", ".join(f"{n} {row[n]:.4g}" for n in figures if row.get(n) is not None)
        with self._writing:
            self.store.append(run.stage, row)
            print(f"{time.strftime('%H:%M')} {run.key}: {row.get('error') or result}", flush=True)

    def _row(self, run: Run, core: int) -> Row | None:
        """Do a run and return its row; None after Ctrl-C."""
        task, _, tunes = run.stage.partition("-")
        choice = asdict(run.choice)
        settings = {"task": task, "method": run.method, "gap": run.gap, "seed": run.seed, **choice}
        settings |= {"data": str(self.texts) if task == "texts" else self.data}
        settings |= {"epochs": EPOCHS[task], "validated": bool(tunes)}
        if self.tiny:
            settings |= {"epochs": 1, "max_samples": 256}
        words = [sys.executable, "-m", "benchmarks.study.ascent", json.dumps(settings)]
        done = subprocess.run(
            ["taskset", "-c", str(core), "timeout", f"{_LONGEST_SECONDS:.0f}", *words],
            capture_output=True,
            text=True,
            env=ENVIRONMENT,
            check=False,
        )
        row: Row = {
            "key": run.key,
            **asdict(run),
            "at": datetime.now(UTC).isoformat("T", "seconds"),
        }
        row["commit"] = conditions()["commit"]
        if done.returncode in (-signal.SIGINT, 128 + signal.SIGINT):
            return None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            return {**row, "error": last.replace(self.data, "DATA")[:300]}
        return row | json.loads(done.stdout.splitlines()[-1])


# --- the page


class Page:
    """What the page says of a task."""

    def __init__(self, task: str, rows: Rows, tiny: bool) -> None:
        self.task, self.tuning = task, tuning_of(task, rows, tiny)
        self.arms = pairs_of(task, self.tuning, tiny)
        self._rows = counting(rows[task])

    def values(self, name: str, figure: str) -> dict[int, float]:
        """Return a figure of an arm by seed, larger is better; without diverged runs."""
        arm, choice = ARMS[self.task][name], self.tuning.found[name]
        assert choice is not None
        seeds = range(FIRST_SEED, FIRST_SEED + self.arms[name])
        runs = {seed: Run(self.task, arm.method, arm.gap, choice, seed).key for seed in seeds}
        own = {seed: self._rows[key] for seed, key in runs.items() if key in self._rows}
        if figure == "gained":  # by computing BatchNorm's statistics again
            return {s: 100 * (r["recomputed_accuracy"] - r["accuracy"]) for s, r in own.items()}
        known = {s: r[figure] for s, r in own.items() if r.get(figure) is not None}
        scale = 100.0 if figure == "accuracy" else -1.0
        return {seed: scale * value for seed, value in known.items()}

    def lead(self, name: str, rival: str, figure: str) -> str:
        """Write the lead of an arm over another one, from the seeds that both have."""
        own, its = self.values(name, figure), self.values(rival, figure)
        both = sorted(own.keys() & its.keys())
        differences = [own[seed] - its[seed] for seed in both]
        return spread(interval(differences)) if both and name != rival else ""

    def comparison(self) -> Iterator[str]:
        """Write the table of the comparison, or why there is none."""
        overfitting = self.tuning.overfitting() if self.task == "texts" else None
        if overfitting is not None:
            yield (
                f"The fast device alone ends {overfitting:.3f} nats above its lowest loss; above "
                f"{OVERFITS_BY}, the arms are compared."
            )
            yield ""
        if not self.arms:
            yield "Not compared."
            return
        images = self.task == "images"
        main, unit = ("accuracy", "points") if images else ("loss", "nats")
        more = {"loss": "test loss"} if images else {"training_loss": "training loss"}
        more |= {"gained": "gained"} if images else {}
        yield (
            f"Leads in {unit}, larger is better, with 95 % intervals of paired differences. "
            + ("Test loss: how much lower than that of `alone`, in nats. Gained: what BatchNorm's "
               "statistics that are computed again add, compared with `alone`, in points."
               if images else "Training loss: how much lower than that of `alone`.")
        )  # fmt: skip
        yield ""
        yield f"| arm | pairs | mean | over alone | over random | {' | '.join(more.values())} |"
        yield "|---" * (5 + len(more)) + "|"
        for name in self.arms:
            own = list(self.values(name, main).values())
            cells = [name, str(len(own)), f"{abs(fmean(own)):.2f}" if own else ""]
            cells += [self.lead(name, rival, main) for rival in ("alone", "random")]
            cells += [self.lead(name, "alone", figure) for figure in more]
            yield "| " + " | ".join(cells) + " |"

    def choices(self) -> Iterator[str]:
        """Write what each arm has chosen."""
        yield "| arm | rate | weight decay | radius | steps | mean of tuning |"
        yield "|---|---|---|---|---|---|"
        for name, choice in self.tuning.found.items():
            if choice is None:
                continue
            mean = self.tuning.mean(name)
            values = (choice.rate, choice.weight_decay, choice.radius, choice.steps)
            shown = f"{abs(mean):.4g}" if math.isfinite(mean) else "as another arm"
            yield f"| {name} | " + " | ".join([*(f"{value:.4g}" for value in values), shown]) + " |"
        yield ""
        yield f"{len(self.tuning.rows)} runs."


def page(rows: Rows, tiny: bool) -> str:
    """Return the page of results."""
    parts = [
        "# Results of the fourth study",
        "Written by `python -m benchmarks.study.perturb --report` from the rows in `rows4/`. The "
        "questions, rules and arms: [PLAN4.md](PLAN4.md).",
    ]
    for task, title in (("images", "Images"), ("texts", "A language model, fine-tuned")):
        own = Page(task, rows, tiny)
        parts += [f"## {title}", "\n".join(own.comparison())]
        parts += ["Tuning:", "\n".join(own.choices())]
    return "\n\n".join(parts) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run what is due."""
    line = argparse.ArgumentParser(prog="python -m benchmarks.study.perturb", description=__doc__)
    add_data_option(line)
    line.add_argument(
        "--texts", type=Path, default=PRETRAINED, help="weights that texts begin with"
    )
    line.add_argument("--hours", type=float, default=24.0, help="begin no run after (default: 24)")
    line.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    line.add_argument("--list", action="store_true", help="say what is due, and run nothing")
    line.add_argument("--tiny", action="store_true", help="see that everything runs, in minutes")
    line.add_argument("--report", action="store_true", help="only write RESULTS4.md")
    given = line.parse_args(arguments)
    folder = TINY_ROWS if given.tiny else FOLDER / "rows4"
    store = Store(folder)
    if given.report:
        file = folder / "RESULTS4.md" if given.tiny else FOLDER / "RESULTS4.md"
        file.write_text(page({stage: store.read(stage) for stage in STAGES}, given.tiny))
        return 0
    if given.tiny and not given.list:
        shutil.rmtree(folder, ignore_errors=True)
    study = Study(store, required_images(given.data), given.texts, given.hours, given.tiny)
    if not given.list:
        store.append("conditions", conditions())
    for stage in given.stages:
        if stage.startswith("texts") and not given.texts.exists():
            print(f"{stage}: left out, there is no {given.texts}; benchmarks.study makes it")
        elif given.list:
            print(*(run.key for run in study.due(stage)), sep="\n")
        else:
            study.run(stage)
    return 0


if __name__ == "__main__":
    sys.exit(main())
