"""Under which conditions runs were made; where they differ, which runs had which."""

from collections.abc import Callable, Sequence
from itertools import groupby
from statistics import fmean

from .finished_run import FinishedRun

_OWN = {
    *(
        "name",
        "out",
        "data",
        "profile",
        "algorithm",
        "seed",
    ),  # a run's own, or a path of this machine
    *("task", "model", "batch-size", "epochs", "seconds", "workers", "clock", "validation-share"),
}
"""Settings that are told elsewhere, or not at all."""

_CLOCKS = {
    "wall": "wall (waiting as measured)",
    "device": "device (waiting as on simulated devices, computed)",
}


def headline(runs: Sequence[FinishedRun]) -> str:
    """Return task, budget and seeds: ``"digits, 15 epochs, 3 seeds"``."""
    seeds = sorted({run.seed for run in runs})
    number = f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds"
    return ", ".join([_values(runs, lambda r: r.task), _values(runs, _budget), number])


def conditions(runs: Sequence[FinishedRun]) -> dict[str, str]:
    """Return the conditions by name; neither paths nor host names are among them."""
    told = {
        "task": varied(runs, lambda run: run.task),
        "model": varied(runs, lambda run: str(run.settings.get("model") or "the task's own")),
        "workers": varied(runs, _workers),
        "local steps of a round": varied(runs, _local_steps),
        "batch size": varied(runs, lambda run: str(run.settings.get("batch-size", "not known"))),
        "budget": varied(runs, _whole_budget),
        "seeds": seeds_text(runs),
        "accuracy measured on": varied(runs, _measured_on),
        "samples trained on": _samples(runs),
        "clock": varied(runs, lambda run: _CLOCKS.get(run.clock, run.clock)),
        "versions": varied(
            runs, lambda run: ", ".join(f"{k} {v}" for k, v in run.versions.items())
        ),
    }
    failed = [f"{run.failures} of {_named(run)}" for run in runs if run.failures]
    if failed:
        told["answers of workers that did not count"] = ", ".join(failed)
    for key in sorted({key for run in runs for key in run.settings} - _OWN):
        text = _setting(key)
        if len({text(run) for run in runs}) > 1:
            told[key] = varied(runs, text)
    return told


def varied(runs: Sequence[FinishedRun], describe: Callable[[FinishedRun], str]) -> str:
    """Return what all runs have in common; else each variant with the runs that have it.

    An algorithm stands for all its seeds where they agree.
    """
    variants = list(dict.fromkeys(describe(run) for run in runs))
    if len(variants) == 1:
        return variants[0]
    by_algorithm: dict[str, set[str]] = {}
    for run in runs:
        by_algorithm.setdefault(run.algorithm, set()).add(describe(run))
    parts = []
    for variant in variants:
        names = [
            run.algorithm if len(by_algorithm[run.algorithm]) == 1 else _named(run)
            for run in runs
            if describe(run) == variant
        ]
        parts.append(f"{variant} ({', '.join(dict.fromkeys(names))})")
    return "; ".join(parts)


def _setting(key: str) -> Callable[[FinishedRun], str]:
    return lambda run: str(run.settings.get(key, "not set"))


def _budget(run: FinishedRun) -> str:
    seconds = run.settings.get("seconds")
    if seconds:
        where = "on simulated devices" if run.clock == "device" else "of training"
        return f"{seconds:g} s {where}"
    return _epochs(run)


def _whole_budget(run: FinishedRun) -> str:
    most = f" ({_epochs(run)} at most)" if run.settings.get("seconds") else ""
    return _budget(run) + most


def _epochs(run: FinishedRun) -> str:
    epochs = run.settings.get("epochs", "?")
    return f"{epochs} epoch" if epochs == 1 else f"{epochs} epochs"


def _values(runs: Sequence[FinishedRun], describe: Callable[[FinishedRun], str]) -> str:
    return " / ".join(dict.fromkeys(describe(run) for run in runs))


def seeds_text(runs: Sequence[FinishedRun]) -> str:
    """Return ``"0, 1, 2"``; who has which, where that differs."""
    by_algorithm: dict[str, list[int]] = {}
    for run in runs:
        by_algorithm.setdefault(run.algorithm, []).append(run.seed)
    return varied(runs, lambda run: ", ".join(map(str, sorted(by_algorithm[run.algorithm]))))


def _samples(runs: Sequence[FinishedRun]) -> str:
    by_algorithm: dict[str, list[int]] = {}
    for run in runs:
        by_algorithm.setdefault(run.algorithm, []).append(run.samples)
    return varied(runs, lambda run: f"{fmean(by_algorithm[run.algorithm]):,.0f}")


def _workers(run: FinishedRun) -> str:
    """Return ``"2 fast (cpu:0, cpu:1) + 1 slow (cpu:2)"``."""
    parts = []
    for tier, members in groupby(run.workers, key=lambda worker: worker.tier):
        devices = [worker.device for worker in members]
        parts.append(f"{len(devices)} {tier} ({', '.join(dict.fromkeys(devices))})")
    return " + ".join(parts)


def _local_steps(run: FinishedRun) -> str:
    """Return ``"32 fast, 8 slow"``."""
    alike = dict.fromkeys((worker.local_steps, worker.tier) for worker in run.workers)
    return ", ".join(f"{steps} {tier}" for steps, tier in alike)


def _measured_on(run: FinishedRun) -> str:
    share = run.settings.get("validation-share")
    if share:
        return f"{share:.0%} of the training data, held out (not on the test set)"
    return "the whole test set"


def _named(run: FinishedRun) -> str:
    return f"{run.algorithm} seed {run.seed}"
