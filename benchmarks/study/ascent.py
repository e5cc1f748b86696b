"""One training run of the fourth study, in one process: steps are counted, and nobody waits.

``python -m benchmarks.study.ascent SETTINGS`` prints the result as JSON. What a slow device would
compute in the meantime is computed in between.
"""

import copy
import json
import math
import sys
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from flower_blsgd import Task
from flower_blsgd.algorithm.randomness import derived_seed, generator
from flower_blsgd.tasks import load_task
from flower_blsgd.worker.batches import tensor_parts
from flower_blsgd.worker.evaluation import evaluate_sums
from flower_blsgd.worker.optimizer import make_optimizer, set_learning_rate

from .loop import dealt
from .tasks import python, recompute_statistics

BATCH = {"images": 32, "texts": 16}
SAMPLES = {"images": 2500, "texts": 2048}
"""Images of 16 x 16 pixels, blocks of 64 bytes."""

VALIDATED = 10_000

_MOMENTUM = 0.9

Direction = list[Tensor] | None
Method = Literal["plain", "random", "next", "other", "sam", "averaged"]


@dataclass(frozen=True)
class Settings:
    """What a run does.

    `data` is the folder of the images, or the file of the model that continues. `validated` is
    whether the model is worth what it is on held-out training data, not on the test set. One
    direction is for `steps` steps of the fast device, each at `radius` from its weights. `method`
    says where it comes from: ``"next"`` from samples of those steps, ``"other"`` from samples that
    the slow device draws itself, ``"sam"`` from the whole batch of each step. The slow device needs
    `gap` times as long as the fast one for a sample.
    """

    task: Literal["images", "texts"]
    data: str
    method: Method
    rate: float
    seed: int
    epochs: int
    validated: bool
    weight_decay: float = 1e-4
    radius: float = 0.0
    steps: int = 1
    gap: int = 1
    max_samples: int = 0


def task_of(settings: Settings) -> Task:
    """Return a task that is small enough for the model to learn it by heart.

    Each seed has its own training samples, without augmentation.
    """
    if settings.task == "texts":
        every = python("validated" if settings.validated else "", settings.data, 0)
    else:
        every = load_task("cifar10", settings.data, "resnet8")
    most = settings.max_samples or SAMPLES[settings.task]
    inputs, targets = tensor_parts(every.train) or ()
    order = torch.from_numpy(generator(settings.seed, "study-ascent").permutation(len(targets)))
    chosen, others = order[:most], order[most : most + VALIDATED]
    task = replace(every, train=(inputs[chosen], targets[chosen]), augment=None)
    if settings.task == "texts":
        return task
    if settings.validated:
        task = replace(task, test=(inputs[others], targets[others]))
    return replace(task, train=_smaller(*task.train), test=_smaller(*tensor_parts(task.test)))


