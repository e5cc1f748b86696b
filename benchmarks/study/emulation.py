"""Make a device slower by repeating its work, where `slowdown` lets it wait with a busy core.

While a core waits, its caches may cool down, and the other core has the memory bandwidth for
itself. A device that is really slower computes all the time. So each step of the slow core is
preceded by gap - 1 steps on a copy of the model, whose results are dropped.
"""

import copy
import os
from typing import Any

import torch
from torch import Tensor

from flower_blsgd.worker.local_sgd import LocalSGD

from .arms import SLOW_CORE


def repeat_steps(times: int) -> None:
    """Let every step of `LocalSGD` on the slow core take `times` as long, in this process."""
    real = LocalSGD._step
    copies: dict[int, LocalSGD] = {}

    def step(self: LocalSGD, *arguments: Any, **more: Any) -> Tensor:
        if os.sched_getaffinity(0) == {SLOW_CORE}:
            if id(self) not in copies:
                shadow = copies[id(self)] = copy.copy(self)
                shadow.model = shadow._forward = copy.deepcopy(self.model)
                shadow._optimizer = torch.optim.SGD(
                    shadow.model.parameters(), lr=0.0, momentum=0.9, fused=True
                )
                shadow._generator = torch.Generator()
            for _ in range(times - 1):
                real(copies[id(self)], *arguments, **more)
        return real(self, *arguments, **more)

    LocalSGD._step = step  # type: ignore[method-assign]
