"""A training script for the tests: three lines make it a worker."""

import atexit
import os
import signal
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import flower_blsgd


def data() -> tuple[Tensor, Tensor]:
    """Return 600 samples of two classes."""
    draw = torch.Generator().manual_seed(5)
    inputs = torch.randn(600, 8, generator=draw)
    return inputs, (inputs.sum(1) > 0).long()


def model() -> nn.Module:
    """Return a small network with the same weights in every process."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def misbehave(how: str, rank: int, steps: int, folder: Path) -> None:
    """Do what a test asks for, such as "raise kill", one after the other and each once."""
    if rank != 1 or steps != 30:
        return
    left = [word for word in how.split() if not (folder / f"{word}-done").exists()]
    if not left:
        return
    (folder / f"{left[0]}-done").touch()
    if left[0] == "raise":
        raise RuntimeError("out of luck")
    os.kill(os.getpid(), signal.SIGKILL)


def main(how: str, processes: int, folder: Path) -> None:
    """Train until the run is over."""
    atexit.register(print, "at exit", flush=True)
    inputs, targets = data()
    dataset, net = TensorDataset(inputs, targets), model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    session = flower_blsgd.join(net, optimizer)
    loader = DataLoader(
        dataset,
        batch_size=session.batch_size,
        sampler=session.sampler(dataset),
        num_workers=processes,
    )

    def figures(given: nn.Module) -> dict[str, float]:
        with torch.no_grad():
            return {"accuracy": (given(inputs).argmax(1) == targets).float().mean().item()}

    session.evaluate(figures)
    for steps, (batch, labels) in enumerate(loader, 1):
        if session.done:
            break
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(batch), labels).backward()
        optimizer.step()
        misbehave(how, session.rank, steps, folder)
        session.step(samples=len(batch))
    print(f"rank {session.rank}: accuracy {figures(net)['accuracy']:.4f}", flush=True)


if __name__ == "__main__":
    how, processes, folder = [*sys.argv[1:], *["", "0", "."][len(sys.argv) - 1 :]]
    main(how, int(processes), Path(folder))
