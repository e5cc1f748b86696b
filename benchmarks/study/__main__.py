"""Take the rows of the second study that are missing; a later call continues after this one.

``python -m benchmarks.study --data CIFAR10``. PLAN2.md says what is run and why. Stages on the wall
clock need a machine that does nothing else. Ctrl-C loses only the runs in progress.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from benchmarks.images import add_data_option, required_images
from benchmarks.taken_under import conditions
from flower_blsgd.devices.machine import usable_cores

from .arms import FAST_CORE, SLOW_CORE
from .runs import Row, Run, Store, is_due, row_of
from .stages import FULL, STAGES, TINY, Scale, read
from .tasks import Places

ROWS = Path(__file__).parent / "rows2"
TINY_ROWS = Path("runs") / "tiny-study"

Say = Callable[[str], None]


class Study:
    """The runs that are due, and how they are done.

    Parameters
    ----------
    store : Store
        Where the rows are.
    places : Places
        Where the data are.
    scale : Scale
        How large it is.
    """

    def __init__(self, store: Store, places: Places, scale: Scale) -> None:
        self.store, self.places, self.scale = store, places, scale

    def due(self, stage: str) -> list[Run]:
        """Return the runs of a stage that can be done now and have no row that counts."""
        rows = read(self.store)
        return [r for r in STAGES[stage](rows, self.scale) if is_due(r, rows[stage])]

    def run(self, stage: str, say: Say) -> None:
        """Run what is due, and what becomes due by it."""
        while due := self.due(stage):
            say(f"{stage}: {len(due)} runs, about {_hours(due):.2f} h")
            if counted := [run for run in due if run.clock == "counted"]:
                self._two_at_once(counted, say)
            else:
                self._alone(due, say)

    def _two_at_once(self, runs: Sequence[Run], say: Say) -> None:
        """Run those that need a core each."""
        free, waiting = [FAST_CORE, SLOW_CORE], list(runs)
        busy: dict[Future[Row], tuple[Run, int]] = {}
        with ThreadPoolExecutor(2) as pool:
            try:
                while waiting or busy:
                    while waiting and free:
                        run, core = waiting.pop(0), free.pop()
                        started = pool.submit(row_of, run, self.places, core)
                        busy[started] = run, core
                    for done in wait(busy, return_when=FIRST_COMPLETED).done:
                        run, core = busy.pop(done)
                        free.append(core)
                        self._keep(run, done.result(), say)
            except KeyboardInterrupt:
                say("waiting for the runs of the moment to end")
                raise

    def _alone(self, runs: Sequence[Run], say: Say) -> None:
        for run in runs:
            self._keep(run, row_of(run, self.places), say)

    def _keep(self, run: Run, row: Row, say: Say) -> None:
        self.store.append(run.stage, row)
        result = f"{row['accuracy']:.2%}" if "accuracy" in row else ""
        if "samples_per_second" in row:
            result += f" {row['samples_per_second']:.0f} samples/s"
        say(
            f"{time.strftime('%H:%M')} {run.stage}: {run.key}: {row.get('error') or result.strip()}"
        )


def _hours(runs: Sequence[Run]) -> float:
    """Return the hours of runs; those whose time is counted run two at a time."""
    seconds = sum(run.expected_seconds / (1 if run.clock == "wall" else 2) for run in runs)
    return seconds / 3600


def listing(study: Study) -> str:
    """Return what is due, in lines; of later stages as far as it is known."""
    lines = []
    for stage in STAGES:
        due = study.due(stage)
        lines += [f"  {run.key}" for run in due]
        lines.append(f"{stage}: {len(due)} runs, {_hours(due):.2f} h")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run what is due."""
    line = argparse.ArgumentParser(prog="python -m benchmarks.study", description=__doc__)
    add_data_option(line)
    line.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    line.add_argument("--list", action="store_true", help="say what is due, and run nothing")
    line.add_argument("--tiny", action="store_true", help="see that everything runs, in minutes")
    line.add_argument("--rows", type=Path, help="folder of the rows (default: beside this file)")
    given = line.parse_args(arguments)
    places = Places(required_images(given.data), given.tiny)
    store = Store(given.rows or (TINY_ROWS if given.tiny else ROWS))
    study = Study(store, places, TINY if given.tiny else FULL)
    if given.list:
        print(listing(study))
        return 0
    if not {FAST_CORE, SLOW_CORE} <= set(usable_cores()):
        raise SystemExit(f"cores {FAST_CORE} and {SLOW_CORE} are needed")
    store.append("conditions", conditions())
    for stage in given.stages:
        study.run(stage, lambda text: print(text, flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
