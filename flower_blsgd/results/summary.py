"""Summarise a run: the figures of ``summary.json``, and the lines that end its output."""

import os
import platform
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..strategy import BiasedLocalSGD
from ..tasks import GIVEN_IN_PYTHON
from .folder import EpochRow
from .metrics import RunMetrics

HARDLY = 0.01
"""A worker whose weight is below this hardly takes part."""

Figures = dict[str, float | str | None]
"""What the cost model predicts of a run, or the same as measured, by name."""

_PACKAGES = ("flower-blsgd", "flwr", "torch", "numpy")


def summary_of(
    config: RunConfig,
    strategy: BiasedLocalSGD,
    metrics: RunMetrics,
    rows: Sequence[EpochRow],
) -> dict[str, Any]:
    """Return what ``summary.json`` says; what was not measured is None.

    Parameters
    ----------
    config : RunConfig
        The settings.
    strategy : BiasedLocalSGD
        Knows the samples given up and the workers.
    metrics : RunMetrics
        Of all rounds.
    rows : sequence of EpochRow
        All epochs.
    """
    evaluated = [row for row in rows if row.accuracy is not None]
    accuracies = [row.accuracy for row in evaluated if row.accuracy is not None]
    return {
        "algorithm": config.algorithm,
        "steps": config.choices.steps,
        "sampler": config.choices.sampler,
        "weights": config.choices.weights,
        "train_on": config.choices.train_on,
        "task": config.task,
        "accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies, default=None),
        "loss": evaluated[-1].loss if evaluated else None,
        "training_seconds": metrics.training_seconds,
        "device_seconds": metrics.device_seconds,
        "clock": metrics.clock,
        "epochs": len(rows),
        "rounds": len(metrics.records),
        "samples": metrics.samples,
        "samples_given_up": strategy.planner.samples_given_up,
        "summing_seconds": metrics.summing_seconds,
        "fast_waiting_share": metrics.waiting_share(fast=True),
        "slow_waiting_share": metrics.waiting_share(fast=False),
        "workers": [_worker(strategy, metrics, index) for index in sorted(metrics.by_worker)],
        "failures": [
            {"round": record.round, "worker": row.label, "reason": row.failure}
            for record in metrics.records
            for row in record.workers
            if row.failure
        ],
        "versions": _versions(),
        "seed": config.seed,
    }


def _worker(strategy: BiasedLocalSGD, metrics: RunMetrics, index: int) -> dict[str, Any]:
    rows = metrics.by_worker[index]
    profile = strategy.registry.workers[index].profile
    weight = sum(row.weight for row in rows) / len(metrics.records)
    stepped = [row for row in rows if row.completed_steps]
    steps = sum(row.completed_steps for row in stepped)
    compute_seconds = sum(row.compute_seconds for row in rows)
    return {
        "name": profile.name,
        "device": profile.device,
        "tier": "fast" if rows[0].fast else "slow",
        "local_steps": rows[-1].local_steps,
        "weight": weight,
        "hardly_takes_part": weight < HARDLY,
        "seconds_per_step": compute_seconds / steps if steps else None,
        "seconds_per_step_alone": metrics.seconds_per_step.get(index),
        "samples": sum(row.num_examples for row in rows),
        "batch_size": stepped[-1].num_examples // stepped[-1].completed_steps if stepped else 0,
        "compute_seconds": compute_seconds,
        "waiting_seconds": sum(row.waiting_seconds for row in rows),
        "transfer_seconds": sum(row.transfer_seconds for row in rows),
        "failures": sum(bool(row.failure) for row in rows),
    }


def _versions() -> dict[str, str]:
    # The names of a model's tensors depend on the version of transformers.
    used = [*_PACKAGES, *(["transformers"] if "transformers" in sys.modules else [])]
    found = {"python": platform.python_version()}
    for package in used:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a bundle, not from an installed package
            found[package] = "not installed"
    return found


