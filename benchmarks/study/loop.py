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
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel

from flower_blsgd import Task
from flower_blsgd.algorithm.randomness import derived_seed, generator
from flower_blsgd.worker.batches import tensor_parts
from flower_blsgd.worker.optimizer import make_optimizer, set_learning_rate

from .tasks import finished, loaded

_STEPS_BETWEEN_WORDS = 16
"""So often rank 0 tells the others how much of the budget is over; in batches, if these are
accumulated.
"""

_WARM_UP_STEPS = 5
_KEPT: list["Rank"] = []
"""See `main`: nothing of torch's may be freed before the result is written."""

_LONGEST_WAIT = timedelta(minutes=10)


@dataclass(frozen=True)
class Settings:
    """What the ranks do: a task, seeds, the rate to begin with, and a budget in seconds or steps.

    `cores`, `gaps` and `batches` are those of each rank. A rank repeats its work by its gap: a
    device that is really slower keeps computing. A batch of 0 is what a rank computes while rank 0
    does its own, rounded down, or with `nearest` to what gives more samples per second. With
    `wire`, gradients travel in float16. Only the last of `accumulate` batches is summed over
    ranks. `outer` has the steps per outer step, its rate and its Nesterov momentum. Ranks meet at
    `address`, or in the folder. The weights are written to `save`.
    """

    task: Mapping[str, Any]
    seed: int
    rate: float
    seconds: float
    cores: list[int]
    gaps: list[int]
    batches: list[int]
    steps: int = 0
    accumulate: int = 1
    sync_bn: bool = False
    nearest: bool = False
    wire: str = "float32"
    outer: tuple[int, float, float] | None = None
    folder: str = ""
    interface: str = "lo"
    address: str = ""
    save: str = ""
    rank: int = 0


class SyncBatchNorm(nn.BatchNorm2d):
    """BatchNorm over the batches of all ranks; torch's own needs a GPU."""

    group: distributed.ProcessGroup | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the normalized inputs."""
        if not (self.training and distributed.is_initialized()):
            return super().forward(inputs)
        size = inputs.new_tensor([inputs.numel() / inputs.shape[1]])
        own = torch.cat([inputs.sum((0, 2, 3)), inputs.square().sum((0, 2, 3)), size])
        *sums, count = all_reduce(own, group=self.group).split([self.num_features] * 2 + [1])
        mean, squares = (one / count for one in sums)
        variance = squares - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        factor = self.weight * (variance + self.eps).rsqrt()
        shift = self.bias - mean * factor
        return inputs * factor.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)


class Rank:
    """One device: the model, its optimizer, and the samples of its steps."""

    def __init__(self, settings: Settings, task: Task) -> None:
        self.settings, self.task = settings, task
        self.gap = settings.gaps[settings.rank]
        self.inputs, self.targets = tensor_parts(task.train) or ()
        self.net = task.initial_model(derived_seed(settings.seed, "model")).train()
        self.shadow = copy.deepcopy(self.net)
        self.forward: nn.Module = self.net
        self.optimizer = _optimizer(self.net, settings.task)
        self.generator = torch.Generator().manual_seed(
            derived_seed(settings.seed, "study-augment", settings.rank)
        )
        self.scale = 1.0
        """Of the mean loss of this rank's batch, before DDP averages over the ranks."""
        self.steps = 0
        trained = [one for one in self.net.parameters() if one.requires_grad]
        self.anchor = [one.detach().clone() for one in trained] if settings.outer else []
        if settings.outer:
            _, rate, momentum = settings.outer
            self.outer = torch.optim.SGD(self.anchor, rate, momentum, nesterov=momentum > 0)

    def join(self, batches: list[int]) -> None:
        """Become a rank of DDP, whose mean over ranks is then the gradient of the whole batch."""
        self.scale = batches[self.settings.rank] * len(batches) / sum(batches)
        group = distributed.new_group() if self.settings.sync_bn else None
        for layer in self.net.modules():
            if group and isinstance(layer, nn.BatchNorm2d):
                layer.__class__, layer.group = SyncBatchNorm, group
        self.forward = DistributedDataParallel(
            self.net, broadcast_buffers=False, gradient_as_bucket_view=True
        )
        if self.settings.wire != "float32":  # gloo has no bfloat16
            self.forward.register_comm_hook(None, fp16_compress_hook)

    def step(self, samples: Tensor) -> None:
        """Do an optimizer step on these samples."""
        self.optimizer.zero_grad()
        *before, last = samples.chunk(self.settings.accumulate)
        for part in before:
            with self.forward.no_sync():
                self._backward(part)
        self._backward(last)
        self.optimizer.step()
        self.steps += 1
        if self.settings.outer and self.steps % self.settings.outer[0] == 0:
            self._outer_step()

    def _backward(self, samples: Tensor) -> None:
        inputs, targets = self.inputs[samples], self.targets[samples]
        if self.task.augment is not None:
            inputs = self.task.augment(inputs, self.generator)
        for _ in range(self.gap - 1):
            self.task.loss(self.shadow(inputs), targets).mean().backward()
        loss = self.task.loss(self.forward(inputs), targets).mean()
        scale = self.scale / self.settings.accumulate
        (loss * scale if scale != 1 else loss).backward()

    def _outer_step(self) -> None:
        """Move the anchor by the outer optimizer, and begin from there."""
        with torch.no_grad():
            trained = (one for one in self.net.parameters() if one.requires_grad)
            pairs = list(zip(self.anchor, trained, strict=True))
            for anchor, parameter in pairs:
                anchor.grad = anchor - parameter
            self.outer.step()
            for anchor, parameter in pairs:
                parameter.copy_(anchor)

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
        while steps < 3 or time.perf_counter() - began < seconds:
            step()
            steps += 1
        measured = (time.perf_counter() - began) / steps
        self.net.load_state_dict(kept)
        self.optimizer = _optimizer(self.net, self.settings.task)
        self.generator.set_state(drawn)
        return measured


