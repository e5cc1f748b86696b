"""Where a model can be evaluated while training goes on: on a device that nobody trains on."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .runtime.devices import WorkerSpec
from .runtime.machine import Machine

NAME = "evaluation"
"""How logs call the process that evaluates."""

_LOWEST_PRIORITY = 19
_FORWARD_SHARE = 1 / 3
"""A forward pass costs about a third of a training step."""

_MOST_BUSY = 0.5
"""Idle cores that would need a larger share of an epoch to evaluate are not worth it."""


@dataclass(frozen=True)
class AsidePlace:
    """Where to evaluate.

    Parameters
    ----------
    worker : WorkerSpec
        The device, or the cores.
    shared : bool (default: False)
        Whether workers may train on it too.
    """

    worker: WorkerSpec
    shared: bool = False

    @property
    def note(self) -> str:
        """What to tell the user."""
        device = self.worker.device_with_cores
        if self.shared:
            at = ", at the lowest priority" if self.worker.cores else ""
            return (
                "warning: evaluation aside has no device of its own: it shares "
                f"{device} with the workers of this machine{at}"
            )
        return f"evaluation aside on {device}, which no worker uses"


def idle_place(
    workers: Sequence[WorkerSpec], machine: Machine, busy_with_workers: float = 0.0
) -> AsidePlace | None:
    """Return a device that no worker uses; None if there is none.

    An accelerator, else cores: the last ones, at most as many as the fast workers have. For each
    accelerator that trains a core stays free, for its process.

    Parameters
    ----------
    workers : sequence of WorkerSpec
        Those that train.
    machine : Machine
        What there is.
    busy_with_workers : float (default: 0.0)
        The share of an epoch that evaluating takes on the fast workers' devices, see
        `evaluation_share`. Above 0 idle cores only count where they can keep up with it.
    """
    training = {worker.device for worker in workers} - {"cpu"}
    for name in machine.accelerators:
        if not any(name == device or _first_of(device, machine) == name for device in training):
            return AsidePlace(WorkerSpec(name, name=NAME))
    if busy_with_workers and training:
        return None  # a CPU does not keep up with an accelerator
    used = {core for worker in workers for core in worker.cores}
    fast = {core for worker in workers if worker.tier != "slow" for core in worker.cores} or used
    idle = [core for core in machine.cores if core not in used][len(training) :]
    cores = tuple(idle[-max(1, len(fast)) :])
    if not cores or busy_with_workers * len(fast) / len(cores) > _MOST_BUSY:
        return None
    return AsidePlace(WorkerSpec("cpu", cores, name=NAME))


def shared_place(machine: Machine, accelerator: bool = False) -> AsidePlace:
    """Return a place that workers may use too: all cores, or the first accelerator if wanted."""
    if accelerator and machine.accelerators:
        return AsidePlace(WorkerSpec(machine.accelerators[0], name=NAME), shared=True)
    return AsidePlace(WorkerSpec("cpu", machine.cores, name=NAME), shared=True)


def evaluation_share(num_train: int, num_test: int, every_epochs: int) -> float:
    """Return the seconds of an evaluation over those of the training between two, on one device.

    >>> evaluation_share(60_000, 10_000, 1)
    0.05555555555555555
    """
    return _FORWARD_SHARE * num_test / (num_train * every_epochs)


def begin_aside(setup: Callable[[], object] | None = None) -> None:
    """Prepare the process that evaluates on cores: whatever trains goes first."""
    os.nice(_LOWEST_PRIORITY)
    if setup is not None:
        setup()


def _first_of(device: str, machine: Machine) -> str:
    """Return the card that a device without a number means; empty if that is not open."""
    if ":" in device:
        return ""
    return next((n for n in machine.accelerators if n.partition(":")[0] == device), "")
