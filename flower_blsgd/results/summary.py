"""The content of ``summary.json``, and the lines that end a run's output."""

import os
import platform
import shlex
import shutil
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..devices.interpreter import installed
from ..protocol import WorkerProfile
from ..strategy.biased_local_sgd import BiasedLocalSGD
from ..strategy.cost_model import NEGLIGIBLE
from ..strategy.round_metrics import WorkerRound
from ..strategy.workers import STARTING
from .folder import EpochRow, shown_late
from .metric import Metric, value_in
from .round_totals import Figures, RunMetrics
from .tables import brief, counted

_FAILURE = ("round", "worker", "kind", "reason")
_PACKAGES = ("flower-blsgd", "flwr", "torch", "numpy")


def summary_of(
    config: RunConfig, strategy: BiasedLocalSGD, metrics: RunMetrics, epochs: Sequence[EpochRow]
) -> dict[str, Any]:
    """Return the part of ``summary.json`` on rounds, epochs and workers; None where not measured.

    In finished rounds ``samples_planned = samples + samples_given_up + samples_cut_off``.
    """
    evaluated = [row for row in epochs if row.value is not None]
    last = evaluated[-1] if evaluated else None
    rows = [(record.round, row) for record in metrics.records for row in record.workers]
    by_worker: dict[int, list[WorkerRound]] = {}
    for _, row in rows:
        if row.trained:
            by_worker.setdefault(row.worker, []).append(row)
    failures = [
        (0, worker.label, kind, worker.start_failure)
        for worker in strategy.registry.workers
        for kind in worker.failures
        if kind.endswith(STARTING)
    ]
    failures += [
        (number, row.label, row.failure_kind, row.failure) for number, row in rows if row.failure
    ]
    return {
        "algorithm": config.algorithm,
        "steps": config.choices.steps,
        "sampler": config.choices.sampler,
        "weights": config.choices.weights,
        "train_on": config.choices.train_on,
        "task": config.task,
        "accuracy": last and last.accuracy,
        "metric": last and last.metric,
        "loss": last and last.loss,
        "training_seconds": metrics.training_seconds,
        "device_seconds": metrics.device_seconds,
        "clock": metrics.clock,
        "epochs": len(epochs),
        "rounds": len(metrics.records),
        "samples": metrics.samples,
        "samples_planned": strategy.planner.samples_planned_so_far,
        "samples_given_up": strategy.planner.samples_given_up,
        "samples_cut_off": strategy.planner.progress.samples_cut_off,
        "async_evaluation": _async_evaluation(config, strategy, epochs),
        "mean_loss_age_rounds": epochs[-1].mean_loss_age_rounds if epochs else None,
        "summing_seconds": sum(row.summing_seconds for _, row in rows),
        "fast_waiting_share": metrics.waiting_share(fast=True),
        "slow_waiting_share": metrics.waiting_share(fast=False),
        "workers": [
            _worker(strategy.registry.workers[index].profile, its, metrics, config)
            for index, its in sorted(by_worker.items())
        ],
        "failures": [dict(zip(_FAILURE, failure, strict=True)) for failure in failures],
        "failures_by_worker": {
            worker.label: dict(Counter(worker.failures))
            for worker in strategy.registry.workers
            if worker.failures
        },
        "versions": versions(),
        "seed": config.seed,
    }


def _async_evaluation(
    config: RunConfig, strategy: BiasedLocalSGD, epochs: Sequence[EpochRow]
) -> dict[str, Any] | None:
    """Return figures of the workers with ``role=evaluate``; None without such a worker."""
    workers = [worker.label for worker in strategy.registry.workers if not worker.trains]
    late = [row.late for row in epochs if row.late]
    due = [row for row in epochs if row.epoch % config.evaluate_every_epochs == 0]
    means = [statistics.fmean(values) for values in zip(*late, strict=True)]
    if not workers:
        return None
    return {
        "workers": workers,
        "results": len(late),
        "without_result": sum(row.value is None for row in due),
        "mean_rounds_late": means[0] if late else None,
        "mean_seconds_late": means[1] if late else None,
    }


