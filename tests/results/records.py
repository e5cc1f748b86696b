"""Rounds and epochs made by hand."""

import dataclasses

from flower_blsgd.algorithm.sampling_stats import SamplingStats
from flower_blsgd.results.folder import EpochRow
from flower_blsgd.strategy.round_metrics import RoundRecord, WorkerRound


def row(worker: int = 0, fast: bool = True, **values: object) -> WorkerRound:
    label = f"{'fast' if fast else 'slow'}-{worker} (cpu:{worker})"
    return WorkerRound(worker, label, fast, **{"local_steps": 4, **values})  # type: ignore[arg-type]


def record(*workers: WorkerRound, **values: object) -> RoundRecord:
    """Return a round of 10 s; what is not given is unremarkable."""
    defaults: dict[str, object] = {
        "round": 1,
        "epoch": 1,
        "rounds_in_epoch": 2,
        "round_in_epoch": 1,
        "learning_rate": 0.1,
        "planning_seconds": 0.0,
        "round_seconds": 10.0,
        "averaging_seconds": 0.0,
        "bytes_moved": 0,
        "train_loss": 1.5,
    }
    return RoundRecord(workers=workers, **{**defaults, **values})  # type: ignore[arg-type]


def stats(**values: float) -> SamplingStats:
    figures = (1.0, 0.25, 2.0, 1.5, 1.125, 1.375, 96, 0.125, 0.25, 0.5, 1.0, 2.0, 1.75, 3.0)
    names = [field.name for field in dataclasses.fields(SamplingStats)]
    return SamplingStats(**{**dict(zip(names, figures, strict=True)), **values})  # type: ignore[arg-type]


def nothing_recorded() -> SamplingStats:
    known = {"share_never_seen": 1.0, "share_left_out": 0.25, "distinct_samples": 96}
    return stats(**dict.fromkeys(vars(stats()), float("nan")) | known)


def epoch(number: int = 1, **values: object) -> EpochRow:
    defaults: dict[str, object] = {
        "wall_seconds": 3.0 * number,
        "training_seconds": 2.0 * number,
        "device_seconds": None,
        "accuracy": 0.5,
        "loss": 1.25,
        "learning_rate": 0.1,
        "train_loss": 1.5,
        "rounds": 2 * number,
        "samples": 128 * number,
        "mean_loss_age_rounds": 0.75,
        "sampling": stats(),
    }
    return EpochRow(epoch=number, **{**defaults, **values})  # type: ignore[arg-type]


def two_rounds() -> tuple[RoundRecord, RoundRecord]:
    """Two rounds of two fast workers and a slow one, of 10 s and 6 s."""
    first = record(
        row(0, completed_steps=4, num_examples=64, weight=0.5, compute_seconds=6.0,
            waiting_seconds=3.0, transfer_seconds=1.0, momentum_zeroed=True),
        row(1, completed_steps=4, num_examples=64, weight=0.25, compute_seconds=4.0,
            waiting_seconds=5.0, transfer_seconds=1.0),
        row(2, fast=False, local_steps=1, completed_steps=1, num_examples=16, weight=0.25,
            compute_seconds=9.0, waiting_seconds=0.0, transfer_seconds=1.0),
        planning_seconds=0.5,
    )  # fmt: skip
    second = record(
        row(0, completed_steps=4, num_examples=64, weight=0.75, compute_seconds=5.0,
            waiting_seconds=0.0, transfer_seconds=1.0),
        row(1, completed_steps=0, weight=0.0, failure="the process died", failure_kind="died"),
        row(2, fast=False, local_steps=2, completed_steps=2, num_examples=32, weight=0.25,
            compute_seconds=4.0, waiting_seconds=1.0, transfer_seconds=1.0),
        round=2,
        round_in_epoch=2,
        round_seconds=6.0,
        planning_seconds=0.25,
    )  # fmt: skip
    return first, second


SPEEDS = {0: 1.0, 1: 1.25, 2: 4.0}
"""Alone, the workers of `two_rounds` need 4, 5 and 4 s, then 4 s and 8 s; 1 s and 1 s are moved."""