def _optimizer(net: nn.Module, task: Mapping[str, Any]) -> torch.optim.Optimizer:
    return make_optimizer(
        task.get("optimizer", "sgd"),
        [one for one in net.parameters() if one.requires_grad],
        momentum=task.get("momentum", 0.9),
        nesterov=False,
        weight_decay=task["weight-decay"],
    )


def train(settings: Settings) -> dict[str, Any]:
    """Train as one rank; return what happened, of rank 0 with what the model is worth."""
    world, number = len(settings.batches), settings.rank
    task = loaded(dict(settings.task), settings.seed)
    rank = Rank(settings, task)
    _KEPT.append(rank)
    if world > 1:
        distributed.init_process_group(
            "gloo",
            init_method=settings.address or f"file://{settings.folder}/meeting",
            rank=number,
            world_size=world,
            timeout=_LONGEST_WAIT,
        )
    batches = _batches(settings, rank)
    if world > 1:
        rank.join(batches)
    result = _trained(settings, rank, batches)
    if world > 1:
        distributed.destroy_process_group()
    if number == 0:
        result |= finished(task, rank.net)
    if settings.save:
        save_file(rank.net.state_dict(), settings.save)
    return result


def _trained(settings: Settings, rank: Rank, batches: list[int]) -> dict[str, Any]:
    """Train until the budget is over; the learning rate falls in a line to zero."""
    world, number, total = len(batches), settings.rank, sum(batches) * settings.accumulate
    first, own = sum(batches[:number]) * settings.accumulate, batches[number] * settings.accumulate
    word = torch.zeros(1, dtype=torch.float64)
    steps, share, counting_from = 0, 0.0, (0, 0.0)
    if world > 1:
        distributed.barrier()
    began = time.perf_counter()
    for samples in dealt(rank.task.num_train, total, settings.seed):
        set_learning_rate(rank.optimizer, settings.rate * (1 - share))
        rank.step(samples[first : first + own])
        steps += 1
        if settings.steps:
            share = steps / settings.steps
        elif world == 1 or steps % max(1, _STEPS_BETWEEN_WORDS // settings.accumulate) == 0:
            share = (time.perf_counter() - began) / settings.seconds
            if world > 1:
                word[0] = share
                distributed.broadcast(word, 0)
                share = word.item()
        if steps == _STEPS_BETWEEN_WORDS:
            counting_from = steps, time.perf_counter() - began
        if share >= 1:
            break
    seconds = time.perf_counter() - began
    result = {"training_seconds": seconds, "steps": steps, "samples": steps * total}
    result["batches"] = batches
    if steps > counting_from[0] > 0:  # without the first steps
        timed = seconds - counting_from[1]
        result["samples_per_second"] = (steps - counting_from[0]) * total / timed
    return result


def _batches(settings: Settings, rank: Rank) -> list[int]:
    """Return the batch of each rank; those that follow speeds are measured, all at a time."""
    batches, largest = list(settings.batches), settings.batches[0]
    if 0 not in batches:
        rank.seconds_of(batches[settings.rank], 0.0)  # warms up
        return batches
    small = max(2, largest // 8)
    few, many = rank.seconds_of(small, 1.5), rank.seconds_of(largest, 1.5)
    per_sample = max(1e-9, (many - few) / (largest - small))
    own = torch.tensor([many - per_sample * largest, per_sample], dtype=torch.float64)
    speeds = [torch.empty_like(own) for _ in batches]
    distributed.all_gather(speeds, own)
    until = (speeds[0][0] + speeds[0][1] * largest).item()
    fitting = [min(largest, max(1, int((until - s[0]) / s[1] + 1e-6))) for s in speeds]
    if settings.nearest:
        fitting = [
            max(
                (fits, min(largest, fits + 1)),
                key=lambda n: (largest + n) / max(until, (s[0] + s[1] * n).item()),
            )
            for fits, s in zip(fitting, speeds, strict=True)
        ]
    return [batch or fits for batch, fits in zip(batches, fitting, strict=True)]


def dealt(num_samples: int, total: int, seed: int) -> Iterator[Tensor]:
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
    os.environ["GLOO_SOCKET_IFNAME"] = settings.interface
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