def measured_figures(metrics: RunMetrics) -> Figures | None:
    """Return what the cost model predicts, as measured on the run's clock.

    None without a round, or if the clock is "device" and a speed is not known.
    """
    if not metrics.records or (metrics.clock == "device" and metrics.device_seconds is None):
        return None
    last = metrics.records[-1]
    epochs = last.epoch - 1 + last.round_in_epoch / last.rounds_in_epoch
    return {
        "clock": metrics.clock,
        "round_seconds": metrics.budget_seconds / len(metrics.records),
        "epoch_seconds": metrics.budget_seconds / epochs,
        "fast_waiting_share": metrics.waiting_share(fast=True),
        "slow_waiting_share": metrics.waiting_share(fast=False),
    }


# --- the lines that end a run's output


def result_line(summary: Mapping[str, Any], folder: Path) -> str:
    """Return what a run reached, and where it is written."""
    state = "stopped early" if summary["interrupted"] else "done"
    accuracy, device_seconds = summary["accuracy"], summary["device_seconds"]
    reached = "" if accuracy is None else f"test accuracy {accuracy:.2%} "
    others = f"{summary['wall_seconds']:.1f} s with evaluation"
    if device_seconds is not None:
        others += f"; {device_seconds:.1f} s on simulated devices, computed"
    return (
        f"{state}: {reached}after {summary['training_seconds']:.1f} s of training "
        f"({others}); results in {folder}"
    )


def slow_device_line(metrics: RunMetrics, config: RunConfig, folder: Path) -> str:
    """Answer "do my slow devices help?" as far as one run can."""
    if metrics.summing_seconds:
        return (
            f"slow devices: they summed up models, for {metrics.summing_seconds:.2g} s in all, "
            "and trained on nothing"
        )
    if all(rows[0].fast for rows in metrics.by_worker.values()):
        return "slow devices: none took part, so nobody waited for one"
    longer = metrics.longer_for_slow()
    if longer is None:
        rounds = "rounds not known to be longer (clock = device needs everybody's speed)"
    else:
        rounds = f"rounds {longer:+.0%} longer for waiting for them"
        rounds += " (simulated devices)" if metrics.clock == "device" else ""
    return (
        f"slow devices: {metrics.sample_share(fast=False):.1%} of the samples, "
        f"{metrics.weight_share(fast=False):.1%} of the weight, {rounds}; "
        f"what they do to accuracy shows beside a run without them: {_fast_only(config, folder)}"
    )


def plan_line(predicted: Figures, measured: Figures) -> str:
    """Return what was predicted and what was measured in one line.

    Examples
    --------
    >>> both = {"epoch_seconds": 2.0, "fast_waiting_share": 0.05}
    >>> plan_line(both, {**both, "epoch_seconds": 2.2})
    'plan: 2 s an epoch, fast waits 5%; measured: 2.2 s (+10%), fast waits 5%'
    """

    def fast_waits(figures: Figures) -> str:
        share = figures["fast_waiting_share"]
        return f", fast waits {share:.0%}" if isinstance(share, float) else ""

    expected, took = predicted["epoch_seconds"], measured["epoch_seconds"]
    assert isinstance(expected, float)
    assert isinstance(took, float)
    return (
        f"plan: {expected:.3g} s an epoch{fast_waits(predicted)}; measured: {took:.3g} s "
        f"({took / expected - 1:+.0%}){fast_waits(measured)}"
    )


def _fast_only(config: RunConfig, folder: Path) -> str:
    """Return how to repeat the run without training on slow workers."""
    if config.task == GIVEN_IN_PYTHON:
        return "train(task, train_on='fast', sampler='uniform', ...)"
    beside = Path(sys.executable).with_name("blsgd")  # the environment may not be activated
    on_path = shutil.which("blsgd") or not beside.exists()
    blsgd = "blsgd" if on_path else shlex.quote(os.path.relpath(beside))
    command = (
        f"{blsgd} run -c {shlex.quote(str(folder / 'config.toml'))} "
        "-s train-on=fast -s sampler=uniform"
    )
    if config.out:
        command += f" -s out={shlex.quote(config.out + '-fast-only')}"
    return command
