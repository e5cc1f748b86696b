"""The hand-written training loop of `benchmarks.own_loop_speedup`, alone or launched.

``python own_loop_script.py SETTINGS``, as JSON: ``task`` (as of `study.tasks.loaded`), ``seed``,
``rate``, ``batch``, ``seconds`` (length of a run alone) and ``model`` (where that is saved).
"""

import json
import sys
import time
from typing import Any

import torch
from safetensors.torch import save_file
from torch.utils.data import BatchSampler, RandomSampler

import flower_blsgd
from benchmarks.study.tasks import loaded, whole
from flower_blsgd.algorithm.randomness import derived_seed


def train(given: dict[str, Any]) -> None:
    """Train with a rate that falls in a line to zero, until the run or the time is over."""
    task = loaded(given["task"], given["seed"])
    inputs, targets = whole(task.train)
    model = task.initial_model(derived_seed(given["seed"], "model")).train()
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=given["rate"],
        momentum=given["task"]["momentum"],
        weight_decay=given["task"]["weight-decay"],
    )
    session = flower_blsgd.join(model, optimizer)
    session.scheduler(optimizer, lambda progress: 1 - progress)
    draw = torch.Generator().manual_seed(derived_seed(given["seed"], "augment", session.rank))
    sampler = RandomSampler(targets, generator=draw)  # type: ignore[arg-type]
    began = 0.0  # after the first step, which warms up
    while not session.done:
        order = sampler if session.is_alone else session.sampler(targets)  # type: ignore[arg-type]
        for batch in BatchSampler(order, given["batch"], drop_last=True):
            images = inputs[batch]
            if task.augment is not None:
                images = task.augment(images, draw)
            optimizer.zero_grad()
            task.loss(model(images), targets[batch]).mean().backward()
            optimizer.step()
            session.step(samples=len(batch))
            if session.is_alone:  # there is no launcher that knows the progress
                began = began or time.perf_counter()
                progress = (time.perf_counter() - began) / given["seconds"]
                if progress >= 1:
                    save_file(model.state_dict(), given["model"])
                    return
                optimizer.param_groups[0]["lr"] = given["rate"] * (1 - progress)
            if session.done:
                break


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
