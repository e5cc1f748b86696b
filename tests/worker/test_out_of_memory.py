"""A device with too little memory, and what the user is told of it."""

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from flower_blsgd import LocalSGD, TrainOrder
from flower_blsgd.config import RunConfig
from flower_blsgd.errors import UsageError
from flower_blsgd.runtime.app_call import handler_of
from flower_blsgd.worker.local_sgd import cross_entropy
from flower_blsgd.worker.out_of_memory import SMALLEST_BATCH, largest_batch

from .stand_in import StandInCapture, record_on_cpu
from .test_cuda_graph import data, order_of, same, small_model


class Memory:
    """A loss for which there is room for so many samples."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.tried: list[int] = []

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.tried.append(len(targets))
        if len(targets) > self.samples:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return cross_entropy(outputs, targets)


@pytest.mark.parametrize(
    ("fits", "batch_size", "tried"),
    [(8, 32, [16, 8]), (7, 20, [10, 5]), (2, 7, [3, 2]), (2, 3, [2]), (9, 2, []), (9, 1, [])],
)
def test_largest_batch_is_found_by_halving(fits: int, batch_size: int, tried: list[int]) -> None:
    found: list[int] = []

    def attempt(size: int) -> None:
        found.append(size)
        if size > fits:
            raise torch.OutOfMemoryError

    assert largest_batch(attempt, batch_size) == (tried[-1] if tried else 0)
    assert found == tried


def test_the_smallest_batch_is_that_of_the_settings() -> None:
    with pytest.raises(UsageError, match="batch-size"):
        RunConfig(batch_size=SMALLEST_BATCH - 1)
    assert RunConfig(batch_size=SMALLEST_BATCH).batch_size == SMALLEST_BATCH


def test_whatever_a_trial_raises_does_not_fit() -> None:
    def attempt(size: int) -> None:
        if size > 4:
            raise torch.OutOfMemoryError
        raise ValueError("Expected more than 1 value per channel when training")

    assert largest_batch(attempt, 16) == 0

    def interrupted(size: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        largest_batch(interrupted, 16)


def test_memory_that_cannot_be_returned_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a recording that failed."""
    returned: list[None] = []

    def empty_cache() -> None:
        returned.append(None)
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    assert largest_batch(lambda size: None, 16) == 8
    assert returned == [None]


@pytest.mark.parametrize("recorded", [False, True])
def test_worker_batch_size_and_a_smaller_one_are_told(
    monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    capture = StandInCapture()
    if recorded:
        record_on_cpu(monkeypatch, capture)
    memory = Memory(5)
    sgd = LocalSGD(small_model(), data(), memory, name="fast-0")
    with pytest.raises(UsageError) as told:
        sgd.run(order_of(1, batch_size=16))
    assert str(told.value) == (
        "worker fast-0: too little memory for its batch of 16; a batch of 4 fits: "
        "divide batch-size by 4 or more"
    )
    assert told.value.__context__ is None  # its traceback would keep the step's memory
    assert memory.tried == [16, 8, 4]
    assert (capture.released > 0) == recorded


@pytest.mark.parametrize(("size", "tried"), [(4, [4, 2]), (2, [2])])
def test_nothing_that_fits_is_told(size: int, tried: list[int]) -> None:
    memory = Memory(1)
    with pytest.raises(UsageError) as told:
        LocalSGD(small_model(), data(), memory).run(order_of(1, batch_size=size))
    assert str(told.value) == (
        f"worker cpu: too little memory for its batch of {size}, and no smaller one fits (the "
        "smallest has 2); take another device or model"
    )
    assert memory.tried == tried


def test_trial_that_fails_otherwise_does_not_replace_the_line() -> None:
    class Fussy(Memory):
        def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
            if len(targets) < 8:
                self.tried.append(len(targets))
                raise ValueError("a batch of at least 8, please")
            return super().__call__(outputs, targets)

    memory = Fussy(5)
    with pytest.raises(UsageError, match=r"^worker cpu: too little memory for its batch of 16, "):
        LocalSGD(small_model(), data(), memory).run(order_of(1, batch_size=16))
    assert memory.tried == [16, 8, 4, 2]


@pytest.mark.parametrize(("fits", "times"), [(7, 3), (6, 3), (5, 5), (3, 5), (2, 7)])
def test_what_batch_size_is_divided_by_makes_it_fit(fits: int, times: int) -> None:
    """Batches of 13: 6 and 3 are tried, and 2."""
    with pytest.raises(UsageError) as told:
        LocalSGD(small_model(), data(), Memory(fits)).run(order_of(1, batch_size=13))
    assert str(told.value).endswith(f"divide batch-size by {times} or more")


@pytest.mark.parametrize("recorded", [False, True])
def test_it_leaves_no_trace(monkeypatch: pytest.MonkeyPatch, recorded: bool) -> None:
    if recorded:
        record_on_cpu(monkeypatch, StandInCapture())
    sgd = LocalSGD(small_model(), data(), Memory(4))
    expected = LocalSGD(small_model(), data(), cuda_graph=False).run(order_of(1))
    assert same(sgd.run(order_of(1)), expected)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    with pytest.raises(UsageError):
        sgd.run(order_of(2, batch_size=12))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in sgd.model.parameters())
    assert same(sgd.run(order_of(1)), expected)  # momentum began with zero


def test_it_reaches_the_user_as_one_line() -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        sgd = LocalSGD(small_model(), data(), Memory(2), name="fast-0")
        report = sgd.run(TrainOrder.from_message(message), context.state)
        return report.to_reply(message)

    context = Context(1, 7, {}, RecordDict(), {})
    reply = handler_of(app, context)(Message(order_of(1).to_records(), 7, "train"))
    assert reply.has_error()
    assert reply.error.reason == (
        "worker fast-0: too little memory for its batch of 4; a batch of 2 fits: "
        "divide batch-size by 2 or more"
    )
    assert len(context.state) == 0
