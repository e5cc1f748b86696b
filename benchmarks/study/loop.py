"""The rivals: a PyTorch loop as one writes it by hand, alone or as a rank of torch's DDP.

``python -m benchmarks.study.loop SETTINGS``: one rank. It ends when its parent does. Rank 0 writes
``result.json``.
"""

import copy
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from flower_blsgd import Task
from flower_blsgd.algorithm.randomness import derived_seed, generator
from flower_blsgd.worker.optimizer import make_optimizer, set_learning_rate
from flower_blsgd.worker.timing import throttle

from .tasks import finished, loaded, whole

DECAYS = (0.6, 0.8)
_STEPS_BETWEEN_WORDS = 16
"""So often rank 0 tells the others how much of the budget is over."""

_WARM_UP_STEPS = 5
_KEPT: list["Rank"] = []
"""See `main`: nothing of torch's may be freed before the result is written."""

_LONGEST_WAIT = timedelta(minutes=10)


@dataclass(frozen=True)
class Settings:
    """What the ranks do.

    Parameters
    ----------
    task : mapping
        Settings that `tasks.loaded` takes.
    seed : int
        Of the weights, the order of the samples, and the augmentation.
    rate, seconds : float
        The learning rate to begin with, and the budget.
    cores : list of int
        One for each rank.
    slowdowns : list of float
        Of each rank: by how much it is slowed on purpose.
    batches : list of int
        Samples per step of each rank; 0: as many as it computes while rank 0 does its own.
    step_seconds : list of [float, float]
        Of each rank, for a clock that counts and does not measure: seconds of a step, constant and
        per sample. Empty: the wall clock.
    evaluate : bool (default: True)
        Whether the model is evaluated in the end.
    folder : str
        Where ranks meet, and the result is written.
    decay : {"steps", "linear"} (default: "steps")
        How the rate falls: times 0.1 at 60 % and at 80 % of the budget, or in a line to zero.
    channels_last : bool (default: False)
        Keep images and filters with their channels next to each other, to save hours where time
        is counted.
    rank : int
        Which one this is.
    """

    task: Mapping[str, Any]
    seed: int
    rate: float
    seconds: float
    cores: list[int]
    slowdowns: list[float]
    batches: list[int]
    step_seconds: list[list[float]] = field(default_factory=list)
    evaluate: bool = True
    folder: str = ""
    decay: str = "steps"
    channels_last: bool = False
    rank: int = 0


class Rank:
    """One device: the model, its optimizer, and the samples of its steps."""

    def __init__(self, settings: Settings, task: Task) -> None:
        self.settings, self.task = settings, task
        self.slowdown = settings.slowdowns[settings.rank]
        self.inputs, self.targets = whole(task.train)
        self.net = task.initial_model(derived_seed(settings.seed, "model")).train()
        self.layout = torch.channels_last if settings.channels_last else torch.contiguous_format
        self.net = self.net.to(memory_format=self.layout)  # type: ignore[call-overload]
        self.forward: nn.Module = self.net
        self.optimizer = _optimizer(self.net, settings.task)
        self.generator = torch.Generator().manual_seed(
            derived_seed(settings.seed, "study-augment", settings.rank)
        )
        self.scale = 1.0
        """Of the mean loss of this rank's batch, before DDP averages over the ranks."""
        self.began = 0.0
        """When this step's own computing began; the sum, which waits for others, is not slowed."""
        self.compute_seconds = 0.0

    def join(self, batches: list[int]) -> None:
        """Become a rank of DDP, whose mean over ranks is then the gradient of the whole batch."""
        self.scale = batches[self.settings.rank] * len(batches) / sum(batches)
        self.forward = DistributedDataParallel(
            self.net, broadcast_buffers=False, gradient_as_bucket_view=True
        )
        if self.slowdown > 1:
            self.forward.register_comm_hook(None, self.slowed_sum)

    def step(self, samples: Tensor) -> None:
        """Do an optimizer step on these samples."""
        self.optimizer.zero_grad()
        self._backward(samples)
        if self.forward is not self.net:
            self.began = time.perf_counter()
        self.optimizer.step()

    def _backward(self, samples: Tensor) -> None:
        inputs, targets = self.inputs[samples], self.targets[samples]
        if self.task.augment is not None:
            inputs = self.task.augment(inputs, self.generator)
        inputs = inputs.contiguous(memory_format=self.layout)
        loss = self.task.loss(self.forward(inputs), targets).mean()
        (loss * self.scale if self.scale != 1 else loss).backward()

    def seconds_of(self, batch: int, seconds: float) -> float:
        """Return the seconds of a step of so many samples, slowed as it is; nothing is changed."""
        kept, drawn = copy.deepcopy(self.net.state_dict()), self.generator.get_state()
        set_learning_rate(self.optimizer, 0.0)
        samples = torch.arange(batch) % len(self.targets)

        def step() -> None:
            self.optimizer.zero_grad()
            self._backward(samples)
            self.optimizer.step()

        for _ in range(_WARM_UP_STEPS):
            step()
        steps, began = 0, time.perf_counter()
        while steps < 3 or time.perf_counter() - began < seconds / self.slowdown:
            start = time.perf_counter()
            step()
            throttle(start, self.slowdown)
            steps += 1
        measured = (time.perf_counter() - began) / steps
        self.net.load_state_dict(kept)
        self.optimizer = _optimizer(self.net, self.settings.task)
        self.generator.set_state(drawn)
        return measured

    def slowed_sum(
        self, group: distributed.ProcessGroup | None, bucket: GradBucket
    ) -> torch.futures.Future[Tensor]:
        """Sleep as a slower device would still compute, and only then join the sum."""
        if bucket.is_last():
            throttle(self.began, self.slowdown)
            self.compute_seconds += time.perf_counter() - self.began
        return allreduce_hook(group, bucket)


