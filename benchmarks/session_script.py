"""The script that `benchmarks.session` launches.

- ``steps FILE BLOCKS``: trains a network, in blocks of steps with and without `Session.step` in
  turns, and writes the seconds of each block.
- ``idle PARAMETERS``: computes nothing, in 20 tensors with so many parameters.
- ``adapter FROZEN RANK``: computes nothing; so many frozen parameters, and a low-rank adapter.
- ``gradients SECONDS``: trains an adapter of 1 MB in steps that take so long for batches of 16, and
  on all but the main worker for batches of 8.
"""

import json
import math
import sys
import time
from pathlib import Path

import torch
from torch import nn

import flower_blsgd
from flower_blsgd.models.resnets import resnet8

WARM_UP, BLOCK, BATCH = 300, 200, 16


def steps(file: str, blocks: int) -> None:
    """Train, and write the seconds of each block of steps: with the session, then without."""
    model = resnet8()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    session = flower_blsgd.join(model, optimizer)
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.arange(BATCH) % 10

    def block(count: int, with_session: bool) -> float:
        began = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            if with_session:
                session.step(samples=BATCH)
        return time.perf_counter() - began

    block(WARM_UP, with_session=True)  # speeds are measured, and rounds begin
    pairs = []
    for number in range(blocks):
        order = [True, False] if number % 2 else [False, True]
        seconds = {with_session: block(BLOCK, with_session) for with_session in order}
        pairs.append([seconds[True], seconds[False]])
    Path(file).write_text(json.dumps(pairs))
    while not session.done:
        session.step(samples=BATCH)


def idle(model: nn.Module) -> None:
    """Take steps that compute nothing."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    session = flower_blsgd.join(model, torch.optim.SGD(trained, 0.01))
    while not session.done:
        session.step(samples=2)


def gradients(seconds: float) -> None:
    """Take steps of a given duration, most of which the core is free."""
    model = nn.ParameterList(torch.zeros(4096) for _ in range(64))
    optimizer = torch.optim.AdamW(model.parameters())
    session = flower_blsgd.join(model, optimizer)
    per_sample = seconds / (16 if session.is_main else 8)
    while not session.done:
        began = time.perf_counter()
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        time.sleep(max(0.0, per_sample * session.batch_size - time.perf_counter() + began))
        optimizer.step()
        session.step(samples=session.batch_size)


def tensors(parameters: int) -> nn.Module:
    """Return a model of 20 tensors."""
    return nn.ParameterList(torch.zeros(parameters // 20) for _ in range(20))


def adapted(frozen: int, rank: int) -> nn.Module:
    """Return a frozen square matrix with a low-rank adapter."""
    torch.manual_seed(0)  # frozen weights are the same on all workers
    side = math.isqrt(frozen)
    base = nn.Linear(side, side, bias=False).requires_grad_(False)
    return nn.ModuleList(
        [base, nn.Linear(side, rank, bias=False), nn.Linear(rank, side, bias=False)]
    )


if __name__ == "__main__":
    mode, *given = sys.argv[1:]
    if mode == "steps":
        steps(given[0], int(given[1]))
    elif mode == "idle":
        idle(tensors(int(given[0])))
    elif mode == "gradients":
        gradients(float(given[0]))
    else:
        idle(adapted(int(given[0]), int(given[1])))