def _smaller(images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return images with half as many rows and columns, in the layout that is fastest."""
    pooled = avg_pool2d(images.float(), 2).round().to(images.dtype)
    return pooled.contiguous(memory_format=torch.channels_last), targets


class Worker:
    """A model, its optimizer, and a copy of the model to compute directions with."""

    def __init__(self, settings: Settings, task: Task) -> None:
        self.task = task
        self.inputs, self.targets = tensor_parts(task.train) or ()
        self.net = task.initial_model(derived_seed(settings.seed, "model")).train()
        if settings.task == "images":
            self.net.to(memory_format=torch.channels_last)
        self.shadow = copy.deepcopy(self.net)
        self.weights = list(self.net.parameters())
        self.optimizer = make_optimizer(
            "sgd" if settings.task == "images" else "adamw",
            self.weights,
            momentum=_MOMENTUM,
            nesterov=False,
            weight_decay=settings.weight_decay,
        )

    def _backward(self, net: nn.Module, samples: Tensor) -> None:
        self.task.loss(net(self.inputs[samples]), self.targets[samples]).mean().backward()

    @property
    def rate(self) -> float:
        """Learning rate of the next step."""
        found: float = self.optimizer.param_groups[0]["lr"]
        return found

    def set_rate(self, rate: float) -> None:
        """Set it."""
        set_learning_rate(self.optimizer, rate)

    def copy_of_weights(self) -> list[Tensor]:
        """Return the parameters as they are."""
        return [one.detach().clone() for one in self.weights]

    def gradient(self, samples: Tensor) -> list[Tensor]:
        """Return the gradient at the present weights; BatchNorm's statistics do not change."""
        own = list(self.shadow.parameters())
        with torch.no_grad():
            for copied, weight in zip(own, self.weights, strict=True):
                copied.copy_(weight)
        self.shadow.zero_grad()
        self._backward(self.shadow, samples)
        return [one.grad.clone() for one in own if one.grad is not None]

    def step(self, samples: Tensor, direction: Direction, radius: float) -> None:
        """Do a step with the gradient at `radius` from the weights, in a direction."""
        self.optimizer.zero_grad()
        if direction is None:
            self._backward(self.net, samples)
        else:
            kept = self.copy_of_weights()
            norm = torch.sqrt(sum((one.square().sum() for one in direction), torch.zeros(())))
            with torch.no_grad():
                for weight, one in zip(self.weights, direction, strict=True):
                    weight.add_(one * (radius / norm.clamp_min(1e-12)))
            self._backward(self.net, samples)
            with torch.no_grad():
                for weight, one in zip(self.weights, kept, strict=True):
                    weight.copy_(one)
        self.optimizer.step()


@dataclass(frozen=True)
class Round:
    """Samples of a round: of each of the fast device's steps, and those that the slow one draws."""

    fast: tuple[Tensor, ...]
    slow: Tensor


def rounds_of(settings: Settings, count: int) -> list[Round]:
    """Return the rounds of a run on `count` samples."""
    batch = BATCH[settings.task]
    total = settings.steps * batch
    fast = dealt(count, total, settings.seed)
    slow = dealt(count, slow_samples(settings), derived_seed(settings.seed, "study-slow"))
    number = settings.epochs * count // total
    return [Round(next(fast).split(batch), next(slow)) for _ in range(number)]


def slow_samples(settings: Settings) -> int:
    """Return how many samples the slow device manages in a round; BatchNorm needs two."""
    return max(2, settings.steps * BATCH[settings.task] // settings.gap)


def train(settings: Settings) -> dict[str, Any]:
    """Train, and return what the model is worth."""
    task = task_of(settings)
    worker = Worker(settings, task)
    other = copy.deepcopy(worker) if settings.method == "averaged" else None
    draw = torch.Generator().manual_seed(derived_seed(settings.seed, "study-random"))
    rounds = rounds_of(settings, len(worker.targets))
    last = len(rounds) * settings.steps
    tenths = {len(rounds) * part // 10 for part in range(1, 11)}
    direction: Direction = None
    curve: list[float | None] = []
    began = time.process_time()
    for number, (present, upcoming) in enumerate(pairwise([*rounds, rounds[-1]])):
        begun, found = worker.copy_of_weights(), direction
        if settings.method == "random":
            found = [torch.randn(one.shape, generator=draw) for one in begun]
        elif settings.method == "next":
            ahead = torch.cat(upcoming.fast)[:: settings.gap]
            direction = worker.gradient(ahead[: slow_samples(settings)])
        elif settings.method == "other":
            direction = worker.gradient(upcoming.slow)
        for place, samples in enumerate(present.fast, number * settings.steps):
            worker.set_rate(settings.rate * (1 - place / last))
            if settings.method == "sam":
                found = worker.gradient(samples)
            worker.step(samples, found, settings.radius)
        if other is not None:
            other.set_rate(worker.rate)
            slow = present.slow.split(BATCH[settings.task])
            for samples in slow:
                other.step(samples, None, 0.0)
            average(begun, worker, other, len(slow) / settings.steps)
        if settings.task == "texts" and number + 1 in tenths:
            curve.append(_worth(task, worker.net)["loss"])
    result: dict[str, Any] = {"cpu_seconds": time.process_time() - began, "steps": last}
    return result | _finished(task, worker.net, curve)


def average(begun: list[Tensor], fast: Worker, slow: Worker, gap_inverse: float) -> None:
    """Let each sample of both count the same, as ``weights = "per-sample"`` does.

    Both began at `begun`. Buffers are averaged by steps, of which the slow one did `gap_inverse` of
    those of the fast one.
    """
    share = 1 / (1 + gap_inverse)
    with torch.no_grad():
        for start, own, its in zip(begun, fast.weights, slow.weights, strict=True):
            own.copy_(start + share * ((own - start) + (its - start)))
            its.copy_(own)
        for own, its in zip(fast.net.buffers(), slow.net.buffers(), strict=True):
            if own.is_floating_point():
                own.lerp_(its, 1 - share)
            its.copy_(own)


def _finished(task: Task, net: nn.Module, curve: list[float | None]) -> dict[str, Any]:
    """Return what the model is worth, on the training samples too.

    Models with BatchNorm also with statistics that are computed again; a model for texts with its
    loss after each tenth of the run.
    """
    found: dict[str, Any] = _worth(task, net)
    trained = _worth(replace(task, test=task.train), net)
    found |= {f"training_{name}": value for name, value in trained.items()}
    if curve:
        return found | {"curve": curve}
    recompute_statistics(task, net)
    return found | {f"recomputed_{name}": value for name, value in _worth(task, net).items()}


def _worth(task: Task, net: nn.Module) -> dict[str, float | None]:
    size = task.evaluation_batch_size or 1024
    report = evaluate_sums(net, task.test, task.loss, task.metric, batch_size=size)
    net.train()
    found = {"loss": report.loss if math.isfinite(report.loss) else None}
    if task.metric_name == "accuracy":
        found["accuracy"] = task.figure(report)
    return found


def main(text: str) -> None:
    """Do one run."""
    settings = Settings(**json.loads(text))
    torch.set_num_threads(1)
    print(json.dumps(train(settings)))


if __name__ == "__main__":
    main(sys.argv[1])
