"""A batch in pieces gives what the whole batch gives."""

import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from flower_blsgd import LocalSGD, TrainOrder, TrainReport
from flower_blsgd.errors import UsageError
from flower_blsgd.tasks.augmentation import random_crop_and_flip
from flower_blsgd.worker.local_sgd import cross_entropy
from flower_blsgd.worker.micro_batches import (
    added,
    check_micro_batches,
    dependence,
    in_pieces,
    pieces_of,
)
from flower_blsgd.worker.model_state import state_record
from flower_blsgd.worker.replica_sgd import ReplicaSGD

from . import test_local_sgd as by_hand
from .replica_orders import copied, furthest, made, perceptron, points
from .replica_orders import order_of as replica_order
from .stand_in import StandInCapture, draw_as_cuda_does, record_on_cpu
from .test_cuda_graph import data, order_of, same, same_bits
from .test_replica_sgd import together


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Steps this small only wait for other threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def independent_model(dropout: bool = False) -> nn.Module:
    """Return a model without BatchNorm, for images of 3x6x6 and four classes."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.Dropout(0.5) if dropout else nn.Identity(),
            nn.Flatten(),
            nn.Linear(8 * 36, 4),
        )


ARRAYS = state_record(independent_model())


def image_order(server_round: int = 1, **changes: Any) -> TrainOrder:
    return order_of(server_round, arrays=ARRAYS, **changes)


def sgd_of(micro_batch_size: int, **settings: Any) -> LocalSGD:
    model = independent_model(settings.pop("dropout", False))
    return LocalSGD(model, data(), micro_batch_size=micro_batch_size, **settings)


def to_rounding(one: TrainReport, other: TrainReport) -> bool:
    return np.allclose(one.losses, other.losses, rtol=1e-6, atol=1e-6) and all(
        np.allclose(array.numpy(), other.arrays[name].numpy(), rtol=1e-6, atol=1e-6)
        for name, array in one.arrays.items()
    )


# --- by hand


def test_gradient_is_that_of_the_mean_though_pieces_differ_in_size() -> None:
    """Of x = 1, 2, 3 the gradient is 2 w (1 + 4 + 9) / 3 = 28 w / 3; pieces have 2 and 1."""
    sgd = by_hand.sgd_of(micro_batch_size=2)
    report = sgd.run(by_hand.order_of([0, 1, 2], batch_size=3, learning_rate=0.03))
    assert by_hand.weight_after(report) == pytest.approx(1 - 0.28)
    # The mean of the pieces' means, (5 w + 18 w) / 2, would give 0.655.
    assert report.losses.tolist() == pytest.approx([1.0, 4.0, 9.0])


def test_losses_stay_in_order_from_step_to_step() -> None:
    report = by_hand.sgd_of(micro_batch_size=1).run(by_hand.order_of([1, 0, 0, 1]))
    assert report.losses.tolist() == pytest.approx([4.0, 1.0, 0.25, 1.0])
    assert by_hand.weight_after(report) == pytest.approx(0.25)
    assert report.completed_steps == 2


def test_momentum_moves_once_in_a_step() -> None:
    sgd = by_hand.sgd_of(momentum=0.9, micro_batch_size=1)
    assert by_hand.weight_after(sgd.run(by_hand.order_of([0, 1] * 2))) == pytest.approx(-0.2)


# --- pieces


@pytest.mark.parametrize(
    ("size", "micro", "cut"),
    [(8, 0, False), (8, 8, False), (8, 9, False), (8, 7, True), (2, 1, True), (1, 1, False)],
)
def test_whether_a_batch_is_cut(size: int, micro: int, cut: bool) -> None:
    assert in_pieces(size, micro) == cut


def test_pieces_are_even_and_never_too_large() -> None:
    for size in range(1, 20):
        for micro in range(1, 22):
            rows = torch.arange(size)
            found = [
                (piece.tolist(), wanted.tolist()) for piece, wanted in pieces_of(rows, -rows, micro)
            ]
            lengths = [len(piece) for piece, _ in found]
            assert [row for piece, _ in found for row in piece] == rows.tolist()
            assert [row for _, wanted in found for row in wanted] == (-rows).tolist()
            assert len(found) == -(-size // micro)
            assert max(lengths) <= micro
            assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("name", ["inputs", "targets"])
def test_what_is_no_tensor_cannot_be_cut(name: str) -> None:
    batch: dict[str, Any] = {"inputs": torch.zeros(4), "targets": torch.zeros(4)}
    with pytest.raises(ValueError, match=f"the {name} of a batch are a dict"):
        list(pieces_of(**(batch | {name: {}}), micro_batch_size=2))


def test_gradients_that_are_missing_count_as_zero() -> None:
    one, two = torch.ones(2), torch.tensor([3.0, 4.0])
    sums = added([one, None, one, None], [two, two, None, None])
    assert [None if s is None else s.tolist() for s in sums] == [[4, 5], [3, 4], [1, 1], None]
    assert one.tolist() == [1, 1]


# --- the same as without


@pytest.mark.parametrize("size", [1, 2, 5, 8])
@pytest.mark.parametrize("micro", [1, 2, 3, 5, 7])
def test_agrees_with_the_whole_batch(size: int, micro: int) -> None:
    order = image_order(batch_size=size)
    assert to_rounding(sgd_of(micro).run(order), sgd_of(0).run(order))


@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"augment": random_crop_and_flip},
        {"channels_last": True},
    ],
    ids=["nesterov", "augmented", "channels last"],
)
def test_agrees_under_other_settings_from_round_to_round(settings: dict[str, Any]) -> None:
    cut, whole = sgd_of(3, **settings), sgd_of(0, **settings)
    for server_round in (1, 2, 3):
        order = image_order(server_round, batch_size=8)
        assert to_rounding(cut.run(order), whole.run(order))


def test_agrees_with_adamw() -> None:
    """Which divides by small numbers at first: rounding grows."""
    order = image_order(batch_size=8, learning_rate=1e-3)
    cut, whole = (sgd_of(n, optimizer="adamw").run(order) for n in (3, 0))
    assert furthest(cut.arrays, whole.arrays) < 1e-4
    assert cut.losses == pytest.approx(whole.losses, rel=1e-4)


def test_agrees_to_the_last_digits_of_double_precision() -> None:
    """So it is the same sum, and not nearly the same."""
    arrays = state_record(made(perceptron))
    order = replica_order(0, arrays, batch_size=12, local_steps=1)
    cut, whole = (
        LocalSGD(made(perceptron), points(), micro_batch_size=n).run(order) for n in (5, 0)
    )
    assert furthest(cut.arrays, whole.arrays) < 1e-14


@pytest.mark.parametrize("micro", [0, 4, 99])
def test_batch_that_fits_into_one_piece_keeps_every_bit(micro: int) -> None:
    order = image_order()
    assert same(sgd_of(micro).run(order), LocalSGD(independent_model(), data()).run(order))


def test_dropout_repeats() -> None:
    one, again, other = (sgd_of(3, dropout=True).run(image_order(seed=seed)) for seed in (1, 1, 2))
    assert same(one, again)
    assert not to_rounding(one, other)


# --- what happens in a step


class Counting:
    """A loss that knows how many samples came at once."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.sizes.append(len(targets))
        return cross_entropy(outputs, targets)


