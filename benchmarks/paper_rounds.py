"""One round of each of the paper's configs, with real models and shapes on made-up data.

``python -m benchmarks.paper_rounds [CONFIG...]``: each config runs as its user would start it,
``blsgd run . -c CONFIG``, with fresh weights, random samples of the shape of the real ones, and
all fast workers on the GPUs that are there. The round is the first one: it includes what a worker
does once, such as recording a CUDA graph. Memory is looked at four times a second.

Without a GPU only the configs that are named run, with a fast and a slow worker on the CPU: a
round of real batches takes hours there. ``--tiny-batches``: real models with two samples a step
and two steps of fast workers. ``--quick``: that with narrow models. Exit code 1: some config was
not run.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from flower_blsgd.config import RunConfig
from flower_blsgd.devices.machine import Machine, this_machine
from flower_blsgd.devices.worker_spec import parse_workers
from flower_blsgd.errors import UsageError, nearest

from .made_up_data import make_up
from .memory_watch import Peak, memory_watched
from .noop_rounds import LONGEST_REASON, ROOT, NotRunError, run
from .rows import Measured, Row, conditions, not_run, parser, row, write

SETTINGS = ("2c8g", "1c1g")
TASKS = ("cifar10", "flowers102", "ag-news", "cifar100", "tiny-imagenet")
CONFIGS = tuple(f"{task}-{setting}" for setting in SETTINGS for task in TASKS)
"""Those that take longest come last, so that a time limit costs the fewest."""

NARROW = {
    "cifar10": "resnet8",
    "cifar100": "wrn-10-1",
    "flowers102": "wrn-10-1",
    "tiny-imagenet": "vit-micro-16",
    "ag-news": "distilbert-micro",
}
"""Models of ``--quick``."""

WITH_PUBLISHED_WEIGHTS = ("tiny-imagenet", "ag-news")
"""Tasks whose models would ask the HF hub; the others refuse `pretrained`."""

ONE_ROUND = {"seconds": 1e-6, "clock": "wall"}
TINY = {"batch-size": 2, "local-steps-fast": 2}
ON_A_CPU = "1x cpu fast; 1x cpu slow"
TEST_SAMPLES = 64
SHORTEST_SECONDS = 5.0

_PAPER_MACHINE = tuple(f"cuda:{card}" for card in range(8))


@dataclasses.dataclass(frozen=True)
class PaperRound:
    """One round of a config.

    Parameters
    ----------
    name : str
        The config.
    settings : dict
        What is set beside it.
    config : RunConfig
        Both together.
    samples : int
        That its workers train on.
    """

    name: str
    settings: dict[str, Any]
    config: RunConfig
    samples: int

    @classmethod
    def of(cls, name: str, cards: int, tiny: bool = False, narrow: bool = False) -> "PaperRound":
        """Return the round of a config on so many CUDA devices; without one on the CPU."""
        table = tomllib.loads((ROOT / "configs" / f"{name}.toml").read_text())
        fast, slow = tiers_of(table["workers"]) if cards else (1, 1)
        settings: dict[str, Any] = {**ONE_ROUND, "workers": ON_A_CPU}
        if cards:
            used = "0" if min(cards, fast) == 1 else f"0-{min(cards, fast) - 1}"
            settings["workers"] = f"{fast}x cuda:{used} fast; {slow}x cpu slow"
        if tiny:
            settings |= TINY
        if narrow:
            settings["model"] = NARROW[table["task"]]
        fresh = {"pretrained": False} if table["task"] in WITH_PUBLISHED_WEIGHTS else {}
        config = RunConfig.from_run_config({**table, **settings, **fresh})
        steps = fast * int(config.local_steps_fast) + slow * int(config.local_steps_slow)
        return cls(name, {**settings, **fresh}, config, steps * config.batch_size)

    @property
    def title(self) -> str:
        """How its rows begin."""
        return f"{self.name}, {self.config.model}, B {self.config.batch_size}"

    def command(self, out: Path) -> list[str]:
        """Return what its user would type."""
        settings = {**self.settings, "out": out}
        said = {k: str(v).lower() if isinstance(v, bool) else v for k, v in settings.items()}
        words = [word for key, value in said.items() for word in ("-s", f"{key}={value}")]
        return [sys.executable, "-m", "flower_blsgd", "run", ".", "-c", self.name, *words]


def tiers_of(workers: str) -> tuple[int, int]:
    """Return how many fast and slow workers there are, on a machine like the paper's."""
    specs = parse_workers(workers, Machine(this_machine().cores, _PAPER_MACHINE))
    fast = sum(spec.tier == "fast" for spec in specs)
    return fast, len(specs) - fast


