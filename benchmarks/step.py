"""LocalSGD against a hand-written PyTorch loop: the same steps, the same data, the same threads.

Competitors take turns within one run. A turn is one order of 32 steps; what LocalSGD does more
(load the global model, keep every sample's loss, copy the result) is part of its turn. A ratio of
the speeds is taken for each pair of turns, since a shared machine changes its mind.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict
from torch import Tensor, nn

from flower_blsgd import LocalSGD, TrainOrder
from flower_blsgd.tasks.augmentation import random_crop_and_flip
from flower_blsgd.tasks.models import resnet20
from flower_blsgd.worker.model_state import state_record

from .rows import Row, conditions, main, row

BATCH_SIZE = 32
STEPS = 32
SAMPLES = 4096
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.01, 0.9, 1e-4


def measure(quick: bool) -> tuple[list[Row], dict[str, Any]]:
    """Measure with one thread and with all cores."""
    turns = 3 if quick else 11
    rows: list[Row] = []
    devices = [("cpu", threads) for threads in (1, torch.get_num_threads())]
    if torch.cuda.is_available():
        devices.append(("cuda", 1))
    for device, threads in dict.fromkeys(devices):
        torch.set_num_threads(threads)
        name = device if device != "cpu" else f"cpu, {threads} thread{'s' * (threads > 1)}"
        rows += pair(name, torch.device(device), turns)
    model = resnet20()
    return rows, conditions(
        model="resnet20",
        parameters=sum(p.numel() for p in model.parameters()),
        batch_size=BATCH_SIZE,
        steps_per_turn=STEPS,
        turns=turns,
        augmentation="crop and flip",
    )


def pair(name: str, device: torch.device, turns: int) -> list[Row]:
    """Return the rows of both competitors on one device."""
    images = torch.randint(0, 256, (SAMPLES, 3, 32, 32), dtype=torch.uint8)
    data = images, torch.randint(0, 10, (SAMPLES,))
    competitors = {"bare loop": bare_loop(data, device), "LocalSGD": local_sgd(data, device)}
    seconds: dict[str, list[float]] = {who: [] for who in competitors}
    for turn in range(turns + 1):  # the first warms up
        names = list(competitors)
        for who in names if turn % 2 else reversed(names):
            indices = np.random.default_rng(turn).permutation(SAMPLES)[: STEPS * BATCH_SIZE]
            began = time.perf_counter()
            competitors[who](indices.astype(np.int32))
            seconds[who].append((time.perf_counter() - began) / STEPS)
    bare, ours = seconds["bare loop"][1:], seconds["LocalSGD"][1:]
    rows = [row(f"bare loop ({name})", bare, "s per step")]
    rows.append(row(f"LocalSGD ({name})", ours, "s per step"))
    speeds = [b / o for b, o in zip(bare, ours, strict=True)]
    rows.append(row(f"speed of LocalSGD ({name})", speeds, "of bare loop"))
    rows[-1] |= {"ratio": statistics.median(speeds), "against": "bare loop"}
    return rows


Turn = Callable[[np.ndarray], None]


def bare_loop(data: tuple[Tensor, Tensor], device: torch.device) -> Turn:
    """Return what anybody would write by hand."""
    model = resnet20().to(device).train()
    images, labels = (part.to(device) for part in data)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
    )
    loss = nn.CrossEntropyLoss()
    generator = torch.Generator(device)

    def turn(indices: np.ndarray) -> None:
        chosen = torch.from_numpy(indices.astype(np.int64)).to(device)
        for batch in chosen.split(BATCH_SIZE):
            inputs = random_crop_and_flip(images[batch], generator)
            optimizer.zero_grad()
            loss(model(inputs), labels[batch]).backward()
            optimizer.step()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    return turn


def local_sgd(data: tuple[Tensor, Tensor], device: torch.device) -> Turn:
    """Return an order of LocalSGD, as a worker handles it."""
    model = resnet20()
    arrays = state_record(model)
    sgd = LocalSGD(
        model,
        data,
        device=device,
        momentum=MOMENTUM,
        weight_decay=WEIGHT_DECAY,
        augment=random_crop_and_flip,
    )
    state = RecordDict()

    def turn(indices: np.ndarray) -> None:
        order = TrainOrder(
            round=1,
            epoch=1,
            local_steps=STEPS,
            batch_size=BATCH_SIZE,
            learning_rate=LEARNING_RATE,
            seed=0,
            deadline_seconds=0.0,
            momentum_policy="keep",
            indices=indices,
            arrays=arrays,
        )
        sgd.run(order, state)

    return turn


if __name__ == "__main__":
    main(measure, __doc__)