def test_batch_is_augmented_as_a_whole_and_computed_in_pieces() -> None:
    augmented: list[int] = []

    def note(inputs: Tensor, generator: torch.Generator) -> Tensor:
        augmented.append(len(inputs))
        return inputs

    loss = Counting()
    sgd = LocalSGD(independent_model(), data(), loss, augment=note, micro_batch_size=3)
    sgd.run(image_order(batch_size=8, local_steps=2))
    assert augmented == [8, 8]
    assert loss.sizes == [3, 3, 2] * 2


def test_data_set_that_the_host_reads_may_be_cut() -> None:
    inputs, targets = data()

    class Pairs(Dataset):
        def __len__(self) -> int:
            return len(inputs)

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return inputs[index], int(targets[index])

    found = LocalSGD(independent_model(), Pairs(), micro_batch_size=3).run(image_order())
    assert same(found, sgd_of(3).run(image_order()))


def test_loss_of_the_wrong_shape_is_told_of_the_piece() -> None:
    sgd = LocalSGD(independent_model(), data(), lambda o, t: o.mean(), micro_batch_size=3)
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        sgd.run(image_order())


@pytest.mark.parametrize("settings", [{}, {"augment": random_crop_and_flip}])
def test_recorded_step_has_all_pieces(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    capture = StandInCapture()
    record_on_cpu(monkeypatch, capture)
    graphed, eager = sgd_of(3, **settings), sgd_of(3, cuda_graph=False, **settings)
    for server_round, size in ((1, 8), (2, 8), (3, 5)):
        order = image_order(server_round, batch_size=size)
        assert same(graphed.run(order), eager.run(order))
    assert capture.replays == [6, 3]


def test_recorded_step_with_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    record_on_cpu(monkeypatch, StandInCapture())
    draw_as_cuda_does(monkeypatch)
    graphed, eager = sgd_of(3, dropout=True), sgd_of(3, dropout=True, cuda_graph=False)
    assert same(graphed.run(image_order()), eager.run(image_order()))


def test_compiled_model_gets_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def compile(model: nn.Module) -> Any:
        def compiled(inputs: Tensor) -> Any:
            sizes.append(len(inputs))
            return model(inputs)

        return compiled

    monkeypatch.setattr(torch, "compile", compile)
    order = image_order(batch_size=8)
    assert same(sgd_of(3, compile=True).run(order), sgd_of(3).run(order))
    assert sizes == [3, 3, 2] * 4  # three steps, and one before them to see whether it works


def test_bfloat16_is_the_same_forward_pass_in_pieces() -> None:
    order = image_order(batch_size=8, local_steps=1)
    cut, whole = (sgd_of(n, precision="bfloat16").run(order) for n in (3, 0))
    assert cut.losses == pytest.approx(whole.losses, rel=0.02)
    assert furthest(cut.arrays, whole.arrays) < 0.01


# --- several workers at once


@pytest.mark.parametrize(
    "settings",
    [{}, {"optimizer": "adamw", "weight_decay": 0.1}, {"augment": lambda x, generator: x * 2}],
    ids=["sgd", "adamw", "augmented"],
)
def test_workers_that_compute_together_cut_their_batches_too(settings: dict[str, Any]) -> None:
    seen = Counting()
    arrays = state_record(made(perceptron))
    orders = [replica_order(worker, arrays) for worker in range(3)]
    replicas = ReplicaSGD(made(perceptron), points(), seen, micro_batch_size=3, **settings)
    found = together(replicas, orders)
    assert seen.sizes == [2, 2] * 3
    for order, report in zip(orders, found, strict=True):
        alone = LocalSGD(made(perceptron), points(), **settings).run(order)
        assert furthest(copied(report.arrays), alone.arrays) < 1e-10
        assert report.losses == pytest.approx(alone.losses, rel=1e-6)


def test_workers_that_compute_together_keep_every_bit_of_a_whole_batch() -> None:
    arrays = state_record(made(perceptron))
    orders = [replica_order(worker, arrays) for worker in range(2)]
    one, other = (
        together(ReplicaSGD(made(perceptron), points(), micro_batch_size=n), orders) for n in (0, 4)
    )
    for mine, theirs in zip(one, other, strict=True):
        assert same_bits(mine.arrays, theirs.arrays)


# --- models that need the whole batch


class Frozen(nn.BatchNorm1d):
    """BatchNorm that stays in eval mode."""

    def train(self, mode: bool = True) -> "Frozen":
        return super().train(False)


@pytest.mark.parametrize(
    ("module", "told"),
    [
        (nn.BatchNorm1d(2), "BatchNorm1d (1)"),
        (nn.BatchNorm2d(2, track_running_stats=False), "BatchNorm2d (1)"),
        (nn.SyncBatchNorm(2), "SyncBatchNorm (1)"),
        (nn.InstanceNorm1d(2, track_running_stats=True), "InstanceNorm1d (1)"),
        (nn.Sequential(nn.ReLU(), nn.LazyBatchNorm1d()), "LazyBatchNorm1d (1.1)"),
        (Frozen(2, track_running_stats=False), "Frozen (1)"),
        (Frozen(2), ""),
        (nn.InstanceNorm1d(2), ""),
        (nn.LayerNorm(2), ""),
        (nn.GroupNorm(1, 2), ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_module_that_uses_the_batch_is_found(module: nn.Module, told: str) -> None:
    model = nn.Sequential(nn.ReLU(), module).eval()
    assert dependence(model) == told
    assert not any(part.training for part in model.modules())


def test_model_that_is_nothing_else_has_no_name() -> None:
    assert dependence(nn.BatchNorm1d(2)) == "BatchNorm1d"


BATCH_NORM = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


@pytest.mark.parametrize("kind", [LocalSGD, ReplicaSGD])
def test_refused_with_the_key_the_module_and_the_way_out(kind: Any) -> None:
    with pytest.raises(UsageError) as told:
        kind(BATCH_NORM, points(), micro_batch_size=4)
    assert str(told.value) == (
        "micro-batch-size = 4: BatchNorm1d (1) of the model takes its statistics from the whole "
        "batch, so pieces would give another result; leave it at 0 and make batch-size smaller, "
        "or use a model without BatchNorm"
    )
    kind(BATCH_NORM, points())


def test_refused_below_zero() -> None:
    with pytest.raises(UsageError, match="micro-batch-size = -1 must be at least 0"):
        check_micro_batches(nn.ReLU(), -1)


def test_random_numbers_of_the_host_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    random.seed(1)
    torch.manual_seed(1)
    expected = random.random(), torch.rand(1)
    random.seed(1)
    torch.manual_seed(1)
    sgd_of(3, dropout=True).run(image_order())
    assert (random.random(), torch.rand(1)) == expected
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
