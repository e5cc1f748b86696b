"""The summary of a run: the figures of ``summary.json`` that its rounds and epochs give."""

import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..config import RunConfig
from ..round_log import RoundRecord
from ..strategy import BiasedLocalSGD
from .accounts import Accounts
from .folder import EpochRow

HARDLY = 0.01
"""A worker whose weight is below this hardly takes part."""

_PACKAGES = ("flower-blsgd", "flwr", "torch", "numpy")

_IF_USED = ("transformers",)
"""Told only where a run uses it: the names of a model's tensors depend on its version."""


def summary_of(
    config: RunConfig,
    strategy: BiasedLocalSGD,
    accounts: Accounts,
    records: Sequence[RoundRecord],
    rows: Sequence[EpochRow],
) -> dict[str, Any]:
    """Return what ``summary.json`` says; what was not measured is None.

    Parameters
    ----------
    config : RunConfig
        The settings.
    strategy : BiasedLocalSGD
        Asked for the samples given up and the workers.
    accounts : Accounts
        Of all rounds.
    records, rows : sequences
        All rounds, all epochs.
    """
    measured = [row for row in rows if row.accuracy is not None]
    accuracies = [row.accuracy for row in measured if row.accuracy is not None]
    return {
        "algorithm": config.algorithm,
        "steps": config.choices.steps,
        "sampler": config.choices.sampler,
        "weights": config.choices.weights,
        "train_on": config.choices.train_on,
        "task": config.task,
        "accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies, default=None),
        "loss": measured[-1].loss if measured else None,
        "training_seconds": accounts.training_seconds,
        "device_seconds": accounts.device_seconds,
        "clock": accounts.clock,
        "epochs": len(rows),
        "rounds": accounts.rounds,
        "samples": accounts.samples,
        "samples_given_up": strategy.planner.samples_given_up,
        "summing_seconds": accounts.summing_seconds,
        "fast_waiting_share": accounts.waiting_share(fast=True),
        "slow_waiting_share": accounts.waiting_share(fast=False),
        "workers": [_worker(strategy, accounts, index) for index in sorted(accounts.workers)],
        "failures": [
            {"round": record.round, "worker": row.label, "reason": row.failure}
            for record in records
            for row in record.workers
            if row.failure
        ],
        "versions": {"python": platform.python_version(), **_versions()},
        "seed": config.seed,
    }


def _worker(strategy: BiasedLocalSGD, accounts: Accounts, index: int) -> dict[str, Any]:
    total = accounts.workers[index]
    profile = strategy.roster.workers[index].profile
    weight = total.weight_sum / accounts.rounds
    return {
        "name": profile.name,
        "device": profile.device,
        "tier": "fast" if total.fast else "slow",
        "local_steps": total.local_steps,
        "weight": weight,
        "hardly_takes_part": weight < HARDLY,
        "seconds_per_step": total.seconds_per_step,
        "seconds_per_step_alone": accounts.seconds_per_step.get(index),
        "samples": total.num_examples,
        "batch_size": total.batch_size,
        "compute_seconds": total.compute_seconds,
        "waiting_seconds": total.waiting_seconds,
        "transfer_seconds": total.transfer_seconds,
        "failures": total.failures,
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in (*_PACKAGES, *(name for name in _IF_USED if name in sys.modules)):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a bundle, not from an installed package
            found[package] = "not installed"
    return found