def _optimizer(net: nn.Module, task: Mapping[str, Any]) -> torch.optim.Optimizer:
    return make_optimizer(
        task.get("optimizer", "sgd"),
        net.parameters(),
        momentum=task.get("momentum", 0.9),
        nesterov=False,
        weight_decay=task["weight-decay"],
    )


def train(settings: Settings) -> dict[str, Any]:
    """Train as one rank; return what happened, of rank 0 with the accuracy."""
    world, number = len(settings.batches), settings.rank
    task = loaded(dict(settings.task), settings.seed)
    rank = Rank(settings, task)
    _KEPT.append(rank)
    if world > 1:
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{settings.folder}/meeting",
            rank=number,
            world_size=world,
            timeout=_LONGEST_WAIT,
        )
    batches = _batches(settings, rank)
    if world > 1:
        rank.join(batches)
    result = _trained(settings, rank, batches)
    if world > 1:
        computing = torch.zeros(world, dtype=torch.float64)
        computing[number] = rank.compute_seconds / result["measured_seconds"]
        distributed.all_reduce(computing)
        result["computing_share_of_slowed"] = computing.max().item()
        distributed.destroy_process_group()
    if number == 0 and settings.evaluate:
        result |= finished(task, rank.net)
    return result


def _trained(settings: Settings, rank: Rank, batches: list[int]) -> dict[str, Any]:
    """Train until the budget is over."""
    world, number, total = len(batches), settings.rank, sum(batches)
    first, own = sum(batches[:number]), batches[number]
    counted = _counted_step_seconds(settings, batches)
    word = torch.zeros(1, dtype=torch.float64)
    steps, share, counting_from = 0, 0.0, (0, 0.0)
    if world > 1:
        distributed.barrier()
    began = rank.began = time.perf_counter()
    for samples in _dealt(rank.task.num_train, total, settings.seed):
        left = 1 - share if settings.decay == "linear" else 0.1 ** sum(share >= d for d in DECAYS)
        set_learning_rate(rank.optimizer, settings.rate * left)
        rank.step(samples[first : first + own])
        steps += 1
        if counted:
            share = steps * counted / settings.seconds
        elif world == 1 or steps % _STEPS_BETWEEN_WORDS == 0:
            share = (time.perf_counter() - began) / settings.seconds
            if world > 1:
                word[0] = share
                distributed.broadcast(word, 0)
                share, rank.began = word.item(), time.perf_counter()
        if steps == _STEPS_BETWEEN_WORDS:
            counting_from = steps, time.perf_counter() - began
        if share >= 1:
            break
    seconds = time.perf_counter() - began
    result = {
        "training_seconds": steps * counted or seconds,
        "measured_seconds": seconds,
        "steps": steps,
        "batches": batches,
        "samples": steps * total,
    }
    if steps > counting_from[0] > 0:  # without the first steps
        timed = seconds - counting_from[1]
        result["samples_per_second"] = (steps - counting_from[0]) * total / timed
    return result


def _batches(settings: Settings, rank: Rank) -> list[int]:
    """Return the batch of each rank; those that follow speeds are measured, all at a time."""
    batches = list(settings.batches)
    largest = batches[0]
    if settings.step_seconds:
        speeds = settings.step_seconds
    elif 0 in batches:
        small = max(2, largest // 8)
        few, many = rank.seconds_of(small, 1.5), rank.seconds_of(largest, 1.5)
        per_sample = max(1e-9, (many - few) / (largest - small))
        own = torch.tensor([many - per_sample * largest, per_sample], dtype=torch.float64)
        gathered = [torch.empty_like(own) for _ in batches]
        distributed.all_gather(gathered, own)
        speeds = [speed.tolist() for speed in gathered]
    else:
        rank.seconds_of(batches[rank.settings.rank], 0.0)  # warms up
        return batches
    until = speeds[0][0] + speeds[0][1] * largest
    fitting = [min(largest, max(2, int((until - s[0]) / s[1] + 1e-6))) for s in speeds]
    return [batch or fits for batch, fits in zip(batches, fitting, strict=True)]


def _counted_step_seconds(settings: Settings, batches: list[int]) -> float:
    """Return the seconds that a step counts as, the slowest rank's; 0 on the wall clock."""
    if not settings.step_seconds:
        return 0.0
    speeds = zip(settings.step_seconds, batches, strict=True)
    return max(constant + per_sample * batch for (constant, per_sample), batch in speeds)


def _dealt(num_samples: int, total: int, seed: int) -> Iterator[Tensor]:
    """Yield the samples of each step, from an endless stream of permutations; all ranks agree."""
    left, number = np.empty(0, np.int64), 0
    while True:
        while len(left) < total:
            permutation = generator(seed, "permutation", number).permutation(num_samples)
            left, number = np.concatenate([left, permutation]), number + 1
        yield torch.from_numpy(left[:total])
        left = left[total:]


def _end_with_parent() -> None:
    os.read(0, 1)  # not sys.stdin, whose lock would be held at exit
    os._exit(1)


def main(text: str) -> None:
    """Be one rank."""
    settings = Settings(**json.loads(text))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.sched_setaffinity(0, {settings.cores[settings.rank]})
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    result = train(settings)
    if settings.rank == 0:
        Path(settings.folder, "result.json").write_text(json.dumps(result))
    # A group of gloo that is freed joins its thread with the GIL held, for which that may wait.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
