"""The last lines of a run: what it reached, and whether the slow devices help."""

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..tasks import GIVEN_IN_PYTHON
from .accounts import Accounts


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


def slow_device_line(accounts: Accounts, config: RunConfig, folder: Path) -> str:
    """Answer "do my slow devices help?" as far as one run can."""
    if accounts.summing_seconds:
        return (
            f"slow devices: they added up models, for {accounts.summing_seconds:.2g} s in all, "
            "and trained on nothing"
        )
    if not any(not total.fast for total in accounts.workers.values()):
        return "slow devices: none took part, so nobody waited for one"
    longer = accounts.longer_for_slow()
    if longer is None:
        rounds = "rounds not known to be longer (clock = device needs everybody's speed)"
    else:
        rounds = f"rounds {longer:+.0%} longer for waiting for them"
        rounds += " (simulated devices)" if accounts.clock == "device" else ""
    return (
        f"slow devices: {accounts.sample_share(fast=False):.1%} of the samples, "
        f"{accounts.weight_share(fast=False):.1%} of the weight, {rounds}; "
        f"what they do to accuracy shows beside a run without them: {_fast_only(config, folder)}"
    )


def _fast_only(config: RunConfig, folder: Path) -> str:
    """Return how the same is done without training on slow workers."""
    if config.task == GIVEN_IN_PYTHON:
        return "train(task, train_on='fast', sampler='uniform', ...)"
    command = (
        f"{_blsgd()} run -c {shlex.quote(str(folder / 'config.toml'))} "
        "-s train-on=fast -s sampler=uniform"
    )
    if config.out:
        command += f" -s out={shlex.quote(config.out + '-fast-only')}"
    return command


def _blsgd() -> str:
    """Return how the command is called from here: the environment may not be activated."""
    beside = Path(sys.executable).with_name("blsgd")
    if shutil.which("blsgd") or not beside.exists():
        return "blsgd"
    return shlex.quote(os.path.relpath(beside))
