"""JPEG files that are decoded when they are read: a worker against a loop with a DataLoader.

``python -m benchmarks.loader``: 2,000 JPEG files of 224 x 224 pixels (smooth noise), a small
convolutional network, and batches of 32. The two take turns within one run, with two reading
processes each. A turn of the worker is an order of 32 steps. A turn of the loop is 32 steps of its
epoch, so its processes have read ahead when the turn begins, and those of the worker have not.
"""

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from flower_blsgd import LocalSGD, TrainOrder
from flower_blsgd.worker.model_io import state_record

from .rows import Measured, conditions, main, row, with_goal
from .step import paired

FILES, SIDE, BATCH, STEPS, PROCESSES = 2_000, 224, 32, 32, 2


class Files(Dataset[tuple[Tensor, int]]):
    """JPEG files as tensors."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with Image.open(self._paths[index]) as image:
            pixels = np.asarray(image.convert("RGB"))
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1), index % 10


def network() -> nn.Module:
    """Return a network that takes about as long for an image as decoding it."""
    torch.manual_seed(0)

    class Scaled(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images.float() / 255 - 0.5

    return nn.Sequential(
        Scaled(),
        nn.Conv2d(3, 16, 7, stride=4),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def write_files(folder: Path, count: int) -> list[Path]:
    """Write JPEG files, and return their paths."""
    draw, paths = np.random.default_rng(0), []
    for number in range(count):
        small = Image.fromarray(draw.integers(0, 255, (32, 32, 3), dtype=np.uint8))
        path = folder / f"{number}.jpg"
        small.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(path, quality=90)
        paths.append(path)
    return paths


def bare_loop(files: Files) -> Callable[[int], None]:
    """Return a turn of a loop as one writes it by hand."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    loader = DataLoader(
        files, BATCH, shuffle=True, drop_last=True, num_workers=PROCESSES, persistent_workers=True
    )

    def forever() -> Iterator[Any]:
        while True:
            yield from loader

    batches = forever()

    def turn(steps: int) -> None:
        for inputs, targets in itertools.islice(batches, steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs), targets).backward()
            optimizer.step()

    return turn


def worker(files: Files) -> Callable[[int], None]:
    """Return a turn of a worker: an order."""
    sgd = LocalSGD(network(), files, momentum=0.9, loader_workers=PROCESSES)
    arrays = state_record(sgd.model)
    draw = np.random.default_rng(0)

    def turn(steps: int) -> None:
        sgd.run(TrainOrder.to_measure(steps, BATCH, len(files), arrays, draw))

    return turn


def measure(quick: bool) -> Measured:
    """Measure both in turns; ratios are of pairs of turns."""
    turns, steps = (2, 4) if quick else (11, STEPS)
    with tempfile.TemporaryDirectory() as folder:
        files = Files(write_files(Path(folder), 200 if quick else FILES))
        competitors = {"DataLoader loop": bare_loop(files), "worker": worker(files)}
        speeds: dict[str, list[float]] = {name: [] for name in competitors}
        for number in range(turns + 1):  # the first starts the processes
            for name in list(competitors)[:: 1 if number % 2 else -1]:
                began = time.perf_counter()
                competitors[name](steps)
                speeds[name].append(BATCH * steps / (time.perf_counter() - began))
    bare, ours = (values[1:] for values in speeds.values())
    rows = [
        row("PyTorch loop with DataLoader", bare, "images per s"),
        with_goal(
            paired("worker, loader-workers = 2", "images per s", ours, bare, "loop"),
            at_least=0.95,
            of="ratio",
        ),
    ]
    return rows, conditions(files=len(files), batch=BATCH, steps=steps, processes=PROCESSES)


if __name__ == "__main__":
    main(measure, __doc__)
