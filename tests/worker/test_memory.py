"""A device with too little memory, and what the user is told of it."""

from typing import Any

import pytest
import torch
from flwr.app import RecordDict
from torch import Tensor

from flower_blsgd import LocalSGD
from flower_blsgd.errors import UsageError
from flower_blsgd.worker import local_sgd
from flower_blsgd.worker.local_sgd import cross_entropy

from ..refusal import refusal
from .helpers import (
    data,
    independent_model,
    independent_order,
    order_of,
    same,
    small_model,
)


class Memory:
    """A loss for which there is room for so many samples."""

    def __init__(self, samples: int, error: Exception) -> None:
        self.samples, self.error = samples, error
        self.tried: list[int] = []

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.tried.append(len(targets))
        if len(targets) > self.samples:
            raise type(self.error)(*self.error.args)
        return cross_entropy(outputs, targets)


SMALLER, NONE = (
    "a batch of {0} fits: set batch={0} for this worker, or divide batch-size by {1} or more",
    "; no smaller size fits; ",
)
MICRO = "micro-batches of {0} fit: set micro-batch-size = {0}, which gives the same result"


@pytest.mark.parametrize(
    ("compiled", "error"),
    [
        (False, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")),
        (True, RuntimeError("MPS backend out of memory (MPS allocated: 9.00 GB)")),
    ],
    ids=["cuda", "mps, compiled"],
)
@pytest.mark.parametrize(
    ("cut", "fits", "size", "micro", "tried", "told"),
    [
        (False, 5, 16, 0, [16, 8, 4], "16; " + SMALLER.format(4, 4)),
        (False, 2, 13, 0, [13, 6, 3, 2], "13; " + SMALLER.format(2, 7)),
        (False, 1, 4, 0, [4, 2], "4" + NONE),
        (True, 5, 16, 0, [16, 8, 4], "16; " + MICRO.format(4)),
        (True, 3, 16, 8, [8, 4, 2], "16 in micro-batches of 8; " + MICRO.format(2)),
        (True, 5, 16, 99, [16, 8, 4], "16; " + MICRO.format(4)),
        (True, 0, 16, 2, [2, 1], "16 in micro-batches of 2" + NONE),
    ],
)
def test_what_fits_is_found_by_halving_and_undone(
    monkeypatch: pytest.MonkeyPatch,
    compiled: bool,
    error: Exception,
    cut: bool,
    fits: int,
    size: int,
    micro: int,
    tried: list[int],
    told: str,
) -> None:
    compiled_sizes: list[int] = []
    monkeypatch.setattr(
        torch,
        "compile",
        lambda model, mode: lambda inputs: (compiled_sizes.append(len(inputs)), model(inputs))[1],
    )
    model, order = (independent_model(), independent_order) if cut else (small_model(), order_of)
    memory = Memory(99, error)
    settings: Any = {"name": "fast-0", "micro_batch_size": micro, "compile": compiled}
    sgd = LocalSGD(model, data(), memory, **settings)
    first = sgd.run(order(1))
    torch.manual_seed(7)
    state = torch.get_rng_state()
    memory.samples, memory.tried = fits, []
    with pytest.raises(UsageError) as refused:
        sgd.run(order(2, batch_size=size))
    message = str(refused.value)
    assert message.startswith(f"worker fast-0: too little memory for its batch of {told}")
    assert refused.value.__context__ is None  # its traceback would keep the step's memory
    assert [n for i, n in enumerate(memory.tried) if n not in memory.tried[:i]] == tried
    ordered = {min(4, micro or 4), tried[0]}
    assert set(compiled_sizes) == (ordered if compiled else set())  # the trials are eager
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in sgd.model.parameters())
    memory.samples = 99
    assert same(sgd.run(order(1)), first)  # momentum began with zero


@pytest.mark.parametrize(
    ("function", "phase"),
    [
        ("SentTensors.load", "loading the global model"),
        ("OptimizerState.begin", "loading the optimizer's state"),
        ("SentTensors.record", "sending the model"),
    ],
)
def test_outside_of_steps_the_phase_and_the_bytes_are_named(
    monkeypatch: pytest.MonkeyPatch, function: str, phase: str
) -> None:
    sgd, state = LocalSGD(small_model(), data(), name="fast-0"), RecordDict()
    expected, second = sgd.run(order_of(1), state), order_of(2)

    def refuse(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with monkeypatch.context() as patched:
        patched.setattr(f"flower_blsgd.worker.local_sgd.{function}", refuse)
        patched.setattr(local_sgd, "free_bytes_on", lambda device: 1_500)
        line = refusal(sgd.run, second, state)
    # 216 + 8 + 8 + 64 + 8 + 1,152 + 4 parameters and 16 + 1 numbers of BatchNorm
    assert line == (
        f"worker fast-0: out of memory on cpu while {phase} (5.9 kB, 1.5 kB free); end other "
        "programs on this device, name fewer workers for it, or use a smaller model"
    )
    assert same(sgd.run(order_of(1), RecordDict()), expected)
