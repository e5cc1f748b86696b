"""A device with too little memory, and what the user is told of it."""

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from flower_blsgd import LocalSGD, TrainOrder
from flower_blsgd.errors import UsageError
from flower_blsgd.runtime.app_call import handler_of
from flower_blsgd.worker.local_sgd import cross_entropy
from flower_blsgd.worker.out_of_memory import largest_batch

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
    ("fits", "batch_size", "expected"), [(8, 32, 8), (7, 20, 5), (1, 3, 1), (0, 9, 0), (9, 1, 0)]
)
def test_largest_batch_is_found_by_halving(fits: int, batch_size: int, expected: int) -> None:
    def attempt(size: int) -> None:
        if size > fits:
            raise torch.OutOfMemoryError

    assert largest_batch(attempt, batch_size) == expected


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
        "worker fast-0: too little memory for batch-size = 16; 4 fits: set batch-size = 4"
    )
    assert told.value.__context__ is None  # its traceback would keep the step's memory
    assert memory.tried == [16, 8, 4]
    assert (capture.released > 0) == recorded


def test_nothing_that_fits_is_told() -> None:
    with pytest.raises(UsageError, match=r"worker cpu: .* = 4, and not even one sample fits"):
        LocalSGD(small_model(), data(), Memory(0)).run(order_of(1))


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
        "worker fast-0: too little memory for batch-size = 4; 2 fits: set batch-size = 2"
    )
    assert len(context.state) == 0
