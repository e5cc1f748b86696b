"""Take the rows of the third study that are missing; a later call continues after this one.

``python -m benchmarks.study --data CIFAR10 --news AG_NEWS --hours 2``. PLAN3.md says what is run
and why. It needs two cores that do nothing else. Ctrl-C loses only the run in progress.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.images import add_data_option, required_images
from benchmarks.taken_under import conditions
from flower_blsgd.devices.machine import usable_cores

from .arms import FAST_CORE, SLOW_CORE
from .link import why_not
from .runs import MOST_TRIES, ROOT, FailedError, Row, Run, Store, command, done, row_of
from .stages import FULL, STAGES, TINY, Scale, due_runs, read
from .tasks import Places, settings_of

ROWS = Path(__file__).parent / "rows3"
RUNS = ROOT / "runs"
"""Where the model that was trained on the news is kept, and the rows of ``--tiny``."""

PRETRAINING = {"rate": 0.002, "batches": [16], "steps": 2500}

Say = Callable[[str], None]


class Study:
    """The runs that are due, and how they are done; none begins that would end after `hours`."""

    def __init__(self, store: Store, places: Places, scale: Scale, hours: float) -> None:
        self.store, self.places, self.scale = store, places, scale
        self.tries = 1 if places.tiny else MOST_TRIES
        self.ends_at = time.monotonic() + 3600 * hours

    def due(self, stage: str) -> list[Run]:
        """Return the runs of a stage that can be done now and have no row that counts."""
        found = due_runs(stage, read(self.store), self.scale, self.tries)
        return [run for run in found if not (run.link and why_not())]

    def run(self, stage: str, say: Say) -> bool:
        """Run what is due, and what becomes due by it; return False when the time is up."""
        while due := self.due(stage):
            say(f"{stage}: {len(due)} runs, about {_hours(due):.2f} h")
            for run in due:
                if time.monotonic() + run.expected_seconds > self.ends_at:
                    return False
                self._keep(run, row_of(run, self.places), say)
        return True

    def _keep(self, run: Run, row: Row, say: Say) -> None:
        self.store.append(run.stage, row)
        figures = ("accuracy", "loss", "samples_per_second")
        result = ", ".join(f"{name} {row[name]:.5g}" for name in figures if row.get(name))
        say(f"{time.strftime('%H:%M')} {run.key}: {row.get('error') or result}")

    def pretrain(self, say: Say) -> None:
        """Train the model on the news if its file is missing: so many steps, whatever they take."""
        file = Path(self.places.pretrained)
        if file.exists():
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        work = {
            **PRETRAINING,
            **({"steps": 5} if self.places.tiny else {}),
            "task": settings_of("news", self.places),
            **{"seed": 0, "seconds": 0, "cores": [FAST_CORE], "gaps": [1]},
            **{"folder": str(file.parent), "save": str(file)},
        }
        say(f"pretraining: {work['steps']} steps")
        try:
            row = done([command("loop", work)], file.parent, 3600.0)
        except FailedError as error:
            raise SystemExit(f"pretraining: {error}") from None
        self.store.append("pretraining", row)


def _hours(runs: Sequence[Run]) -> float:
    return sum(run.expected_seconds for run in runs) / 3600


def main(arguments: list[str] | None = None) -> int:
    """Run what is due."""
    line = argparse.ArgumentParser(prog="python -m benchmarks.study", description=__doc__)
    add_data_option(line)
    line.add_argument("--news", type=Path, required=True, help="folder of AG News as parquet files")
    line.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    line.add_argument("--hours", type=float, default=24.0, help="end in time (default: 24)")
    line.add_argument("--list", action="store_true", help="say what is due, and run nothing")
    line.add_argument("--tiny", action="store_true", help="see that everything runs, in minutes")
    line.add_argument("--rows", type=Path, help="folder of the rows (default: beside this file)")
    given = line.parse_args(arguments)
    if not given.news.is_dir():
        raise SystemExit(f"--news {given.news}: there is no such folder")
    own = RUNS / ("tiny-study3" if given.tiny else "study3")
    if given.tiny:
        shutil.rmtree(own, ignore_errors=True)
    data, news = required_images(given.data), str(given.news.resolve())
    places = Places(data, news, str(own / "news.safetensors"), given.tiny)
    store = Store(given.rows or (own if given.tiny else ROWS))
    study = Study(store, places, TINY if given.tiny else FULL, given.hours)
    if given.list:
        for stage in given.stages:  # of later ones as far as it is known
            due = study.due(stage)
            print(*(f"  {run.key}" for run in due), sep="\n")
            print(f"{stage}: {len(due)} runs, {_hours(due):.2f} h")
        return 0
    if not {FAST_CORE, SLOW_CORE} <= set(usable_cores()):
        raise SystemExit(f"cores {FAST_CORE} and {SLOW_CORE} are needed")
    store.append("conditions", conditions())

    def say(text: str) -> None:
        print(text, flush=True)

    study.pretrain(say)
    if reason := why_not():
        say(f"{reason}; its runs are left out")
    for stage in given.stages:
        if not study.run(stage, say):
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
