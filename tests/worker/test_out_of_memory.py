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
from flower_blsgd.worker.out_of_memory import SMALLEST_BATCH, largest_size

from .stand_in import StandInCapture, record_on_cpu
from .test_cuda_graph import data, order_of, same, small_model
from .test_micro_batches import image_order, independent_model, to_rounding


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
def test_largest_size_is_found_by_halving(fits: int, batch_size: int, tried: list[int]) -> None:
    found: list[int] = []

    def attempt(size: int) -> None:
        found.append(size)
        if size > fits:
            raise torch.OutOfMemoryError

    assert largest_size(attempt, batch_size, SMALLEST_BATCH) == (tried[-1] if tried else 0)
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

    assert largest_size(attempt, 16, 2) == 0

    def interrupted(size: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        largest_size(interrupted, 16, 2)


def test_memory_that_cannot_be_returned_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a recording that failed."""
    returned: list[None] = []

    def empty_cache() -> None:
        returned.append(None)
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    assert largest_size(lambda size: None, 16, 2) == 8
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


# --- models whose batch can be cut


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(
    ("fits", "micro", "tried", "told"),
    [
        (5, 0, [16, 8, 4], "16; pieces of 4 fit: set micro-batch-size = 4, which gives the same "),
        (1, 0, [16, 8, 4, 2, 1], "16; pieces of 1 fit: set micro-batch-size = 1, which gives the "),
        (3, 8, [8, 4, 2], "16 in pieces of 8; pieces of 2 fit: set micro-batch-size = 2, which "),
        (0, 0, [16, 8, 4, 2, 1], "16, and not even one sample at a time fits; take another device"),
        (0, 2, [2, 1], "16 in pieces of 2, and not even one sample at a time fits; take another "),
        (5, 99, [16, 8, 4], "16; pieces of 4 fit: set micro-batch-size = 4, which gives the same "),
    ],
    ids=["4 fit", "1 fits", "2 of 8 fit", "none fits", "none of 2 fits", "was whole"],
)
def test_pieces_that_fit_are_told(
    monkeypatch: pytest.MonkeyPatch,
    recorded: bool,
    fits: int,
    micro: int,
    tried: list[int],
    told: str,
) -> None:
    if recorded:
        record_on_cpu(monkeypatch, StandInCapture())
    memory = Memory(fits)
    sgd = LocalSGD(independent_model(), data(), memory, name="fast-0", micro_batch_size=micro)
    with pytest.raises(UsageError) as refused:
        sgd.run(image_order(batch_size=16))
    begin = "worker fast-0: too little memory for its batch of "
    assert str(refused.value).startswith(begin + told)
    in_turn = [size for i, size in enumerate(memory.tried) if size not in memory.tried[:i]]
    assert in_turn == tried


def test_what_is_told_fits_and_gives_the_same_result() -> None:
    order = image_order(batch_size=16)
    with pytest.raises(UsageError, match="set micro-batch-size = 4"):
        LocalSGD(independent_model(), data(), Memory(5)).run(order)
    cut = LocalSGD(independent_model(), data(), Memory(5), micro_batch_size=4).run(order)
    assert to_rounding(cut, LocalSGD(independent_model(), data()).run(order))


# --- what is left of it


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