def _worker(
    profile: WorkerProfile, rows: Sequence[WorkerRound], metrics: RunMetrics, config: RunConfig
) -> dict[str, Any]:
    stepped = [row for row in rows if row.completed_steps]
    steps = sum(row.completed_steps for row in stepped)
    compute_seconds = sum(row.compute_seconds for row in rows)
    weight = sum(row.weight for row in rows) / len(metrics.records)
    return {
        "name": profile.name,
        "device": profile.device,
        "tier": "fast" if rows[-1].fast else "slow",
        "local_steps": rows[-1].local_steps,
        "weight": weight,
        "negligible": weight < NEGLIGIBLE,
        "seconds_per_step": compute_seconds / steps if steps else None,
        "seconds_per_step_alone": metrics.seconds_per_step.get(rows[0].worker),
        "samples": sum(row.num_examples for row in rows),
        "batch_size": stepped[-1].num_examples // stepped[-1].completed_steps if stepped else 0,
        "precision": None if config.is_script else profile.precision or config.precision,
        "compute_seconds": compute_seconds,
        "waiting_seconds": sum(row.waiting_seconds for row in rows),
        "transfer_seconds": sum(row.transfer_seconds for row in rows),
        "failures": sum(bool(row.failure) for row in rows),
        "momentum_zeroed": sum(row.momentum_zeroed for row in rows),
        "skipped_steps": sum(row.skipped_steps for row in rows),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a run's results depend on."""
    # The names of a model's tensors depend on transformers.
    used = [*_PACKAGES, *(["transformers"] if "transformers" in sys.modules else [])]
    return {"python": platform.python_version(), **installed(used)}


# --- the lines that end a run's output


def final_line(summary: Mapping[str, Any], config: RunConfig, folder: Path) -> str:
    """Return the line with the results: ``"done: test accuracy 98.33% after 3.3 s ..."``."""
    state = "stopped early" if summary["interrupted"] else "done"
    device_seconds = summary["device_seconds"]
    metric = Metric.of(summary, config.validation_share)
    final = metric.named(value_in(summary))
    reached = final and f"{metric.split} {final} "
    others = f"{summary['wall_seconds']:.1f} s with evaluation"
    if device_seconds is not None:
        others += f"; {device_seconds:.1f} s on simulated devices, computed"
    return (
        f"{state}: {reached}after {summary['training_seconds']:.1f} s of training "
        f"({others}); results in {folder}"
    )


def failures_line(failures: Mapping[str, Mapping[str, int]]) -> str:
    """Return ``"failures: fast-0 (cpu:0) died 2, late 1; slow-1 (cpu:1) raised 3"``."""
    kinds = {name: ", ".join(f"{k} {n}" for k, n in its.items()) for name, its in failures.items()}
    return "failures: " + "; ".join(f"{name} {text}" for name, text in kinds.items())


def last_lines(
    summary: Mapping[str, Any], metrics: RunMetrics, config: RunConfig, folder: Path
) -> list[str]:
    """Return the last lines of a run: its results, whether slow devices help, failures, the plan.

    The summary is the content of ``summary.json``; the folder is the results folder.
    """
    lines = [final_line(summary, config, folder)]
    if metrics.records:
        brought, *compare = _slow_devices(summary, metrics, config, folder)
        lines += [f"slow devices: {brought}", *(f"  {line}" for line in compare)]
        lines += [f"  {line}" for line in summary["slow_devices"]]
    if found := summary["async_evaluation"]:
        busy = brief(summary["async_evaluation_seconds"], 2)
        parts = [
            f"async evaluation: {', '.join(found['workers'])} computed for {busy} s; "
            f"{counted(found['results'], 'result')}"
        ]
        if found["results"]:
            late = found["mean_rounds_late"], found["mean_seconds_late"]
            parts.append(f"{shown_late(late)} late on average")
        if found["without_result"]:
            parts.append(f"{counted(found['without_result'], 'epoch')} without a result")
        lines.append(", ".join(parts))
    if failed := summary["failures_by_worker"]:
        lines.append(failures_line(failed))
    if summary["predicted"] and summary["measured"]:
        lines.append(plan_line(summary["predicted"], summary["measured"]))
    return lines


def _slow_devices(
    summary: Mapping[str, Any], metrics: RunMetrics, config: RunConfig, folder: Path
) -> list[str]:
    """Answer "do my slow devices help?" as far as one run can."""
    if seconds := summary["summing_seconds"]:
        return [f"they only summed models, for {brief(seconds, 2)} s in total"]
    rows = (row for record in metrics.records for row in record.workers)
    slow = [row for row in rows if row.trained and not row.fast]
    if not slow:
        return ["none trained"]
    samples = sum(row.num_examples for row in slow) / max(1, metrics.samples)
    brought = f"{samples:.1%} of the samples"
    longer = metrics.longer_for_slow()
    if longer is None:
        brought += "; what they bring is unknown (clock = device needs all speeds)"
    elif samples < 1:
        times = 1 / ((1 - samples) * (1 + longer))
        simulated = " (simulated devices)" if metrics.clock == "device" else ""
        brought += f", {times:.2f} times the samples per second of the fast ones alone{simulated}"
    return [brought, f"to compare the accuracy without them: {_fast_only(config, folder)}"]


def _fast_only(config: RunConfig, folder: Path) -> str:
    """Return the command that repeats the run without the slow workers."""
    if config.objects:
        return train_call(config, "train_on='fast'", "sampler='uniform'", "...")
    words = ["-c", str(folder / "config.toml"), "-s", "train-on=fast", "-s", "sampler=uniform"]
    words += ["-s", f"out={config.out}-fast-only"] if config.out else []
    return blsgd_command(config, *words)


def train_call(config: RunConfig, *arguments: str) -> str:
    """Return a call of `train` for a run whose parts were given as objects."""
    task = "task" if "task" in config.objects else repr(config.task)
    named = {argument.partition("=")[0] for argument in arguments}
    parts = [f"{name}=..." for name in config.objects if name not in ("task", *named)]
    return f"train({', '.join([task, *arguments, *parts])})"


def blsgd_command(config: RunConfig, *words: str) -> str:
    """Return a command line of ``blsgd run``, or ``blsgd launch`` if a script was trained.

    It works without an activated environment.
    """
    blsgd = shutil.which("blsgd") and "blsgd"
    blsgd = blsgd or os.path.relpath(Path(sys.executable).with_name("blsgd"))
    if config.is_script:
        of_module = config.task.startswith("-m ")
        script = config.task.split(" ", 1) if of_module else [config.task]
        return shlex.join([blsgd, "launch", *words, *script]) + " ..."
    return shlex.join([blsgd, "run", *words])


def plan_line(predicted: Figures, measured: Figures) -> str:
    """Return ``"plan: 2 s per epoch, fast waits 5%; measured: 2.2 s (+10%), fast waits 5%"``."""
    waits = [
        "" if share is None else f", fast waits {share:.0%}"
        for share in (predicted["fast_waiting_share"], measured["fast_waiting_share"])
    ]
    expected, took = predicted["epoch_seconds"], measured["epoch_seconds"]
    return (
        f"plan: {brief(expected)} s per epoch{waits[0]}; measured: {brief(took)} s "
        f"({took / expected - 1:+z.0%}){waits[1]}"
    )