def measure(chosen: argparse.Namespace) -> Measured:
    """Run the configs, one after another."""
    cards = torch.cuda.device_count()
    ends_at = time.monotonic() + chosen.seconds
    rows: list[Row] = []
    stopped = ""
    for name in chosen.configs or CONFIGS:
        one = PaperRound.of(name, cards, chosen.tiny_batches or chosen.quick, chosen.quick)
        reason = stopped
        if not (cards or chosen.configs or chosen.tiny_batches or chosen.quick):
            reason = "no CUDA device here; name the config, or --tiny-batches"
        try:
            if reason:
                raise NotRunError(reason)
            rows += rows_of_run(one, ends_at - time.monotonic())
        except (NotRunError, UsageError) as error:
            rows.append(not_run(f"{one.title}: first round", str(error), "s"))
        except KeyboardInterrupt:  # what was measured so far is written all the same
            stopped = "interrupted"
            rows.append(not_run(f"{one.title}: first round", stopped, "s"))
    return rows, conditions(
        cards=cards,
        data="made up",
        weights="fresh",
        batches="tiny" if chosen.tiny_batches or chosen.quick else "the paper's",
        models="narrow" if chosen.quick else "the paper's",
        settings=ONE_ROUND,
        memory_looked_at="every 0.25 s",
        seed=0,
    )


def rows_of_run(one: PaperRound, longest_seconds: float) -> list[Row]:
    """Run a round in processes of its own, and return its rows.

    Raises
    ------
    NotRunError
        If it failed, or took longer.
    UsageError
        If its data cannot be made up.
    """
    if longest_seconds < SHORTEST_SECONDS:
        raise NotRunError("no time was left for it")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        cache, out = Path(folder) / "cache", Path(folder) / "run"
        began = time.monotonic()
        make_up(cache, one.config, one.samples + one.config.batch_size, TEST_SAMPLES)
        # Whatever is missing in the cache is an error, never a download.
        stack.enter_context(patch.dict(os.environ, BLSGD_CACHE=str(cache), HF_HUB_OFFLINE="1"))
        peak = stack.enter_context(memory_watched(os.getpid()))
        run(one.command(out), longest_seconds - (time.monotonic() - began))
        first = json.loads((out / "rounds.jsonl").read_text().splitlines()[0])
    return rows_of(one.title, first, peak)


def rows_of(title: str, first: dict[str, Any], peak: Peak) -> list[Row]:
    """Return the rows of a round.

    Parameters
    ----------
    title : str
        How they begin.
    first : dict
        The line of the round in ``rounds.jsonl``.
    peak : Peak
        Of the whole run.

    Raises
    ------
    NotRunError
        If one of its workers failed.
    """
    workers = first["workers"]
    failed = [f"{w['label']}: {w['failure']}" for w in workers if w["failure"]]
    if failed:
        reason = " ".join(failed[0].split())[:LONGEST_REASON]
        raise NotRunError(f"{len(failed)} of {len(workers)} workers failed; {reason}")
    fast, slow = ([w for w in workers if w["fast"] is tier] for tier in (True, False))
    took = first["planning_seconds"] + first["round_seconds"]
    said = f"{title}: first round, {len(fast)} + {len(slow)} workers"
    against = seconds_per_step(fast)
    rows = [
        row(said, [took], "s"),
        row(f"{title}: step of a fast worker ({devices_of(fast)})", against, "s"),
        row(
            f"{title}: step of a slow worker ({devices_of(slow)})",
            seconds_per_step(slow),
            "s",
            against,
            "fast",
        ),
    ]
    if peak.card_bytes:
        rows.append(row(f"{title}: most memory taken on a card", [peak.card_bytes / 1e9], "GB"))
    if peak.host_bytes:
        host = f"{title}: most host memory of all its processes (PSS)"
        rows.append(row(host, [peak.host_bytes / 1e9], "GB"))
    return rows


def seconds_per_step(workers: Iterable[dict[str, Any]]) -> list[float]:
    """Return those of each worker: mean over its steps of the round."""
    return [worker["compute_seconds"] / worker["completed_steps"] for worker in workers]


def devices_of(workers: Iterable[dict[str, Any]]) -> str:
    """Return the kinds of their devices; a label is such as ``fast-0 (cpu:0)``."""
    places = (worker["label"].partition("(")[2].rstrip(")") for worker in workers)
    return ", ".join(sorted({place.partition(":")[0] for place in places}))


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    line = parser(__doc__)
    line.add_argument(
        "configs", nargs="*", metavar="CONFIG", help="2c8g, 1c1g, or a single one (default: all)"
    )
    line.add_argument(
        "--tiny-batches", action="store_true", help="real models, batches of 2, 2 fast steps"
    )
    line.add_argument("--seconds", type=float, default=3600.0, help="of all (default: 3600)")
    chosen = line.parse_args(arguments)
    configs = []
    for name in chosen.configs:
        found = [one for one in CONFIGS if name in (one, one.rpartition("-")[2])]
        if not found:
            line.error(f"{name}: no such config; {nearest(name, (*SETTINGS, *CONFIGS))}")
        configs += found
    chosen.configs = configs
    return chosen


if __name__ == "__main__":
    given = options()
    measured, taken_under = measure(given)
    write(measured, taken_under, given.json)
    sys.exit(any(one["value"] is None for one in measured))
