r"""Seconds per epoch of CIFAR-10 / ResNet20 on a fast and a slowed device, by algorithm.

``python -m benchmarks.epoch``: our algorithms on the local grid, and the same synchronous training
by PyTorch's own DistributedDataParallel: a rank on each device, the slow one slowed by the same
rule. The competitors take turns. Each row is a multiple of biased-local-sgd: how many times longer
an epoch takes. Where the steps of the slow device follow from its speed, the speeds are calibrated
before the run.

An epoch is one pass over as many images as the row's name says; seconds of rounds are scaled to
exactly that many samples. The first epoch, in which processes start, is left out. Without
CIFAR-10 the images are made up, which changes no time. NCCL needs a GPU for each rank; gloo also
serves two ranks on one.
"""

import argparse
import json
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flower_blsgd.algorithm.catalog import ALGORITHMS
from flower_blsgd.devices.machine import Machine, this_machine
from flower_blsgd.devices.worker_spec import parse_workers

from . import ddp
from .images import add_data_option, data_text, found_images
from .noop_rounds import NotRunError, run
from .rows import Measured, Row, conditions, not_run, parser, row, write

COMPARED = (
    "biased-local-sgd",
    "fast-only-local-sgd",
    "balanced-local-sgd",
    "sync-sgd",
    "sync-sgd-fast-only",
)
QUICKLY_COMPARED = ("biased-local-sgd", "sync-sgd")
BASE = "biased-local-sgd"
SETTINGS = {
    "task": "benchmarks.images:some_images",
    "batch-size": 32,
    "learning-rate": 0.05,
    "local-steps-fast": 32,
    "local-steps-slow": "auto",
    "evaluate-every-epochs": 1000,
}
LONGEST_SECONDS = 900.0


def measure(chosen: argparse.Namespace) -> Measured:
    """Run the competitors in turn."""
    folder = found_images(chosen.data)
    data = data_text(chosen.images, folder)
    specs = parse_workers(chosen.workers)
    competitors = [*chosen.algorithms, *([] if chosen.no_ddp else ["gloo", "nccl"])]
    reasons = {name: ddp.why_not(name, specs) for name in ("gloo", "nccl")}
    seconds: dict[str, list[float]] = {}
    for _ in range(chosen.repeats):
        for name in competitors:
            if reasons.get(name):
                continue
            try:
                if name in ALGORITHMS:
                    own = epochs_of(name, chosen, data)
                else:
                    settings = ddp.Settings(chosen.workers, name, data, chosen.model, chosen.epochs)
                    own = ddp.epoch_seconds(settings, LONGEST_SECONDS)
                seconds.setdefault(name, []).extend(own)
            except NotRunError as error:
                reasons[name] = str(error)
    rows = rows_of(competitors, seconds, reasons, chosen.images)
    return rows, conditions(
        workers=chosen.workers,
        model=chosen.model,
        images="CIFAR-10" if folder else "made up",
        images_per_epoch=chosen.images,
        epochs=f"{chosen.epochs}, the first left out",
        repeats=chosen.repeats,
        settings=SETTINGS,
        seed=0,
    )


def rows_of(
    competitors: Sequence[str],
    seconds: dict[str, list[float]],
    reasons: dict[str, str | None],
    images: int,
) -> list[Row]:
    """Return a row for each competitor, as multiples of biased local SGD."""
    base = seconds.get(BASE)
    rows = []
    for name in competitors:
        shown = name if name in ALGORITHMS else f"DistributedDataParallel ({name})"
        title = f"{shown}, {images:,} images"
        if reasons.get(name):
            rows.append(not_run(title, str(reasons[name]), "s per epoch"))
        else:
            rows.append(row(title, seconds[name], "s per epoch", base, BASE if base else ""))
    return rows


def epochs_of(algorithm: str, chosen: argparse.Namespace, data: str) -> list[float]:
    """Return the seconds of every epoch but the first of a run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        settings: dict[str, Any] = {
            **SETTINGS,
            "data": data,
            "model": chosen.model,
            "workers": chosen.workers,
            "algorithm": algorithm,
            "epochs": chosen.epochs,
        }
        if not chosen.quick and ALGORITHMS[algorithm].steps == "system-aware":
            lines = blsgd("calibrate", settings).splitlines()
            settings |= tomllib.loads(next(x for x in lines if x.startswith("workers = ")))
        blsgd("run", {**settings, "out": out}, ".")
        lines = (out / "rounds.jsonl").read_text().splitlines()
        return scaled_epochs([json.loads(line) for line in lines], chosen.images)


def scaled_epochs(rounds: Iterable[dict[str, Any]], images: int) -> list[float]:
    """Return the seconds of every epoch but the first, scaled to so many samples.

    Epochs have whole rounds, so one of them may have some samples more than the next.
    """
    seconds: dict[int, float] = {}
    samples: dict[int, int] = {}
    for one in rounds:
        epoch = one["epoch"]
        took = one["planning_seconds"] + one["round_seconds"]
        seconds[epoch] = seconds.get(epoch, 0.0) + took
        trained = sum(worker["num_examples"] for worker in one["workers"])
        samples[epoch] = samples.get(epoch, 0) + trained
    first = min(seconds)
    return [seconds[epoch] * images / samples[epoch] for epoch in seconds if epoch != first]


def blsgd(command: str, settings: dict[str, Any], *arguments: str) -> str:
    """Run a command of ours with these settings; return what it prints."""
    words = [word for key, value in settings.items() for word in ("-s", f"{key}={value}")]
    return run([sys.executable, "-m", "flower_blsgd", command, *arguments, *words], LONGEST_SECONDS)


def default_workers(machine: Machine, slowdown: int = 8) -> str:
    """Return a fast and a slowed device of this machine: two GPUs, one twice, or two cores."""
    cards = [name for name in machine.accelerators if name.startswith("cuda")]
    places = cards or [f"cpu:{core}" for core in machine.cores]
    fast, slow = places[0], places[min(1, len(places) - 1)]
    return f"1x {fast} fast; 1x {slow} slow slowdown={slowdown}"


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    line = parser(__doc__)
    add_data_option(line)
    line.add_argument("--workers", help="a fast and a slowed one (default: of this machine)")
    line.add_argument("--images", type=int, help="of an epoch (default: 4096; quick: 1024)")
    line.add_argument("--model", choices=("resnet20", "resnet8"), help="quick: resnet8")
    line.add_argument("--epochs", type=int, help="of a run (default: 3; quick: 2)")
    line.add_argument("--repeats", type=int, default=1, help="turns of all (default: 1)")
    line.add_argument(
        "--algorithms", nargs="+", choices=tuple(ALGORITHMS), help="quick: biased and synchronous"
    )
    line.add_argument("--no-ddp", action="store_true", help="our own algorithms only")
    chosen = line.parse_args(arguments)
    quick = chosen.quick
    chosen.workers = chosen.workers or default_workers(this_machine())
    chosen.images = chosen.images or (1024 if quick else 4096)
    chosen.model = chosen.model or ("resnet8" if quick else "resnet20")
    chosen.epochs = chosen.epochs or (2 if quick else 3)
    chosen.algorithms = chosen.algorithms or list(QUICKLY_COMPARED if quick else COMPARED)
    if chosen.epochs < 2:
        line.error("--epochs: at least 2, since the first is left out")
    if len(parse_workers(chosen.workers)) != 2:
        line.error("--workers: a fast and a slowed worker, such as '1x cpu:0; 1x cpu:1 slowdown=8'")
    return chosen


if __name__ == "__main__":
    given = options()
    write(*measure(given), given.json)
